"""Predictions of what XLA compiles: a call is started once, and takes what is in it."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.costs.families import family_of
from graphsplit.planning.costs.machine import Device, Host, Link, Machine
from graphsplit.planning.costs.work import Work
from graphsplit.planning.tasks import Result
from graphsplit.simulate.prediction.compiled_work import ASSUMED, CallWork, Member, work_of_call

WEIGHTS = tf.Variable(tf.ones([64, 64]), name="weights")


def call(*members: tuple[str, list[int]], sizes: list[int], returned: int) -> CallWork:
    """A second for each byte that is fused, ten for a kernel of its own.

    Members are of a type and read results, by number: first those of others, then their own.
    """
    first = len(sizes) - len(members)
    found = {
        first + k: Member(
            family_of(name),
            tuple(map(Result, reads)),
            10.0,
            Work(family_of(name), "float32", 1.0, 99.0),
            name == "Identity",
        )
        for k, (name, reads) in enumerate(members)
    }
    return work_of_call(found, [Result(returned)], lambda result: sizes[result.task], lambda work: work.bytes)


def test_what_is_fused_is_read_and_written_once():
    """tanh(x) + x, squared: x is read once, the result written; nothing in between is."""
    found = call(("Tanh", [0]), ("AddV2", [1, 0]), ("Identity", [2]), ("Square", [3]), sizes=[3] * 5, returned=4)
    assert found == (3.0 + 3.0, 0)


def test_products_are_kernels_of_their_own():
    """The first product is written; what is fused reads that, and writes what the second product reads."""
    x, w, b = range(3)
    members = ("MatMul", [x, w]), ("BiasAdd", [3, b]), ("Tanh", [4]), ("MatMul", [5, w])
    found = call(*members, sizes=[7, 7, 1, 5, 5, 5, 5], returned=6)
    assert found.seconds == 10 + (5 + 1) + 5 + 10
    assert found.held_bytes == 5 + 5  # the first product until tanh is there


def test_what_is_fused_again_later_holds_its_operands():
    """The gradient of tanh needs tanh, which is computed again from the product: that stays until then."""
    x, w, axes = range(3)
    members = ("MatMul", [x, w]), ("Tanh", [3]), ("Sum", [4, axes]), ("MatMul", [5, w]), ("TanhGrad", [4, 6])
    found = call(*members, sizes=[1, 1, 0, 100, 100, 1, 1, 100], returned=7)
    assert found.held_bytes == 100 + 100 + 1 + 1  # tanh is written for the sum, too


def boxed(**others: float) -> Machine:
    device = Device("unit", "GPU", {"float32": 1e9}, {"float32": 1e30}, 1e9, 1e9, **others)  # type: ignore[arg-type]
    return Machine("unit box", device, 8, Link("cable", 1e9, 0.0), host=Host())


def activated(x):
    for _ in range(8):
        x = tf.nn.tanh(x * 2.0 + 1.0)
    return x


X = tf.TensorSpec([128, 64])
COPY_S = 128 * 64 * 4 / 1e9  # of X, from the host


def test_a_compiled_call_is_started_once_and_fuses():
    plain = gs.predict(activated, X, machine=boxed(launch_s=1.0), devices=1)
    compiled = gs.predict(
        gs.parallelize(activated, devices=1, jit_compile=True), X, machine=boxed(launch_s=1.0), devices=1
    )
    assert plain.step_s == pytest.approx(24.0 + COPY_S)
    assert compiled.step_s == pytest.approx(1.0 + COPY_S)
    bare = gs.predict(gs.parallelize(activated, devices=1, jit_compile=True), X, machine=boxed(), devices=1)
    assert bare.step_s == pytest.approx(COPY_S + 2 * 128 * 64 * 4 / 1e9, rel=0.01)  # read once, written once
    assert ASSUMED in bare.assumptions
    assert ASSUMED not in plain.assumptions


def train(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.nn.relu(tf.linalg.matmul(x, WEIGHTS))))
    WEIGHTS.assign_sub(1e-6 * tape.gradient(loss, WEIGHTS))
    return loss


@pytest.mark.parametrize("layout", ["home", "replicated", "sharded"])
def test_compiled_training_computes_the_same_products(layout: str):
    """Of products alone, a compiled step takes as long as the plain one: they are the same kernels."""
    device = Device("unit", "GPU", {"float32": 1e9}, {"float32": 1e30}, 1e30, 1e9)
    machine = Machine("unit box", device, 8, Link("cable", 1e30, 0.0), host=Host())
    plain, compiled = (
        gs.predict(gs.parallelize(train, devices=2, jit_compile=jit), X, machine=machine, devices=2, variables=layout)
        for jit in (False, True)
    )
    assert compiled.step_s == pytest.approx(plain.step_s)
    assert compiled.operations < plain.operations
    assert compiled.sent_bytes == plain.sent_bytes


def test_a_compiled_tf_function():
    fn = tf.function(activated, jit_compile=True)
    found = gs.predict(fn, X, machine=boxed(launch_s=1.0), devices=1)
    assert found.step_s == pytest.approx(1.0 + COPY_S)
