"""A layer of experts."""

from __future__ import annotations

import tensorflow as tf

import graphsplit as gs
from tests.helpers.mesh_cases import numbers, variable

WIDTH, HIDDEN, TOKENS, EXPERTS, ROOM = 8, 12, 6, 8, 4
IN_PLACE = {"*experts*": (gs.cut("batch", in_place=True),), "*": "home"}
FOUR = {"batch": 4}


def rows_of(count: int) -> tf.Tensor:
    return tf.constant(numbers(count, TOKENS, WIDTH, seed=5))


def dispatched(x: tf.Tensor, gate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """Return to which seat of which expert each token goes, and with which weight it comes back."""
    chances = tf.nn.softmax(x @ gate)
    best = tf.one_hot(tf.argmax(chances, -1), gate.shape[1], dtype=x.dtype)
    place = tf.cast(tf.cumsum(best, 1) * best, tf.int32) - 1  # in its expert's queue, row by row
    seats = tf.one_hot(place, ROOM, dtype=x.dtype) * best[..., None]  # [rows, tokens, experts, room]
    return seats, seats * chances[..., None]


class Layer:
    """A layer of experts behind another layer."""

    def __init__(self, experts: int = EXPERTS):
        self.before, self.gate = variable("before", WIDTH, WIDTH), variable("gate", WIDTH, experts)
        self.up = variable("experts/up", experts, WIDTH, HIDDEN)
        self.down = variable("experts/down", experts, HIDDEN, WIDTH)
        self.bias = variable("experts/bias", experts, 1, 1, HIDDEN)
        self.variables = [self.before, self.gate, self.up, self.down, self.bias]

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        h = tf.tanh(x @ self.before)
        seats, back = dispatched(h, self.gate)
        inside = tf.einsum("gsec,gsm->egcm", seats, h)
        active = tf.nn.gelu(tf.einsum("egcm,emh->egch", inside, self.up) + self.bias)
        return h + tf.einsum("gsec,egcm->gsm", back, tf.einsum("egch,ehm->egcm", active, self.down))
