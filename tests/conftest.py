"""Five logical CPU devices for every test, four logical GPUs for `-m gpu`; TensorFlow starts here and nowhere else."""

from __future__ import annotations

import dataclasses
import gc
import os
import re
from collections.abc import Iterator, Sequence

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

gc.disable()  # up to the first test: see `pytest_collection_finish`

import keras  # noqa: E402, F401 (before `keep_compiled`)
import pytest  # noqa: E402
import tensorflow as tf  # noqa: E402

from tests.helpers.processes import keep_compiled  # noqa: E402

keep_compiled()

import graphsplit as gs  # noqa: E402
from graphsplit.api.layouts import automatic  # noqa: E402
from tests.helpers import durations  # noqa: E402
from tests.helpers.samples import sample  # noqa: E402

DEVICES = int(os.environ.get("GRAPHSPLIT_TEST_DEVICES", "5"))
MANY = 12  # devices: more than most tests need, see test_twelve_devices.py

FEW = "more devices than this process has: `test_twelve_devices.py` starts one with twelve"
NO_GPU = "no GPU that TensorFlow finds (`graphsplit doctor` says more), or a run without `-m gpu`, which hides them"
GPU_MB = int(os.environ.get("GRAPHSPLIT_TEST_GPU_MB", "2000"))  # of each of four logical GPUs, in each process


def pytest_configure(config: pytest.Config) -> None:
    """Start TensorFlow.

    `-m gpu` gives it four logical GPUs. All other tests run on CPU devices, on every machine: a number of devices
    means GPUs where there are any, and so GPUs are hidden from them and from the processes that they start.
    """
    if tf.config.list_physical_devices("GPU"):
        if re.search(r"(?<!not )\bgpu\b", config.option.markexpr):
            gs.use_logical_devices(4, kind="GPU", memory_mb=GPU_MB)
        else:
            tf.config.set_visible_devices([], "GPU")
            os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    if "GRAPHSPLIT_TEST_V1" in os.environ:  # see test_other_regimes.py
        tf.compat.v1.disable_v2_behavior()
    gs.use_logical_devices(DEVICES)
    if "GRAPHSPLIT_TEST_WORKERS" in os.environ:  # see test_on_workers.py
        workers = gs.workers.LocalWorkers(int(os.environ["GRAPHSPLIT_TEST_WORKERS"]), devices=2)
        config.add_cleanup(workers.close)
        gs.connect(workers, timeout_s=240)
        # (cases call steps inside of a tf.function, over workers here; `worker_reading.py` tests what is said of it)
        config.addinivalue_line("filterwarnings", "ignore:.* is called inside of a tf.function, and runs on worker")
    tf.config.list_logical_devices()  # starts TensorFlow


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark what is `long` or `quick`: in one place, since a sample of a table is no property of any one case."""
    for item in items:
        if item.get_closest_marker("gpu") and not tf.config.list_logical_devices("GPU"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        if item.get_closest_marker("many") and DEVICES < MANY:
            item.add_marker(pytest.mark.skip(reason=FEW))
    seconds = durations.read()
    shorter = [item for item in items if not item.get_closest_marker("long")]
    chosen = _samples(shorter, "default")
    for item in shorter:
        slow = seconds.get(durations.function_of(item.nodeid), 0) > durations.LONG_S
        if item not in chosen and (slow or _table(item, "default")):
            item.add_marker("long")
    for item in _samples([item for item in shorter if not item.get_closest_marker("long")], "quick"):
        item.add_marker("quick")


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out what is there before the first test, which stays to the end.

    That is a million objects of TensorFlow and Keras, which each full collection would visit.
    """
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)  # after fixtures of the module have ended
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Function | None) -> None:
    """Let it leave out what the tests of a file have left, too.

    TensorFlow keeps the gradient of each `tf.custom_gradient` that it ever traced, with its graph: two million objects
    by the end. (`living_objects` visits all that is not left out, whenever a layout is set.)
    """
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@dataclasses.dataclass(frozen=True)
class Table:
    """The cases of a function, or of a file, of which a run takes a sample.

    Attributes:
      name: what pytest calls the function, or the file.
      whole_file: its functions have not all the same parameters, so that a function is the value to have.
      count: how many cases run, or "all".
    """

    name: str
    whole_file: bool
    count: int | str


def _table(item: pytest.Function, run: str) -> Table | None:
    """Return the table of a case, if the mark `sampled` of its function, or else of its file, says what a run takes."""
    for node, mark in item.iter_markers_with_node("sampled"):
        if (count := _counts(*mark.args, **mark.kwargs)[run]) is not None:
            return Table(item.nodeid.partition("[")[0] if node is item else node.nodeid, node is not item, count)
    return None


def _counts(default: int | None = None, *, quick: int | str | None = None) -> dict[str, int | str | None]:
    """Return what the mark `sampled` says: how many cases run by default, and how many with `-m quick`."""
    return {"default": default, "quick": quick}


def _samples(items: Sequence[pytest.Function], run: str) -> set[pytest.Function]:
    """Return the cases that a run takes of the tables that say so."""
    cases: dict[Table, dict[str, pytest.Function]] = {}
    for item in items:
        if (table := _table(item, run)) is not None:
            cases.setdefault(table, {})[item.nodeid] = item
    chosen = set()
    for table, item_by_name in cases.items():
        parameters = {
            name: {"function": item.originalname} if table.whole_file else _parameters(item)
            for name, item in item_by_name.items()
        }
        count = len(parameters) if table.count == "all" else table.count
        chosen |= {item_by_name[name] for name in sample(parameters, count)}
    return chosen


def _parameters(item: pytest.Function) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Start every test from the same random state."""
    tf.keras.utils.set_random_seed(0)


@pytest.fixture(autouse=True)
def regime(request: pytest.FixtureRequest) -> None:
    """Compute as a process of tests was asked to: see test_keras_automatic.py."""
    if "GRAPHSPLIT_TEST_COPIES_TAKE_TIME" in os.environ:
        request.getfixturevalue("copies_take_time")
        request.getfixturevalue("plain_oracle")


@pytest.fixture
def copies_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `variables="auto"` choose for logical CPU devices, and small models, as it does for GPUs and large ones."""
    monkeypatch.setattr(automatic, "copies_take_time", lambda _: True)
    monkeypatch.setattr(automatic, "LEAST_BYTES", 0)


@pytest.fixture
def plain_oracle() -> Iterator[None]:
    """Let a `tf.function` compute what was written.

    TensorFlow's graph optimizer, which graphsplit leaves out on CPUs, turns divisions by constants into products with
    their reciprocals. In Adam's float32 scalars that is 1e-9 in a float64 model, a thousand times what is tested.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": before["disable_meta_optimizer"]})
