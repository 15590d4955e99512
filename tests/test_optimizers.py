"""Every optimizer of Keras under sharded layouts: the numbers of one device, and no more bytes than at home."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tf_keras

import graphsplit as gs
from graphsplit.planning.device_bytes import traffic

DEVICES, ROWS = 5, 33
ZERO_1 = {"slots of *": "sharded", "*": "replicated"}

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    **{
        name: (getattr(keras.optimizers, name), {})
        for name in ("SGD", "RMSprop", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Adafactor", "Nadam", "Ftrl")
    },
    **{
        name: (getattr(keras.optimizers, name), {})
        for name in ("Lion", "Lamb", "Muon")
        if hasattr(keras.optimizers, name)
    },
    "Nesterov": (keras.optimizers.SGD, {"momentum": 0.9, "nesterov": True}),
    "centered": (keras.optimizers.RMSprop, {"centered": True, "momentum": 0.9}),
    "amsgrad": (keras.optimizers.Adam, {"amsgrad": True}),
    "EMA": (keras.optimizers.Adam, {"use_ema": True, "ema_overwrite_frequency": 2}),
    "clipnorm": (keras.optimizers.Adam, {"clipnorm": 0.01}),
    "global_clipnorm": (keras.optimizers.Adam, {"global_clipnorm": 0.01}),
    "weight decay": (keras.optimizers.Adam, {"weight_decay": 0.1}),
    "accumulation": (keras.optimizers.Adam, {"gradient_accumulation_steps": 2}),
    "loss scaling": (lambda rate: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(rate)), {}),
    "tf_keras": (tf_keras.optimizers.Adam, {}),
    "fused Adam": (tf_keras.optimizers.legacy.Adam, {}),
    "fused Adagrad": (tf_keras.optimizers.legacy.Adagrad, {}),
}
SHORT = ("Adam", "Ftrl", "Muon", "EMA", "clipnorm", "loss scaling", "fused Adam")
NUMBERS = np.random.default_rng(0).standard_normal((ROWS, 42)).astype(np.float32)
X, Y = NUMBERS[:, :37], NUMBERS[:, 37:]


def model_of(name: str) -> Any:
    """Return a compiled model of layers of uneven sizes. (A bias before a normalization has noise for a gradient.)"""
    make, options = OPTIMIZERS[name]
    library = tf_keras if name.startswith(("tf_keras", "fused")) else keras
    library.utils.set_random_seed(1)
    layers = library.layers
    widths = [
        layers.Dense(90, "relu"),
        layers.Dense(96, "tanh"),
        layers.Dense(95, use_bias=False),
        layers.BatchNormalization(),
    ]
    widths += [layers.Dense(64), layers.Dense(11), layers.Dense(5)]
    model = library.Sequential([layers.Input((37,)), *widths])
    model.compile(make(0.01, **options), "mse")
    return model


def bytes_through_the_busiest(model: Any) -> int:
    _, sent, received = traffic(model.plan(X, Y)).busiest
    return sent + received


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in SHORT else [pytest.mark.long]) for name in OPTIMIZERS]
)
def test_no_optimizer_moves_more_than_at_home(name: str):
    plain = model_of(name)
    for _ in range(2):
        plain.train_on_batch(X, Y)
    at_home = bytes_through_the_busiest(gs.multi_gpu_model(model_of(name), gpus=DEVICES))
    for layout in ("sharded", ZERO_1):
        model = gs.multi_gpu_model(model_of(name), gpus=DEVICES, variables=layout)
        for _ in range(2):
            model.train_on_batch(X, Y)
        for own, expected in zip(model.get_weights(), plain.get_weights(), strict=True):
            np.testing.assert_allclose(own, expected, 2e-3, 2e-4)
        assert (
            bytes_through_the_busiest(model) <= at_home + 1024
        )  # (fused kernels take all whole: as at home, and norms)
        model.plan(X, Y).check()


@pytest.mark.skipif(not hasattr(keras.optimizers, "Muon"), reason="this version of Keras has no Muon")
def test_a_matrix_is_put_together_once_and_orthogonalized_in_one_place():
    model = gs.multi_gpu_model(model_of("Muon"), gpus=DEVICES, variables="sharded")
    plan = model.plan(X, Y)
    products = [op for op in plan.ops_once if op.type == "MatMul" and op.name.startswith("muon/")]
    places = plan.owners.of_ops
    assert len({places[op.index] for op in products}) > 1
    read = {tensor.op for op in products for tensor in op.inputs}
    joined = [i for i in read if plan.program.ops[i].divides]
    first = [op for op in products if any(tensor.op in joined for tensor in op.inputs)]
    assert joined
    assert all(places[tensor.op] == places[op.index] for op in products for tensor in op.inputs)
    assert len(joined) == len(first) // 2, [op.name for op in first]  # (x @ x', and what that makes @ x)
