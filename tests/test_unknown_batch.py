"""One trace for any batch size: planned with a stand-in, counted in each run, equal to one device for every size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import graphsplit as gs
from benchmarks.coverage_models import MODELS
from graphsplit.core.sizes import rows as rows_
from graphsplit.emission import emit
from graphsplit.emission.shards.random_numbers import own_numbers
from graphsplit.errors import CheckError
from tests.helpers.float64 import EXACT, float64
from tests.helpers.law import assert_close, assert_law
from tests.helpers.trainings import start_elsewhere
from tests.helpers.unknown_sizes import last_plan
from tests.rule_cases import CASES, Case
from tests.rule_cases.table import first_of_each

__all__ = ["float64"]
SIZES = (5, 7, 2, 1, 6)  # fewer rows than devices among them
# They shape numpy arrays, or nested lists, by a number of rows that is only known in each run.
NEED_A_NUMBER = {
    "AddV2-6-b3,b3",
    "ConcatV2-8-b3",
    "ConcatV2-9-b3",
    "MatrixSetDiagV2-1-b34,b33",
    "MatrixSetDiagV3-1-b34,b33",
    "Reshape-18-b34",
    "Reshape-19-3b4",
    "Reshape-20-34b",
    "Reshape-21-b34",
    "Reshape-22-34b",
    "EnsureShape-1-6b,",
    "CTCLoss-0-4b3,b",
}
# An end beyond every batch that was tried is no end for every batch; a Squeeze may squeeze a batch of one.
CLIPPED = {"Squeeze-3-b13", "StridedSlice-4-b4", "StridedSliceGrad-4-b2"}


def test_cases_that_are_named_exist() -> None:
    assert {case.name for case in CASES} >= NEED_A_NUMBER | CLIPPED


def any_batch(case: Case) -> tuple[Callable[..., Any], Any]:
    """Return a case as a function of arguments of any number of rows, and how it is split."""
    axes = [argument.axis for argument in case.arguments]
    first = next(i for i, axis in enumerate(axes) if axis is not None)
    signature = [
        tf.TensorSpec([None if c in "bB+" else int(c) for c in argument.shape], tensor.dtype)
        for argument, tensor in zip(case.arguments, case.make_arguments(3), strict=True)
    ]

    @tf.autograph.experimental.do_not_convert
    def function(*tensors: tf.Tensor) -> list[tf.Tensor]:
        return case.run(tf.shape(tensors[first])[axes[first]], tensors)

    return tf.function(function, input_signature=signature), {"tensors": tuple(axes)}


BATCHED = [case for case in CASES if any(argument.axis is not None for argument in case.arguments)]


@pytest.mark.parametrize("case", [case for case in BATCHED if case.name in NEED_A_NUMBER], ids=lambda case: case.name)
def test_cases_that_need_a_number_cannot_be_traced_without(case: Case) -> None:
    function, _ = any_batch(case)
    with pytest.raises((TypeError, ValueError)):
        function(*case.make_arguments(5))


@pytest.mark.sampled(48, quick=7)
@pytest.mark.parametrize(
    "case", first_of_each([case for case in BATCHED if case.name not in NEED_A_NUMBER]), ids=lambda case: case.name
)
def test_rules(case: Case) -> None:
    function, split = any_batch(case)
    parallel = gs.parallelize(function, devices=3, split=split)
    for rows in (7, 2, 1):
        arguments = case.make_arguments(rows)
        for actual, expected in zip(parallel(*arguments), case.run(rows, arguments), strict=True):
            assert_close(actual, expected, f"{rows} rows", 1e-12 if expected.dtype == tf.complex128 else None)
    plan = parallel.plan(*arguments)
    plan.check()
    emit(plan).check()
    assert plan.program.batch_is_unknown
    assert len(parallel._traces.planned) == 1
    if case.name not in CLIPPED and not any("B" in argument.shape for argument in case.arguments):
        assert len(plan.unsharded_ops) == case.at_home, str(plan)
        if not case.at_home and not case.partial:  # whether it pays to keep a sum partial is another matter
            assert any(op.type == case.op_type for op in plan.sharded_ops), str(plan)


@pytest.mark.usefixtures("float64", "plain_oracle")
@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_networks_train_with_one_trace(name: str) -> None:
    made = MODELS[name]

    def make() -> tuple[Callable[..., Any], Any]:
        keras.utils.set_random_seed(1)
        training = made()
        start_elsewhere(training.variables)
        return training.step, training.variables

    calls = [made().inputs(rows) for rows in SIZES]
    plan = assert_law(make, calls, at_home=None, tolerance=EXACT, devices=3, tuning={"reduce_retracing": True})
    assert plan.program.batch_is_unknown
    tables = ["ResourceScatterAdd"] * 2 if name == "Wide & deep" else []  # updated once, with the rows of all
    assert [op.type for op in plan.rows_kept if op in plan.program.ops] == tables, str(plan)
    inside = {op.type for op, _ in plan.unsharded_ops if op not in plan.program.ops}  # of the optimizer's branches
    assert inside <= ({"ScatterNd", "ConcatV2", "StridedSlice"} if tables else set()), str(plan)


def recurrent() -> tuple[keras.Model, tuple[int, ...]]:
    inputs = keras.Input((5, 3))
    h = layers.Bidirectional(layers.GRU(4, return_sequences=True))(layers.Masking()(inputs))
    return keras.Model(inputs, layers.Dense(2)(layers.LSTM(4)(h))), (5, 3)


def normalised() -> tuple[keras.Model, tuple[int, ...]]:
    stack = [layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.MaxPool2D()]
    return keras.Sequential([keras.Input((8, 8, 3)), *stack, layers.Flatten(), layers.Dense(2)]), (8, 8, 3)


def attentive() -> tuple[keras.Model, tuple[int, ...]]:
    inputs = keras.Input((6, 8))
    h = layers.MultiHeadAttention(2, 4, dropout=0.2, seed=3)(inputs, inputs, use_causal_mask=True)
    return keras.Model(inputs, layers.Dense(2)(layers.LayerNormalization()(inputs + h))), (6, 8)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("float64", "plain_oracle")
@pytest.mark.parametrize("network", [attentive, recurrent, normalised], ids=lambda f: f.__name__)
def test_gradients_from_outside(network: Callable[[], tuple[keras.Model, tuple[int, ...]]]) -> None:
    """Inside a function that knows no sizes; the residuals of shards without rows are not there."""
    results: list[list[tf.Tensor]] = []
    for split in (False, True):
        keras.utils.set_random_seed(3)
        model, shape = network()
        forward = gs.parallelize(lambda x, model=model: model(x, training=True), devices=3) if split else model

        @tf.function(input_signature=[tf.TensorSpec((None, *shape), tf.float64)])
        def gradients(x, forward=forward, model=model, split=split):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = forward(x) if split else forward(x, training=True)
                loss = tf.reduce_mean(y**2)
            found = tape.gradient(loss, [x, *model.trainable_variables])
            return loss, y, tf.concat([tf.reshape(g, [-1]) for g in found], 0)  # some are mathematically zero

        rng = np.random.default_rng(0)
        results.append([gradients(tf.constant(rng.standard_normal((rows, *shape)))) for rows in (7, 2, 1)])
    assert_close(results[1], results[0], tolerance=EXACT)
    spec = tf.TensorSpec((None, *shape), tf.float64)
    plan = tf.function(lambda x: forward.gradient_plan(x) and x).get_concrete_function(spec) and last_plan(forward)
    assert plan.program.batch_is_unknown
    assert not plan.unsharded_ops, str(plan)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("shape", [(None, 6), (None, 3, 5)])
@pytest.mark.parametrize("make", ["normal", "truncated_normal", "uniform"])
@pytest.mark.parametrize("dtype", [tf.float32, tf.float64])
def test_random_numbers_are_those_of_one_device(shape: tuple[int | None, ...], make: str, dtype: tf.DType) -> None:
    def noisy(x):
        return x + getattr(tf.random, f"stateless_{make}")(tf.shape(x), [1, 2], dtype=dtype)

    parallel = gs.parallelize(tf.function(noisy, input_signature=[tf.TensorSpec(shape, dtype)]), devices=4)
    for rows in (9, 3, 1, 4):
        x = tf.zeros((rows, *shape[1:]), dtype)
        np.testing.assert_array_equal(parallel(x).numpy(), noisy(x).numpy())
    assert any(step.shards and step.shards.draw for step in parallel.plan(x).steps)


def test_numbers_are_not_drawn_by_stand_ins_for_sizes() -> None:
    """Whoever asks for the numbers of a known shape, where it is not known, would get those of some other shape."""

    def noisy(x):
        return x + tf.random.stateless_uniform(tf.shape(x), [1, 2])

    parallel = gs.parallelize(tf.function(noisy, input_signature=[tf.TensorSpec((None, 6))]), devices=2)
    ops = parallel.plan(tf.zeros((8, 6))).program.ops
    [drawn] = [op for op in ops if op.type == "StatelessRandomUniformV2"]
    with pytest.raises(CheckError, match=r"draws numbers of the shape .* as if it were known"):
        own_numbers(drawn, "numbers", ["shape", "key", "counter", "algorithm"], range(4))


def test_every_number_of_rows_and_devices() -> None:
    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float64), tf.TensorSpec((2, None), tf.float64)])
    def f(x, z):
        both = tf.concat([x, 2 * x], 0)
        rows = tf.shape(x)[0]
        return {
            "rows": tf.nn.relu(x) * tf.cast(rows, tf.float64),
            "time major": tf.transpose(z) + x[:, :2],
            "halves": both[:rows] - both[rows:],
            "all": [reduce(x) for reduce in (tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod)],
            "truth": (tf.reduce_all(x > -9), tf.reduce_any(x > 9)),
            "pairs": tf.nn.softmax(x @ tf.transpose(x)),
            "flat": tf.reshape(x, [-1]) + tf.reshape(tf.tile(z[0][:, None], [1, 3]), [3 * rows]),
            "zeros": tf.zeros([rows, 2], tf.float64) + tf.transpose(z),
        }

    for devices in range(1, 6):
        parallel = gs.parallelize(f, devices=devices, split={"x": 0, "z": 1})
        for rows in range(1, 10):
            rng = np.random.default_rng(rows)
            x, z = rng.standard_normal((rows, 3)), rng.standard_normal((2, rows))
            assert_close(parallel(x, z), f(x, z), f"{rows} rows on {devices} devices")
        assert len(parallel._traces.planned) == 1
        plan = parallel.plan(x, z)
        assert not plan.unsharded_ops, str(plan)


@pytest.mark.parametrize(
    ("rows", "weight"), [((5, 6), (6, 8)), ((5, 6), (1, 6, 8)), ((3, 5, 6), (3, 6, 8)), ((1, 5, 6), (1, 4, 6, 8))]
)
def test_gradients_of_batched_products(rows: tuple[int, ...], weight: tuple[int, ...]) -> None:
    """TensorFlow does not say how many axes their sums have left, of which some are over nothing."""

    def make() -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
        w = tf.Variable(np.random.default_rng(1).normal(size=weight))

        @tf.function(input_signature=[tf.TensorSpec((None, *rows), tf.float64)])
        def step(x: tf.Tensor) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                loss = tf.reduce_mean(tf.sin(x @ w))
            return loss, tape.gradient(loss, [x, w])

        return step, [w]

    calls = [(tf.constant(np.random.default_rng(count).normal(size=(count, *rows))),) for count in (5, 1, 7)]
    assert_law(make, calls, sharded=["BatchMatMulV2", "Sum"])


def test_weights_of_devices() -> None:
    f = tf.function(lambda x: tf.nn.relu(x), input_signature=[tf.TensorSpec((None, 2))])
    parallel = gs.parallelize(f, devices=3, shares=[1, 0, 3])
    for rows in (1, 2, 3, 8):
        assert_close(parallel(tf.ones((rows, 2))), tf.ones((rows, 2)))


def test_no_rows_at_all() -> None:
    f = tf.function(lambda x: (tf.nn.relu(x), tf.reduce_sum(x)), input_signature=[tf.TensorSpec((None, 2))])
    parallel = gs.parallelize(f, devices=3)
    assert_close(parallel(tf.zeros((0, 2))), f(tf.zeros((0, 2))))


def test_a_shard_without_rows_does_not_run() -> None:
    """Division by zero fails on any entry: were rows made up for an empty shard, it would fail here."""
    f = tf.function(lambda x: 12 // x, input_signature=[tf.TensorSpec((None,), tf.int32)])
    parallel = gs.parallelize(f, devices=4)
    assert parallel(tf.constant([3])).numpy().tolist() == [4]
    assert {op.type for op in parallel.plan(tf.constant([3])).sharded_ops} >= {"FloorDiv"}


@pytest.mark.sampled(quick="all")
def test_effects_happen_once_whatever_the_size() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        count, mean = tf.Variable(0), tf.Variable(tf.zeros(2, tf.float64))

        def step(x):
            tf.debugging.assert_all_finite(x, "finite")
            count.assign_add(1)
            for _ in tf.range(2):
                mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(tf.tanh(x), 0))
            return tf.tanh(x) - mean, count

        return step, [count, mean]

    rng = np.random.default_rng(0)
    calls = [(tf.constant(rng.standard_normal((rows, 2))),) for rows in SIZES]
    plan = assert_law(make, calls, sharded=["Tanh"], tuning={"reduce_retracing": True}, devices=4)
    assert plan.program.batch_is_unknown


def test_arguments_that_are_not_one_batch() -> None:
    f = tf.function(lambda x, y: x * y, input_signature=[tf.TensorSpec((None, 2)), tf.TensorSpec((None, 2))])
    parallel = gs.parallelize(f, devices=2)
    assert_close(parallel(tf.ones((4, 2)), tf.ones((4, 2))), tf.ones((4, 2)))
    with pytest.warns(gs.errors.RetracingWarning, match=r"x.shape\[0\] and y.shape\[0\] are the same size; .* 4 and 1"):
        assert_close(parallel(tf.ones((4, 2)), tf.ones((1, 2))), tf.ones((4, 2)))  # y is broadcast
    for rows, others in ((5, 1), (1, 3), (4, 4)):  # and that is all
        assert_close(parallel(tf.ones((rows, 2)), tf.ones((others, 2))), tf.ones((max(rows, others), 2)))
    assert len(parallel._traces.planned) == 2
    inside = tf.function(parallel, input_signature=[tf.TensorSpec((None, 2)), tf.TensorSpec((None, 2))])
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"x and y were taken for one batch, and must have"):
        inside(tf.ones((4, 2)), tf.ones((1, 2)))
    apart = gs.parallelize(f, devices=2, split={"y": None})
    inside = tf.function(apart, input_signature=[tf.TensorSpec((None, 2)), tf.TensorSpec((None, 2))])
    assert_close(inside(tf.ones((4, 2)), tf.ones((1, 2))), tf.ones((4, 2)))


def test_two_traces_and_no_more() -> None:
    traces = []

    def f(x, flag):
        traces.append(flag)
        return tf.nn.relu(x) if flag else x

    parallel = gs.parallelize(f, devices=2, tuning={"reduce_retracing": True})
    for rows in (3, 4, 5, 4, 3, 6):
        parallel(tf.ones((rows, 2)), True)
    assert traces == [True, True]
    parallel(tf.ones((3, 2)), False)  # another structure, of which nothing is known yet
    assert traces == [True, True, False]
    parallel(tf.ones((3, 2, 1)), True)  # another rank
    assert len(traces) == 4


def test_a_function_keeps_its_own_reduce_retracing() -> None:
    traces = []
    f = tf.function(lambda x: traces.append(x) or tf.nn.relu(x), reduce_retracing=True, autograph=False)
    parallel = gs.parallelize(f, devices=2)
    for rows in (3, 4, 5, 6):
        parallel(tf.ones((rows, 2)))
    assert len(traces) == 2


def test_strict_sees_what_needs_all_rows() -> None:
    f = tf.function(lambda x: tf.sort(x, axis=0), input_signature=[tf.TensorSpec((None, 2))])
    with pytest.raises(gs.errors.StrictError, match="a row"):
        gs.parallelize(f, devices=2, strict=True)(tf.ones((4, 2)))


def shapes_of(parallel: gs.ParallelFunction, *arguments: Any) -> Sequence[Any]:
    plan = parallel.plan(*arguments)
    return [plan.program.shape(tensor) for tensor in plan.program.outputs]


def test_sizes_are_followed_and_doubtful_ones_are_not() -> None:
    @tf.function(input_signature=[tf.TensorSpec((None, 4))])
    def f(x):
        rows = tf.shape(x)[0]
        return tf.reshape(x, [rows * 2, 2]), x[:3], x[1:], x[:, :3], tf.zeros([rows, rows]), x[: rows // 2]

    assert shapes_of(gs.parallelize(f, devices=2), tf.ones((4, 4))) == [
        (rows_(2), 2),
        (None, 4),
        (None, 4),
        (rows_(1), 3),
        (rows_(1), rows_(1)),
        (None, 4),
    ]


def test_batches_sent_ahead() -> None:
    """Rows are counted and cut before they travel; a shard without rows gets nothing."""
    weight = tf.Variable(tf.ones((2, 3)))

    @tf.function(input_signature=[tf.TensorSpec((None, 2))])
    def f(x):
        return tf.nn.relu(x @ weight) + tf.ones([tf.shape(x)[0], 1]), tf.reduce_mean(x)

    parallel = gs.parallelize(f, devices=3)
    batches = [tf.random.stateless_normal((rows, 2), [rows, 0]) for rows in (5, 7, 1, 2, 4)]
    for actual, batch in zip(parallel.map(iter(batches)), batches, strict=True):
        assert_close(actual, f(batch))
    assert parallel.plan(batches[0]).program.batch_is_unknown


def test_batches_of_several_arguments_sent_ahead() -> None:
    weight = tf.Variable(tf.ones((4, 1)))

    def f(x, y):
        return tf.reduce_sum((x @ weight - y) ** 2, 1)

    parallel = gs.parallelize(f, devices=3, tuning={"reduce_retracing": True})
    x = tf.random.stateless_normal((20, 4), [1, 2])
    batches = tf.data.Dataset.from_tensor_slices((x, x[:, :1])).batch(6)
    for actual, batch in zip(parallel.map(batches), batches, strict=True):
        assert_close(actual, f(*batch))
    assert parallel.plan(x[:5], x[:5, :1]).program.batch_is_unknown
