"""A product and its variables, and a machine that computes products only."""

from __future__ import annotations

import tensorflow as tf

from graphsplit.planning.costs.machine import Device, Link, Machine

HERE = "tests.test_prediction"
WEIGHTS = tf.Variable(tf.ones([64, 64]), name="weights")


def boxed(rate: float = 1e9, link: float = 1e9, memory: float = 1e9, count: int = 8, **others: float) -> Machine:
    """A machine that computes products only: all else takes no time."""
    device = Device("unit", "GPU", {"float32": rate}, {"float32": 1e30}, 1e30, memory, **others)  # type: ignore[arg-type]
    return Machine("unit box", device, count, Link("cable", link, 0.0), network=Link("net", link / 10, 1e-3))


def product(x):
    return tf.linalg.matmul(x, WEIGHTS)


X = tf.TensorSpec([128, 64])
