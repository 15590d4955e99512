"""Small Keras models of every kind with data for them, and the comparison of two runs of `fit`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

import graphsplit as gs

layers = keras.layers
ROWS = 19


@dataclass(frozen=True)
class Case:
    """A model, its data and what it is compiled with; `sharded` must run on the shards in training."""

    build: Callable[[], keras.Model]
    data: Callable[[], tuple[Any, Any]]
    compile: dict[str, Any] = field(default_factory=lambda: {"loss": "mse"})
    sharded: tuple[str, ...] = ("MatMul",)

    def model(self) -> keras.Model:
        """Return the built model, with the same weights every time."""
        keras.utils.set_random_seed(1)
        return self.build()


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(ROWS, *shape)).astype("float32")


def classes(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(0, count, (ROWS, *shape))


def dense() -> keras.Model:
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, "tanh", kernel_regularizer="l2"), layers.Dropout(0.3), layers.Dense(3)]
    )


def convolutional() -> keras.Model:
    image = keras.Input((8, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(image)
    x = layers.BatchNormalization(momentum=0.5)(x)
    x = layers.Activation("relu")(x)
    x = layers.MaxPooling2D()(x)
    x = layers.Dropout(0.2)(x)
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(5, 3)(x))
    return keras.Model(image, layers.Dense(4)(x))


def siamese() -> keras.Model:
    left, right = keras.Input((5,), name="left"), keras.Input((5,), name="right")
    encoder = keras.Sequential([layers.Input((5,)), layers.Dense(6, "tanh"), layers.Dense(4)])
    joined = layers.Concatenate()([encoder(left), encoder(right)])
    outputs = {"sum": layers.Dense(2, name="sum")(joined), "same": layers.Dense(1, "sigmoid", name="same")(joined)}
    return keras.Model({"left": left, "right": right}, outputs)


def embedding() -> keras.Model:
    return keras.Sequential(
        [layers.Input((7,), dtype="int32"), layers.Embedding(11, 6), layers.GlobalAveragePooling1D(), layers.Dense(2)]
    )


def attention() -> keras.Model:
    sequence = keras.Input((6, 8))
    x = layers.MultiHeadAttention(2, 4)(sequence, sequence)
    x = layers.LayerNormalization()(layers.Add()([x, sequence]))
    return keras.Model(sequence, layers.Dense(2)(layers.Flatten()(x)))


def recurrent() -> keras.Model:
    return keras.Sequential([layers.Input((4, 3)), layers.LSTM(5), layers.Dense(2)])


class Subclassed(keras.Model):
    """Nested inputs, a loss of its own, a training step of its own with a metric and two optimizer-like updates."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = layers.Dense(6, "tanh")
        self.decode = layers.Dense(3)
        self.steps = self.add_weight(name="steps", shape=(), dtype="int64", initializer="zeros", trainable=False)
        self.spread = keras.metrics.MeanSquaredError(name="spread")

    def call(self, inputs: Any, training: bool = False) -> Any:
        hidden = self.encode(inputs["pair"][0]) * self.encode(inputs["pair"][1])
        self.add_loss(keras.ops.mean(hidden**2))
        return self.decode(hidden) + inputs["bias"]

    def train_step(self, data: Any) -> Any:
        self.steps.assign_add(1)
        logs = super().train_step(data)
        x, y = data[:2]
        self.spread.update_state(y, self(x, training=False))
        return {**logs, "spread": self.spread.result()}


def subclassed() -> keras.Model:
    model = Subclassed()
    model(subclassed_data()[0])
    return model


def subclassed_data() -> tuple[Any, Any]:
    return {"pair": (numbers(4), numbers(4, seed=3)), "bias": numbers(3, seed=4)}, numbers(3, seed=5)


SPARSE = {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "metrics": ["accuracy"]}

CASES = {
    "dense": Case(dense, lambda: (numbers(6), numbers(3, seed=2)), {"loss": "mse", "metrics": ["mae"]}),
    "convolutional": Case(
        convolutional,
        lambda: (numbers(8, 8, 2), classes(4)),
        SPARSE,
        ("Conv2D", "Conv2DBackpropFilter", "Conv2DBackpropInput", "MatMul"),
    ),
    "siamese": Case(
        siamese,
        lambda: (
            {"left": numbers(5), "right": numbers(5, seed=7)},
            {"sum": numbers(2, seed=8), "same": classes(2, 1)},
        ),
        {
            "loss": {"sum": "mse", "same": "binary_crossentropy"},
            "loss_weights": {"sum": 0.5, "same": 2.0},
            "metrics": {"same": ["accuracy", keras.metrics.AUC(num_thresholds=20)]},
        },
    ),
    "embedding": Case(embedding, lambda: (classes(11, 7), classes(2)), SPARSE, ("MatMul", "GatherV2")),
    "attention": Case(attention, lambda: (numbers(6, 8), numbers(2, seed=9)), sharded=("MatMul", "Einsum")),
    "recurrent": Case(recurrent, lambda: (numbers(4, 3), numbers(2, seed=9))),
    "subclassed": Case(subclassed, subclassed_data),
}

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": lambda: keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.01, 3, 0.5), epsilon=1e-3),
    "clipped": lambda: keras.optimizers.AdamW(0.01, epsilon=1e-3, global_clipnorm=0.1, use_ema=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01, epsilon=1e-3, clipnorm=0.05, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.05), initial_scale=8.0),
}


def fit(case: Case, optimizer: str, gpus: Any, **options: Any) -> tuple[keras.Model, dict[str, list[float]]]:
    """Return the model that ran, wrapped or (gpus=1) not, and its history; `gpus` may be more arguments, by name."""
    model = gs.multi_gpu_model(case.model(), **(gpus if isinstance(gpus, dict) else {"gpus": gpus}))
    model.compile(OPTIMIZERS[optimizer](), **copied(case.compile))
    keras.utils.set_random_seed(2)
    x, y = case.data()
    return model, model.fit(x, y, **{"verbose": 0, "epochs": 2, **options}).history


def copied(config: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of `compile` with metrics and losses of their own: Keras would share their state."""
    return {
        key: keras.saving.deserialize_keras_object(keras.saving.serialize_keras_object(value))
        for key, value in config.items()
    }


def state(model: keras.Model) -> list[tuple[str, np.ndarray]]:
    """Return every variable of a model: weights, seeds, optimizer, metrics."""
    variables = [*model.variables, *model.optimizer.variables, *model.metrics_variables]
    return [(v.path, np.asarray(v)) for v in variables]


def assert_same(actual: list[tuple[str, Any]], expected: list[tuple[str, Any]], tolerance: float = 1e-5) -> None:
    """Compare named numbers relative to the largest of each."""
    assert len(actual) == len(expected)
    for (name, a), (_, e) in zip(actual, expected, strict=True):
        a64, e64 = np.asarray(a, np.float64), np.asarray(e, np.float64)
        scale = np.max(np.abs(e64), initial=1e-3)
        np.testing.assert_allclose(a64, e64, rtol=0, atol=tolerance * scale, err_msg=name)


def assert_sharded(model: keras.Model, kinds: tuple[str, ...], devices: int) -> None:
    """Assert that the last training batch really was split and that these op types ran on the shards."""
    plan = model.train_function.plan()
    plan.check()
    assert len(plan.devices) == min(devices, plan.batch)
    types = [op.type for op in plan.sharded_ops]
    missing = [kind for kind in kinds if kind not in types]
    assert not missing, f"{missing} not sharded\n{plan}"
    if "MatMul" in kinds:
        assert types.count("MatMul") >= 2, str(plan)  # forward and gradient
