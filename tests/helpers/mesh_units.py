"""A block whose kernels consist of units, and its training on a mesh."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

import graphsplit as gs
from graphsplit.api.layouts.layout_spellings import AxisCut
from tests.helpers.mesh_cases import Made, Step, variable

WIDTH, LENGTH, SIZE, HIDDEN = 12, 5, 4, 10  # SIZE is the width of a head


def block(heads: int, shared: int = 0, fused: bool = False) -> tuple[dict[str, tf.Variable], Step]:
    """Attention and SwiGLU, as models have them whose kernels are matrices; `shared` heads of keys and values."""
    few = shared or heads
    sizes = [count * SIZE for count in (heads, few, few)]
    if fused:
        into = {"qkv": variable("qkv", WIDTH, sum(sizes)), "bias": variable("bias", sum(sizes))}
    else:
        into = {name: variable(name, WIDTH, (heads if name == "q" else few) * SIZE, seed=ord(name)) for name in "qkv"}
    rest = {"o": (heads * SIZE, WIDTH), "gate_up": (WIDTH, 2 * HIDDEN), "down": (HIDDEN, WIDTH)}
    own = {**into, **{name: variable(name, *shape) for name, shape in rest.items()}}

    def apart(x: tf.Tensor, count: int) -> tf.Tensor:
        return tf.transpose(tf.reshape(x, (-1, LENGTH, count, SIZE)), (0, 2, 1, 3))

    def run(x: tf.Tensor) -> tf.Tensor:
        fusion = (3 if few == heads else sizes) if fused else None
        both = tf.split(x @ own["qkv"] + own["bias"], fusion, -1) if fused else [x @ own[name] for name in "qkv"]
        q, k, v = (apart(one, count) for one, count in zip(both, (heads, few, few), strict=True))
        k, v = (tf.repeat(one, heads // few, 1) if few < heads else one for one in (k, v))
        weights = tf.nn.softmax(tf.einsum("bhte,bhse->bhts", q, k) / 2.0)
        mixed = tf.transpose(tf.einsum("bhts,bhse->bhte", weights, v), (0, 2, 1, 3))
        x += tf.reshape(mixed, (-1, LENGTH, heads * SIZE)) @ own["o"]
        gate, up = tf.split(x @ own["gate_up"], 2, -1)
        return x + (tf.nn.silu(gate) * up) @ own["down"]

    return own, run


def trained(heads: int, shared: int = 0, fused: bool = False) -> Made:
    """A step of Adam by hand; its slots are named after their variables."""
    named, run = block(heads, shared, fused)
    weights = list(named.values())
    first, second = (
        [tf.Variable(tf.zeros_like(own), name=f"{name}_{slot}", trainable=False) for name, own in named.items()]
        for slot in "mv"
    )

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            y = run(x)
            loss = tf.reduce_mean(y**2)
        for own, m, v, gradient in zip(weights, first, second, tape.gradient(loss, weights), strict=True):
            m.assign(0.9 * m + 0.1 * gradient)
            v.assign(0.99 * v + 0.01 * gradient**2)
            own.assign_sub(0.01 * m / (tf.sqrt(v) + 1e-2))  # (a larger epsilon: rounding counts less)
        return loss, y

    return [*weights, *first, *second], step


HEADS = gs.cut("model", unit=SIZE)
FUSED = gs.cut("model", unit=SIZE, blocks=3)
ALIKE = {"o*": (HEADS,), "gate_up*": (None, gs.cut("model", blocks=2)), "down*": ("model",), "*": "home"}
MERGED = {"qkv*": (None, FUSED), "bias*": (FUSED,), **ALIKE}


def by_name(layout: dict[str, Any]) -> dict[str, Any]:
    """Return layouts that name the axis alone, and leave it to the planner to find the units."""
    plain = lambda own: "model" if isinstance(own, AxisCut) else own  # noqa: E731
    return {name: own if isinstance(own, str) else tuple(map(plain, own)) for name, own in layout.items()}
