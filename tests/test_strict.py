"""What a plan says of work at home, and what `strict` refuses, whichever way the work came there."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from tests.helpers.law import rows


def weights(*shape: int) -> tf.Variable:
    return tf.Variable(0.3 * np.random.default_rng(0).normal(size=shape))


def born_whole(x):
    """Work of the batch's size on rows that no argument has: sums over all rows so far, which nothing splits."""
    z = tf.random.stateless_normal((tf.shape(x)[0], 64), (1, 2), dtype=tf.float64)
    return tf.reduce_sum(tf.cumsum(tf.cumsum(z) ** 2)) + tf.reduce_sum(x)


def test_the_plan_counts_all_work():
    w, v = weights(6, 8), weights(20, 20)
    plan = gs.parallelize(lambda x: (x @ w, v @ v), devices=2).plan(rows(10, 6))
    ours, theirs = 2 * 10 * 6 * 8, 2 * 20**3
    assert f"on the shards: {100 * ours / (ours + theirs):.4g} % of the FLOPs" in str(plan)


def test_strict_refuses_work_on_rows_that_are_born_inside():
    parallel = gs.parallelize(born_whole, devices=3, strict=True)
    with pytest.raises(gs.errors.StrictError, match="% of the floating-point operations work on the batch") as caught:
        parallel(rows(13, 3))
    assert "and so does what follows it (2 Cumsum" in str(caught.value)
    gs.verify(gs.parallelize(born_whole, devices=3), rows(13, 3))


def test_how_much_is_sharded_can_be_asserted():
    w = weights(6, 256)

    def f(x):
        return tf.reduce_sum(x @ w) + tf.reduce_sum(tf.sort(x, 0))

    plan = gs.parallelize(f, devices=2).plan(rows(13, 6))
    assert 0.9 < plan.sharded_fraction < 1
    assert str(plan).startswith(f"Plan: {100 * plan.sharded_fraction:.4g} % of the FLOPs sharded on 2 devices, ")
    assert gs.parallelize(f, devices=2, split=None).plan(rows(13, 6)).sharded_fraction == 0
    assert gs.parallelize(tf.identity, devices=2).plan(rows(13, 6)).sharded_fraction == 1, "there are no FLOPs"
    assert gs.parallelize(f, devices=2, split=None).plan(rows(13, 6)).balance == 0.5
    assert gs.parallelize(tf.identity, devices=2).plan(rows(13, 6)).balance == 1
    with pytest.raises(gs.errors.StrictError, match="would run on one device"):
        gs.parallelize(f, devices=2, strict=True)(rows(13, 6))


@pytest.mark.parametrize("strict", [0.1, 1.0, "yes", None])
def test_strict_is_a_truth_value(strict):
    with pytest.raises(gs.errors.ArgumentError, match=r"strict must be True or False, got .*balance > 0.9."):
        gs.parallelize(born_whole, strict=strict)


def test_small_work_on_whole_values_is_no_reason():
    """Adam on more weights than the batch has numbers; weights with as many rows as the batch."""
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(8)])
    optimizer = keras.optimizers.Adam(clipnorm=1.0)
    optimizer.build(model.trainable_variables)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2) + 1e-3 * sum(tf.reduce_sum(w**2) for w in model.trainable_variables)
        optimizer.apply(tape.gradient(loss, model.trainable_variables))
        return loss

    gs.parallelize(step, devices=2, strict=True)(tf.random.normal((8, 8)))


def test_an_argument_that_is_kept_whole_is_no_reason():
    parallel = gs.parallelize(lambda x, y: (x + 1, tf.cumsum(y)), devices=2, split={"y": None}, strict=True)
    gs.verify(parallel, rows(7, 3), rows(7, 4))


def test_a_loop_for_all_shards_says_why_and_what_is_at_home_in_its_turns():
    def f(x):
        return tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x + tf.sort(tf.tanh(x), 0)), [0, x])[1]

    plan = gs.parallelize(f, devices=2).plan(rows(7, 3))
    assert "runs once for all shards, which synchronize in every iteration: StatelessWhile" in str(plan)
    assert plan.unsharded_ops
    with pytest.raises(gs.errors.StrictError, match="would run on one device"):
        gs.parallelize(f, devices=2, strict=True)(rows(7, 3))


def test_which_ids_a_batch_has_is_found_at_home():
    """The sparse gradients of an embedding: ids are gathered, values are not; of numbers it would be a reason."""
    table = tf_keras.layers.Embedding(500, 16)
    table.build((None, 5))
    optimizer = tf_keras.optimizers.SGD(0.1)
    optimizer.build(table.trainable_variables)
    w = weights(16, 64)

    def step(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.cast(table(ids), tf.float64) @ w) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, table.variables), table.variables, strict=True))
        return loss

    ids = tf.constant(np.random.default_rng(0).integers(0, 500, (13, 5)))
    plan = gs.parallelize(step, devices=3, strict=True).plan(ids)
    assert [op.type for op, _ in plan.unsharded_ops] == ["Unique"]
    assert plan.gathered_bytes(plan.unsharded_ops[0][0]) == 8 * 13 * 5
    assert "UnsortedSegmentSum" in {op.type for op in plan.sharded_ops}
    with pytest.raises(gs.errors.StrictError, match="which entries are new depends on all rows"):
        gs.parallelize(lambda x: tf.unique(x)[1], devices=3, strict=True).plan(rows(13, 1)[:, 0])
    with pytest.raises(
        gs.errors.StrictError, match="which entries are new depends on all rows"
    ):  # no variable needs these
        gs.parallelize(lambda x, ids: (2 * x, tf.unique(ids).y), devices=3, strict=True).plan(rows(13, 3), ids[:, 0])


def test_options_reach_what_is_planned_for_gradients():
    """Of a forward function alone, everything is sharded; its gradient has to see all rows."""

    @tf.custom_gradient
    def counted(x):
        return 2 * x, lambda g: g + tf.cast(tf.size(tf.unique(tf.reshape(g, [-1])).y), g.dtype)

    parallel = gs.parallelize(counted, devices=3, strict=True, tuning={"bucket_bytes": 600})
    x = tf.ones((7, 3))
    assert parallel.plan(x).asked.bucket_bytes == 600
    with tf.GradientTape() as tape:
        tape.watch(x)
        with pytest.raises(gs.errors.StrictError, match="Unique"):
            parallel(x)
    loose = gs.parallelize(counted, devices=3, tuning={"bucket_bytes": 600})
    assert loose.gradient_plan(x).asked == loose.plan(x).asked


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rmsprop", "adam"])
@pytest.mark.parametrize("variables", ["home", "sharded"])
def test_a_table_is_updated_where_it_is(optimizer: str, variables: str):
    """The rows of a sparse gradient go to the table once, whatever the optimizer: no other form sends less."""
    net = [keras.layers.Input((3,), dtype="int32"), keras.layers.Embedding(200, 8), keras.layers.Flatten()]
    model = keras.Sequential([*net, keras.layers.Dense(16), keras.layers.Dense(1)])
    model = gs.multi_gpu_model(model, gpus=3, strict=True, variables={"embedding*": variables, "*": "home"})
    model.compile(optimizer, "mse")
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 200, (7, 3)), rng.normal(size=(7, 1))
    plan = model.plan(x, y)
    assert "MatMul" in {op.type for op in plan.sharded_ops}
    assert "dataset.map" not in str(plan)
    if optimizer == "sgd" and variables == "home":
        [scatter] = plan.rows_kept
        assert f"  rows that variables keep, each written once, on their devices: 1\n    {scatter.type} " in str(plan)
        assert plan.gathered_bytes(scatter) >= 4 * 7 * 3 * 8
    assert gs.verify(model, x, y)


_ROWS_KEPT = {
    "concat": lambda q, k: q.assign(tf.concat([k, q], 0)[: q.shape[0]]),
    "a queue": lambda q, k: q.assign(tf.concat([q[tf.shape(k)[0] :], k], 0)),
    "roll": lambda q, k: q.assign(tf.tensor_scatter_nd_update(tf.roll(q, 7, 0), tf.range(7)[:, None], k)),
    "a ring": lambda q, k: q.scatter_nd_update(((5 + tf.range(tf.shape(k)[0])) % q.shape[0])[:, None], k),
    "rows by number": lambda q, k: q.scatter_update(tf.IndexedSlices(k, tf.range(7))),
    "a slice": lambda q, k: q[:7].assign(k),
}


@pytest.mark.parametrize("form", list(_ROWS_KEPT))
@pytest.mark.parametrize("layout", ["home", "sharded", "replicated"])
def test_a_queue_keeps_rows(form: str, layout: str):
    queue = tf.Variable(np.random.default_rng(1).normal(size=(20, 6)), name="queue")
    gs.set_variable_layout(queue, layout, devices=3)

    def step(k):
        k = tf.math.l2_normalize(k, 1)
        _ROWS_KEPT[form](queue, k)
        return tf.reduce_mean(k @ tf.transpose(queue))

    parallel = gs.parallelize(step, devices=3, strict=True)
    plan = parallel.plan(rows(7, 6))
    assert "MatMul" in {op.type for op in plan.sharded_ops}
    assert not plan.unsharded_ops
    kept = [op for op in plan.rows_kept if plan.gathered(op)]
    assert kept or (layout != "home" and form == "rows by number")  # each device writes its own
    for op in kept:
        assert plan.gathered_bytes(op) == 8 * 7 * 6
        assert "each written once, on their devices: 1\n" in str(plan)
    assert gs.verify(parallel, rows(7, 6))


def test_what_computes_with_rows_that_are_kept_is_refused():
    """Rows that are sorted before they are kept are work on one device."""
    queue = tf.Variable(np.zeros((7, 6)))

    def step(k):
        queue.assign(tf.sort(tf.tanh(k), 0))
        return tf.reduce_sum(k)

    with pytest.raises(gs.errors.StrictError, match="TopKV2 'sort/TopKV2'"):
        gs.parallelize(step, devices=3, strict=True)(rows(7, 6))
