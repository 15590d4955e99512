"""Shards that take turns on a device, and stages, in what placements and timelines show."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import graphsplit as gs
from graphsplit.inspect import PlacedOp
from graphsplit.inspect.views.lanes import Lane, lanes_of
from graphsplit.inspect.views.pages import page_data
from graphsplit.inspect.views.summaries import summarize
from tests.helpers.law import rows
from tests.helpers.pipelines import named, training
from tests.helpers.stages import perceptron

HERE, THERE = "/device:CPU:0", "/device:CPU:1"


def test_lanes_by_hand():
    ops = [
        PlacedOp("update", "Add", HERE),
        PlacedOp("shard_0/a", "MatMul", HERE, shard=0),
        PlacedOp("shard_2/a", "MatMul", HERE, shard=2),
        PlacedOp("shard_0/b", "MatMul", THERE, shard=0, stage="decoder"),
        PlacedOp("shard_0/zero", "Const", THERE, shard=0),
        PlacedOp("graphsplit/gather/a/shard_1", "Identity", THERE, shard=1),
    ]
    assert {name: str(lane) for name, lane in lanes_of(ops).items()} == {
        "update": "CPU:0",
        "shard_0/a": "shards 0, 2 in turns on CPU:0",
        "shard_2/a": "shards 0, 2 in turns on CPU:0",
        "shard_0/b": "stage decoder, shard 0 on CPU:1",
        "shard_0/zero": "stage decoder, shard 0 on CPU:1",
        "graphsplit/gather/a/shard_1": "shard 1 on CPU:1",
    }
    assert str(Lane("", (3, 4, 5))) == "shards 3 to 5 in turns on any device"


@pytest.mark.parametrize("by_hand", [False, True])
def test_stages_are_lanes_of_pictures_and_page(by_hand: bool):
    """Two pipelines of two stages, cut or given."""
    options: dict[str, Any] = {"micro_batches": 2, "schedule": "1f1b"}
    if by_hand:
        places = [["CPU:0", "CPU:2"], ["CPU:1", "CPU:3"]]
        step, _ = training(2, lambda fn, number: named(gs.on_device(fn, places[number]), number))
        parallel, names = gs.parallelize(step, devices=["CPU:0", "CPU:2"], **options), ["part0", "part1"]
    else:
        parallel, names = gs.parallelize(perceptron(4)()[0], devices=4, stages=2, **options), ["0", "1"]
    placement = parallel.placement(rows(9, 6), rows(9, 6))
    two = [f"stage {name}, shards 0 to 3 \u00d7 2" for name in names]
    shown = [group for group in summarize(placement).lanes if group.shown.stage]
    assert [group.title for group in shown] == two
    assert {group.shown.shards for group in shown} == {
        (2, 3)
    }  # one pipeline is drawn, that is not on the default device
    lanes = [
        f"stage {names[0]}, shards 0 to 1 in turns on CPU:0",
        f"stage {names[1]}, shards 0 to 1 in turns on CPU:1",
        f"stage {names[0]}, shards 2 to 3 in turns on CPU:2",
        f"stage {names[1]}, shards 2 to 3 in turns on CPU:3",
    ]
    page = page_data(placement)
    shown = [(lane["work"], lane["shards"]) for lane in page["lanes"] if lane["work"].startswith("stage")]
    shards = [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert shown == [(lane.partition(" on ")[0], own) for lane, own in zip(lanes, shards, strict=True)]
    products = [op for op in page["ops"] if op["type"] == "MatMul" and op.get("shard") == 3]
    assert {(page["lanes"][op["lane"]]["work"], op["stage"]) for op in products} == {
        (shown[2 + number][0], name) for number, name in enumerate(names)
    }
    kinds = {(op.stage, op.backward) for op in placement.ops.values() if op.type == "MatMul" and op.shard is not None}
    assert kinds == {(name, backward) for name in names for backward in (False, True)}


def test_the_turns_of_a_step_are_those_of_the_chart():
    step, _ = perceptron(6, 48)()
    parallel = gs.parallelize(step, devices=2, stages=2, micro_batches=3, schedule="1f1b")
    given = rows(96, 48), rows(96, 48)
    plan, timeline = parallel.plan(*given), gs.inspect.timeline(parallel, *given)
    products = [event for event in timeline.events if event.type in ("MatMul", "Tanh", "TanhGrad")]
    for device, place in enumerate((HERE, THERE)):
        ran = [timeline.placement.ops[event.name] for event in products if event.device == place]
        turns = [f"{'B' if op.backward else 'F'}{op.shard}" for op in ran]
        assert [turn for turn, _ in itertools.groupby(turns)] == list(map(str, plan.schedule.order(device)))
