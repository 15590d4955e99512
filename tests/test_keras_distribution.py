"""`keras.distribution` on TensorFlow: what `fit` computes under `DataParallel` is what one device does."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.keras_cases import CASES, OPTIMIZERS, Case, assert_same, assert_sharded, copied, state
from tests.helpers.keras_distributions import (
    ROWS,
    compiled,
    data,
    distribution,
    fixture_enabled,
    layers,
    numbers_of,
    parallel,
    small,
)

__all__ = ["fixture_enabled"]


def assert_equal(run: Callable[[], list[tuple[str, Any]]], devices: int, tolerance: float = 1e-5) -> None:
    """Run on one device and under a distribution, and compare."""
    expected = run()
    with parallel(devices).scope():
        assert_same(run(), expected, tolerance)


def everything(case: Case, optimizer: str, before: Callable[[], Any], between: Callable[[], Any]) -> Any:
    """Return a model of a case, and what all of its calls compute; `before` it is made, `between` that and compile."""
    before()
    model = case.model()
    between()
    model.compile(OPTIMIZERS[optimizer](), **copied(case.compile))
    keras.utils.set_random_seed(2)
    x, y = case.data()
    history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)  # (8, 8, 3 rows)
    single = tf.nest.map_structure(lambda a: a[:8], (x, y))  # (as many as have a trace)
    found = [
        *numbers_of(history),
        ("evaluate", model.evaluate(x, y, batch_size=8, verbose=0)),
        *[("predict", value) for value in tf.nest.flatten(model.predict(x, batch_size=8, verbose=0))],
        ("train_on_batch", model.train_on_batch(*single)),
        ("test_on_batch", model.test_on_batch(*single)),
        *[("predict_on_batch", value) for value in tf.nest.flatten(model.predict_on_batch(single[0]))],
    ]
    return model, [*found, *state(model)]


def every_case() -> Iterator[Any]:
    optimizers = list(OPTIMIZERS)
    for i, name in enumerate(CASES):
        for devices in (3, 4):
            for early in (True, False):
                when = "set before" if early else "set after"
                optimizer = optimizers[i % len(optimizers)]
                yield pytest.param(name, optimizer, devices, early, id=f"{name}, {devices}, {when}")


@pytest.mark.parametrize(("name", "optimizer", "devices", "early"), list(every_case()))
def test_equals_one_device(name: str, optimizer: str, devices: int, early: bool):
    def set_it() -> None:
        distribution.set_distribution(parallel(devices))

    def nothing() -> None:
        pass

    case = CASES[name]
    _, expected = everything(case, optimizer, nothing, nothing)
    model, found = everything(case, optimizer, set_it if early else nothing, nothing if early else set_it)
    assert_same(found, expected)
    assert_sharded(model, case.sharded, devices)


class Subclassed(keras.Model):
    """Not built before its first batch; its step counts, and adds a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = layers.Dense(8, "tanh"), layers.Dense(3)
        self.drop, self.batches = layers.Dropout(0.3), keras.metrics.Sum(name="batches")

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.first(x)
        self.add_loss(keras.ops.mean(hidden**2))
        return self.second(self.drop(hidden, training=training))

    def train_step(self, data: Any) -> Any:
        logs = super().train_step(data)
        self.batches.update_state(1.0)
        return {**logs, "batches": self.batches.result()}


def subclassed() -> keras.Model:
    keras.utils.set_random_seed(1)
    return Subclassed()


UNBUILT = {"sequential": lambda: small(inputs=False), "subclassed": subclassed}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "first"),
    [
        pytest.param(make, first, id=f"{name}, {first}")
        for name, make in UNBUILT.items()
        for first in ("fit", "evaluate", "predict", "train_on_batch", "plan")
    ],
)
def test_the_first_batch_builds_a_model(make: Any, first: str, enabled: gs.keras.KerasDistribution):
    x, y = data()

    def run() -> list[tuple[str, Any]]:
        model = compiled(make())
        assert not model.built
        firsts = {
            "evaluate": lambda: model.evaluate(x, y, verbose=0),
            "predict": lambda: model.predict(x, verbose=0),
            "train_on_batch": lambda: model.train_on_batch(x, y),
        }
        found = firsts.get(first, lambda: 0)()
        if first == "plan" and distribution.distribution() is not None:
            assert enabled.plan(model, x, y).rows == (6, 5, 5)
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0)
        if distribution.distribution() is not None:
            assert_sharded(model, ("MatMul", "TanhGrad"), 3)
        return [*numbers_of(history), ("first", found), *state(model)]

    assert_equal(run, 3)


@pytest.mark.long
@pytest.mark.parametrize("steps", [2, pytest.param(3, marks=pytest.mark.long)])
def test_steps_per_execution(steps: int):
    x, y = data(38)

    def run() -> list[tuple[str, Any]]:
        seen: list[int] = []
        model = compiled(small(), steps_per_execution=steps)
        count = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: seen.append(batch))
        history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[count])
        predicted = model.predict(x, batch_size=8, verbose=0)
        return [*numbers_of(history), ("seen", seen), ("predicted", predicted), *state(model)]

    assert_equal(run, 4)


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> Any:
        x, y = data()
        return x[8 * i : 8 * i + 8], y[8 * i : 8 * i + 8]


def batches() -> Iterator[Any]:
    while True:
        yield from (Sequence()[i] for i in range(2))


KINDS_OF_DATA: dict[str, Callable[[], dict[str, Any]]] = {
    "tf.data": lambda: {"x": tf.data.Dataset.from_tensor_slices(data()).batch(8), "shuffle": False},
    "generator": lambda: {"x": batches(), "steps_per_epoch": 2, "shuffle": False},
    "PyDataset": lambda: {"x": Sequence(), "shuffle": False},
    "class weights": lambda: {
        "x": data()[0],
        "y": np.arange(ROWS) % 3,
        "batch_size": 8,
        "class_weight": {1: 2.0, 2: 0.5},
    },
    "sample weights": lambda: {
        "x": data()[0],
        "y": data()[1],
        "batch_size": 8,
        "sample_weight": np.linspace(0, 1, ROWS),
    },
    "validation": lambda: {"x": data(40)[0], "y": data(40)[1], "batch_size": 8, "validation_split": 0.3},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", list(KINDS_OF_DATA))
def test_kinds_of_data(kind: str):
    loss = "sparse_categorical_crossentropy" if kind == "class weights" else "mse"
    weighted = {"metrics": [], "weighted_metrics": ["mse"]} if kind == "sample weights" else {"metrics": []}

    def run() -> list[tuple[str, Any]]:
        model = small()
        model.add(layers.Softmax())
        compiled(model, loss=loss, **weighted)
        history = model.fit(**KINDS_OF_DATA[kind](), epochs=2, verbose=0)
        if distribution.distribution() is not None:
            assert_sharded(model, ("MatMul",), 4)
        return [*numbers_of(history), *state(model)]

    assert_equal(run, 4)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Your input ran out of data")  # so Keras finds the end
def test_data_of_unknown_length_is_counted_as_if_it_were_known():
    """Keras' own function is called once more to find the end of each epoch, and counts that as a step."""
    known = tf.data.Dataset.from_tensor_slices(data(32)).batch(8)
    unknown = known.filter(lambda x, y: True)
    expected = compiled(small())
    losses = expected.fit(known, epochs=3, verbose=0, shuffle=False).history["loss"]
    plain = compiled(small())
    plain.fit(unknown, epochs=3, verbose=0, shuffle=False)
    model = compiled(small())
    with parallel(3).scope():
        found = model.fit(unknown, epochs=3, verbose=0, shuffle=False).history["loss"]
    assert [int(m.optimizer.iterations) for m in (expected, model)] == [12, 12]
    assert int(plain.optimizer.iterations) > 12  # the page says so
    assert_same([("loss", found), *state(model)], [("loss", losses), *state(expected)])


@pytest.mark.long
def test_callbacks(tmp_path: Path):
    x, y = data(19)

    def run() -> list[tuple[str, Any]]:
        folder = tmp_path / str(distribution.distribution() is not None)
        folder.mkdir()
        model = compiled(small())
        found = keras.callbacks
        history = model.fit(
            x,
            y,
            batch_size=8,
            epochs=4,
            verbose=0,
            validation_split=0.3,
            callbacks=[
                found.ModelCheckpoint(str(folder / "best.keras"), save_best_only=True),
                found.EarlyStopping(monitor="loss", patience=1, min_delta=0.2, restore_best_weights=True),
                found.LearningRateScheduler(lambda epoch: 0.05 / (epoch + 1)),
                found.BackupAndRestore(str(folder / "backup")),
                found.CSVLogger(str(folder / "log.csv")),
            ],
        )
        loaded = keras.models.load_model(folder / "best.keras")
        assert len(history.epoch) < 4
        assert (folder / "log.csv").read_text().count("\n") == len(history.epoch) + 1
        return [*numbers_of(history), *state(model), *state(loaded)]

    def with_rate() -> list[tuple[str, Any]]:
        before = OPTIMIZERS["adam"]
        OPTIMIZERS["adam"] = lambda: keras.optimizers.Adam(0.05, epsilon=1e-3)  # a schedule cannot be set
        try:
            return run()
        finally:
            OPTIMIZERS["adam"] = before

    assert_equal(with_rate, 4)


def trained(model: keras.Model) -> list[tuple[str, Any]]:
    return [(v.path, np.asarray(v)) for v in [*model.weights, *model.optimizer.variables]]


def loaded(path: Path) -> keras.Model:
    keras.utils.set_random_seed(3)  # no file has the state of Dropout's seeds: a new one is drawn
    model: keras.Model = keras.models.load_model(path)
    return model


@pytest.mark.long
def test_files_and_copies(tmp_path: Path):
    x, y = data()
    with parallel(3).scope():
        model = compiled(small())
        model.fit(x, y, batch_size=8, verbose=0)
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        model.export(str(tmp_path / "exported"), verbose=False)
        copies = [loaded(tmp_path / "model.keras") for _ in range(2)]
        copies += [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:
            assert type(other) is keras.Sequential
            assert_same(trained(other), trained(model), 1e-7)
    weights = small(seed=5)
    weights.load_weights(tmp_path / "model.weights.h5")
    exported = tf.saved_model.load(str(tmp_path / "exported"))
    served = exported.serve(x)
    assert_same([("served", served), ("weights", weights(x))], [("model", model(x))] * 2)
    keras.utils.set_random_seed(3)
    expected = copies[0].fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"]
    with parallel(4).scope():  # what was trained on 3 goes on, on 1 and on 4
        keras.utils.set_random_seed(3)
        assert_same(
            [("loss", copies[1].fit(x, y, batch_size=8, verbose=0, shuffle=False).history["loss"])], [("", expected)]
        )


@pytest.mark.long
def test_one_device_then_four_then_three_then_one():
    x, y = data()

    def run(where: list[Any]) -> list[tuple[str, Any]]:
        model, found = compiled(small()), []
        for one in where:
            distribution.set_distribution(one)
            found += numbers_of(model.fit(x, y, batch_size=8, verbose=0, shuffle=False))
            found.append(("predicted", model.predict(x, verbose=0)))
            if one is not None:
                assert_sharded(model, ("MatMul",), one.device_mesh.devices.size)
        assert type(model.train_function).__name__ == "function"
        return [*found, *state(model)]

    expected = run([None] * 4)
    assert_same(run([None, parallel(4), parallel(3), None]), expected)


@pytest.mark.long
def test_functions_are_kept_while_nothing_changes():
    x, y = data()
    model, four, three = compiled(small()), parallel(4), parallel(3)

    def train_function() -> Any:
        model.fit(x, y, verbose=0)
        return model.train_function

    with four.scope():
        first = train_function()
        assert train_function() is first
        model.predict(x, verbose=0)
        assert model.predict_function.owner is first.owner
    with three.scope():
        model.predict(x, verbose=0)
        assert train_function() is not first
    with four.scope():
        other = train_function()
        assert other is not first
        compiled(model)
        assert train_function() is not other
        assert model.make_train_function(force=True) is not None


@pytest.mark.long
def test_compiled_by_xla():
    def run() -> list[tuple[str, Any]]:
        keras.utils.set_random_seed(1)  # without dropout: compiled on one device, it draws numbers of XLA's own
        model = compiled(
            keras.Sequential([layers.Input((6,)), layers.Dense(8, "tanh"), layers.Dense(3)]), jit_compile=True
        )
        history = model.fit(*data(), batch_size=8, epochs=2, verbose=0)
        if distribution.distribution() is not None:
            assert model.train_function.plan().jit_compile
            assert model.train_function.step.plan(*model.train_function._last).jit_compile
        return [*numbers_of(history), *state(model)]

    assert_equal(run, 4)
    with parallel(4).scope():
        model = compiled(small())
        model.fit(*data(), verbose=0)
        assert not model.train_function.plan().jit_compile


@pytest.mark.long
def test_mixed_precision():
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        assert_equal(lambda: numbers_of(compiled(small()).fit(*data(), batch_size=8, verbose=0)), 4, tolerance=2e-2)
    finally:
        keras.config.set_dtype_policy(before)


@pytest.mark.long
def test_two_dimensional_meshes_and_other_devices_than_the_first():
    x, y = data(19)
    expected = numbers_of(compiled(small()).fit(x, y, batch_size=8, epochs=2, verbose=0))
    mesh = distribution.DeviceMesh((2, 2), ["data", "other"], [f"cpu:{d}" for d in range(4)])
    square = distribution.ModelParallel(layout_map=distribution.LayoutMap(mesh))  # (Keras' DataParallel fails there)
    last = distribution.DataParallel(devices=["cpu:4"])
    odd = distribution.DataParallel(devices=["cpu:3", "cpu:1"])
    for one, rows in ((square, (2, 1)), (last, (3,)), (odd, (2, 1))):
        with one.scope():
            model = compiled(small())
            assert_same(numbers_of(model.fit(x, y, batch_size=8, epochs=2, verbose=0)), expected)
            plan = model.train_function.plan()  # of the last batch, 3 rows
            assert [r for r in plan.rows if r] == [r for r in rows if r]
            assert set(plan.devices) <= {f"/device:{d.upper()}" for d in one.device_mesh.devices.flatten()}


@pytest.mark.long
def test_models_answer(enabled: gs.keras.KerasDistribution):
    x, y = data(7)
    distribution.set_distribution(parallel(3))
    model = compiled(small())
    assert enabled.plan(model, x, y).rows == (3, 2, 2)
    assert "TanhGrad" in {op.type for op in enabled.plan(model, x, y).sharded_ops}
    assert "TanhGrad" not in {op.type for op in enabled.plan(model, x).sharded_ops}
    assert enabled.plan(model, tf.TensorSpec([None, 6])).rows == ()
    placement = enabled.placement(model, x, y, actual=True)
    assert placement.title == f"{model.name}.train_step"
    placement.assert_on("shard_2/*", "CPU:2")
    assert gs.placement(model, x).rows == (3, 2, 2)
    assert gs.inspect.timeline(model, x, y).duration_s > 0
    report = gs.verify(model, x, y)
    assert report.passed, str(report)
    assert len(report.devices) == 3
    model.fit(x, y, batch_size=4, epochs=2, verbose=0)
    assert enabled.plan(model).batch == 4
    distribution.set_distribution(None)
    assert len(gs.placement(model, x).devices) == 1


@pytest.mark.long
def test_a_model_that_is_wrapped_keeps_its_devices():
    x, y = data()
    expected = numbers_of(compiled(small()).fit(x, y, batch_size=8, verbose=0))
    with parallel(4).scope():
        model = compiled(gs.multi_gpu_model(small(), 2))
        assert_same(numbers_of(model.fit(x, y, batch_size=8, verbose=0)), expected)
        assert len(model.plan().devices) == 2
        assert gs.verify(model, x, y).devices == ("/device:CPU:0", "/device:CPU:1")
