"""The first line of a plan counts the devices that work, and says what it does not know."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.planning.device_bytes import traffic_of_call
from graphsplit.planning.work_shares import shares_of
from tests.helpers.law import rows

MESH = {"batch": 2, "model": 2}


def headline(plan) -> str:
    return str(plan).splitlines()[0]


@pytest.mark.parametrize("layout", [MESH, {"devices": 3, "stages": 3, "micro_batches": 2, "schedule": "gpipe"}])
def test_all_devices_that_work_are_counted(layout: dict):
    up, down = tf.Variable(rows(6, 8), name="up"), tf.Variable(rows(8, 6), name="down")
    if layout is MESH:
        gs.set_variable_layout([up, down], {"up": (None, "model"), "down": ("model", None)}, mesh=MESH)
        layout = {"mesh": MESH}
    step = gs.parallelize(lambda x: tf.nn.relu(x @ up) @ down, **layout)
    report, plan = gs.verify(step, rows(5, 6)), step.plan(rows(5, 6))
    assert report.passed
    assert f" on {len(report.devices)} devices, " in headline(plan)
    assert plan.compare(plan).startswith(f"A plan for {len(report.devices)} devices against ")
    if "mesh" in layout:
        assert "\n  shard 1: CPU:2 and CPU:3, 2 rows\n" in str(plan)


WEIGHTS = [tf.Variable(0.3 * rows(6, 6), name=f"weight_{k}") for k in range(3)]


def picking(x, picked):
    """Return a step that works on some rows, once: those of a mask, or of a degree. Data say how many these are."""
    with tf.GradientTape() as tape:
        h = x @ WEIGHTS[0]
        own = tf.boolean_mask(h, picked) if picked.dtype == tf.bool else tf.slice(h, [picked[0], 0], [picked[1], 6])
        loss = tf.reduce_mean(((own @ WEIGHTS[1]) @ WEIGHTS[2]) ** 2)
    for weight, gradient in zip(WEIGHTS, tape.gradient(loss, WEIGHTS), strict=True):
        weight.assign_sub(0.01 * gradient)
    return loss


MASK, DEGREE = tf.constant(np.arange(40) % 3 > 0), tf.constant([5, 9])


@pytest.mark.parametrize("picked", [MASK, DEGREE], ids=["a mask", "a degree"])
def test_reasons_explain_all_that_is_not_sharded(picked: tf.Tensor):
    """What follows from some of the rows has reasons, though nothing is as long as the batch any more."""
    step = gs.parallelize(picking, devices=3, split={"picked": None})
    assert gs.verify(step, rows(40, 6), picked).passed
    plan = step.plan(rows(40, 6), picked)
    shares = shares_of(plan)
    explained = sum(cause.flops for cause in shares.causes)
    assert explained > 0.5 * shares.flops
    assert explained > 0.9 * (shares.flops - shares.sharded_flops), str(plan)
    counted = [own for own in _percent(str(plan), "of the FLOPs (sharded|work on|run once)") if own < 100]
    assert abs(sum(counted) - 100) < 1.1, str(plan)  # (what is less than 1 % has no line)
    assert re.search(r": up to [0-9.]+ % of the FLOPs; (it picks rows|its sizes are not known)", str(plan)), str(plan)


def ranked(x):
    """Return products behind Python code, whose result has no shape unless it is given one."""
    ranks = tf.numpy_function(lambda h: np.argsort(h, axis=0).astype(h.dtype), [x @ WEIGHTS[0]], x.dtype)
    return tf.reduce_sum(tf.matmul(ranks, WEIGHTS[1]) ** 2)


def test_work_of_unknown_rank_is_not_counted_as_none():
    """A product on one device of which no shape is known leaves no share of the FLOPs that is exact."""
    step = gs.parallelize(ranked, devices=3)
    assert gs.verify(step, rows(40, 6)).passed
    plan = step.plan(rows(40, 6))
    assert headline(plan).startswith("Plan: at most 100 % of the FLOPs sharded on 3 devices, "), headline(plan)
    assert "balance" not in headline(plan)
    assert re.search(r": at least 0 % of the FLOPs, not counting .*1 BatchMatMulV2.* of unknown rank; ", str(plan)), (
        plan
    )
    with pytest.raises(gs.errors.StrictError, match="PyFunc"):
        gs.parallelize(ranked, devices=3, strict=True).plan(rows(40, 6))


def _percent(text: str, what: str) -> list[float]:
    return [float(found[1]) for found in re.finditer(rf"([0-9.e-]+) % {what}", text)]


def test_work_on_some_rows_is_refused():
    step = gs.parallelize(picking, devices=3, strict=True)
    with pytest.raises(gs.errors.StrictError, match="give those that do not count a weight of 0"):
        step.plan(rows(40, 6), MASK)


@pytest.mark.parametrize("layout", ["home", "replicated", "sharded"])
def test_the_headline_sees_how_evenly_devices_work(layout: str):
    """Each operation counts once for what is sharded, and on each device that runs it for the balance."""
    weights = [tf.Variable(rows(24, 48), name="up"), tf.Variable(rows(48, 24), name="down")]
    optimizer = keras.optimizers.Adam()
    optimizer.build(weights)
    gs.set_variable_layout([*weights, *optimizer.variables[2:]], layout, devices=3)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(x @ weights[0] @ weights[1]))
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    parallel = gs.parallelize(step, devices=3)
    plan, placed = parallel.plan(rows(9, 24)), parallel.placement(rows(9, 24))
    computed = [device.flops for device in placed.devices.values()]
    assert sum(computed) / (len(computed) * max(computed)) == pytest.approx(plan.balance, abs=0.1)
    assert f" on 3 devices, balance {plan.balance:.2f}, " in headline(plan)
    assert (plan.balance < 0.9) == (layout == "home"), plan.balance
    assert plan.sharded_fraction < 0.9, "the optimizer is no work on rows"
    assert (", at most 33 % of these on one device: " in str(plan)) == (layout == "sharded"), str(plan)


@pytest.mark.parametrize("known", [True, False])
def test_steps_in_a_loop_count_as_often_as_they_run(known: bool):
    """What a turn computes and sends counts in each turn; of a number that nobody knows, once, and at least."""
    weight = tf.Variable(0.1 * rows(6, 8), name="weight")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ weight) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    def steps(x, count):
        total = tf.constant(0.0, x.dtype)
        for turn in tf.range(5 if known else count):
            total += step(x[turn])
        return total

    one = gs.parallelize(step, devices=3).plan(rows(8, 6))
    loop = gs.parallelize(steps, devices=3, split={"x": 1, "count": None})
    args = (tf.stack([rows(8, 6)] * 5), tf.constant(5))
    assert gs.verify(loop, *args).passed
    plan, times = loop.plan(*args), 5 if known else 1
    assert shares_of(plan).sharded_flops == times * shares_of(one).sharded_flops
    sent, of_one = (sum(traffic_of_call(own).sent.values()) for own in (plan, one))
    others_rows, turn = 5 * 6 * 8, 2 * 8
    assert sent == times * (of_one + 4 * others_rows + turn), "all of x is cut in each turn, not a step of it"
    shared_out = sum(shares_of(plan).without_rows.values()) + shares_of(plan).sharded_flops
    assert shared_out + sum(cause.flops for cause in shares_of(plan).causes) == shares_of(plan).flops
    text, turns = (
        str(plan),
        "each of 5 iterations" if known else "each iteration, of which nobody knows how many there are",
    )
    assert f" {'' if known else 'at least '}{format_bytes(sent)} sent a step" in headline(plan)
    assert re.search(rf"    {turns}: \d+ operations .* on every shard; .* 2 reduces; .* sent\n", text + "\n"), text
    assert "on every shard: 0 operations, outside of loops and branches" in text


@pytest.mark.parametrize("count", [1, 2])
def test_one_row_is_not_sharded(count: int):
    """Nor are variables of a few bytes, though that was asked for, with an update in a branch."""
    weight = tf.Variable(1.0)

    def step(x: tf.Tensor) -> tf.Tensor:
        loss = tf.reduce_mean(tf.tanh(x @ tf.fill((4, 2), weight)))
        return tf.cond(loss > 0, lambda: weight.assign_sub(0.1 * loss * weight), lambda: weight + 0.0)

    text = str(gs.parallelize(step, devices=["GPU:0", "GPU:1"], variables="sharded").plan(tf.ones((count, 4))))
    how, where = ("in one shard,", "in one shard, on one device") if count == 1 else ("sharded", "sharded")
    assert f"% of the FLOPs {how} on {count_text(count, 'device')}" in text.splitlines()[0]
    assert f"  all work on the batch is {where}\n" in text
    assert "note: variables='sharded': all stay where they are, as each is small, or no number" in text
    assert "variables sharded:" not in text
