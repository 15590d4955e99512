"""Effects, `verify` and plans: what happens once, what is reported, what is printed."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api import verification
from graphsplit.planning.costs.work import data_in
from graphsplit.planning.device_bytes import live_bytes
from graphsplit.planning.work_shares import shares_of
from tests.helpers.law import assert_close, check, rows, sharded_types

pytestmark = pytest.mark.sampled(quick="all")

# Effects


def test_effects_happen_once_and_in_order(capfd):
    log = []

    def f(x):
        tf.print("sum", tf.reduce_sum(x))
        y = tf.py_function(lambda v: log.append(v.numpy().tolist()) or v * 2, [x], tf.float64)
        y.set_shape(x.shape)
        tf.print("then", tf.reduce_sum(y))
        return tf.square(x) + y

    parallel = gs.parallelize(f, devices=3)
    x = tf.constant([1.0, 2.0, 3.0, 4.0, 5.0], tf.float64)
    assert_close(parallel(x), tf.square(x) + 2 * x)
    assert log == [[1.0, 2.0, 3.0, 4.0, 5.0]]
    assert capfd.readouterr().err.splitlines()[-2:] == ["sum 15", "then 30"]
    plan = parallel.plan(x)
    assert "Square" in {op.type for op in plan.sharded_ops}
    assert [op.type for op, _ in plan.unsharded_ops] == ["EagerPyFunc"]


def test_variables_read_and_written_in_program_order():
    v, seen = tf.Variable(1.0, dtype=tf.float64), tf.Variable(0.0, dtype=tf.float64)

    def f(x):
        before = v * x
        v.assign_add(tf.reduce_sum(x))
        after = v * x
        seen.assign(v)
        v.assign(0.0)
        return before, after, v.read_value()

    check_x = rows(7)
    expected = f(check_x)
    v.assign(1.0)
    parallel = gs.parallelize(f, devices=3)
    assert_close(parallel(check_x), expected)
    assert_close(tf.convert_to_tensor(seen), 1.0 + tf.reduce_sum(check_x))
    assert "Mul" in sharded_types(parallel, check_x)


def test_variables_made_on_the_first_call():
    class Layer:
        w = None

        def __call__(self, x):
            if self.w is None:
                self.w = tf.Variable(tf.ones((3, 2), tf.float64))
            return x @ self.w

    layer = Layer()
    parallel = gs.parallelize(layer, devices=2)
    assert_close(parallel(rows(5, 3)), rows(5, 3) @ tf.ones((3, 2), tf.float64))
    assert "MatMul" in sharded_types(parallel, rows(5, 3))


def test_stateful_random_ops_draw_what_one_device_draws():
    def f(x):
        return x + tf.random.normal(tf.shape(x), seed=5, dtype=tf.float64)

    drawn = []
    for fn in (tf.function(f), gs.parallelize(f, devices=3)):
        tf.random.set_seed(3)
        drawn.append([fn(rows(7)) for _ in range(3)])
    assert_close(drawn[1], drawn[0])
    assert not np.array_equal(drawn[0][0], drawn[0][1])


# verify


def test_verify_restores_state_and_reports():
    v = tf.Variable(2.0)

    def step(x):
        v.assign_add(tf.reduce_mean(x))
        return {"loss": tf.reduce_sum(x), "n": 3}

    parallel = gs.parallelize(step, devices=3)
    report = gs.verify(parallel, tf.range(7.0))
    assert float(v) == 2.0
    assert report.largest < 1e-6
    assert str(report).splitlines()[:2] == ["PASS: equal bit by bit", "3 devices against one, step:"]


def test_verify_of_all_kinds_of_results():
    def kinds(x):
        return {"x": x * 2, "name": "text", "raw": b"raw", "none": None, "count": 3, "ragged": tf.ragged.stack([x, x])}

    report = gs.verify(gs.parallelize(kinds, devices=2), tf.range(7.0))
    assert len(report.differences) == 6
    assert report.largest == 0.0


def test_verify_under_a_tape_and_of_a_tape():
    v = tf.Variable(2.0)

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(x * v)
        return tape.gradient(y, v)

    x = tf.range(7.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = x * 3
        assert gs.verify(gs.parallelize(step, devices=2), x).largest < 1e-6
    assert tape.gradient(y, x).numpy().tolist() == [3.0] * 7


def test_verify_sees_a_difference():
    calls = []

    def unstable(x):
        calls.append(1)
        return x * len(calls)  # another number in every trace

    report = gs.verify(gs.parallelize(unstable, devices=2), tf.ones(4))
    assert report.largest == pytest.approx(0.5)
    assert not report.passed
    assert str(report) == (
        "CHECK: output 0 0.5 relative, more than rounding explains (1.9e-06)\n"
        "likely causes:\n"
        "  Python code that does something else each time it is traced: it is traced for one device and for several\n"
        "  a defect of graphsplit: please report it with the plan, print(function.plan(...))\n"
        "2 devices against one, unstable:\n"
        "  output 0  1 absolute, 0.5 relative; rounding explains up to 1.9e-06"
    )


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.float32, tf.float64])
def test_verify_knows_rounding(dtype: tf.DType):
    numbers = np.random.default_rng(0).normal(size=(501, 40))
    x = tf.cast(numbers - numbers.mean(), dtype)  # sums that cancel: many last places of the little that is left

    def cancelling(x):
        return tf.reduce_sum(tf.matmul(x, x, transpose_b=True)) / 7, tf.reduce_mean(x), tf.argmax(tf.reduce_sum(x, 0))

    report = gs.verify(gs.parallelize(cancelling, devices=3), x)
    assert report.passed, str(report)
    assert report.largest > 0 or dtype in (tf.float16, tf.bfloat16)


def test_verify_knows_more_than_rounding():
    wrong = []  # off by one part in 100,000 after the first trace

    def drifting(x):
        wrong.append(1)
        return tf.reduce_sum(x) * (1 + 1e-5 * (len(wrong) - 1)), tf.reduce_sum(x)

    report = gs.verify(gs.parallelize(drifting, devices=2), tf.random.stateless_uniform((100,), [1, 2]))
    assert [d.is_rounding for d in report.differences] == [False, True]
    assert str(report).startswith("CHECK: output 0 1e-05 relative, more than rounding explains (9.5e-07)\n")


def test_verify_ranks_by_what_rounding_explains():
    """A difference of rounding errors is all rounding, however large it is beside what is left of them."""

    def cancelling(x):
        total = tf.reduce_sum(x)
        return total - tf.reduce_sum(tf.reverse(x, [0])), total

    report = gs.verify(gs.parallelize(cancelling, devices=3), tf.random.stateless_normal((1001,), [1, 2]) + 1)
    first = str(report).splitlines()[0]
    assert [d.share for d in report.differences] == sorted((d.share for d in report.differences), reverse=True)
    assert report.passed
    assert "PASS: every difference is rounding; largest: output " in first or not report.largest


def test_verify_names_what_makes_more_of_a_rounding_error():
    wrong = []

    def jumping(x):
        wrong.append(1)
        return tf.argmax(tf.reduce_sum(x, 0) + tf.one_hot(len(wrong), 3) * 9)  # another one in every trace

    report = gs.verify(gs.parallelize(jumping, devices=2), tf.ones((5, 3)))
    assert "  ArgMax at test_effects_and_plans.py:" in str(report)


def test_verify_under_a_half_type():
    weights = tf.Variable(tf.random.stateless_normal((64, 8), [3, 4]))

    def mixed(x):
        y = tf.cast(x, tf.float16) @ tf.cast(weights, tf.float16)
        weights.assign_add(0.1 * tf.matmul(x, tf.nn.softmax(tf.cast(y, tf.float32)), transpose_a=True))
        return tf.reduce_mean(tf.cast(y, tf.float32) ** 2)

    report = gs.verify(gs.parallelize(mixed, devices=3), tf.random.stateless_normal((50, 64), [5, 6]))
    assert report.passed, str(report)


# Plans


def test_plan_of_rows_that_couple():
    def coupled(x):
        similarity = x @ tf.transpose(x)
        centred = x - tf.reduce_mean(x, 0)
        labels = tf.range(tf.shape(x)[0])
        loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, similarity)
        return similarity, centred, tf.reduce_mean(loss)

    parallel = check(coupled, rows(7, 4), sharded="MatMul")
    plan = parallel.plan(rows(7, 4))
    assert not plan.unsharded_ops, str(plan)
    assert {"MatMul", "Sub", "SparseSoftmaxCrossEntropyWithLogits"} <= {op.type for op in plan.sharded_ops}


@pytest.mark.parametrize("rows_of_it", [True, False])
def test_a_weight_that_is_as_long_as_the_batch_has_no_rows(rows_of_it: bool):
    """A weight of LoRA is reshaped for a product over several axes; one that is repeated for each row has rows."""
    a, b = tf.Variable(tf.ones((64, 2))), tf.Variable(tf.ones((2, 4, 32)))

    def f(x):  # [128, 64]
        weight = tf.reshape(a @ tf.reshape(b, (2, 128)), (64, 4, 32))
        made = tf.reshape(tf.reshape(weight, (128, 64)) * 2.0, (64, 128))
        if rows_of_it:
            made = made + tf.reduce_sum(tf.tile(a[:1], (128, 1)) ** 2 + 1.0)
        return x @ made

    plan = gs.parallelize(f, devices=4).plan(tf.ones((128, 64)))
    text = str(plan)
    assert {op.type for op in plan.sharded_ops} >= {"MatMul"}
    assert not plan.unsharded_ops
    assert not shares_of(plan).causes
    assert "all work on the batch is sharded" in text
    pairs = zip(plan.program.ops, data_in(plan.program, 128), strict=True)
    found = {(op.type, is_data) for op, is_data in pairs if op.type in ("Reshape", "Tile")}
    assert found == {("Reshape", False), *([("Tile", True)] if rows_of_it else [])}


def test_what_is_alive_is_told_by_the_shards_that_differ():
    def f(x):
        return tf.reduce_sum(tf.tanh(x) ** 2), tf.unique(x).y

    function = gs.parallelize(f, devices=4, shares=[1, 3, 2, 1])
    plan = function.plan(tf.ones(70))
    every = live_bytes(plan)
    [line] = [line for line in str(plan).splitlines() if "peak of activations" in line]
    first, second = (f"{every[device]} B" for device in plan.devices[:2])
    assert line == f"  peak of activations: {first} on CPU:0, {second} on CPU:1, no more on 2 others"
    assert max(every[device] for device in plan.devices[2:]) <= every[plan.devices[1]]
    assert "peak of activations" not in str(
        gs.parallelize(tf.function(f, input_signature=[tf.TensorSpec([None])]), devices=2).plan(tf.TensorSpec([None]))
    )


def test_a_python_function_asks_for_no_device():
    def f(x):
        return tf.numpy_function(lambda v: v * 2, [x], tf.float32) + 1

    plan = gs.parallelize(f, devices=2).plan(tf.ones((4, 2)))
    assert [line for line in str(plan).splitlines() if "tf.device" in line] == []


@pytest.mark.parametrize("cut_first", [True, False])
def test_a_constant_read_whole_and_in_pieces(cut_first: bool):
    def both(x):
        twos = tf.raw_ops.Fill(dims=[7, 3], value=tf.constant(2.0, tf.float64))
        if cut_first:
            return x + twos, tf.matmul(x, twos, transpose_b=True)
        return tf.matmul(x, twos, transpose_b=True), x + twos

    check(both, rows(7, 3), sharded="MatMul").plan(rows(7, 3)).check()


# Reductions


def reduced(plan: gs.inspect.Plan) -> list[str]:
    return [plan.program.ops[r.tensor.op].type for r in plan.moves if r.kind == "reduce"]


def test_what_several_readers_need_is_reduced_once():
    def f(x):
        mean = tf.reduce_mean(x, 0, keepdims=True)
        return x - mean, tf.square(tf.squeeze(mean, 0)), tf.exp(tf.reshape(mean, [3, 1]))

    parallel, x = gs.parallelize(f, devices=3), rows(7, 3)
    assert_close(parallel(x), f(x))
    assert reduced(parallel.plan(x)) == ["Mean"]
    assert {"Mean", "Sub"} <= sharded_types(parallel, x)


def test_a_large_sum_is_not_reduced_for_small_readers():
    def f(x, w):
        large = tf.matmul(x, x, transpose_a=True)
        return tf.exp(tf.linalg.matvec(large, w)), tf.exp(large[0, :2])

    parallel, x, w = gs.parallelize(f, devices=3, split={"x": 0, "w": None}), rows(7, 16), rows(16)
    assert_close(parallel(x, w), f(x, w))
    plan = parallel.plan(x, w)
    shapes = [plan.program.shape(r.tensor) for r in plan.moves if r.kind == "reduce"]
    assert sorted(shapes) == [(2,), (16, 1)]  # and not (16, 16)


def test_gradients_do_not_wait_for_each_other():
    """The optimizer of Keras hands all gradients through one IdentityN, which would keep all of them in memory."""

    def f(x):
        first, second = tf.raw_ops.IdentityN(input=[tf.reduce_sum(x, 0), tf.reduce_max(x, 1)])
        return tf.exp(first), tf.exp(second)

    parallel, x = gs.parallelize(f, devices=3), rows(7, 3)
    assert_close(parallel(x), f(x))
    assert reduced(parallel.plan(x)) == ["Sum"]
    assert "IdentityN" not in {node.op for node in parallel.graph_def(x).node}


def test_verify_takes_no_overflow_for_rounding():
    """Where the next larger argument overflows on one device as well, an infinite result is wrong all the same."""
    traced = []

    def overflowing(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        traced.append(1)
        largest = tf.reduce_max(x)
        return largest * 2 if len(traced) == 1 else largest, largest  # (the first trace is the parallelized one)

    report = gs.verify(gs.parallelize(overflowing, devices=2), tf.fill([9], tf.constant(tf.float16.max, tf.float16)))
    assert [d.is_rounding for d in report.differences] == [False, True]


def test_verify_has_nothing_to_compare_random_numbers_without_a_seed_with():
    calls = []

    def drawing(x):
        calls.append(1)
        return x * len(calls) + tf.random.normal(tf.shape(x)), x + 1  # another number in every trace, in the noise

    report = gs.verify(gs.parallelize(drawing, devices=2), tf.ones((20, 4)))
    assert [d.is_rounding for d in report.differences] == [False, True]
    assert re.fullmatch(
        r"CHECK: output 0 is [\d.]+ relative from itself in two calls on one device, so there is nothing to compare "
        r"with\. The function draws new random numbers in each call \(with tf\.random\.set_seed, or a seed= of "
        r"tf\.random\.normal and tf\.nn\.dropout, as well: use stateless ones, a tf\.random\.Generator or Keras' "
        r"SeedGenerator\), or reads what changes",
        str(report).splitlines()[0],
    )
    generator = tf.random.Generator.from_seed(3)
    seeded = gs.parallelize(lambda x: x + generator.normal(tf.shape(x)), devices=2)
    assert gs.verify(seeded, tf.ones((20, 4))).passed


def test_verify_takes_noise_for_rounding_where_a_device_differs_from_itself(monkeypatch: pytest.MonkeyPatch):
    """As on GPUs, which add up in another order in each call: what should be zero is another small number each time."""
    rng, results = np.random.default_rng(0), verification._Runs._results

    def noisy(self: Any, *call: Any) -> list[tf.Tensor]:
        return [value + rng.normal(size=value.shape) * 1e-8 for value in results(self, *call)]

    monkeypatch.setattr(verification._Runs, "_results", noisy)
    x = tf.random.stateless_normal((9, 4), [1, 2])

    def cancelling(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.reduce_sum(x, 0) - tf.reduce_sum(x, 0), x + 1

    assert gs.verify(gs.parallelize(cancelling, devices=2), x).passed
