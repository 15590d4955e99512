"""What Keras users do with a model in everyday life, under each layout of its variables: as on one device.

A life is what happens to models, from when they are made. It is lived on one device, in plain Keras, and on four; both
return the same numbers. Whatever happened before, training then goes on on all devices, its state laid out as asked.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.api.layouts.variable_layouts import plain_variable, variables_of
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.keras_cases import assert_same, numbers
from tests.helpers.layout_cases import held_by_device
from tests.helpers.policies import policy
from tests.helpers.processes import python

__all__ = ["policy"]

DEVICES = 4
LAYOUTS = ["home", "sharded", "replicated"]
ROWS = 14  # two batches of 7, uneven for four devices; one trace (others take batches of several sizes)
X, Y = numbers(20)[:ROWS], numbers(3, seed=2)[:ROWS]
LARGE = 256  # bytes: smaller variables stay where they are
layers = keras.layers


class Run:
    """One run of a life: on one device, or with variables laid out so."""

    def __init__(self, folder: Path, layout: str | None):
        self.folder, self.layout = folder, layout
        self.wrapped: list[Any] = []

    def wrap(self, template: Any, devices: int = DEVICES) -> Any:
        """Return a model on all devices; the template itself on one."""
        if self.layout is None:
            return template
        self.wrapped.append(gs.multi_gpu_model(template, devices, variables=self.layout))
        return self.wrapped[-1]

    def laid_out(self, *of: Any) -> None:
        """Assert that variables lie as asked now: of models with their optimizers, or of anything else."""
        if self.layout is not None:
            assert_laid_out(of, self.layout)


def assert_laid_out(of: Any, layout: str) -> None:
    variables = [
        v for v in variables_of(list(of)) if v.dtype.is_floating and v.shape.num_elements() * v.dtype.size > LARGE
    ]
    held = held_by_device(variables)
    whole = sum(v.shape.num_elements() * v.dtype.size for v in variables)
    parts = [parts_of_variable(v) for v in variables]
    with raw_handles():
        kept = [(v.name, v.handle.device) for v, own in zip(variables, parts, strict=True) if own is None]
    if layout == "home":
        assert len(kept) == len(parts)
        assert set(held.values()) == {whole}
        return
    laid = [own for own in parts if own is not None]
    assert {own.layout for own in laid} == {layout}
    assert len(held) == DEVICES
    if layout == "replicated":  # (copies that are old are made again before the next batch)
        assert not kept
        assert set(held.values()) == {whole}
    else:  # (what is owned whole by the device where it was made is no part)
        assert all(own.in_parts for own in laid), [own.path for own in laid if not own.in_parts]
        assert sum(held.values()) == whole
        assert max(held.values()) < 0.4 * whole, (held, kept)


def assert_trains_on_all(model: Any) -> None:
    plan = model.train_function.plan()
    plan.check()
    assert len(plan.devices) == DEVICES
    products = [op for op in plan.sharded_ops if op.type in ("MatMul", "Einsum", "BatchMatMulV2")]
    assert len(products) >= 3, str(plan)  # forward and gradients


_on_one_device: dict[str, list[tuple[str, Any]]] = {}


@pytest.fixture(params=["sharded", *[pytest.param(own, marks=pytest.mark.long) for own in ("home", "replicated")]])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def alike(request: pytest.FixtureRequest, layout: str, tmp_path: Path) -> Callable[..., Run]:
    """Live on one device, once for all layouts, and on several; compare, and return the run on several."""

    def run(life: Callable[[Run], Any], tolerance: float = 1e-4, goes_on: bool = True) -> Run:
        name = f"{request.node.originalname} {life.__name__} {request.node.callspec.params.get('policy')}"
        if name not in _on_one_device:
            (tmp_path / "one").mkdir(exist_ok=True)
            _on_one_device[name] = named(life(Run(tmp_path / "one", None)))
        (tmp_path / "several").mkdir(exist_ok=True)
        several = Run(tmp_path / "several", layout)
        assert_same(named(life(several)), _on_one_device[name], tolerance)
        for model in several.wrapped if goes_on else ():
            if getattr(model, "optimizer", None) is not None:
                model.train_on_batch(X[:7], Y[:7])
                several.laid_out(model)
                assert_trains_on_all(model)
        return several

    return run


def named(result: Any) -> list[tuple[str, Any]]:
    return [(str(i), np.array(leaf)) for i, leaf in enumerate(tf.nest.flatten(result))]


def network(library: Any = keras, seed: int = 1) -> Any:
    """Return a model whose kernels are large enough to be cut."""
    library.utils.set_random_seed(seed)
    own = library.layers
    inner = [own.Dense(96, "relu", name="up"), own.BatchNormalization(name="norm"), own.Dropout(0.2, name="drop")]
    return library.Sequential([own.Input((20,), name="rows"), *inner, own.Dense(3, name="down")], name="net")


def adam(library: Any = keras, **options: Any) -> Any:
    return library.optimizers.Adam(0.01, epsilon=1e-3, **options)


def compiled(model: Any, library: Any = keras, optimizer: Any = None, **options: Any) -> Any:
    """Compile; make the slots, since a step that makes them is traced twice."""
    model.compile(optimizer or adam(library), "mse", **options)
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model: Any, epochs: int = 1, **options: Any) -> list[float]:
    """Train; return the losses."""
    given = {"batch_size": 7, "epochs": epochs, "shuffle": False, "verbose": 0, **options}
    return [v for _, v in sorted(model.fit(X, Y, **given).history.items())]


def state(model: Any) -> list[Any]:
    """Return weights, seeds and slots."""
    own = model.optimizer.variables
    optimizer = own() if callable(own) else own
    return [np.array(v.numpy()) for v in (*model.variables, *optimizer)]


def scores(model: Any) -> Any:
    return model.predict(X, batch_size=7, verbose=0)


# --- files -----------------------------------------------------------------------------------------------------------


def test_files(alike: Any):
    """A model that is loaded goes on as the one that was saved does; so does one that gets the weights only."""

    def life(run: Run) -> Any:
        model = compiled(run.wrap(network()), metrics=["mae"])
        found = [fit(model)]
        model.save(run.folder / "whole.keras")
        model.save_weights(run.folder / "some.weights.h5")
        run.laid_out(model)
        found.append(fit(model))
        loaded = run.wrap(keras.models.load_model(run.folder / "whole.keras"))
        found += [fit(loaded), state(loaded)]
        other = compiled(run.wrap(network(seed=3)))
        fit(other)
        other.load_weights(run.folder / "some.weights.h5")
        run.laid_out(loaded, other)
        return [*found, fit(other), state(other), state(model)]

    alike(life)


READER = """
import json, os, sys
import numpy as np, tensorflow as tf
x = np.load("x.npy")
found = {}
for folder in sorted(os.listdir(".")):
    if os.path.isdir(folder):
        signature = tf.saved_model.load(folder).signatures["serving_default"]
        [scores] = signature(tf.constant(x)).values()
        found[folder] = scores.numpy().tolist()
assert not any(name.startswith("graphsplit") for name in sys.modules)
print(json.dumps(found))
"""


@pytest.mark.filterwarnings("ignore:.*tf.lite.Interpreter is deprecated")
def test_what_is_exported(layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It loads without graphsplit, is converted for phones, is transpiled for several devices; training goes on."""
    monkeypatch.chdir(tmp_path)
    np.save("x.npy", X)
    one, model = (compiled(own) for own in (network(), gs.multi_gpu_model(network(), DEVICES, variables=layout)))
    fit(one)
    before = scores(one)
    fit(model)
    model.export("exported", verbose=False)
    tf.saved_model.save(model, "saved")
    assert_laid_out([model], layout)
    report = gs.serving.transpile_saved_model("exported", "transpiled", DEVICES)
    assert len(report.plans["serving_default"].sharded_ops) > 3
    lite = tf.lite.TFLiteConverter.from_saved_model("exported").convert()
    assert_same([("lite", lite_scores(lite))], [("lite", before)], 1e-4)
    read = python("-c", READER)
    assert read.returncode == 0, read.stderr[-3000:]
    found = json.loads(read.stdout.splitlines()[-1])
    expected = [(kind, before) for kind in ("exported", "saved", "transpiled")]
    assert_same(sorted(found.items()), expected, 1e-4)
    assert_same(named([fit(model), state(model)]), named([fit(one), state(one)]), 1e-4)
    assert_laid_out([model], layout)


def lite_scores(model: bytes) -> Any:
    interpreter = tf.lite.Interpreter(model_content=model)
    [given], [scores] = interpreter.get_input_details(), interpreter.get_output_details()
    interpreter.resize_tensor_input(given["index"], X.shape)
    interpreter.allocate_tensors()
    interpreter.set_tensor(given["index"], X)
    interpreter.invoke()
    return interpreter.get_tensor(scores["index"])


@pytest.mark.long
def test_checkpoints(alike: Any):
    """Read into a model that has trained, and into a new one."""

    def life(run: Run) -> Any:
        model = compiled(run.wrap(network()))
        found = [fit(model)]
        after = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(run.folder / "after")
        found.append(fit(model))
        run.laid_out(model)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(after).assert_consumed()
        run.laid_out(model)
        found.append(fit(model))  # as the second time
        new = compiled(run.wrap(network(seed=3)))
        tf.train.Checkpoint(model=new, optimizer=new.optimizer).read(after)
        return [*found, fit(new), state(new), state(model)]

    alike(life)


@pytest.mark.long
def test_checkpoints_of_parts_and_of_managers(alike: Any):
    def life(run: Run) -> Any:
        model = compiled(run.wrap(network()))
        before = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(run.folder / "before")
        found = [fit(model)]
        tf.train.Checkpoint(model=model).read(before).expect_partial()
        found += [fit(model), state(model)]
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), run.folder / "kept", max_to_keep=1)
        manager.save()
        fit(model)
        manager.restore_or_initialize()
        return [*found, fit(model), state(model)]

    alike(life)


# --- values from outside, copies -------------------------------------------------------------------------------------


def test_values(alike: Any):
    """Weights are set, assigned and trained with another rate, in between and between two batches."""

    def life(run: Run) -> Any:
        model = compiled(run.wrap(network()))
        found = [fit(model)]
        weights = model.get_weights()
        found.append(fit(model))
        model.set_weights(weights)
        run.laid_out(model)
        kernel = model.get_layer("up").kernel
        for rows in (slice(7), slice(7, 14)):  # between two batches
            kernel.assign(kernel * 0.5)
            model.get_layer("down").bias.assign_add(np.ones(3))
            found.append(model.train_on_batch(X[rows], Y[rows]))
        model.optimizer.learning_rate = 0.02
        found += [fit(model), model(X[:5], training=False).numpy()]
        lines: list[str] = []
        model.summary(print_fn=lines.append)
        found += [model.count_params(), [ord(letter) for letter in "".join(lines)]]
        return [*found, state(model)]

    alike(life)


def clone(model: Any) -> Any:
    cloned = keras.models.clone_model(model)
    cloned.set_weights(model.get_weights())
    return compiled(cloned)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda model: pickle.loads(pickle.dumps(model)), "clone": clone}


@pytest.mark.long
@pytest.mark.parametrize("how", COPIES)
def test_copies(alike: Any, how: str):
    """A copy is trained as the model is that it was copied from, which goes on by itself."""

    def life(run: Run) -> Any:
        model = compiled(run.wrap(network()))
        found = [fit(model)]
        keras.utils.set_random_seed(5)  # (a clone's layers draw seeds of their own)
        again = run.wrap(COPIES[how](model))
        found += [fit(again), state(again)]
        run.laid_out(again)
        return [*found, fit(model), state(model)]

    alike(life)


# --- compile ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_compiled_again(alike: Any):
    """With another optimizer, whose slots are others; with a layer frozen; before it is wrapped, and after training."""

    def life(run: Run) -> Any:
        model = run.wrap(compiled(network()))
        found = [fit(model), state(model)]
        run.laid_out(model)
        before = weakref.ref(model.optimizer)
        model.get_layer("up").trainable = False
        compiled(model, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
        found += [fit(model), state(model)]
        run.laid_out(model)
        gc.collect()
        return [*found, before() is None]

    alike(life, goes_on=False)


@pytest.mark.long
def test_compiled_often(alike: Any):
    """By its template, too; with layers frozen and thawed; before it is wrapped, after, and after training."""

    def life(run: Run) -> Any:
        template = compiled(network())
        found = [fit(template)]
        model = run.wrap(template)
        found += [fit(model), state(model)]
        run.laid_out(model)
        before = weakref.ref(model.optimizer)
        compiled(model, optimizer=keras.optimizers.RMSprop(0.01, momentum=0.5, epsilon=1e-3))
        found += [fit(model), state(model)]
        run.laid_out(model)
        gc.collect()
        found.append(before() is None)
        model.get_layer("up").trainable = False
        compiled(model, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
        found += [fit(model), state(model)]
        run.laid_out(model)
        compiled(template, optimizer=model.optimizer)  # of which it has the slots already
        found += [fit(model), state(model)]
        model.get_layer("up").trainable = True
        compiled(model, optimizer=keras.optimizers.AdamW(0.01, epsilon=1e-3, clipnorm=0.1), metrics=["mae"])
        return [*found, fit(model), state(model), fit(template), fit(model), state(model)]

    alike(life)


def test_steps_per_execution_states_and_stopping(alike: Any):
    def life(run: Run) -> Any:
        keras.utils.set_random_seed(1)
        recurrent = layers.LSTM(24, stateful=True, name="memory")
        sequence = [layers.Input(batch_shape=(6, 4, 5)), recurrent, layers.Dense(3)]
        model = run.wrap(keras.Sequential(sequence))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"], steps_per_execution=2)
        x, y, found, ended = numbers(20)[:18].reshape(18, 4, 5), numbers(3, seed=2)[:18], [], []

        class Stops(keras.callbacks.Callback):
            def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
                ended.append(batch)

            def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
                self.model.stop_training = epoch == 1

        options: dict[str, Any] = {"batch_size": 6, "shuffle": False, "verbose": 0}
        for _ in range(2):
            history = model.fit(x, y, epochs=5, callbacks=[Stops()], **options)
            found += [history.history["loss"], history.history["mae"], np.array(recurrent.states[0].numpy())]
            recurrent.reset_state()
        model.reset_metrics()
        run.laid_out(model)
        return [*found, ended, [m.result() for m in model.metrics], [np.array(v.numpy()) for v in model.variables]]

    alike(life, goes_on=False)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["mixed_float16"], indirect=True)
def test_mixed_precision(alike: Any, policy: str):
    def life(run: Run) -> Any:
        model = run.wrap(network())
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05, momentum=0.9)), "mse")
        found = [fit(model)]
        model.save(run.folder / "half.keras")
        loaded = run.wrap(keras.models.load_model(run.folder / "half.keras"))
        keras.utils.set_random_seed(5)
        return [*found, fit(loaded), state(loaded), state(model)]

    alike(life, tolerance=1e-2)


# --- callbacks -------------------------------------------------------------------------------------------------------


class Averages(keras.callbacks.Callback):
    """The mean of the weights after each epoch, which the model has at the end (SWA, by hand)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.seen.append(self.model.get_weights())

    def on_train_end(self, logs: Any = None) -> None:
        self.model.set_weights([np.mean(own, 0) for own in zip(*self.seen, strict=True)])


@pytest.mark.long
def test_callbacks_that_change_weights(alike: Any):
    def life(run: Run) -> Any:
        model = run.wrap(network())
        optimizer = adam(use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4)
        compiled(model, optimizer=optimizer)
        swap = keras.callbacks.SwapEMAWeights(swap_on_epoch=True)
        options = {"validation_data": (X[:9], Y[:9])}
        found = [fit(model, 2, callbacks=[swap], **options), state(model)]
        best = keras.callbacks.ModelCheckpoint(run.folder / "best.keras", "loss", save_best_only=True)
        stop = keras.callbacks.EarlyStopping("loss", patience=1, min_delta=10.0, restore_best_weights=True)
        found += [fit(model, 3, callbacks=[best, stop]), state(model)]
        model.load_weights(run.folder / "best.keras")
        found += [fit(model, 2, callbacks=[Averages()]), state(model)]
        return [*found, fit(model, 1), state(model)]

    alike(life)


@pytest.mark.long
def test_training_that_was_broken_off(alike: Any):
    """It goes on where it was, in a model that is made anew."""

    class Breaks(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if epoch == 1:
                raise KeyboardInterrupt

    def life(run: Run) -> Any:
        backup = keras.callbacks.BackupAndRestore(run.folder / "backup")
        with contextlib.suppress(KeyboardInterrupt):
            fit(compiled(run.wrap(network())), 3, callbacks=[backup, Breaks()])
        backup = keras.callbacks.BackupAndRestore(run.folder / "backup")
        model = compiled(run.wrap(network()))
        return [fit(model, 3, callbacks=[backup]), state(model)]

    alike(life)


# --- models that change ----------------------------------------------------------------------------------------------


@pytest.mark.long
def test_quantized_after_training(alike: Any):
    def life(run: Run) -> Any:
        model = compiled(run.wrap(network()))
        found = [fit(model), state(model)]
        model.quantize("int8", filters="up|down")
        return [*found, scores(model), [np.array(v.numpy()) for v in model.variables]]

    alike(life, goes_on=False)


@pytest.mark.long
def test_low_rank_adapters(alike: Any):
    def life(run: Run) -> Any:
        model = compiled(run.wrap(network()))
        found = [fit(model)]
        model.get_layer("up").enable_lora(4)
        compiled(model)
        found += [fit(model), state(model), len(model.trainable_variables)]
        model.save(run.folder / "lora.keras")
        loaded = run.wrap(keras.models.load_model(run.folder / "lora.keras"))
        keras.utils.set_random_seed(5)
        return [*found, fit(loaded), state(loaded)]

    alike(life)


@pytest.mark.long
def test_models_that_share_layers(alike: Any):
    """Each is trained in turn, with an optimizer of its own; and so is one that is not wrapped."""

    def life(run: Run) -> Any:
        keras.utils.set_random_seed(1)
        inputs, shared = keras.Input((20,)), layers.Dense(96, "tanh", name="shared")
        made = [keras.Model(inputs, layers.Dense(3, name=f"head_{k}")(shared(inputs))) for k in range(3)]
        models = [compiled(run.wrap(own)) for own in made[:2]] + [compiled(made[2])]
        found = [fit(model) for _ in range(2) for model in models]
        return [*found, [fit(model) for model in models[:2]], [state(model) for model in models]]

    alike(life)


class Adversaries(keras.Model):
    """Two networks, each with an optimizer of its own, which a step of one's own trains."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (
            keras.Sequential([keras.Input((20,)), layers.Dense(96), layers.Dense(3)]) for _ in "ab"
        )
        self.built = True

    def call(self, x: Any) -> Any:
        return self.left(x) - self.right(x)

    def compile(self, *optimizers: Any) -> None:
        super().compile()
        self.optimizers = optimizers

    def train_step(self, data: Any) -> Any:
        x, y = data[:2]
        with tf.GradientTape(persistent=True) as tape:
            left = tf.reduce_mean((self.left(x) - y) ** 2)
            right = tf.reduce_mean((self.right(x) - tf.stop_gradient(self.left(x))) ** 2)
        for part, loss, optimizer in zip((self.left, self.right), (left, right), self.optimizers, strict=True):
            optimizer.apply(tape.gradient(loss, part.trainable_variables), part.trainable_variables)
        return {"left": left, "right": right}


@pytest.mark.long
def test_two_optimizers(alike: Any):
    def life(run: Run) -> Any:
        keras.utils.set_random_seed(1)
        model = run.wrap(Adversaries())
        model.compile(adam(), keras.optimizers.SGD(0.01, momentum=0.9))
        found = [fit(model, 2), [np.array(v.numpy()) for own in model.optimizers for v in own.variables]]
        return [*found, fit(model), model.predict(X, verbose=0)]

    run = alike(life)
    run.laid_out(run.wrapped, *run.wrapped[0].optimizers)


@pytest.mark.long
def test_a_model_of_keras_2(alike: Any):
    def life(run: Run) -> Any:
        tf_keras.backend.experimental.enable_tf_random_generator()
        model = compiled(run.wrap(network(tf_keras)), tf_keras)
        found = [fit(model)]
        model.save(run.folder / "whole.keras")
        weights = model.get_weights()
        found.append(fit(model))
        model.set_weights(weights)
        loaded = run.wrap(tf_keras.models.load_model(run.folder / "whole.keras"))
        tf_keras.utils.set_random_seed(5)
        found += [fit(loaded), state(loaded)]
        path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(run.folder / "checkpoint")
        fit(model)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).read(path)
        model.get_layer("up").trainable = False
        compiled(model, tf_keras, tf_keras.optimizers.legacy.SGD(0.05, momentum=0.9))
        tf_keras.utils.set_random_seed(6)
        return [*found, fit(model), state(model)]

    try:
        alike(life)
    finally:
        tf_keras.backend.experimental.disable_tf_random_generator()


# --- the session -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_cleared_session(alike: Any):
    def life(run: Run) -> Any:
        model = compiled(run.wrap(network()))
        found = [fit(model)]
        keras.backend.clear_session()
        found += [fit(model), state(model)]
        other = compiled(run.wrap(network(seed=3)))
        return [*found, fit(other), fit(model), state(other), state(model)]

    alike(life)


@pytest.mark.long
def test_a_model_that_is_deleted_is_gone(layout: str):
    """Its variables, their parts, its functions; the template goes on if it is kept."""
    model = compiled(gs.multi_gpu_model(network(), DEVICES, variables=layout))
    fit(model)
    model.predict(X, verbose=0)
    variables = [plain_variable(v) for v in (*model.variables, *model.optimizer.variables)]
    parts = [part for v in variables if (own := parts_of_variable(v)) is not None for part in own._parts]
    kept = [weakref.ref(one) for one in (model.template, model.optimizer, *variables, *parts)]
    del model, variables, parts
    with contextlib.suppress(NameError):
        del own, part  # noqa: F821
    gc.collect()
    assert [one() for one in kept if one() is not None] == []


@pytest.mark.long
@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param(["replicated", "sharded"], id="for training, after predictions"),
        pytest.param(["home", "replicated", "sharded", "home", "sharded"], marks=pytest.mark.long, id="often"),
    ],
)
def test_a_layout_that_comes_in_mid_life(layouts: list[str], tmp_path: Path):
    """Functions and files of before a layout, and between two, go on; training is as on one device."""

    def life(wraps: bool) -> Any:
        template = compiled(network())
        model = gs.multi_gpu_model(template, DEVICES) if wraps else template
        kept = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        read = tf.function(lambda x: template(x, training=False))
        found: list[Any] = [read(X), scores(model), model.evaluate(X, Y, verbose=0)]
        for k, layout in enumerate(layouts):
            if k == 1:
                model.optimizer.build(model.trainable_variables)
            if wraps:
                gs.set_variable_layout(template, layout, DEVICES, reshard_after_forward=False)
            found += [scores(model), fit(model) if k else 0.0]
            if wraps and k:
                assert_laid_out([model], layout)
                assert_trains_on_all(model)
            found += [model.evaluate(X, Y, verbose=0), read(X)]
            path = kept.write(tmp_path / f"{wraps}-{layout}")
            model.save(tmp_path / "model.keras")
            kept.read(path).expect_partial()
        return [*found, fit(model), state(model)]

    assert_same(named(life(True)), named(life(False)), 1e-4)


@pytest.mark.long
def test_a_template_that_is_wrapped_again(alike: Any):
    """For other devices, while the first model is still there."""

    def life(run: Run) -> Any:
        template = compiled(network())
        first = run.wrap(template, 2)
        found = [fit(first)]
        second = run.wrap(template, DEVICES)
        found += [fit(second), state(second)]
        if run.layout is not None:
            del run.wrapped[0]
        return found

    alike(life)
