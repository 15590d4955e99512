"""Numbers that are those of the rows themselves: what they read and add to, each shard has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.propagation.sharding_checks import check_step
from tests.helpers.law import assert_law, rows

DEVICES = [1, 2, 3, 4]
COUNT = 11


def law(apply, *more, devices, calls=None, at_home=0, signature=None, **options):
    """Compare a step whose loss is a function of `tanh(x @ w)` in rows of 6, its gradients included."""

    def make():
        w = tf.Variable(0.3 * np.random.default_rng(0).normal(size=(4, 6)))

        def step(x, *others):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.sin(apply(tf.tanh(x @ w), *others)))
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return (tf.function(step, input_signature=signature) if signature else step), (w,)

    return assert_law(make, calls or [(rows(COUNT, 4), *more)], devices=devices, at_home=at_home, **options)


def assert_own(plan, op_type, devices):
    """Nothing of an op is reduced over the shards, or read whole by them."""
    ops = [op for op in plan.sharded_ops if op.type == op_type]
    assert devices == 1 or ops, str(plan)
    for op in ops:
        given = plan.steps[op.index].shards
        assert given.shift
        assert all(str(layout).startswith("shard") for layout in given.gives), str(given.gives)


PICKED = tf.constant(np.random.default_rng(1).integers(0, 6, (COUNT, 3)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("devices", DEVICES)
def test_gradient_of_a_gather_from_each_row(devices: int):
    plan = law(lambda h, i: tf.gather(h, i, batch_dims=1), PICKED, devices=devices)
    assert_own(plan, "UnsortedSegmentSum", devices)


@pytest.mark.parametrize("devices", [2, 3])
def test_gradient_of_a_gather_with_two_batch_axes(devices: int):
    picked = PICKED[..., None] % 3

    def apply(h, i):
        return tf.gather(tf.reshape(h, [-1, 3, 2, 1]) + tf.zeros((1, 1, 1, 3), h.dtype), i % 2, batch_dims=2)

    assert_own(law(apply, picked, devices=devices), "UnsortedSegmentSum", devices)


@pytest.mark.parametrize("devices", [1, 3])
def test_gather_of_a_batch_of_unknown_size(devices: int):
    signature = [tf.TensorSpec((None, 4), tf.float64), tf.TensorSpec((None, 3), tf.int64)]
    calls = [(rows(COUNT, 4), PICKED), (rows(2, 4), PICKED[:2]), (rows(7, 4), PICKED[:7])]
    law(lambda h, i: tf.gather(h, i, batch_dims=1), devices=devices, calls=calls, signature=signature)


@pytest.mark.parametrize("devices", DEVICES)
def test_elements_of_each_row(devices: int):
    """`h[range(n), i]`, as actor-critic and DQN pick what an action is worth."""

    def apply(h, i):
        return tf.gather_nd(h, tf.stack([tf.range(tf.shape(h)[0], dtype=tf.int64), i[:, 0]], -1))

    plan = law(apply, PICKED, devices=devices)
    assert_own(plan, "GatherNd", devices)
    assert_own(plan, "ScatterNd", devices)
    assert devices == 1 or not [move for move in plan.moves if move.kind in ("gather", "all-gather")]


@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("axes", [(6,), (3, 2), (2, 1, 3)])
def test_gradient_of_the_largest_of_each_row(devices: int, axes: tuple[int, ...]):
    """It puts what it is given to places in all rows, made flat: a shard has those of its own rows."""
    plan = law(lambda h: tf.math.top_k(tf.reshape(h, [-1, *axes]), axes[-1] // 2)[0], devices=devices)
    assert_own(plan, "ScatterNd", devices)


@pytest.mark.parametrize("devices", [2, 3])
def test_gradient_of_the_largest_of_each_micro_batch(devices: int):
    options = {"micro_batches": 2, "sharded": ["ScatterNd"]}
    plan = law(lambda h: tf.math.top_k(h, 2)[0], devices=devices, **options)
    assert_own(plan, "ScatterNd", devices)
    assert not [move for move in plan.moves if move.kind in ("gather", "all-gather", "reduce-scatter")]


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("axes", [(6,), (3, 2)])
def test_largest_of_rows_of_unknown_number(devices: int, axes: tuple[int, ...]):
    signature = [tf.TensorSpec((None, 4), tf.float64)]
    calls = [(rows(n, 4),) for n in (COUNT, 2, 7, 1)]
    apply = lambda h: tf.sort(tf.reshape(h, [-1, *axes]))  # noqa: E731
    plan = law(apply, devices=devices, calls=calls, signature=signature, at_home=None)
    assert_own(plan, "ScatterNd", devices)


@pytest.mark.parametrize("unknown", [False, True])
def test_nearest_neighbours(unknown: bool):
    """Distances of each row to all: what is put into them is cut into rows, as they are."""

    def apply(h, i):
        near = tf.gather(tf.matmul(h, h, transpose_b=True), i % tf.shape(h, tf.int64)[0], batch_dims=1)
        return near if unknown else near + tf.math.top_k(tf.matmul(h, -h, transpose_b=True), 3)[0]

    signature = [tf.TensorSpec((None, 4), tf.float64), tf.TensorSpec((None, 3), tf.int64)] if unknown else None
    calls = [(rows(n, 4), PICKED[:n]) for n in (COUNT, 7, 1)] if unknown else [(rows(COUNT, 4), PICKED)]
    plan = law(apply, devices=3, calls=calls, signature=signature, at_home=None)
    for op_type in ("UnsortedSegmentSum", *([] if unknown else ["ScatterNd"])):
        assert_own(plan, op_type, 3)


@pytest.mark.parametrize("op", ["top_k", "gather"])
def test_numbers_of_many_rows(op: str):
    """More than are computed while planning: that they are in equal steps is enough."""
    count = 1200
    picked = tf.random.stateless_uniform((count, 3), [1, 2], 0, 6, tf.int64)
    apply = {"top_k": lambda h, i: tf.math.top_k(h, 2)[0] + tf.cast(i[:, :1], h.dtype)}.get(
        op, lambda h, i: tf.gather(h, i, batch_dims=1)
    )
    plan = law(apply, devices=3, calls=[(rows(count, 4), picked)], at_home=None)
    assert_own(plan, {"top_k": "ScatterNd", "gather": "UnsortedSegmentSum"}[op], 3)


@pytest.mark.parametrize("change", ["one more", "steps of less", "another length", "down"])
def test_largest_at_places_of_other_rows(change: str):
    """Places that reach into the next row, or are counted otherwise, are not a shard's own."""

    def apply(h):
        count = tf.shape(h)[0]
        starts = {
            "one more": tf.range(1, 6 * count + 1, 6),
            "steps of less": tf.range(0, 5 * count, 5),
            "another length": tf.range(0, 6 * count, 6)[:, None] + [[0, 6]],
            "down": tf.range(6 * count - 6, -6, -6),
        }[change]
        places = tf.math.top_k(h, 2)[1] + (starts if change == "another length" else starts[:, None])
        return tf.scatter_nd(tf.reshape(places, [-1, 1]), tf.reshape(h[:, :2], [-1]), [6 * count + 12])

    signature = [tf.TensorSpec((None, 4), tf.float64)]
    for known in (None, signature):
        plan = law(apply, devices=3, calls=[(rows(COUNT, 4),)], signature=known, at_home=None)
        assert not any(step.shards and step.shards.shift for step in plan.steps if step.shards)


def test_places_that_a_cast_may_change():
    """An index of 130 is -126 as int8, and then one of the row before; of the first row, it is passed over."""

    def apply(h):
        wide = tf.tile(h, [1, 25])
        largest = tf.cast(tf.cast(tf.math.top_k(wide, 150)[1], tf.int8), tf.int32)
        places = largest + 150 * tf.expand_dims(tf.range(tf.shape(h)[0]), 1)
        return tf.math.unsorted_segment_sum(wide, places, 150 * tf.shape(h)[0])

    plan = law(apply, devices=3, at_home=None)
    assert not any(step.shards and step.shards.shift for step in plan.steps)


UPDATES = ("update", "add", "sub", "min", "max")


@pytest.mark.parametrize("kind", UPDATES)
def test_elements_put_into_each_row(kind: str):
    """Each shard puts those of its own rows, and their gradients take them out again."""
    scatter = getattr(tf, f"tensor_scatter_nd_{kind}")

    def apply(h, i):
        own = tf.stack([tf.range(tf.shape(h)[0], dtype=tf.int64), i[:, 0]], -1)
        return scatter(h, own, 2.0 * h[:, 3]) + scatter(tf.zeros_like(h), own, h[:, 0])

    plan = law(apply, PICKED, devices=3, sharded=["GatherNd"])
    assert_own(plan, f"TensorScatter{kind.title()}", 3)
    assert not [move for move in plan.moves if move.kind in ("gather", "all-gather")]
    op = next(op for op in plan.sharded_ops if op.type == f"TensorScatter{kind.title()}")
    step = plan.steps[op.index]
    with pytest.raises(gs.errors.CheckError, match="numbers entries"):
        check_step(plan.program, op, replace(step, shards=replace(step.shards, shift={})), plan.mesh)


@pytest.mark.parametrize("devices", [2, 3])
def test_elements_of_rows_of_unknown_number(devices: int):
    def apply(h, i):
        own = tf.stack([tf.range(tf.shape(h)[0], dtype=tf.int64), i[:, 0]], -1)
        return tf.tensor_scatter_nd_update(h, own, tf.gather_nd(h, own) ** 2)

    signature = [tf.TensorSpec((None, 4), tf.float64), tf.TensorSpec((None, 3), tf.int64)]
    calls = [(rows(n, 4), PICKED[:n]) for n in (COUNT, 2, 7, 1)]
    plan = law(apply, devices=devices, calls=calls, signature=signature)
    for op_type in ("GatherNd", "ScatterNd", "TensorScatterUpdate"):
        assert_own(plan, op_type, devices)


@pytest.mark.parametrize("order", ["every other", "from one", "of another length"])
def test_numbers_of_other_rows_of_unknown_number(order: str):
    def apply(h):
        n = tf.shape(h)[0]
        starts = {"every other": (0, 2 * n, 2), "from one": (1, n + 1), "of another length": (0, 9)}
        places = tf.range(*starts[order])
        return tf.gather_nd(h, tf.stack([places % n, places % 6], -1))

    signature = [tf.TensorSpec((None, 4), tf.float64)]
    plan = law(apply, devices=3, calls=[(rows(COUNT, 4),), (rows(2, 4),)], signature=signature, at_home=None)
    assert not any(step.shards and step.shards.shift for step in plan.steps)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["add", "sub", "min", "max"])
def test_updates_of_a_whole_tensor_are_joined(kind: str):
    """Each shard puts its rows into the tensor, or into zeros. A tensor that is larger than they are stays whole."""
    scatter = getattr(tf, f"tensor_scatter_nd_{kind}")
    table, large = (tf.reshape(tf.range(3.0 * n, dtype=tf.float64), [n, 3]) for n in (6, COUNT + 1))

    def apply(h, i):
        once = scatter(table, i[:, :1], h[:, :3])
        _, turned = tf.while_loop(lambda k, t: k < 2, lambda k, t: (k + 1, scatter(t, i[:, :1], h[:, 3:])), (0, table))
        return once * turned + tf.reduce_sum(scatter(large, i[:, :1], h[:, :3]))

    plan = law(apply, PICKED, devices=3, at_home=None)
    found = [op for op in plan.sharded_ops if op.type == f"TensorScatter{kind.title()}"]
    assert len(found) == 1, str(plan)
    assert "partial" in str(plan.steps[found[0].index].shards.gives[0])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("each", [1, 2])
def test_crops_from_the_image_of_each_row(devices: int, each: int):
    boxes = tf.cast(tf.sigmoid(rows(COUNT, each, 4)) / 2 + [0.0, 0.0, 0.4, 0.4], tf.float32)

    def apply(h, boxes):
        images = tf.cast(tf.reshape(h, [-1, 3, 2, 1]), tf.float32)
        own = tf.repeat(tf.range(tf.shape(h)[0]), each)
        return tf.cast(tf.image.crop_and_resize(images, tf.reshape(boxes, [-1, 4]), own, [2, 2]), tf.float64)

    plan = law(apply, boxes, devices=devices, tolerance=1e-6)
    assert_own(plan, "CropAndResize", devices)
    assert_own(plan, "CropAndResizeGradImage", devices)


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
def test_segments_of_each_row(op: str):
    segment = getattr(tf.math, f"unsorted_segment_{op}")
    ids = np.arange(COUNT)[:, None] * 2 + np.array([0, 1, 1, 0, 0, 1])
    plan = law(lambda h: segment(h, tf.constant(ids), 2 * COUNT), devices=3, at_home=None)
    assert_own(plan, f"UnsortedSegment{op.title()}", 3)


@pytest.mark.parametrize("order", ["reversed", "shuffled", "shifted by one"])
def test_numbers_of_other_rows(order: str):
    """Then what they read is put together for all: slower, and as right."""
    own = np.arange(COUNT)
    other = {"reversed": own[::-1], "shuffled": np.random.default_rng(0).permutation(COUNT), "shifted by one": own - 1}
    ids = tf.constant(other[order] % COUNT)

    def apply(h):
        picked = tf.gather_nd(h, tf.stack([ids, ids % 6], -1))
        added = tf.math.unsorted_segment_sum(h, ids, COUNT) + tf.scatter_nd(ids[:, None], h, [COUNT, 6])
        put = tf.tensor_scatter_nd_update(h, tf.stack([ids, ids % 6], -1), h[:, 0])
        return added * picked[:, None] + put

    plan = law(apply, devices=3, at_home=None)
    assert not any(step.shards and step.shards.shift for step in plan.steps)


def test_indices_that_nothing_was_gathered_by():
    """They may be larger than a row: nothing says that they are not."""

    def apply(h, i):
        ids = tf.range(tf.shape(h)[0], dtype=tf.int64)[:, None] * 3 + i
        return tf.math.unsorted_segment_sum(h[:, :3], ids, 3 * COUNT + 6)

    plan = law(apply, PICKED, devices=3)
    assert not any(step.shards and step.shards.shift for step in plan.steps)


def test_a_sum_that_each_device_holds_whole_is_named():
    """Its places follow from data, so no device knows which of them are its rows'."""

    step = gs.parallelize(lambda x, i: tf.math.unsorted_segment_max(x, i, 5000), devices=3)
    text = str(step.plan(tf.TensorSpec((64, 4)), tf.TensorSpec((64,), tf.int32)))
    assert "each device holds a whole tensor: 1\n    UnsortedSegmentMax 'UnsortedSegmentMax'" in text
    assert ": 80.0 kB on each device" in text
