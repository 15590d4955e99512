"""`keras.distribution` on TensorFlow, switched on and off: what is replaced, left, refused; who is told."""

from __future__ import annotations

import gc
import subprocess
import sys
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.keras.distribution.replacements import REPLACEMENTS
from tests.helpers.keras_cases import assert_same
from tests.helpers.keras_distributions import compiled, data, numbers_of, parallel, small
from tests.helpers.processes import python

distribution, layers = keras.distribution, keras.layers


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Forget the distribution at the end, and leave nothing on."""
    yield
    distribution.set_distribution(None)
    gs.keras.enable_distribution().disable()


def names_of_keras() -> dict[str, Any]:
    found = {}
    for replacement in REPLACEMENTS:
        owner = replacement.owner()
        found[f"{owner.__name__}.{replacement.name}"] = vars(owner).get(replacement.name)
    return found


def is_on() -> bool:
    return hasattr(REPLACEMENTS[-1].owner(), "num_processes")


def test_everything_is_keras_own_again():
    before = names_of_keras()
    whole = [set(vars(replacement.owner())) for replacement in REPLACEMENTS]
    enabled = gs.keras.enable_distribution()
    during = names_of_keras()
    assert all(during[name] is not before[name] for name in before)
    assert len(before) == len(REPLACEMENTS)
    enabled.disable()
    assert names_of_keras() == before
    assert [set(vars(replacement.owner())) for replacement in REPLACEMENTS] == whole


def test_nothing_happens_on_import():
    script = (
        "import graphsplit as gs, keras; gs.multi_gpu_model; gs.keras.KerasDistribution; "
        "from keras.src.backend.tensorflow import distribution_lib; print(hasattr(distribution_lib, 'num_processes'))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout.split() == ["False"]


def test_enabled_within_enabled():
    with gs.keras.enable_distribution():
        with gs.keras.enable_distribution():
            assert is_on()
        assert is_on()
    assert not is_on()
    first = gs.keras.enable_distribution()
    with gs.keras.enable_distribution():
        pass
    assert is_on()
    gs.keras.enable_distribution().disable()
    assert not is_on()
    first.disable()  # once is enough
    with pytest.raises(gs.errors.ArgumentError, match="was disabled"):
        first.plan(small(), data()[0])
    second = gs.keras.enable_distribution()
    first.disable()  # what another call switched on stays on
    assert is_on()
    with pytest.raises(ZeroDivisionError), second:
        _ = 1 / 0
    assert not is_on()


@pytest.mark.long
def test_the_next_fit_is_keras_own():
    x, y = data()

    def run(*, off: bool) -> list[tuple[str, Any]]:
        model = compiled(small())
        found = []
        for _ in range(2):
            found += numbers_of(model.fit(x, y, batch_size=8, verbose=0, shuffle=False))
            model.predict(x, verbose=0)
            if off:
                assert hasattr(model.train_function, "step")
                gs.keras.enable_distribution().disable()
                assert (model.train_function, model.predict_function) == (None, None)
        assert not hasattr(model.train_function, "step")
        return found

    expected = run(off=False)
    gs.keras.enable_distribution()
    distribution.set_distribution(parallel(3))  # it stays set
    model = compiled(small())
    found = numbers_of(model.fit(x, y, batch_size=8, verbose=0, shuffle=False))
    model.predict(x, verbose=0)
    assert hasattr(model.train_function, "step")
    gs.keras.enable_distribution().disable()
    assert (model.train_function, model.predict_function) == (None, None)
    found += numbers_of(model.fit(x, y, batch_size=8, verbose=0, shuffle=False))
    assert not hasattr(model.train_function, "step")
    assert_same(found, expected)


def test_without_it_nothing_is_distributed():
    """What the first sentence of the page says: on TensorFlow a distribution is taken, and one device runs."""
    with parallel(3).scope():
        model = compiled(small())
        model.fit(*data(), verbose=0)
    assert not hasattr(model.train_function, "step")


def test_models_are_not_kept_alive():
    with gs.keras.enable_distribution(), parallel(3).scope():
        model = compiled(small())
        model.fit(*data(), verbose=0)
        gone = weakref.ref(model)
        del model
        gc.collect()
        assert gone() is None


class Loop(keras.Sequential):
    def make_train_function(self, force: bool = False) -> Any:
        self.train_function = self._make_function(self.train_step)
        return self.train_function


class CallsKeras(keras.Sequential):
    def make_train_function(self, force: bool = False) -> Any:
        super().make_train_function(force)
        return self.train_function


@pytest.mark.long
@pytest.mark.parametrize("kind", [Loop, CallsKeras])
def test_a_class_that_drives_batches_itself_is_told(kind: type):
    x, y = data()

    class Own(kind):  # (a class is told once)
        pass

    with gs.keras.enable_distribution() as enabled, parallel(3).scope():
        model = compiled(Own([layers.Input((6,)), layers.Dense(3)]))
        with pytest.warns(UserWarning, match="overrides") as told:
            model.fit(x, y, verbose=0)
        assert str(told[0].message) == (
            "Own overrides make_train_function, which runs the batches itself, on one "
            "device, instead of the 3 of DataParallel. Override train_step, test_step or predict_step instead."
        )
        assert told[0].filename == __file__
        model.fit(x, y, verbose=0)
        assert not hasattr(model.train_function, "step")
        model.evaluate(x, y, verbose=0)  # which the class has not made its own
        assert hasattr(model.test_function, "step")
        with pytest.raises(gs.errors.UnsupportedError) as error:
            enabled.plan(model, x, y)
        assert str(error.value) == (
            f"{model.name!r} has no plan here: it runs on one device, since its class overrides "
            "make_train_function. Override train_step instead."
        )


def test_a_model_that_runs_eagerly_is_told():
    x, y = data()
    expected = numbers_of(compiled(small(), run_eagerly=True).fit(x, y, batch_size=8, verbose=0))
    with gs.keras.enable_distribution() as enabled, parallel(3).scope():
        model = compiled(small(), run_eagerly=True)
        with pytest.warns(UserWarning, match="run_eagerly") as told:
            found = numbers_of(model.fit(x, y, batch_size=8, verbose=0))
        assert str(told[0].message) == (
            f"{model.name!r} was compiled with run_eagerly=True: it runs operation by operation, on one device instead "
            "of the 3 of DataParallel, many times slower. The numbers are the same. To use the devices, compile "
            "without run_eagerly."
        )
        assert_same(found, expected)
        model.fit(x, y, batch_size=8, verbose=0)
        with (
            pytest.warns(UserWarning, match="run_eagerly"),
            pytest.raises(gs.errors.ArgumentError, match="has no plan"),
        ):
            enabled.plan(model, x, y)


def test_questions_that_have_no_answer():
    x, y = data()
    with gs.keras.enable_distribution() as enabled:
        model = compiled(small())
        with pytest.raises(gs.errors.UnsupportedError) as error:
            enabled.plan(model, x, y)
        assert str(error.value) == (
            f"{model.name!r} has no plan here: it runs on one device, since no distribution of several is set. Call "
            "keras.distribution.set_distribution first."
        )
        with pytest.raises(gs.errors.ArgumentError, match=r"^keras\.distribution is about models of Keras 3, got int"):
            enabled.plan(3, x)
        distribution.set_distribution(parallel(3))
        with pytest.raises(gs.errors.ArgumentError, match="has run no step since it was wrapped and compiled"):
            enabled.plan(model)
        with pytest.raises(gs.errors.UnsupportedError, match=r"made by multi_gpu_model\. Call its own plan"):
            enabled.plan(gs.multi_gpu_model(model, 2), x, y)


def test_devices_that_are_not_here():
    x, y = data()
    with gs.keras.enable_distribution() as enabled, distribution.DataParallel(devices=["gpu:0", "gpu:1"]).scope():
        model = compiled(small())
        assert enabled.plan(model, x, y).devices == ("/device:GPU:0", "/device:GPU:1")
        with pytest.raises(gs.errors.DeviceError, match=r"^devices=\['gpu:0', 'gpu:1'\]: GPU:0, GPU:1 do not exist"):
            model.fit(x, y, verbose=0)


def test_models_of_a_strategy():
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        model = compiled(small())
    with (
        gs.keras.enable_distribution(),
        parallel(3).scope(),
        pytest.raises(
            gs.errors.UnsupportedError, match=r"strategy's scope.*keras\.distribution takes the strategy's place"
        ),
    ):
        model.fit(*data(16), batch_size=8, verbose=0)


def test_processes():
    with gs.keras.enable_distribution():
        distribution.initialize()
        distribution.initialize(num_processes=1, process_id=0)
        with pytest.raises(gs.errors.UnsupportedError) as error:
            distribution.initialize("10.0.0.1:1234,10.0.0.2:2345", 2, 0)
        assert "start `graphsplit worker` on each machine and call graphsplit.connect([addresses]) here" in str(
            error.value
        )
        with pytest.raises(ValueError, match="has 2 jobs, but num_processes is 3"):
            distribution.initialize("10.0.0.1:1234,10.0.0.2:2345", 3, 0)
        one = distribution.DataParallel()
        assert (one.num_processes, one.data_shard_id) == (1, 0)
        dataset = tf.data.Dataset.range(8)
        assert one.distribute_dataset(dataset) is dataset
        assert distribution.list_devices() == [f"cpu:{d}" for d in range(5)]
        assert distribution.get_device_count() == 5
        assert distribution.get_device_count("gpu") == 0
        assert one.device_mesh.backend_mesh == tuple(f"/device:CPU:{d}" for d in range(5))
        layout = distribution.TensorLayout(["batch", None], one.device_mesh)
        assert layout.backend_layout == (("batch", None), one.device_mesh.backend_mesh)
        with pytest.raises(ValueError, match="Cannot create sharding when device mesh is not set"):
            _ = distribution.TensorLayout(["batch", None]).backend_layout
        value = tf.ones((4, 2))
        assert distribution.distribute_tensor(value, layout) is value


CLUSTER = """
import keras, numpy as np, graphsplit as gs
with gs.workers.LocalWorkers(2, devices=1) as workers:
    gs.connect(workers, timeout_s=240)
    gs.keras.enable_distribution()
    devices = keras.distribution.list_devices()
    print(*devices)
    print(keras.distribution.list_devices("cpu") == devices, keras.distribution.get_device_count())
    x, y = np.random.default_rng(0).normal(size=(7, 4)), np.ones((7, 2))
    found = []
    for one in (None, keras.distribution.DataParallel()):
        keras.distribution.set_distribution(one)
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(2)])
        model.compile("sgd", "mse")
        found.append(model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"])
    print(np.allclose(*found, rtol=1e-5), *model.train_function.plan().devices)
"""


@pytest.mark.timeout(600)
def test_workers_of_a_cluster():
    done = python("-c", CLUSTER, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    workers = " ".join(f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(2))
    assert done.stdout.splitlines() == [workers, "True 2", f"True {workers}"]


def test_another_keras_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch):
    before = names_of_keras()
    for version, what in (("3.2.1", "older"), ("3.16.0.dev0", "newer")):
        monkeypatch.setattr(keras, "__version__", version)
        with pytest.raises(
            gs.errors.UnsupportedError, match=rf"3\.3 to 3\.15, and this is {version}:\n  - it is {what}\n"
        ):
            gs.keras.enable_distribution()
        monkeypatch.undo()
    trainer = REPLACEMENTS[0].owner()
    monkeypatch.setattr(trainer, "make_test_function", lambda self: None)
    monkeypatch.delattr(trainer, "make_train_function")
    with pytest.raises(gs.errors.UnsupportedError) as error:
        gs.keras.enable_distribution()
    assert str(error.value) == (
        f"keras.distribution on TensorFlow is there for Keras 3.3 to 3.15, and this is {keras.__version__}:\n"
        "  - TensorFlowTrainer.make_train_function is missing\n"
        "  - TensorFlowTrainer.make_test_function takes self instead of self, force\n"
        "Install one of those, or use multi_gpu_model, which needs none of this."
    )
    monkeypatch.undo()
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(
        gs.errors.UnsupportedError, match=r"Keras runs on 'jax' here, which has a keras\.distribution of its own"
    ):
        gs.keras.enable_distribution()
    monkeypatch.undo()
    assert names_of_keras() == before
    assert not is_on()


@pytest.mark.long
def test_no_warning_where_nothing_is_distributed():
    with gs.keras.enable_distribution(), warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(Loop([layers.Input((6,)), layers.Dense(3)])).fit(*data(), verbose=0)
        one = distribution.DataParallel(devices=["cpu:0"])
        with one.scope():
            model = compiled(small())
            model.fit(*data(), verbose=0)
            assert not hasattr(model.train_function, "step")
            assert np.isfinite(model.evaluate(*data(), verbose=0)).all()
