"""The law on more devices than a variable has parts, in a process of its own: `python -m` this, and a number."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.law import assert_law, rows

WEIGHTS, WIDTH = 5, 30
Made = tuple[Callable[..., Any], Sequence[tf.Variable]]


def network(devices: int) -> Made:
    """Layers with biases, each with a slot: clipped by the norm of all, momentum. All are sharded."""
    weights = [tf.Variable(0.3 * rows(WIDTH, WIDTH) + 0.01 * k, name=f"weight_{k}") for k in range(WEIGHTS)]
    biases = [tf.Variable(0.1 * rows(WIDTH) + 0.01 * k, name=f"bias_{k}") for k in range(WEIGHTS)]
    trained = [*weights, *biases]
    slots = [tf.Variable(tf.zeros_like(v), name=f"momentum/{v.name.split(':')[0]}") for v in trained]
    gs.set_variable_layout([*trained, *slots], "sharded", devices)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for weight, bias in zip(weights, biases, strict=True):
                h = tf.sin(h @ weight + bias)
            loss = tf.reduce_mean(h**2)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, trained), 0.5)
        for variable, slot, gradient in zip(trained, slots, gradients, strict=True):
            slot.assign(0.9 * slot + gradient)
            variable.assign_sub(0.1 * slot)
        return loss

    return step, [*trained, *slots]


def assert_law_in_fewer_parts(devices: int, batches: Sequence[int]) -> None:
    """Train on uneven batches, compare with one device, and look at how variables and slots are divided."""
    calls = [(rows(count, WIDTH),) for count in batches]
    plan = assert_law(lambda: network(devices), calls, devices=devices, sharded=["MatMul"], at_home=None)
    plan.check()
    _, variables = network(devices)
    owned, places = Counter[str](), []
    for variable in variables:
        parts = parts_of_variable(variable)
        places.append((variable.device,) if parts is None else parts.devices)
        whole = {variable.device: 8 * variable.shape.num_elements()}
        owned.update(whole if parts is None else parts.bytes_on_devices())
    assert all(1 < len(of_weight) < devices for of_weight in places[:WEIGHTS])
    half = len(variables) // 2
    assert places[:half] == places[half:]  # slots are with their variables
    assert len(owned) == devices
    assert sum(owned.values()) == sum([8 * v.shape.num_elements() for v in variables])  # nothing is anywhere twice
    row_bytes = 2 * 8 * WIDTH  # of a weight and its slot
    assert max(owned.values()) <= 4 / 3 * sum(owned.values()) / devices + row_bytes


if __name__ == "__main__":
    gs.use_logical_devices(int(sys.argv[1]))
    assert_law_in_fewer_parts(int(sys.argv[1]), [2 * int(sys.argv[1]) + 1])
