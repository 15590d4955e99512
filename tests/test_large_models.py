"""A language model of 20 million parameters whose state is divided over four devices trains as on one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.device_bytes import live_bytes, traffic
from tests.helpers.law import assert_close

WORDS, WIDTH, LAYERS, HEADS, LENGTH = 8000, 384, 8, 6, 16


class Language:
    """Blocks of attention and two dense layers, trained by Adam."""

    def __init__(self) -> None:
        self.weights: list[tf.Variable] = []
        self.embedding = self._weight("embedding", WORDS, WIDTH)
        self.blocks = [
            {
                "mixed": self._weight(f"block_{k}/mixed", WIDTH, 3 * WIDTH),
                "joined": self._weight(f"block_{k}/joined", WIDTH, WIDTH),
                "up": self._weight(f"block_{k}/up", WIDTH, 4 * WIDTH),
                "down": self._weight(f"block_{k}/down", 4 * WIDTH, WIDTH),
            }
            for k in range(LAYERS)
        ]
        self.head = self._weight("head", WIDTH, WORDS)
        named = [(w, w.name.partition(":")[0]) for w in self.weights]
        self.slots = [[tf.Variable(tf.zeros_like(w), name=f"adam/{n}/{s}") for s in "mv"] for w, n in named]
        self.count = tf.Variable(0.0, name="count")

    def _weight(self, name: str, *shape: int) -> tf.Variable:
        value = np.random.default_rng(len(self.weights)).standard_normal(shape) / np.sqrt(shape[0])
        self.weights.append(tf.Variable(value.astype(np.float32), name=name))
        return self.weights[-1]

    @property
    def variables(self) -> list[tf.Variable]:
        return [*self.weights, *[slot for pair in self.slots for slot in pair], self.count]

    def logits(self, words: tf.Tensor) -> tf.Tensor:
        x = tf.gather(self.embedding, words)
        mask = tf.linalg.band_part(tf.ones((LENGTH, LENGTH)), -1, 0)
        for block in self.blocks:
            mixed = tf.reshape(_normal(x) @ block["mixed"], (-1, LENGTH, 3, HEADS, WIDTH // HEADS))
            query, key, value = tf.unstack(tf.transpose(mixed, (2, 0, 3, 1, 4)))
            scores = tf.matmul(query, key, transpose_b=True) / (WIDTH // HEADS) ** 0.5
            seen = tf.matmul(tf.nn.softmax(scores + 1e9 * (mask - 1.0)), value)
            x += tf.reshape(tf.transpose(seen, (0, 2, 1, 3)), (-1, LENGTH, WIDTH)) @ block["joined"]
            x += tf.nn.gelu(_normal(x) @ block["up"]) @ block["down"]
        return _normal(x) @ self.head

    def step(self, words: tf.Tensor, targets: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, self.logits(words))
            loss = tf.reduce_mean(losses)
        gradients = [tf.convert_to_tensor(g) for g in tape.gradient(loss, self.weights)]
        self.count.assign_add(1.0)
        rate = 1e-3 * tf.sqrt(1 - 0.999**self.count) / (1 - 0.9**self.count)
        for weight, (m, v), gradient in zip(self.weights, self.slots, gradients, strict=True):
            m.assign_add(0.1 * (gradient - m))
            v.assign_add(1e-3 * (tf.square(gradient) - v))
            weight.assign_sub(rate * m / (tf.sqrt(v) + 1e-3))
        return loss


def _normal(x: tf.Tensor) -> tf.Tensor:
    mean, variance = tf.nn.moments(x, -1, keepdims=True)
    return (x - mean) * tf.math.rsqrt(variance + 1e-5)


def bytes_on_devices(variables: list[tf.Variable]) -> dict[str, int]:
    found: dict[str, int] = {}
    for variable in variables:
        parts = parts_of_variable(variable)
        own: dict[str, Any] = {variable.device: 4} if parts is None else parts.bytes_on_devices()
        for device, size in own.items():
            found[device] = found.get(device, 0) + size
    return found


@pytest.mark.long
def test_twenty_million_parameters():
    rng = np.random.default_rng(0)
    words, targets = (tf.constant(rng.integers(0, WORDS, (6, LENGTH))) for _ in range(2))
    plain, sharded = Language(), Language()
    weights = sum(4 * v.shape.num_elements() for v in sharded.weights)
    assert weights >= 4 * 20_000_000
    gs.set_variable_layout(sharded.variables, "sharded", 4)
    step, single = gs.parallelize(sharded.step, devices=4, strict=True), tf.function(plain.step)
    for _ in range(2):
        assert_close(step(words, targets), single(words, targets))
    total = 3 * weights
    assert max(bytes_on_devices(sharded.variables).values()) <= total / 4 + 4 * WORDS * WIDTH / 4 + 8
    plan = step.plan(words, targets)
    assert max(traffic(plan).busiest[1:]) <= 1.05 * 3 * 3 / 4 * weights
    assert max(live_bytes(plan).values()) < weights
    for a, b in zip(sharded.variables, plain.variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-3)  # Adam magnifies small gradients
