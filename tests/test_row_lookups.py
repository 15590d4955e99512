"""Tables whose rows lie on several devices: ids go to the rows, rows come back, and gradients go to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.device_bytes import traffic
from tests.helpers.law import assert_close, assert_law
from tests.helpers.layout_cases import bytes_sent, numbers

Made = tuple[Callable[..., Any], Sequence[tf.Variable]]
WORDS, WIDTH = 401, 8


def ids(rows: int, each: int = 3, words: int = WORDS) -> tf.Tensor:
    """Return ids, many of them twice and in the rows of several shards, and those of the first and the last row."""
    found = np.random.default_rng(rows).integers(0, words, (rows, each))
    found[-1], found[0, :2] = found[0], (0, words - 1)
    return tf.constant(found)


def add(table: tf.Variable, slot: tf.Variable, gradient: tf.IndexedSlices) -> None:
    table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))


def dense(table: tf.Variable, slot: tf.Variable, gradient: tf.IndexedSlices) -> None:
    slot.assign(0.9 * slot + tf.convert_to_tensor(gradient))
    table.assign_sub(0.1 * slot)


def update(table: tf.Variable, slot: tf.Variable, gradient: tf.IndexedSlices) -> None:
    """Adagrad, row by row: each row once."""
    unique, which = tf.unique(tf.reshape(gradient.indices, [-1]))
    total = tf.math.unsorted_segment_sum(tf.reshape(gradient.values, [-1, WIDTH]), which, tf.size(unique))
    slot.scatter_update(tf.IndexedSlices(tf.gather(slot, unique) + total**2, unique))
    table.scatter_sub(tf.IndexedSlices(0.1 * total / (tf.sqrt(tf.gather(slot, unique)) + 0.1), unique))


def training(how: Callable[..., None], layout: str, devices: int) -> Made:
    table = tf.Variable(numbers(WORDS, WIDTH), name="table")
    slot = tf.Variable(tf.zeros_like(table), name="slot")
    if layout != "home":
        gs.set_variable_layout([table, slot], layout, devices)

    def step(words: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(tf.gather(table, words)) ** 2)
        how(table, slot, tape.gradient(loss, table))
        return loss

    return step, [table, slot]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("how", "devices"), [(add, 3), (dense, 2), (update, 5)])
def test_training(how: Callable[..., None], devices: int):
    layouts = itertools.cycle(["home", "sharded"])
    plan = assert_law(
        lambda: training(how, next(layouts), devices), [(ids(7),), (ids(11),)], devices=devices, at_home=None
    )
    assert not plan.state.whole
    kinds = ("GatherV2", "ResourceGather")
    lookups = [op for op in plan.ops_once if op.type in kinds and op.device]
    assert {plan.owners.of_ops[op.index] for op in lookups} == set(plan.devices)


@pytest.mark.parametrize(("how", "devices"), [(add, 3), pytest.param(update, 5, marks=pytest.mark.long)])
def test_copies_of_a_table(how: Callable[..., None], devices: int):
    layouts, made = itertools.cycle(["home", "replicated"]), []

    def make() -> Made:
        made.append(training(how, next(layouts), devices))
        return made[-1]

    plan = assert_law(make, [(ids(7),), (ids(11),)], devices=devices, at_home=None)
    assert not plan.state.whole
    table = max(traffic(plan).busiest[1:])
    assert table < WORDS * WIDTH * 4
    for variable in made[1][1]:
        parts = parts_of_variable(variable)
        assert parts is not None
        assert parts.in_parts
        first, *others = [tf.raw_ops.ReadVariableOp(resource=part.handle, dtype=tf.float32) for part in parts._parts]
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_a_table_of_few_long_rows_is_cut_along_them():
    """Rows are written in parts, and entries of all rows are looked up where they are."""
    layouts = itertools.cycle(["home", "sharded"])

    def make() -> Made:
        table = tf.Variable(numbers(3, 640), name="table")
        if (layout := next(layouts)) != "home":
            gs.set_variable_layout([table], layout, 4)

        def step(rows: tf.Tensor) -> tf.Tensor:
            found = tf.gather(table, rows[:, 0] * 7, axis=1)
            table.scatter_sub(tf.IndexedSlices(tf.ones((3, 640)) * tf.reduce_sum(found), tf.constant([2, 0, 2])))
            return found

        return step, [table]

    plan = assert_law(make, [(ids(7, words=91),)], devices=4, at_home=None)
    assert not plan.state.whole
    for kind in ("ResourceScatterSub", "GatherV2"):
        found = [plan.owners.of_ops[op.index] for op in plan.ops_once if op.type == kind]
        assert len({*found}) == len(found) == 4, kind
    assert max(traffic(plan).busiest[1:]) < 3 * 640 * 4


@pytest.mark.parametrize("layout", ["sharded", ("model", None)], ids=str)
@pytest.mark.parametrize(
    "numbered",
    [7, [[30, 2], [7, 2]], np.zeros((0,), np.int32), np.full((1,) * 8, 7)],
    ids=["one", "pairs", "none", "of eight dimensions"],
)
def test_rows_are_written_by_numbers_of_any_shape(numbered: Any, layout: Any):
    """Each part is given its own of them, be it none, and of rows that come twice the sum."""
    numbers_of_rows, layouts = tf.constant(numbered), itertools.cycle(["home", layout])
    mesh = None if layout == "sharded" else {"batch": 1, "model": 3}

    def make() -> Made:
        table = tf.Variable(numbers(31, WIDTH), name="table")
        if (own := next(layouts)) != "home":
            gs.set_variable_layout([table], own, **({"devices": 3} if mesh is None else {"mesh": mesh}))

        def step(x: tf.Tensor) -> tf.Tensor:
            rows = tf.ones((*numbers_of_rows.shape, WIDTH)) * tf.reduce_sum(x)
            table.scatter_add(tf.IndexedSlices(rows, numbers_of_rows))
            return x

        return step, [table]

    options: dict[str, Any] = {"devices": 3} if mesh is None else {"mesh": mesh}
    plan = assert_law(make, [(numbers(6, 2),)], at_home=None, **options)
    kinds = [op.type for op in plan.program.ops]
    if numbers_of_rows.shape.rank > 7:  # more coordinates than TensorFlow picks by: written on one device
        assert (bool(plan.state.whole), kinds.count("ResourceScatterAdd")) == (True, 1)
    else:
        assert not plan.state.whole
        assert (kinds.count("ResourceScatterAdd"), kinds.count("GatherNd")) == (3, 6)


def test_what_travels_grows_with_the_batch():
    found = []
    for rows in (8, 16):
        step, _ = training(add, "sharded", 4)
        parallel = gs.parallelize(step, devices=4, strict=True)
        plan = parallel.plan(ids(rows))
        with partition_graphs() as graphs:
            parallel(ids(rows))
        sent = bytes_sent(graphs, plan)
        assert traffic(plan).busiest[1] <= 4 * rows * 3 * (4 * WIDTH + 24)
        found.append(sum(sent.values()))
    table = WORDS * WIDTH * 4
    assert found[1] < 4 * table  # (by whole operations, of which each shard has a part)
    assert found[1] <= 2.1 * found[0]


def test_any_number_of_rows_and_ids_that_are_none():
    signature = [tf.TensorSpec((None, 3), tf.int64)]
    step, variables = training(add, "sharded", 4)
    plain, expected = training(add, "home", 1)
    parallel = gs.parallelize(tf.function(step, input_signature=signature), devices=4)
    for rows in (9, 2):
        assert_close(parallel(ids(rows)), plain(ids(rows)))
    assert_close(tf.convert_to_tensor(variables[0]), tf.convert_to_tensor(expected[0]))
    for wrong in (WORDS, -1):
        with pytest.raises(tf.errors.InvalidArgumentError, match=r"indices\[.*\] = .* is not in \[0, "):
            parallel(tf.fill((4, 3), tf.constant(wrong, tf.int64)))
    assert_close(tf.convert_to_tensor(variables[0]), tf.convert_to_tensor(expected[0]))


def test_whole_tables_where_that_is_less():
    """A batch with more rows than the table has them put together, as other weights."""
    step, _ = training(add, "sharded", 3)
    plan = gs.parallelize(step, devices=3).plan(ids(200))
    assert not [op for op in plan.program.ops if op.type == "GatherV2" and op.name.startswith("Gather/rows")]
    assert [op for op in plan.sharded_ops if op.type == "GatherV2"]


def two_towers(optimizer: Any) -> Any:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    user, item = keras.Input((2,), dtype="int32", name="user"), keras.Input((4,), dtype="int32", name="item")
    towers = []
    for words, given in ((900, user), (700, item)):
        embedded = layers.GlobalAveragePooling1D()(layers.Embedding(words, 16)(given))
        towers.append(layers.Dense(8, "tanh")(embedded))
    model = keras.Model([user, item], layers.Dot(1)(towers))
    model.compile(optimizer, "mse")
    optimizer.build(model.trainable_variables)
    return model


@pytest.mark.long
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_two_towers(name: str):
    results = []
    x, y = [ids(21, 2, 900), ids(21, 4, 700)], numbers(21, 1)
    for layout in ("home", "sharded"):
        model = two_towers(getattr(keras.optimizers, name)(0.1 if name == "SGD" else 1e-3))
        parallel = gs.multi_gpu_model(model, 4, variables=layout)
        history = parallel.fit(x, y, batch_size=8, epochs=1, shuffle=False, verbose=0).history
        if layout == "sharded":
            tables = [parts_of_variable(v.value) for v in model.trainable_variables if "embedding" in v.path]
            assert [parts is not None and parts.in_parts for parts in tables] == [True, True]

            def step(data: Any, model: Any = model) -> Any:
                return model.train_step(data)

            plan = gs.parallelize(step, devices=4, strict=True).plan((tuple(tensor[:8] for tensor in x), y[:8]))
            assert max(traffic(plan).busiest[1:]) < 900 * 16 * 4 / 2  # of one table
        results.append([history["loss"], *model.get_weights()])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 if name == "SGD" else 1e-4)


def test_what_is_recomputed_is_looked_up_where_its_rows_are():
    """The backward pass needs the rows of two blocks again: they are sent again, and no part of the table is."""

    def make() -> Made:
        table, w = tf.Variable(numbers(WORDS, WIDTH), name="table"), tf.Variable(numbers(WIDTH, WIDTH), name="w")
        if next(layouts) == "sharded":
            gs.set_variable_layout([table], "sharded", 3)

        def step(words: tf.Tensor) -> tf.Tensor:
            h = tf.zeros((*words.shape, WIDTH))
            with tf.GradientTape() as tape:
                for k in range(2):
                    with tf.name_scope(f"block_{k}"):
                        h = tf.tanh((tf.gather(table, (words + k) % WORDS) + h) @ w) ** 2
                loss = tf.reduce_mean(h)
            by_table, by_w = tape.gradient(loss, [table, w])
            table.scatter_sub(tf.IndexedSlices(0.1 * by_table.values, by_table.indices))
            w.assign_sub(0.1 * by_w)
            return loss

        return step, [table, w]

    layouts = itertools.cycle(["home", "sharded"])
    plan = assert_law(make, [(ids(7),), (ids(11),)], at_home=None, recompute=["block_*"])
    assert [op for op in plan.program.ops if "rows_1/again" in op.name and op.device]
    assert not [move for move in plan.moves if plan.program.shape(move.tensor)[:1] in {(134,), (133,)}]


@pytest.mark.parametrize("layout", ["sharded", "home"])
def test_a_plan_says_that_rows_are_looked_up_where_they_are(layout: str):
    table = tf.Variable(tf.random.stateless_normal((900, 16), [1, 2]), name="table")
    gs.set_variable_layout([table], layout, devices=3)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.embedding_lookup(table, ids) ** 2)
        gradient = tape.gradient(loss, table)
        table.scatter_sub(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
        return loss

    ids = tf.constant(np.arange(11) * 80 % 900)
    parallel = gs.parallelize(step, devices=3)
    assert gs.verify(parallel, ids).passed
    found = [line for line in str(parallel.plan(ids)).splitlines() if " where they are, on 3 devices: " in line]
    words = [line.split()[2] for line in found]
    assert words == (["looked", "written"] if layout == "sharded" else []), found


def test_each_device_finds_its_own_rows():
    """Which rows of a gradient are of a part of the table is asked once, where the part is, and not on one device."""
    step, _ = training(dense, "sharded", 4)
    plan = gs.parallelize(step, devices=4).plan(ids(64))
    asking = [op for op in plan.program.ops if "SegmentSum" in op.name and op.type in ("Less", "GreaterEqual")]
    assert len(asking) == 2 * 4
    assert [plan.places.once(op) for op in asking] == [(device,) for device in plan.devices for _ in range(2)]
    assert not any(op in plan.sharded_ops for op in asking)
