"""Predictions of what XLA compiles: a call is started once, and takes what is in it."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos.graphdefs import make_node
from graphsplit.costs.families import family_of
from graphsplit.costs.machine import Device, Host, Link, Machine
from graphsplit.costs.work import Work
from graphsplit.prediction.compiled_work import ASSUMED, CompiledCall, Pricing, work_of_call

WEIGHTS = tf.Variable(tf.ones([64, 64]), name="weights")


def price(sizes: dict[str, int]) -> Pricing:
    """A second for each byte that is fused, ten for a kernel of its own."""

    def work(node):
        return Work(family_of(node.op), "float32", 1.0, 99.0)

    def seconds(node, own):
        return 10.0 if node is not None else own.bytes

    return Pricing(work, seconds, lambda reference: sizes[reference.partition(":")[0]], {"Identity"}.__contains__)


def test_what_is_fused_is_read_and_written_once():
    """tanh(x) + x, squared: x is read once, the result written; nothing in between is."""
    nodes = [
        make_node("tanh", "Tanh", ["x"]),
        make_node("add", "AddV2", ["tanh", "x"]),
        make_node("same", "Identity", ["add"]),
        make_node("square", "Square", ["same"]),
    ]
    found = work_of_call(CompiledCall(tuple(nodes), ["square:0"]), price({"x": 3, "tanh": 3, "add": 3, "square": 3}))
    assert found == (3.0 + 3.0, 0)


def test_products_are_kernels_of_their_own():
    """The first product is written; what is fused reads that, and writes what the second product reads."""
    nodes = [
        make_node("one", "MatMul", ["x", "w"]),
        make_node("add", "BiasAdd", ["one", "b"]),
        make_node("tanh", "Tanh", ["add"]),
        make_node("two", "MatMul", ["tanh", "w"]),
    ]
    sizes = {"x": 7, "w": 7, "b": 1, "one": 5, "add": 5, "tanh": 5, "two": 5}
    found = work_of_call(CompiledCall(tuple(nodes), ["two:0"]), price(sizes))
    assert found.seconds == 10 + (5 + 1) + 5 + 10
    assert found.held_bytes == 5 + 5  # the first product until tanh is there


def test_what_is_fused_again_later_holds_its_operands():
    """The gradient of tanh needs tanh, which is computed again from the product: that stays until then."""
    nodes = [
        make_node("one", "MatMul", ["x", "w"]),
        make_node("tanh", "Tanh", ["one"]),
        make_node("loss", "Sum", ["tanh", "axes"]),
        make_node("other", "MatMul", ["loss", "w"]),
        make_node("grad", "TanhGrad", ["tanh", "other"]),
    ]
    sizes = {"x": 1, "w": 1, "axes": 0, "one": 100, "tanh": 100, "loss": 1, "other": 1, "grad": 100}
    found = work_of_call(CompiledCall(tuple(nodes), ["grad:0"]), price(sizes))
    assert found.held_bytes == 100 + 100 + 1 + 1 or found.held_bytes == 100 + 100 + 1


def boxed(**others: float) -> Machine:
    device = Device("unit", "GPU", {"float32": 1e9}, {"float32": 1e30}, 1e9, 1e9, **others)  # type: ignore[arg-type]
    return Machine("unit box", device, 8, Link("cable", 1e9, 0.0), host=Host())


def activated(x):
    for _ in range(8):
        x = tf.nn.tanh(x * 2.0 + 1.0)
    return x


X = tf.TensorSpec([128, 64])


def test_a_compiled_call_is_started_once_and_fuses():
    plain = gs.predict(activated, X, machine=boxed(launch_s=1.0), devices=1)
    compiled = gs.predict(
        gs.parallelize(activated, devices=1, jit_compile=True), X, machine=boxed(launch_s=1.0), devices=1
    )
    assert plain.step_s == pytest.approx(24.0)
    assert compiled.step_s == pytest.approx(1.0)
    bare = gs.predict(gs.parallelize(activated, devices=1, jit_compile=True), X, machine=boxed(), devices=1)
    assert bare.step_s == pytest.approx(2 * 128 * 64 * 4 / 1e9, rel=0.01)  # read once, written once
    assert ASSUMED in bare.assumptions
    assert ASSUMED not in plain.assumptions


def train(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.square(tf.nn.relu(tf.linalg.matmul(x, WEIGHTS))))
    WEIGHTS.assign_sub(1e-6 * tape.gradient(loss, WEIGHTS))
    return loss


@pytest.mark.parametrize("layout", ["home", "mirrored", "sharded"])
def test_compiled_training_computes_the_same_products(layout: str):
    """Of products alone, a compiled step takes as long as the plain one: they are the same kernels."""
    device = Device("unit", "GPU", {"float32": 1e9}, {"float32": 1e30}, 1e30, 1e9)
    machine = Machine("unit box", device, 8, Link("cable", 1e30, 0.0), host=Host())
    plain, compiled = (
        gs.predict(gs.parallelize(train, devices=2, jit_compile=jit), X, machine=machine, devices=2, layout=layout)
        for jit in (False, True)
    )
    assert compiled.step_s == pytest.approx(plain.step_s)
    assert compiled.operations < plain.operations
    assert compiled.sent_bytes == plain.sent_bytes


def test_a_compiled_tf_function():
    fn = tf.function(activated, jit_compile=True)
    found = gs.predict(fn, X, machine=boxed(launch_s=1.0), devices=1)
    assert found.step_s == pytest.approx(1.0)
