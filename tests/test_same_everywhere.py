"""One function, one plan: in every process, whatever order its sets have there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = """
import hashlib
import keras
import tensorflow as tf
import graphsplit as gs
from graphsplit.emission import emit

gs.use_logical_devices(3)
widths = (24, 24, 24, 24, 24, 24, 90)
blocks = [(keras.layers.Dense(n, "relu"), keras.layers.BatchNormalization()) for n in widths]
net = keras.Sequential([keras.Input((24,)), *[layer for block in blocks for layer in block], keras.layers.Dense(1)])
optimizer = keras.optimizers.Adam()
optimizer.build(net.trainable_variables)

def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((net(x, training=True) - y) ** 2)
    optimizer.apply(tape.gradient(loss, net.trainable_variables), net.trainable_variables)
    return loss

specs = tf.TensorSpec([66, 24]), tf.TensorSpec([66, 1])
for layout in ("home", "replicated", "sharded"):
    prediction = gs.predict(step, *specs, machine="8xA100-SXM4-80GB", devices=3, variables=layout, micro_batches=2)
    graph = emit(prediction.plan)
    told = [(node.name, node.op, tuple(node.input), node.device) for node in graph.nodes]
    print(layout, prediction.step_s, len(told), hashlib.sha256(repr(told).encode()).hexdigest())
"""


@pytest.mark.long
def test_plans_and_predictions_are_the_same_in_every_process():
    def said(seed: int) -> str:
        environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=280, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    first = said(1)
    assert len(first.splitlines()) == 3
    assert [said(seed) for seed in (2, 3)] == [first, first]
