"""What cases over worker processes share: how they are named, a network to train, and comparing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

# `calls` are a few of what is asked of workers that are all well, `more` the others.
GROUPS: dict[str, dict[str, Callable]] = {name: {} for name in ("calls", "more", "lost", "often", "pairs", "meshes")}
LIMIT_S = float(os.environ.get("GRAPHSPLIT_TEST_CASE_S", "800"))  # of a case
WAIT_S = 200  # machines that run tests are slow


def case(group: str):
    def register(fn):
        GROUPS[group][fn.__name__] = fn
        return fn

    return register


def all_well(workers, cluster) -> None:
    """Start what is lost again."""
    for task in cluster.health(2.0).lost:
        if not cluster.health(2.0).workers[task].answers:
            workers.restart(task)
    until(lambda: all(worker.answers for worker in cluster.health(2.0).workers))
    cluster.reconnect()
    cluster.deadline_s = None


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def rows(count: int = 7, width: int = 6) -> tf.Tensor:
    return tf.random.stateless_normal((count, width), [1, 2], dtype=tf.float64)


class Network(tf.Module):
    """Two layers with the momentum of their optimizer and a counter; all in float64."""

    def __init__(self, width: int = 6, device: str = "CPU:0"):
        self.width = width
        with tf.device(device):
            self.weights = [tf.Variable(rows(width, width) / width + k, name=f"w{k}") for k in range(2)]
            self.momenta = [tf.Variable(tf.zeros_like(w), name=f"m{k}") for k, w in enumerate(self.weights)]
            self.count = tf.Variable(np.int64(0), name="count")

    def train(self, x):
        with tf.GradientTape() as tape:
            h = tf.tanh(x @ self.weights[0]) @ self.weights[1]
            loss = tf.reduce_mean((h - tf.reduce_mean(h, 0)) ** 2)
        for w, m, g in zip(self.weights, self.momenta, tape.gradient(loss, self.weights), strict=True):
            m.assign(0.9 * m + g)
            w.assign_sub(0.05 * m)
        self.count.assign_add(1)
        return loss

    def values(self) -> list[np.ndarray]:
        return [v.numpy() for v in (*self.weights, *self.momenta, self.count)]


def same(a, b, what: str = "", exact: bool = False) -> None:
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x, y) if exact else np.allclose(x, y, rtol=1e-12, atol=1e-12), (what, x, y)


def trained(steps: int, batches: Callable[[int], tf.Tensor] = lambda k: rows(5 + k % 3)) -> Network:
    """Return a network trained on one device of this process."""
    network = Network()
    step = tf.function(network.train, reduce_retracing=True)
    for k in range(steps):
        step(batches(k))
    return network
