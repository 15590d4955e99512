"""Predicted memory: what loops keep, and what is a piece of another buffer."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks import peaks
from graphsplit.planning.device_bytes import live_bytes
from tests.helpers.predictions import WEIGHTS, X, boxed


def test_what_a_loop_keeps_for_its_gradient_is_alive():
    """Each turn keeps what its gradient needs: five turns keep five times as much, on each device of its own rows."""

    def keeping(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(
                lambda i, _: i < 5, lambda i, y: (i + 1, tf.nn.tanh(tf.linalg.matmul(y, WEIGHTS))), [0, x]
            )[1]
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    one, two = (gs.predict(keeping, X, machine=boxed(), devices=n) for n in (1, 2))
    assert one.memory["/device:GPU:0"].live_bytes >= 5 * 128 * 64 * 4
    assert 5 * 64 * 64 * 4 <= two.memory["/device:GPU:1"].live_bytes < one.memory["/device:GPU:0"].live_bytes


@pytest.mark.parametrize("is_split", [False, True])
def test_what_a_turn_holds_is_alive(is_split: bool):
    """What is wide only inside of a loop is counted, on each device: its own rows, also where turns are split."""

    def widening(x):
        def turn(i, y):
            wide = tf.tile(tf.nn.tanh(y), [1, 16])
            return i + 1, y * tf.reduce_mean(wide**2, 0 if is_split else 1, keepdims=True)[:, : y.shape[1]]

        return tf.while_loop(lambda i, _: i < 5, turn, [0, x])[1]

    plan = gs.parallelize(widening, devices=2).plan(X)
    [loop] = [step for op, step in zip(plan.program.ops, plan.steps, strict=True) if op.bodies]
    assert bool(loop.bodies) == is_split
    wide = 2 * 16 * 64 * 64 * 4  # of half of the rows, and their squares
    assert all(wide <= size < 2 * wide for size in live_bytes(plan).values())
    memory = gs.predict(widening, X, machine="8xA100-SXM4-80GB", devices=2).memory
    assert all(wide <= memory[f"/device:GPU:{d}"].live_bytes < 2 * wide for d in range(2))


def test_lists_count_beside_a_result_of_unknown_size():
    def keeping(x):
        shapes = [tf.TensorShape([]), x.shape, tf.TensorShape([None])]
        with tf.GradientTape() as tape:
            tape.watch(x)
            _, y, left = tf.while_loop(
                lambda i, _, left: i < 5,
                lambda i, y, left: (i + 1, tf.nn.tanh(y), tf.boolean_mask(left, left > i)),
                [0, x, tf.range(9)],
                shapes,
            )
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x), tf.size(left)

    found = gs.predict(keeping, X, machine=boxed(link=1e30), devices=1, unknown_size=9).memory["/device:GPU:0"]
    assert found.live_bytes >= 5 * 128 * 64 * 4


def test_rows_that_are_cut_off_are_no_copies():
    """TensorFlow hands on a piece of the same buffer, if rows are multiples of 64 bytes."""

    def cut(x):
        parts = tf.split(x * 2.0, 4)
        return tf.add_n([tf.reduce_sum(part, 0) for part in parts])

    machine = boxed(link=1e30)
    live = {
        columns: gs.predict(cut, tf.TensorSpec([128, columns]), machine=machine, devices=1).memory["/device:GPU:0"]
        for columns in (64, 63)
    }
    assert 128 * 64 * 4 <= live[64].live_bytes < 1.1 * 128 * 64 * 4
    assert live[63].live_bytes >= 2 * 128 * 63 * 4


def test_lists_hold_what_a_turn_makes_and_no_copies():
    """Weights that each turn puts into a list for the gradient are there once, and so are rows of what is read."""
    weights = tf.Variable(tf.ones([512, 512]))

    def keeping(x):
        with tf.GradientTape() as tape:
            y = x
            for _ in tf.range(10):
                y = tf.nn.tanh(y @ weights)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, weights)

    found = gs.predict(keeping, tf.TensorSpec([8, 512]), machine=boxed(), devices=1).memory["/device:GPU:0"]
    assert found.live_bytes < 5 * 512 * 512 * 4  # ten copies of the weights would be twice as much


def test_cross_entropy_writes_gradients_over_logits():
    """TensorFlow's kernel does, if nobody else reads the logits."""
    labels = tf.zeros([128], tf.int32)

    def held(and_read: bool) -> int:
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                logits = tf.linalg.matmul(x, tf.ones([64, 4096]))
                loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            gradient = tape.gradient(loss, x)
            return gradient, tf.reduce_max(logits) if and_read else loss

        return gs.predict(run, X, machine=boxed(), devices=1).memory["/device:GPU:0"].live_bytes

    size, weights = 128 * 4096 * 4, 64 * 4096 * 4
    assert size + weights <= held(and_read=False) < 1.1 * (size + weights)
    assert held(and_read=True) >= 2 * size + weights


# A U-Net holds a fifth more than is predicted, for a reason that nobody has found yet.
OFF = {**dict.fromkeys(("WaveNet", "Transformer decoder", "GAN", "Siamese"), peaks.NEAR), "U-Net": 0.25}


@pytest.mark.long
@pytest.mark.parametrize("name", OFF)
def test_peaks_are_near_those_of_the_allocator(name: str):
    """Without variables and arguments, which are known, and would hide how far off the rest is."""
    [found] = peaks.peaks_of(name, [1], small=False)
    assert found.network == name
    assert abs(found.off) <= OFF[name], found


def test_peaks_are_of_networks_that_the_benchmark_has():
    assert set(OFF) <= set(peaks.NETWORKS)
