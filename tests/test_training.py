"""Everything that a training step keeps and changes: optimizers, statistics, metrics, counters, tables, summaries."""

from __future__ import annotations

import glob
from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf
import tf_keras
from keras import layers, optimizers

import graphsplit as gs
from benchmarks.coverage_models import Training, integers, numbers, supervised
from tests.helpers.float64 import EXACT, float64
from tests.helpers.law import assert_law
from tests.helpers.trainings import assert_training

__all__ = ["float64"]
pytestmark = pytest.mark.usefixtures("float64")

ROWS = (7, 7, 1)
STEPS = (7,) * 4  # of optimizers, which never see the batch: one trace


def small(optimizer: Callable[[], Any], normalised: bool = True) -> Callable[[], Training]:
    """Return the training of a small network with an optimizer."""

    def made() -> Training:
        model = keras.Sequential([layers.Input((4,)), layers.Dense(6, "tanh"), layers.Dense(5)])
        if normalised:
            model = keras.Sequential([*model.layers[:1], layers.BatchNormalization(momentum=0.5), *model.layers[1:]])
            model.build((None, 4))
        return supervised(model, lambda rows: (numbers(rows, 4), integers(5, rows)), optimizer=optimizer())

    return made


# Optimizers

KINDS = {
    name: kind
    for name, kind in vars(optimizers).items()
    if isinstance(kind, type) and issubclass(kind, optimizers.Optimizer)
    if name not in ("Optimizer", "LossScaleOptimizer", "MultiOptimizer")  # which hold others
}
SGD, ADAM = optimizers.SGD, optimizers.Adam
OPTIONS: dict[str, Callable[[], optimizers.Optimizer]] = {
    "nesterov": lambda: SGD(0.1, 0.9, nesterov=True),
    "clipnorm": lambda: SGD(0.1, clipnorm=0.05),
    "clipvalue": lambda: SGD(0.1, clipvalue=0.01),
    "global_clipnorm": lambda: ADAM(0.01, global_clipnorm=0.05),
    "amsgrad": lambda: ADAM(0.01, amsgrad=True),
    "weight decay": lambda: optimizers.AdamW(0.01, weight_decay=0.1),
    "moving average": lambda: SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "accumulation": lambda: ADAM(0.01, gradient_accumulation_steps=2, clipnorm=0.05),
    "exponential": lambda: SGD(optimizers.schedules.ExponentialDecay(0.1, 2, 0.5, staircase=True)),
    "cosine": lambda: ADAM(optimizers.schedules.CosineDecayRestarts(0.1, 2)),
    "piecewise": lambda: SGD(optimizers.schedules.PiecewiseConstantDecay([1, 2], [0.1, 0.05, 0.01])),
    "polynomial": lambda: SGD(optimizers.schedules.PolynomialDecay(0.1, 3)),
    "loss scale": lambda: optimizers.LossScaleOptimizer(ADAM(0.01, global_clipnorm=0.05), initial_scale=8.0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", KINDS)
def test_keras_optimizer(name: str):
    assert_training(small(lambda: KINDS[name](0.01), normalised=False), STEPS[:3], sharded=["MatMul", "TanhGrad"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OPTIONS)
def test_optimizer_options(name: str):
    assert_training(small(OPTIONS[name]), STEPS, sharded=["MatMul", "TanhGrad"], strict=True)


V1 = tf.compat.v1.train
OLD = {
    "gradient descent": lambda: V1.GradientDescentOptimizer(0.1),
    "momentum": lambda: V1.MomentumOptimizer(0.1, 0.9, use_nesterov=True),
    "adam": lambda: V1.AdamOptimizer(0.01),
    "rmsprop": lambda: V1.RMSPropOptimizer(0.01, centered=True),
    "adagrad": lambda: V1.AdagradOptimizer(0.1),
    "adadelta": lambda: V1.AdadeltaOptimizer(0.1),
    "ftrl": lambda: V1.FtrlOptimizer(0.1),
    **{
        f"tf_keras {name}": (lambda name=name: getattr(tf_keras.optimizers, name)(0.01, clipnorm=0.05))
        for name in ("SGD", "Adam", "RMSprop", "Adagrad", "Nadam", "Adamax", "Adadelta", "Ftrl", "AdamW")
    },
    **{
        f"legacy {name}": (lambda name=name: getattr(tf_keras.optimizers.legacy, name)(0.01))
        for name in ("SGD", "Adam", "RMSprop")
    },
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", OLD)
def test_older_optimizers(name: str):
    def make() -> tuple[Any, Sequence[tf.Variable]]:
        start = tf.random.Generator.from_seed(1)
        w, b = (
            tf.Variable(start.normal((4, 3), dtype=tf.float64), name="w"),
            tf.Variable(start.normal((3,), dtype=tf.float64), name="b"),
        )
        optimizer = OLD[name]()
        optimizer.apply_gradients([(tf.ones_like(v), v) for v in (w, b)])  # makes its variables

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ w + b) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, [w, b]), [w, b], strict=True))
            return loss

        variables = optimizer.variables
        return step, [w, b, *(variables() if callable(variables) else variables)]

    calls = [(numbers(rows, 4),) for rows in STEPS]
    assert_law(make, calls, sharded=["MatMul", "TanhGrad"], tolerance=EXACT, strict=True)


def test_apply_under_if():
    def made() -> Training:
        training = small(lambda: ADAM(0.01), normalised=False)()
        model = keras.Sequential([layers.Input((4,)), layers.Dense(5)])
        optimizer = ADAM(0.1)
        optimizer.build(model.trainable_variables)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, model(x)))
            gradients = tape.gradient(loss, model.trainable_variables)
            if loss > 1.5:
                optimizer.apply(gradients, model.trainable_variables)
            else:
                optimizer.iterations.assign_add(100)
            return loss

        return Training(step, [*model.variables, *optimizer.variables], training.inputs)

    assert_training(made, (7,) * 6, sharded=["MatMul"], strict=True)


def test_batch_normalisation_of_tf_keras():
    """Fused in tf_keras, which only float32 has: 1e-5 is a few hundred roundings of 1e-7, divided by deviations."""

    def make() -> tuple[Any, Any]:
        tf_keras.utils.set_random_seed(1)
        model = tf_keras.Sequential(
            [
                tf_keras.layers.Conv2D(4, 3, input_shape=(8, 8, 2), dtype="float32"),
                tf_keras.layers.BatchNormalization(momentum=0.5, dtype="float32"),
                tf_keras.layers.ReLU(dtype="float32"),
                tf_keras.layers.Flatten(dtype="float32"),
                tf_keras.layers.Dense(3, dtype="float32"),
            ]
        )
        optimizer = tf_keras.optimizers.SGD(0.01)
        optimizer.build(model.trainable_variables)

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        # (the bias before a normalisation has no gradient but rounding errors)
        return step, [v for v in model.variables if "conv2d" not in v.name or "bias" not in v.name]

    calls = [(tf.cast(numbers(rows, 8, 8, 2), tf.float32),) for rows in (7, 2)]
    assert_law(make, calls, sharded=["Conv2D", "Conv2DBackpropFilter"], tolerance=3e-5, strict=True)


class Perceptron(tf.Module):
    """A model in plain TensorFlow, its step a method with a counter and a running mean of its own."""

    def __init__(self) -> None:
        super().__init__()
        start = tf.random.Generator.from_seed(2)
        self.layers = [tf.Variable(start.normal(shape, dtype=tf.float64)) for shape in ((4, 6), (6, 3))]
        self.mean, self.calls = tf.Variable(tf.ones(4, tf.float64)), tf.Variable(0)
        self.momenta = [tf.Variable(tf.ones_like(w)) for w in self.layers]

    @tf.Module.with_name_scope
    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        self.mean.assign(0.9 * self.mean + 0.1 * tf.reduce_mean(x, 0))
        for w in self.layers:
            x = tf.nn.gelu(x @ w)
        return x

    def train(self, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self(x - self.mean) ** 2)
        for w, m, g in zip(self.layers, self.momenta, tape.gradient(loss, self.layers), strict=True):
            m.assign(0.9 * m + g / (1.0 + tf.norm(g)))
            w.assign_sub(0.1 * m)
        self.calls.assign_add(1)
        return loss


def test_module():
    def make() -> tuple[Any, Any]:
        module = Perceptron()
        return module.train, module.variables

    calls = [(numbers(rows, 4),) for rows in (7, 7)]
    gelu = "Erf" if tf.__version__.startswith("2.16.") else "Erfc"
    assert_law(make, calls, sharded=["MatMul", gelu], tolerance=EXACT, strict=True)


# Metrics, counters, tables, summaries

METRICS: dict[str, Callable[[], keras.metrics.Metric]] = {
    "accuracy": keras.metrics.SparseCategoricalAccuracy,
    "entropy": lambda: keras.metrics.SparseCategoricalCrossentropy(from_logits=True),
}
BINARY: dict[str, Callable[[], keras.metrics.Metric]] = {
    "auc": lambda: keras.metrics.AUC(num_thresholds=20, from_logits=True),
    "precision": keras.metrics.Precision,
    "recall": lambda: keras.metrics.Recall(thresholds=[0.3, 0.6]),
    "error": keras.metrics.RootMeanSquaredError,
}


@pytest.mark.parametrize(
    "names", [["accuracy", "precision"], pytest.param([*METRICS, *BINARY], marks=pytest.mark.long)], ids=len
)
def test_metrics_and_counters(names: list[str]):
    def made() -> Training:
        training = small(lambda: SGD(0.1), normalised=False)()
        metrics = {name: (METRICS | BINARY)[name]() for name in names}
        mean = keras.metrics.Mean()
        rows_seen, steps = tf.Variable(0, dtype=tf.int64), tf.Variable(0)
        head = keras.Sequential([layers.Input((4,)), layers.Dense(5)])

        def step(x: tf.Tensor, y: tf.Tensor) -> dict[str, Any]:
            loss = training.step(x, y)
            logits = head(x)
            for name, metric in metrics.items():
                if name in METRICS:
                    metric.update_state(y, logits, sample_weight=tf.abs(x[:, 0]))
                else:
                    metric.update_state(y[:, None] > 2, tf.sigmoid(logits[:, :1]))
            mean.update_state(loss)
            steps.assign_add(1)
            rows_seen.assign_add(tf.shape(x, tf.int64)[0])
            return {"loss": mean.result(), "rows": rows_seen + 0, **{n: m.result() for n, m in metrics.items()}}

        state = [v for m in (*metrics.values(), mean) for v in m.variables]
        return Training(step, [*training.variables, *head.variables, *state, rows_seen, steps], training.inputs)

    assert_training(made, (7, 7), sharded=["MatMul", "ArgMax"], strict=True)


def test_lookup_tables():
    def make() -> tuple[Any, Any]:
        keys, values = tf.constant(["a", "b", "c"]), tf.constant([1, 2, 3], tf.int64)
        fixed = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), -1)
        grows = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
        weights = tf.Variable(tf.reshape(tf.range(12.0, dtype=tf.float64), [4, 3]))

        def step(words: tf.Tensor, x: tf.Tensor) -> Any:
            before = grows.lookup(words)
            ids = fixed.lookup(words)
            grows.insert(words, ids)
            row = tf.gather(weights, tf.maximum(ids, 0))
            weights.assign_sub(0.1 * tf.tile(tf.reduce_sum(row * x, 0, keepdims=True), [4, 1]))
            return before, ids, row * x, grows.size()

        return step, [weights]

    words = tf.constant(["a", "c", "?", "b", "a", "c", "d"])
    calls = [(words, numbers(7, 3)), (words[::-1], numbers(7, 3, seed=2))]
    # a table lives on one device; its contents are not a variable's value that could be sent
    plan = assert_law(make, calls, sharded=["GatherV2", "Mul"], at_home=None, tolerance=EXACT)
    kinds = sorted(op.type for op, _ in plan.unsharded_ops)
    assert kinds == ["LookupTableFindV2", "LookupTableFindV2", "LookupTableInsertV2"]


def test_summaries(tmp_path: Any):
    def run(name: str, parallel: bool) -> list[Any]:
        writer = tf.summary.create_file_writer(str(tmp_path / name))

        def step(x: tf.Tensor, i: tf.Tensor) -> tf.Tensor:
            with writer.as_default(i):
                loss = tf.reduce_mean(tf.tanh(x))
                tf.summary.write("loss", loss)
                tf.summary.write("x", x)
            return loss

        fn = gs.parallelize(step, devices=3) if parallel else tf.function(step)
        for i in range(3):
            fn(numbers(7, 4, seed=i), tf.constant(i, tf.int64))
        writer.close()
        (file,) = glob.glob(str(tmp_path / name / "*"))
        events = [tf.compat.v1.Event.FromString(r.numpy()) for r in tf.data.TFRecordDataset(file)]
        return [(e.step, v.tag, tf.make_ndarray(v.tensor)) for e in events for v in e.summary.value]

    plain, many = run("plain", False), run("many", True)
    assert [(step, tag) for step, tag, _ in many] == [(step, tag) for step, tag, _ in plain]
    assert len(plain) == 6
    for (_, tag, a), (_, _, b) in zip(many, plain, strict=True):
        assert abs(a - b).max() < EXACT, tag
