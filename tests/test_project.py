"""The house itself: floors, public names, private imports, examples in docstrings and in the README."""

from __future__ import annotations

import ast
import doctest
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.requirements import NEWEST, OLDEST
from tests.conftest import LONG, QUICK

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "graphsplit"
FLOORS = [  # from the ground up; a file may import from lower floors and from its own, without circles
    "core",
    "graph",
    "clusters",
    "program",
    "costs",
    "tracing",
    "rules",
    "planning",
    "emission",
    "runtime",
    "placement",
    "prediction",
    "api",
    "keras_models",
    "saved_models",
    "demos",
    "testing",
    "cli",
]
NEED_FRESH_PROCESS = {"DeviceError", "WorkerLostError", "use_logical_devices"}  # `test_docs` runs their examples
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))


def imports_of(module: str) -> set[str]:
    """Return the modules of graphsplit that a file imports anywhere: in functions and for types only, too."""
    found = set()
    for node in ast.walk(ast.parse((PACKAGE / module).read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            path = name.replace(".", "/").removeprefix("graphsplit/")
            found |= {m for m in (f"{path}.py", f"{path}/__init__.py", f"{path.rpartition('/')[0]}.py") if m in MODULES}
            if name.startswith("graphsplit.") and f"{path.rpartition('/')[0]}/__init__.py" in MODULES:
                found.add(f"{path.rpartition('/')[0]}/__init__.py")
    return found


def test_every_folder_is_a_floor():
    assert sorted({m.split("/")[0] for m in MODULES if m != "__init__.py"}) == sorted(FLOORS)
    listed = re.findall(r"^\| `(\w+)/` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert listed == FLOORS[::-1], "CONTRIBUTING.md lists other floors"


@pytest.mark.parametrize("module", [m for m in MODULES if m != "__init__.py"])
def test_imports_point_downwards(module: str):
    floor = module.split("/")[0]
    above = [m for m in imports_of(module) if FLOORS.index(m.split("/")[0]) > FLOORS.index(floor)]
    assert not above, f"{module} imports {above}"


def test_no_circles_among_modules():
    # (a package's __init__ gathers names of its own modules, which import each other and not it)
    graph = {m: {i for i in imports_of(m) if not i.endswith("__init__.py")} for m in MODULES if m != "__init__.py"}
    order = graphlib.TopologicalSorter({m: i for m, i in graph.items() if not m.endswith("__init__.py")})
    order.prepare()  # raises CycleError, which names them


def test_private_tensorflow_in_one_file_only():
    pattern = re.compile(r"tensorflow\.(python|core)\b")
    found = [m for m in MODULES if pattern.search((PACKAGE / m).read_text())]
    assert found == ["core/tensorflow_internals.py"]


def test_quick_names_tests_that_exist():
    for name in (*QUICK, *LONG):
        file, _, function = name.partition("::")
        [path] = (ROOT / "tests").rglob(file)
        assert f"def {function or 'test_'}" in path.read_text(), name


def test_import_is_light():
    script = "import sys, graphsplit; print('tensorflow' in sys.modules, 'keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == ["False", "False"]


def test_public_names_and_signatures():
    lines = []
    for name in gs.__all__:
        value = getattr(gs, name)
        if inspect.isfunction(value):
            lines.append(f"{name}{inspect.signature(value)}")
        else:
            own = [c for c in value.__mro__ if c.__module__.startswith("graphsplit.") and not issubclass(c, Exception)]
            members = {m for c in own for m in vars(c) if not m.startswith("_")}
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
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for case in finder.find(loaded, loaded.__name__):
        if case.name.split(".")[-1] not in NEED_FRESH_PROCESS:
            runner.run(case)
    assert runner.failures == 0


def test_the_readme_has_all_options():
    table = (ROOT / "README.md").read_text().partition("\n## Options\n")[2].partition("\n## ")[0]
    options = list(inspect.signature(gs.parallelize).parameters)[1:]
    assert [name for name in options if f"`{name}`" not in table] == []


def test_the_code_of_the_readme_runs():
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code) == 3
    done = subprocess.run([sys.executable, "-c", "\n".join(code)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "nothing that carries the batch runs at home" in done.stdout
    assert re.search(r"^PASS: every difference is rounding; .*\n4 devices against one:$", done.stdout, re.MULTILINE)


def test_tensorflow_is_one_that_is_checked():
    """The versions that setup.cfg allows, those that errors name, and what runs here."""
    asked = re.findall(r"^    tensorflow.* >= ([\d.]+), < ([\d.]+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    oldest, newest = [".".join(map(str, version)) for version in (OLDEST, (NEWEST[0], NEWEST[1] + 1))]
    assert asked == [(oldest, newest)] * 2
    assert OLDEST[:2] <= tuple(map(int, tf.__version__.split(".")[:2])) <= NEWEST
