"""The house itself: floors, public names, private imports, examples in docstrings and in the README."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import graphsplit as gs

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "graphsplit"
FLOORS = [  # from the ground up; a file may import from lower floors, and from its own where it says so
    ["errors", "tensorflow_internals", "layouts", "collecting", "polynomials"],
    ["sizes"],
    ["graphdefs", "devices", "structures", "optimizing"],
    ["folding", "hoisting", "decompositions", "writing", "signatures", "shape_inference", "stages"],
    ["programs", "merging", "row_counts"],
    ["open_sizes"],
    ["bodies", "untiling"],
    ["lists"],
    ["reading"],
    ["rules"],
    ["splitting", "tracing", "steps", "home_rows"],
    ["packing"],
    ["ordering"],
    ["plans"],
    ["propagation", "communication", "drawing", "staging", "loop_inputs"],
    ["demands"],
    ["control_flow"],
    ["planning"],
    ["emitted"],
    ["operands", "drafts"],
    ["resharding"],
    ["emission", "absent_shards"],
    ["execution"],
    ["cutting", "feeding"],
    ["differentiation", "retracing", "prefetching"],
    ["compiling"],
    ["functions"],
    ["placement", "verification", "device_functions"],
    ["keras_models", "v1_graphs", "saved_models"],
    ["demos"],
    ["cli"],
]
FLOOR_OF = {name: height for height, names in enumerate(FLOORS) for name in names}
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))


def room(module: str) -> str:
    return module.split("/")[0].removesuffix(".py")


def top_level_imports(path: Path) -> set[str]:
    """Return the rooms of graphsplit that a file imports when it is imported."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "graphsplit" else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("graphsplit.")}
    return found


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__.py"])
def test_imports_point_downwards(module: str):
    own = room(module)
    assert own in FLOOR_OF, f"{own} has no floor yet"
    for other in top_level_imports(PACKAGE / module) - {own}:
        assert FLOOR_OF[other] < FLOOR_OF[own], f"{module} imports {other}"


def test_private_tensorflow_in_one_file_only():
    pattern = re.compile(r"tensorflow\.(python|core)\b")
    found = [m for m in MODULES if pattern.search((PACKAGE / m).read_text())]
    assert found == ["tensorflow_internals.py"]


def test_import_is_light():
    script = "import sys, graphsplit; print('tensorflow' in sys.modules, 'keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


def test_public_names_and_signatures():
    lines = []
    for name in gs.__all__:
        value = getattr(gs, name)
        if inspect.isfunction(value):
            lines.append(f"{name}{inspect.signature(value)}")
        else:
            members = [m for m in vars(value) if not m.startswith("_")]
            lines.append(f"class {name}: {', '.join(sorted(members))}" if members else f"class {name}")
    golden = ROOT / "tests" / "public_names.txt"
    assert lines == golden.read_text().splitlines(), "\n".join(["public names changed:", *lines])


def test_every_public_name_is_documented():
    for name in gs.__all__:
        assert inspect.getdoc(getattr(gs, name)), name


@pytest.mark.parametrize("module", MODULES)
def test_examples_in_docstrings(module: str):
    name = "graphsplit." + module.removesuffix(".py").replace("/", ".")
    loaded = importlib.import_module(name.removesuffix(".__init__"))
    needs_fresh_process = {"use_logical_devices"}
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for case in finder.find(loaded, loaded.__name__):
        if case.name.split(".")[-1] not in needs_fresh_process:
            runner.run(case)
    assert runner.failures == 0


def test_example_of_the_readme():
    code = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert code
    done = subprocess.run([sys.executable, "-c", code.group(1)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "nothing that carries the batch runs at home" in done.stdout
    largest = re.search(r"4 devices against one: largest relative difference (\S+)", done.stdout)
    assert largest
    assert float(largest.group(1)) < 1e-3  # Adam divides small gradients by their size


def test_tensorflow_is_the_one_that_was_checked():
    assert tf.__version__.startswith("2.21."), "tensorflow_internals.py was checked with 2.21"
