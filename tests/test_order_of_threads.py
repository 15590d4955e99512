"""The order in which a thread is predicted to run operations, against the order in which TensorFlow's did."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys

import tensorflow as tf

import graphsplit as gs
from graphsplit.simulate.prediction.replay import Resource, replay

_ROWS, _WIDTH, _LAYERS = 256, 256, 5
_TYPES = ("MatMul", "Tanh", "TanhGrad", "AssignSubVariableOp")


def orders() -> dict[str, list[str]]:
    """Return the names of a training step's operations in the order in which they were recorded, and predicted."""
    gs.use_logical_devices(2, threads_per_device=1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    from tests.test_calibration import rough  # (makes a variable)

    weights = [tf.Variable(tf.random.stateless_normal([_WIDTH, _WIDTH], [0, k]) / 16) for k in range(_LAYERS)]

    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for w in weights:
                y = tf.nn.tanh(y @ w)
            loss = tf.reduce_mean(y**2)
        for w, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            w.assign_sub(0.1 * gradient)
        return loss

    split, x = gs.parallelize(step, devices=1), tf.ones([_ROWS, _WIDTH])
    recorded = gs.inspect.timeline(split, x)
    predicted = gs.predict(split, x, machine=rough(), devices=1)
    tasks = predicted._tasks.tasks
    queue = replay(tasks, dict.fromkeys(predicted._tasks.resources, Resource()))
    in_turn = sorted(range(len(tasks)), key=lambda i: queue.starts[i])
    return {
        "queue": [tasks[i].name for i in in_turn if tasks[i].type in _TYPES],
        "recorded": [event.name for event in sorted(recorded.events, key=lambda e: e.start_s) if event.type in _TYPES],
        "predicted": [event.name for event in predicted.events if event.type in _TYPES],
    }


def test_a_thread_runs_operations_in_the_predicted_order():
    """Each gradient goes into its variable before that of the layer below is computed: memory follows from it.

    Without oneDNN: where TensorFlow rewrites products for it, under other types, chance decides which of two that
    become ready together is first.
    """
    code = "import json; from tests.test_order_of_threads import orders; print(json.dumps(orders()))"
    environment = {**os.environ, "TF_ENABLE_ONEDNN_OPTS": "0"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert sorted(found["recorded"]) == sorted(found["predicted"])
    assert len(found["recorded"]) == 2 * _LAYERS + 2 * _LAYERS + 2 * _LAYERS - 1
    predicted, queue = (alike(found["recorded"], found[name]) for name in ("predicted", "queue"))
    assert predicted > 0.97
    assert queue < predicted  # what was ready first is not first


def alike(first: list[str], second: list[str]) -> float:
    """Return of how many pairs the same one is first in both."""
    place = {name: k for k, name in enumerate(first)}
    pairs = list(itertools.combinations(second, 2))
    return sum(place[a] < place[b] for a, b in pairs) / len(pairs)
