"""The project itself: layers, public names, private imports, examples in docstrings and in the README, its guides."""

from __future__ import annotations

import ast
import doctest
import functools
import graphlib
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import textwrap
import types
from collections.abc import Set
from pathlib import Path

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.renamed import NAMES
from graphsplit.core.requirements import NEWEST, OLDEST
from graphsplit.planning.planner import PASSES
from tests.helpers import durations
from tests.helpers.fresh_examples import NEED_FRESH_PROCESS
from tests.helpers.processes import python
from tests.mutants.table import mutants

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "graphsplit"
LAYERS = [  # from the lowest up; a file may import from lower layers and from its own, without circles
    "errors.py",
    "core",
    "program",
    "tracing",
    "rules",
    "planning",
    "emission",
    "axes",
    "runtime",
    "api",
    "workers",
    "inspect",
    "simulate",
    "keras",
    "serving",
    "cli",
]
UPWARDS = {  # what is asked for what stands above, and imports it when it is asked
    "api/calls/compilation.py": ["simulate/search/chosen_plans.py"],
    "api/calls/parallel_function.py": ["inspect/placements.py", "inspect/sources.py"],
    "planning/plan.py": [f"inspect/plans/{name}.py" for name in ("plan_comparison", "plan_text", "strictness")],
}
MODULES = sorted(p.relative_to(PACKAGE).as_posix() for p in PACKAGE.rglob("*.py"))
FENCED = ["core/keras_internals.py", "core/tensorflow_internals.py", "core/variables/parted_classes.py"]
PUBLIC_IN_PYTHON = {"_asdict", "_exit", "_fields", "_getframe", "_make", "_replace"}  # the underscore is in its manual
FRIENDS = {  # of a `ParallelFunction`, which other files of its layer and the next one share
    *(
        "_arrangement",
        "_find",
        "_flatten",
        "_get",
        "_run_planned",
        "_name",
        "_options",
        "_planned",
        "_programs_so_far",
        "_run",
        "_seen",
        "_title",
        "_traced",
        "_variables_so_far",
    ),
    "_parallel_step",
}


ENTRIES = ("__init__.py", "__main__.py")  # the public names, and the command line
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


@functools.cache
def tree_of(module: str) -> ast.Module:
    return ast.parse((PACKAGE / module).read_text())


@functools.cache
def imports_of(module: str) -> set[str]:
    """Return the modules of graphsplit that a file imports anywhere: in functions and for types only, too."""
    found = set()
    for node in ast.walk(tree_of(module)):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in [name for name in names if name.startswith("graphsplit")]:
            path = name.replace(".", "/").removeprefix("graphsplit/")
            found |= {m for m in (f"{path}.py", f"{path}/__init__.py", f"{path.rpartition('/')[0]}.py") if m in MODULES}
            if f"{path.rpartition('/')[0]}/__init__.py" in MODULES:
                found.add(f"{path.rpartition('/')[0]}/__init__.py")
    return found


@pytest.mark.sampled(quick="all")
def test_every_folder_is_in_the_table_of_folders():
    rows = re.findall(r"^\| `(\w+)/` \|.*\| (.*?) ?\|$", ARCHITECTURE, re.MULTILINE)
    assert sorted({m.split("/")[0] for m in MODULES if m not in ENTRIES}) == sorted(LAYERS)
    assert [layer for layer, _ in rows] == LAYERS[:0:-1], "docs/architecture.md lists other folders"
    below = sorted({m.rpartition("/")[0] for m in MODULES if m.count("/") == 2})
    assert sorted(f"{layer}/{name}" for layer, own in rows for name in re.findall(r"`(\w+)/`", own)) == below
    for folder in [*LAYERS[1:], *below]:
        assert ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text())), folder


def test_the_stops_from_a_call_to_its_graph_are_there():
    """Each stop of the walk is a file and names of functions, classes and methods in it; each other path exists."""
    stops = re.findall(r"^\d+\. `([\w/]+\.py)` (`.*?`):", ARCHITECTURE, re.MULTILINE)
    assert 10 <= len(stops) <= 15
    for file, names in stops:
        tree = ast.walk(ast.parse((PACKAGE / file).read_text()))
        defined = {node.name for node in tree if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        assert set(re.findall(r"\w+", names)) <= defined, file
    for path in re.findall(r"`((?:[a-z]\w*/)+(?:\w+\.py)?)`", ARCHITECTURE):
        assert any((above / path).exists() for above in (PACKAGE, PACKAGE / "..", *PACKAGE.glob("*/"))), path


def test_the_page_lists_the_passes():
    listed = re.findall(r"^\| `(\w+)` \|", ARCHITECTURE.partition("## Passes")[2], re.MULTILINE)
    assert listed == [decide.__name__ for decide in PASSES]


@pytest.mark.sampled(quick="all")
def test_imports_point_downwards():
    def level(module: str) -> int:
        return LAYERS.index(module.split("/")[0])

    modules = [m for m in MODULES if m not in ENTRIES]
    above = {m: [other for other in sorted(imports_of(m)) if level(other) > level(m)] for m in modules}
    assert {m: found for m, found in above.items() if found} == UPWARDS


def test_lower_layers_work_without_those_above(tmp_path: Path):
    (tmp_path / "graphsplit").mkdir()
    for name in ("__init__.py", *LAYERS[: LAYERS.index("api") + 1]):
        (tmp_path / "graphsplit" / name).symlink_to(PACKAGE / name)
    code = """
        import graphsplit as gs, tensorflow as tf
        gs.use_logical_devices(2)
        w = tf.Variable(tf.ones((3, 2)))
        gs.set_variable_layout(w, "sharded", devices=2)
        step = gs.parallelize(lambda x: w.assign_sub(tf.matmul(x, x @ w, transpose_a=True)), devices=2)
        assert step.plan(tf.ones((5, 3))).sharded_fraction == 1
        assert step(tf.ones((5, 3)))[0, 0] == -14
        print(gs.__file__)
    """
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTHONPYCACHEPREFIX": str(tmp_path / "compiled")}
    ran = python("-c", textwrap.dedent(code), cwd=tmp_path, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert Path(ran.stdout.split()[-1]).is_relative_to(tmp_path)


@pytest.mark.sampled(quick="all")
def test_no_circles_among_modules():
    # (a package's __init__ gathers names of its own modules, which import each other and not it)
    graph = {m: {i for i in imports_of(m) if not i.endswith("__init__.py")} for m in MODULES if m != "__init__.py"}
    order = graphlib.TopologicalSorter({m: i for m, i in graph.items() if not m.endswith("__init__.py")})
    order.prepare()  # raises CycleError, which names them


def test_no_circles_among_folders():
    """What a subfolder imports does not import the subfolder, in whatever way. A file beside them counts by itself."""
    folders: dict[str, set[str]] = {}
    for module in [m for m in MODULES if m not in ENTRIES and not m.endswith("__init__.py")]:
        below = imports_of(module) - {*UPWARDS.get(module, [])}
        imported = {folder_of(other) for other in below if not other.endswith("__init__.py")}
        folders.setdefault(folder_of(module), set()).update(imported - {folder_of(module)})
    graphlib.TopologicalSorter(folders).prepare()  # raises CycleError, which names them


def folder_of(module: str) -> str:
    return module.rpartition("/")[0] if module.count("/") == 2 else module


def test_no_class_name_stands_twice():
    trees = [tree_of(module) for module in MODULES]
    names = [node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    assert sorted(names) == sorted(set(names))


@pytest.mark.sampled(quick="all")
def test_private_tensorflow_in_one_file_only():
    pattern = re.compile(r"(?<!backend\.)tensorflow\.(python|core)\b")  # (`keras.src.backend.tensorflow` is below)
    found = [m for m in MODULES if pattern.search((PACKAGE / m).read_text())]
    assert found == ["core/tensorflow_internals.py"]


def own_private_names(tree: ast.AST) -> set[str]:
    """Return the private names that the classes of a file define: methods, fields, slots, what they give `self`."""
    found = set()
    for kind in [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]:
        for node in ast.walk(kind):
            match node:
                case ast.FunctionDef(name=name) | ast.AnnAssign(target=ast.Name(id=name)):
                    found.add(name)
                case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                    found.add(name)
                case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=names)):
                    found |= {name.value for name in names}
                case ast.Assign(targets=[ast.Name(id=name)]):
                    found.add(name)
    return found


def foreign_private_names(source: str, own: Set[str] = frozenset()) -> set[str]:
    """Return the private attributes that a file uses of objects that are not ours, also by a name that stands there.

    Of `self` that is what no class of ours has (`own`). Of other objects it is what no class of this file has: another
    file's may have a name that TensorFlow has as well. And the class and the `__dict__` that something is given.
    """
    return private_names_of_others(ast.parse(source), own)


def private_names_of_others(tree: ast.Module, own: Set[str]) -> set[str]:
    """Return what `foreign_private_names` finds in a file that is parsed."""
    here = own_private_names(tree)
    found = set()

    def note(name: str, ours: Set[str] = here, is_given: bool = False) -> None:
        is_private = re.match(r"_(?!graphsplit_)[a-zA-Z*]", name) and name not in PUBLIC_IN_PYTHON | FRIENDS | ours
        if is_private or (is_given and name in ("__class__", "__dict__")):
            found.add(name)

    for node in ast.walk(tree):
        match node:
            case ast.Attribute(value=ast.Name(id="self" | "cls") | ast.Call(func=ast.Name(id="super")), attr=name):
                note(name, here | own, not isinstance(node.ctx, ast.Load))
            case ast.Attribute(attr=name):
                note(name, is_given=not isinstance(node.ctx, ast.Load))
            case ast.FunctionDef(name=name):
                note(name, {name} - {"__class__"}, is_given=True)
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]):
                note(name)
            case ast.Call(func=ast.Name(id="setattr" | "delattr"), args=[_, ast.Constant(value=str(name)), *_]):
                note(name, is_given=True)
            case ast.Call(func=ast.Attribute(attr="__setattr__"), args=[_, ast.Constant(value=str(name)), *_]):
                note(name, is_given=True)
            case ast.Call(args=[_, ast.JoinedStr(values=[ast.Constant(value=str(name)), *_] as parts), *_]):
                if getattr(node.func, "id", None) in ("getattr", "hasattr", "setattr", "delattr"):
                    note("".join(part.value if isinstance(part, ast.Constant) else "*" for part in parts))
            case ast.Dict(keys=keys):  # of which a class is made
                for key in keys:
                    if isinstance(key, ast.Constant) and isinstance(key.value, str):
                        note(key.value)
    return found


@functools.cache
def foreign_private_names_by_file() -> dict[str, set[str]]:
    own = set().union(*[own_private_names(tree_of(module)) for module in MODULES])
    return {m: names for m in MODULES if (names := private_names_of_others(tree_of(m), own))}


def test_private_attributes_in_few_files_only():
    found = foreign_private_names_by_file()
    assert sorted(found) == FENCED, {m: names for m, names in found.items() if m not in FENCED}
    sources = {m: (PACKAGE / m).read_text() for m in MODULES}
    assert [m for m, source in sources.items() if re.search(r"keras\.src\b", source)] == ["core/keras_internals.py"]


ON_NODES_AND_GRAPHS = {  # what other names of ours are, which no variable has
    "_graphsplit_at_home": "core/protos.py",
    "_graphsplit_layout": "program/asked_layouts.py",
    "_graphsplit_of_gradient": "program/asked_layouts.py",
    "_graphsplit_of_variable": "core/protos.py",
    "_graphsplit_own_trace": "core/variables/parted_variables.py",
    "_graphsplit_part": "rules/families/random.py",
    "_graphsplit_role": "core/protos.py",
}


def names_of_ours(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return the `_graphsplit_` attributes that a file uses, and the strings that may name one."""
    nodes = list(ast.walk(tree))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return tuple({name for name in own if re.fullmatch(r"_graphsplit_\w+", name)} for own in (attributes, texts))


def test_users_variables_have_one_record():
    found = {module: names_of_ours(tree_of(module)) for module in MODULES}
    attributes = {module: names for module, (names, _) in found.items() if names}
    assert set().union(*attributes.values()) == {"_graphsplit_record"}
    assert {module.rpartition("/")[0] for module in attributes} == {"core/variables"}
    named = {name: module for module, (_, texts) in found.items() for name in texts - {"_graphsplit_record"}}
    assert named == ON_NODES_AND_GRAPHS


@pytest.mark.parametrize(
    ("planted", "found"),
    {
        "v._handle": "_handle",
        "v._graphsplit_record": "",
        "v._handle = h": "_handle",
        "point._replace(x=1)": "",
        "getattr(optimizer, '_index_dict', ())": "_index_dict",
        "getattr(model, f'_{kind}_counter')": "_*_counter",
        "v.__class__ = kind": "__class__",
        "v.__class__": "",
        "object.__setattr__(m, '__dict__', template.__dict__)": "__dict__",
        "type('Parted', (tf.Variable,), {'_handle': handle})": "_handle",
        "class Ours(keras.Model):\n    def f(self): return self._trainable_variables": "_trainable_variables",
        "class Ours:\n    _own = ()\n    def f(self, other): return self._own + other._own": "",
        "class Ours:\n    def __class__(self): return keras.Model": "__class__",
    }.items(),
)
def test_the_fence_finds_what_is_planted(planted: str, found: str):
    assert foreign_private_names(planted) == ({found} - {""})


def test_the_contract_checks_what_is_private():
    """Each private attribute is named by a check of `ci/contract.py`, which runs on other versions."""
    tree = ast.parse((ROOT / "ci" / "contract.py").read_text())
    checked = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(decorator_list=[_, ast.Call(func=ast.Name(id="relies_on"), args=names)]):
                checked |= {name.value for name in names}
    assert checked == set().union(*foreign_private_names_by_file().values())


def work_in_constructors(source: str) -> list[str]:
    """Return the classes whose constructor does more than keep what it is given: loops, or calls methods of its own."""
    found = []
    for kind in [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]:
        for made in [node for node in kind.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]:
            for node in ast.walk(made):
                match node:
                    case ast.For() | ast.While() | ast.Call(func=ast.Attribute(value=ast.Name(id="self"))):
                        found.append(kind.name)
    return found


WORK_IN_CONSTRUCTORS = {
    "api/calls/parallel_function.py ParallelFunction": "checks what a user asks, where it is written",
    "workers/local_workers.py LocalWorkers": "holds processes, which it starts; a user makes it, and it ends them",
    "core/tensorflow_internals.py RuntimeFunction": "holds a function of the runtime, which forgets it with it",
    "core/variables/parted_variables.py VariableParts": "holds the parts' memory, which ends with it",
}
"""Classes whose constructors do more than keep what they are given, and why."""


def test_nothing_runs_in_a_constructor():
    """Passes are functions, and run when they are called; what holds something outside of Python may get it."""
    found = {f"{m} {name}" for m in MODULES for name in work_in_constructors((PACKAGE / m).read_text())}
    assert found == set(WORK_IN_CONSTRUCTORS)


def test_work_in_a_constructor_is_found():
    kept = "class A:\n    def __init__(self, ops):\n        self.ops, self.by = ops, {op.name: op for op in ops}\n"
    assert work_in_constructors(kept) == []
    assert work_in_constructors(f"{kept}        self.run()\n") == ["A"]
    assert work_in_constructors(f"{kept}        for op in ops: op.visit()\n") == ["A"]


def test_durations_are_of_tests_that_exist():
    seconds = durations.read()
    assert durations.text(seconds) == durations.FILE.read_text()
    assert [function for function in seconds if not durations.exists(function)] == []


def test_mistakes_that_tests_must_find_can_be_made():
    for mutant in mutants():
        assert (PACKAGE / mutant.file).read_text().count(mutant.before) == 1, mutant


def test_import_is_light():
    script = "import sys, graphsplit.cli; print('tensorflow' in sys.modules, 'keras' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == ["False", "False"]


def public_names(module: types.ModuleType) -> dict[str, object]:
    """Return what a module offers, and what those modules offer that it does, by how users write them."""
    found: dict[str, object] = {}
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.ismodule(value):
            found |= {f"{name}.{inner}": own for inner, own in public_names(value).items()}
        else:
            found[name] = value
    return found


@pytest.mark.sampled(quick="all")
def test_public_names_and_signatures():
    spec = importlib.util.spec_from_file_location("api", ROOT / "ci" / "api.py")
    api, lines = importlib.util.module_from_spec(spec), []
    spec.loader.exec_module(api)
    for name, value in public_names(gs).items():
        if inspect.isfunction(value):
            lines.append(f"{name}{inspect.signature(value)}")
        else:
            members = {} if issubclass(value, Exception) else api.members_of(value)
            lines.append(f"class {name}: {', '.join(sorted(members))}" if members else f"class {name}")
    golden = ROOT / "tests" / "public_names.txt"
    assert lines == golden.read_text().splitlines(), "\n".join(["public names changed:", *lines])
    assert len([name for name in gs.__all__ if not inspect.ismodule(getattr(gs, name))]) <= 20


def test_every_public_name_is_documented():
    for name, value in public_names(gs).items():
        assert inspect.getdoc(value), name


def test_a_name_that_changed_says_what_it_is_now():
    now = public_names(gs)
    assert [name for name, new in NAMES.items() if new not in now or name in now] == []
    with pytest.raises(AttributeError, match=r"no attribute 'timeline_of'. It is gs.inspect.timeline now.$"):
        gs.timeline_of  # noqa: B018
    modules = sorted({new.partition(".")[0] for new in NAMES.values() if "." in new}, reverse=True)
    printed = python("-c", "\n".join(f"import graphsplit.{name} as m; print(*m.__all__)" for name in modules)).stdout
    assert printed.splitlines() == [" ".join(getattr(gs, name).__all__) for name in modules]


@pytest.mark.sampled(1)
def test_examples_in_docstrings():
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    for module in MODULES:
        name = "graphsplit." + module.removesuffix(".py").replace("/", ".")
        loaded = importlib.import_module(name.removesuffix(".__init__"))
        for case in finder.find(loaded, loaded.__name__):
            if case.name.split(".")[-1] not in NEED_FRESH_PROCESS:
                runner.run(case)
    assert runner.failures == 0  # (each was printed)
    assert runner.tries > 100


def test_no_test_imports_a_test():
    """What several need is a helper; who runs the tests of other files in another way starts a process."""
    found = set()
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            named = (
                [node.module or "", *[alias.name for alias in node.names]] if isinstance(node, ast.ImportFrom) else []
            )
            if any(part.startswith("test_") for name in named for part in name.split(".")):
                found.add(path.name)
    assert found == set()


@pytest.mark.long
def test_the_code_of_the_readme_runs():
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code) == 2
    done = python("-c", "\n".join([*code, "print(c)"]))
    assert done.returncode == 0, done.stderr
    passed = r"^PASS: every difference is rounding; .*\n4 devices against one, a training step of 'sequential':$"
    assert re.search(passed, done.stdout, re.MULTILINE)
    assert "tf.Tensor([2. 2. 2. 2.], shape=(4,), dtype=float32)" in done.stdout
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_tensorflow_is_one_that_is_checked():
    """The versions that setup.cfg allows, those that errors name, and what runs here."""
    asked = re.findall(r"^    tensorflow.* >= ([\d.]+), < ([\d.]+)$", (ROOT / "setup.cfg").read_text(), re.MULTILINE)
    oldest, newest = [".".join(map(str, version)) for version in (OLDEST, (NEWEST[0], NEWEST[1] + 1))]
    assert asked == [(oldest, newest)] * 2
    told = f"{oldest} to {NEWEST[0]}.{NEWEST[1]}"
    assert [told in (ROOT / page).read_text() for page in ("CONTRIBUTING.md", "docs/installing.md")] == [True] * 2, told
    assert OLDEST[:2] <= tuple(map(int, tf.__version__.split(".")[:2])) <= NEWEST
