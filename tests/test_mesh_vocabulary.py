"""A vocabulary cut along an axis of a mesh: tables by their rows, heads, softmax and cross entropy by parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.axes.columns import planned_along
from graphsplit.core.layouts import EvenCut, Shard
from graphsplit.emission.checks import check_emitted
from graphsplit.emission.emitter import emit
from graphsplit.planning.device_bytes import along, traffic
from graphsplit.planning.propagation.sharding_checks import check_step
from graphsplit.rules import Sharded
from graphsplit.rules.factors import Shift
from tests.helpers.law import rows
from tests.helpers.mesh_cases import (
    LENGTH,
    MESHES,
    VOCABULARY,
    WIDTH,
    Made,
    assert_law,
    devices_of,
    ids_of,
    numbers,
    variable,
)

LAYOUT = {"table": ("model", None), "bias": ("model",), "last": (None, "model")}
TOKEN = 8  # bytes of one number for each token

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]


def sparse(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)


def dense(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return tf.nn.softmax_cross_entropy_with_logits(tf.one_hot(labels, VOCABULARY, dtype=logits.dtype), logits)


def of_probabilities(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return keras.losses.sparse_categorical_crossentropy(labels, 1.0 * tf.nn.softmax(logits))


def of_logarithms(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    return -tf.gather(tf.nn.log_softmax(logits), labels, batch_dims=1)


def language(loss_of: Loss, *, tied: bool = True, rows_written: bool = False) -> Callable[[], Made]:
    """Return what makes a table, a head (the table again, or one of its own), a loss and a step."""

    def make() -> Made:
        table, bias, last = (
            variable("table", VOCABULARY, WIDTH),
            variable("bias", VOCABULARY),
            variable("last", WIDTH, VOCABULARY),
        )
        variables = [bias, table] if tied else [bias, last, table]

        def step(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                x = tf.reshape(tf.tanh(tf.gather(table, ids)), [-1, WIDTH])
                logits = (tf.matmul(x, table, transpose_b=True) if tied else x @ last) + bias
                loss = tf.reduce_mean(loss_of(tf.reshape(tf.roll(ids, 1, 1), [-1]), logits))
            *others, own = tape.gradient(loss, variables)
            if rows_written:
                table.scatter_sub(tf.IndexedSlices(0.1 * own.values, own.indices))
            else:
                others.append(tf.convert_to_tensor(own))
            for weight, gradient in zip(variables, others, strict=False):
                weight.assign_sub(0.1 * gradient)
            return loss, tf.linalg.global_norm(others)

        return variables, step

    return make


def layout_of(variables: list[tf.Variable]) -> dict[str, Any]:
    return {own.name.split(":")[0]: LAYOUT[own.name.split(":")[0]] for own in variables}


def assert_in_place(parallel: gs.ParallelFunction[..., Any], batch: tf.Tensor) -> None:
    """Assert that no variable is put together, and that TensorFlow sends what is planned, and no whole logits."""
    plan = parallel.plan(batch)
    assert not plan.state.gathered
    assert not plan.state.whole
    assert "gathered before it is used" not in str(plan)
    sent = parallel.placement(batch, actual=True).transfers
    more = sum(transfer.bytes for transfer in sent) - sum(traffic(plan).sent.values())
    assert 0 <= more <= 64  # integers of shapes, which are no moves


CASES = [
    ("sparse", language(sparse), MESHES[1]),
    ("a head of its own, rows written", language(sparse, tied=False, rows_written=True), MESHES[1]),
    ("a head of its own", language(sparse, tied=False), MESHES[2]),
    ("dense", language(dense), MESHES[1]),
    ("probabilities", language(of_probabilities), MESHES[1]),
    ("logarithms", language(of_logarithms), MESHES[0]),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("make", "mesh"),
    [pytest.param(*case[1:], marks=[pytest.mark.long] * (k > 2)) for k, case in enumerate(CASES)],
    ids=[f"{c[0]}-{c[2]}" for c in CASES],
)
def test_a_vocabulary_in_parts(make: Callable[[], Made], mesh: dict[str, int]):
    """Eleven words over two or three devices, rows of several numbers; tables, heads and losses where the parts are."""
    parallel = assert_law(make, layout_of(make()[0]), mesh, [ids_of(5), ids_of(1)])
    assert_in_place(parallel, ids_of(5))


def test_three_numbers_for_each_token_travel():
    """Beside them, the sum of what was looked up, and that of the head's gradient by its operand: no logits."""
    parallel = assert_law(language(sparse), layout_of(language(sparse)()[0]), MESHES[0], [ids_of(5)])
    tokens = 5 * LENGTH
    sums = 2 * 2 * tokens * WIDTH * 8  # two all-reduces, each a reduce-scatter and an all-gather on two devices
    numbers_of_tokens = 3 * 2 * tokens * TOKEN  # to one device, and what they amount to back
    assert traffic(parallel.plan(ids_of(5))).by_kind[along("model")] == sums + numbers_of_tokens


@pytest.mark.long
def test_a_vocabulary_in_parts_for_any_number_of_rows():
    make = language(sparse, tied=False, rows_written=True)
    batches = [ids_of(count) for count in (5, 1, 8, 2)]
    parallel = assert_law(make, layout_of(make()[0]), MESHES[1], batches, tuning={"reduce_retracing": True})
    assert len({id(parallel.plan(batch)) for batch in batches[2:]}) == 1


def test_ids_and_labels_out_of_range():
    """They are errors that name the number, as on one device; labels also for who reads the gradient only."""
    table, head = variable("table", VOCABULARY, WIDTH), variable("head", WIDTH, VOCABULARY)
    mesh = MESHES[1]
    layout = {"table": ("model", None), "head": (None, "model")}
    gs.set_variable_layout([table, head], layout, devices_of(mesh), mesh=mesh)

    def gradient(labels: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = sparse(labels, x @ head)
        return tape.gradient(loss, x)

    functions = (
        lambda ids, _: tf.gather(table, ids),
        lambda labels, x: sparse(labels, x @ head),
        gradient,
        lambda ids, x: table.scatter_add(tf.IndexedSlices(x, ids)),
    )
    for function in functions:
        parallel = gs.parallelize(function, mesh=mesh, devices=devices_of(mesh))
        before = table.numpy()
        for bad in (VOCABULARY, -1):
            ids = tf.constant([1, bad, 10, 5, 0])
            with pytest.raises(tf.errors.InvalidArgumentError, match=rf" {bad} is not in \[0, 6\)"):
                parallel(ids, tf.constant(numbers(5, WIDTH)))
        assert table.numpy().shape == before.shape


@pytest.mark.parametrize("loss_of", [sparse, dense, of_logarithms])
def test_logits_of_minus_infinity(loss_of: Loss):
    """Masked words: what the kernels make of them."""
    head, mesh = variable("head", WIDTH, VOCABULARY), MESHES[0]
    one, mask = tf.Variable(head), np.zeros(VOCABULARY)
    mask[[2, 7]] = -np.inf
    gs.set_variable_layout(head, (None, "model"), devices_of(mesh), mesh=mesh)

    def by(own: tf.Variable) -> Callable[..., tf.Tensor]:
        return lambda labels, x: loss_of(labels, x @ own + mask)

    labels, x = tf.constant([1, 2, 7, 0, 3]), tf.constant(numbers(5, WIDTH))
    parallel = gs.parallelize(by(head), mesh=mesh, devices=devices_of(mesh))
    np.testing.assert_allclose(parallel(labels, x), by(one)(labels, x), 1e-9)
    assert not parallel.plan(labels, x).state.gathered


@pytest.mark.parametrize("find", [tf.argmax, tf.argmin])
def test_the_largest_class(find: Callable[..., tf.Tensor]):
    """Two numbers for each row travel; of equal ones the first counts, and what is no number is passed over."""
    mesh, values = MESHES[0], 10 * numbers(3, 2, VOCABULARY)
    values[0, 0, [2, 5]], values[0, 1, 4], values[1, 1], values[2, 0, 8:] = np.nan, -np.inf, np.nan, np.inf
    for dtype, size in ((np.float64, 8), (np.int32, 4)):
        one = tf.Variable(np.nan_to_num(values, posinf=9, neginf=-9).astype(dtype) if dtype is np.int32 else values)
        own = tf.Variable(one, name="own")
        gs.set_variable_layout(own, (None, None, "model"), devices_of(mesh), mesh=mesh)
        function = lambda x, weights=own: find(weights * x, -1)  # noqa: E731
        parallel, x = gs.parallelize(function, mesh=mesh, devices=devices_of(mesh)), tf.ones((3, 1, 1), one.dtype)
        np.testing.assert_array_equal(parallel(x), find(one * x, -1))
        rows, given = 3 * 2, 3 * size  # `x`, by which each device multiplies
        # (the largest goes to one device and back, the first of its places to one)
        assert traffic(parallel.plan(x)).by_kind[along("model")] == given + rows * (2 * size + 4)


def test_a_gradient_whose_norm_is_taken_is_made_in_parts():
    table = variable("table", VOCABULARY, WIDTH)

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.gather(table, ids)) ** 2)
        [gradient], norm = tf.clip_by_global_norm([tf.convert_to_tensor(tape.gradient(loss, table))], 0.5)
        table.assign_sub(gradient)
        return norm

    plan = along_the_axis(step)
    plan.check()
    [added] = [step for op, step in zip(plan.program.ops, plan.steps, strict=True) if op.type == "UnsortedSegmentSum"]
    assert added.shards.gives == (Shard(0, partition=EvenCut(VOCABULARY)),)


def test_half_precision():
    """Sums over classes are taken in float32."""
    mesh = MESHES[0]
    for dtype, tolerance in ((tf.float16, 2e-3), (tf.bfloat16, 2e-2)):
        head = tf.Variable(tf.cast(numbers(WIDTH, VOCABULARY), dtype), name="head")
        one = tf.Variable(head)
        gs.set_variable_layout(head, (None, "model"), devices_of(mesh), mesh=mesh)
        parallel = gs.parallelize(lambda labels, x: sparse(labels, x @ head), mesh=mesh, devices=devices_of(mesh))  # noqa: B023
        labels, x = tf.constant([1, 2, 7, 0, 3]), tf.cast(numbers(5, WIDTH), dtype)
        found, expected = (tf.cast(value, tf.float32) for value in (parallel(labels, x), sparse(labels, x @ one)))
        np.testing.assert_allclose(found, expected, tolerance)


def test_a_table_cut_along_its_width():
    """Each device looks up its part of every row, and writes it."""
    one, table, mesh = variable("one", VOCABULARY, WIDTH), variable("table", VOCABULARY, WIDTH), MESHES[1]
    one.assign(table)
    gs.set_variable_layout(table, (None, "model"), devices_of(mesh), mesh=mesh)

    def by(own: tf.Variable) -> Callable[..., tf.Tensor]:
        def step(ids: tf.Tensor) -> tf.Tensor:
            own.scatter_add(tf.IndexedSlices(tf.tanh(tf.gather(own, ids)), ids))
            return tf.reduce_sum(tf.gather(own, ids) ** 2)

        return step

    parallel, ids = gs.parallelize(by(table), mesh=mesh, devices=devices_of(mesh)), ids_of(5)
    np.testing.assert_allclose(parallel(ids), by(one)(ids), 1e-9)
    np.testing.assert_allclose(table.numpy(), one.numpy(), 1e-9)
    assert_in_place(parallel, ids)


@pytest.mark.long
@pytest.mark.parametrize("from_logits", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_keras_language_model(from_logits: bool):
    layout = {"table/embeddings": ("model", None), "head/kernel": (None, "model"), "head/bias": ("model",), "*": "home"}
    x = ids_of(14).numpy().astype(np.int32)
    y, found = np.roll(x, 1, 1), []
    for mesh in (None, MESHES[1]):
        keras.utils.set_random_seed(3)
        layers = keras.layers
        template = keras.Sequential(
            [
                keras.Input((LENGTH,), dtype="int32"),
                layers.Embedding(VOCABULARY, WIDTH, name="table"),
                layers.Dense(WIDTH, "tanh"),
                layers.Dense(VOCABULARY, None if from_logits else "softmax", name="head"),
            ]
        )
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
        template.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2, clipnorm=0.5), loss, metrics=["accuracy"])
        model = template if mesh is None else gs.multi_gpu_model(template, mesh=mesh, variables=layout)
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history
        history = [history["loss"], history["accuracy"]]
        found.append((history, model.predict(x[:5], verbose=0), template.get_weights()))
        if mesh is not None:
            plan = model.plan(x[:5], y[:5], step="train")
            assert not plan.state.gathered
            assert not plan.state.whole
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), *found)


def along_the_axis(step: Callable[[tf.Tensor], Any]) -> gs.inspect.Plan:
    """Return the plan of the axis by itself, along which lies what has a dimension for the words."""
    program, words = gs.parallelize(step, devices=1).plan(ids_of(5)).program, EvenCut(VOCABULARY)
    read = {op.inputs[0].op: op.out_shapes[0] or () for op in program.ops if op.type == "ReadVariableOp"}
    laid = {program.ops[i].name: Shard(shape.index(VOCABULARY), partition=words) for i, shape in read.items()}
    assert laid
    return planned_along(program, "model", 2, laid)


def looked_up(table: tf.Variable) -> Callable[[tf.Tensor], None]:
    """Return a step that makes a gradient of the whole table."""

    def step(ids: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.gather(table, ids)) ** 2)
        table.assign_sub(0.1 * tf.convert_to_tensor(tape.gradient(loss, table)))

    return step


def test_the_plan_of_the_axis_is_right():
    plan = along_the_axis(language(sparse, tied=False, rows_written=True)()[1])
    plan.check()
    check_emitted(plan, emit(plan))


@pytest.mark.parametrize(
    ("kind", "broken"),
    [
        ("GatherV2", lambda own: replace(own, shift={})),
        ("GatherV2", lambda own: replace(own, shift={1: own.shift[1]._replace(others="")})),
        ("GatherV2", lambda own: replace(own, shift={1: Shift(Shard(0, partition=EvenCut(10)), others="zeros")})),
        ("GatherV2", lambda own: replace(own, gives=(own.wants[1],))),
        ("OneHot", lambda own: replace(own, shift={})),
        ("ResourceScatterSub", lambda own: replace(own, shift={})),
        ("UnsortedSegmentSum", lambda own: replace(own, shift={1: own.shift[1]._replace(others="zeros")})),
    ],
)
def test_numbers_that_are_read_as_if_a_device_had_all(kind: str, broken: Callable[[Sharded], Sharded]):
    table = variable("table", VOCABULARY, WIDTH)
    is_dense = kind == "UnsortedSegmentSum"
    step = looked_up(table) if is_dense else language(sparse, tied=False, rows_written=True)()[1]
    plan = along_the_axis(step)
    program = plan.program
    steps = zip(program.ops, plan.steps, strict=True)
    op, step = next((op, step) for op, step in steps if op.type == kind and step.shards and step.shards.shift)
    check_step(program, op, step, plan.mesh)
    with pytest.raises(gs.errors.CheckError):
        check_step(program, op, replace(step, shards=broken(step.shards)), plan.mesh)


@pytest.mark.parametrize("rows_of_batch", [19, 20])
def test_sums_of_rows_are_not_cut_between_columns(rows_of_batch: int):
    """What classes add up to has nothing but rows, which are shared out: no column puts them together to cut them."""
    kernel = tf.Variable(0.1 * rows(8, 50), name="kernel")
    mesh = {"batch": 2, "model": 2}
    gs.set_variable_layout([kernel], {"kernel": (None, "model")}, mesh=mesh)

    def step(x, y):
        with tf.GradientTape() as tape:
            logits = tf.reshape(tf.reshape(x, [-1, 8]) @ kernel, [-1, 50])
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.reshape(y, [-1]), logits=logits)
            loss = tf.reduce_mean(losses)
        kernel.assign_sub(0.1 * tape.gradient(loss, kernel))
        return loss

    x, y = rows(rows_of_batch, 16, 8), tf.constant(np.arange(rows_of_batch * 16).reshape(-1, 16) % 50)
    parallel = gs.parallelize(step, mesh=mesh, strict=True)
    assert gs.verify(parallel, x, y).passed
    plan = parallel.plan(x, y)
    assert not plan.unsharded_ops, str(plan)
    assert not [move for move in plan.moves if move.kind in ("gather", "all-gather")], str(plan)
