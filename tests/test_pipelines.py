"""Pipelines: schedules of stages and micro-batches, and that what runs follows them with one device's results."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import emit
from graphsplit.planning.device_bytes import live_bytes
from graphsplit.planning.schedule.schedules import KINDS, Slot, make_schedule
from tests.helpers.law import assert_law, rows
from tests.helpers.messages import message
from tests.helpers.pipelines import named, training

pytestmark = pytest.mark.sampled(quick=4)


def assert_pipeline(stages: int, places: list[Any], **options: Any) -> gs.inspect.Plan:
    """Compare a training step of stages on devices with that of one device."""
    twins = itertools.cycle([lambda fn, _: fn, lambda fn, number: named(gs.on_device(fn, places[number]), number)])
    given = rows(11, 6), rows(11, 6)
    return assert_law(lambda: training(stages, next(twins)), [given, given], sharded=["Tanh", "TanhGrad"], **options)


# The pure function


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("shards", [1, 2, 4, 7, 12])
def test_schedules_are_as_long_as_published(stages: int, shards: int):
    for kind in ("gpipe", "1f1b"):
        schedule = make_schedule(kind, stages, shards)
        schedule.check()
        assert schedule.slots == 2 * (shards + stages - 1)
        assert schedule.idle_share == pytest.approx((stages - 1) / shards)
    for stage in range(stages):
        assert schedule.alive(stage) <= stages - stage  # of 1f1b, the last
        assert make_schedule("gpipe", stages, shards).alive(stage) == shards
    schedule = make_schedule("zero-bubble", stages, shards)
    schedule.check()
    if shards >= stages:
        assert schedule.slots == 3 * shards + stages - 1  # Qi et al. 2024: (S - 1) (F + B - W) idle
    for chunks in (2, 3):
        schedule = make_schedule("interleaved", stages * chunks, shards, chunks)
        schedule.check()
        if shards % stages == 0:
            assert schedule.idle_share == pytest.approx((stages - 1) / (shards * chunks))


@pytest.mark.parametrize("waits", [False, True])
def test_a_schedule_is_drawn_as_it_will_run(waits: bool):
    """Micro-batches that wait for each other inside of a stage, for statistics of all rows, cannot follow 1F1B."""
    weights = [tf.Variable(rows(6, 6) / 3) for _ in range(4)]

    def step(x):
        with tf.GradientTape() as tape:
            for weight in weights:
                x = tf.tanh(x @ weight)
                x = x - tf.reduce_mean(x, 0) if waits else x
            loss = tf.reduce_mean(x**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    parallel = gs.parallelize(step, devices=2, stages=2, micro_batches=4, schedule="1f1b")
    assert gs.verify(parallel, rows(11, 6)).passed
    plan = parallel.plan(rows(11, 6))
    plan.check()
    schedule = plan.schedule
    for device in range(2):
        own = [(plan.phases[turn.phase].task, turn.shard) for turn in plan.turns]
        ran = [(task.stage, task.kind, shard) for task, shard in own if task.stage == device]
        assert [slot[:3] for slot in schedule.order(device)] == ran, str(schedule)
    later = [slot for slot in schedule.starts if slot[:2] == (0, "B")]
    begun = [time for slot, time in schedule.starts.items() if slot[:2] == (0, "F")]
    assert (min(schedule.starts[slot] for slot in later) > max(begun)) == waits
    busy = len(schedule.starts) // 2
    idle = schedule.slots - busy
    assert f"{idle} of {schedule.slots} slots idle, {100 * idle / schedule.slots:.3g} %" in str(schedule)
    assert (f"all micro-batches wait for each other {schedule.waits} times" in str(plan)) == waits
    assert waits or f"{schedule}".startswith("1f1b: 2 stages, 4 micro-batches, 2 of 10 slots idle, 20 %\n")
    if waits:
        first = min(schedule.starts, key=lambda slot: -slot.waits)
        broken = dataclasses.replace(schedule, starts={**schedule.starts, first: -1})
        with pytest.raises(gs.errors.CheckError, match="before all micro-batches have waited"):
            broken.check()


def test_broken_schedules_are_seen():
    schedule = make_schedule("1f1b", 2, 3)
    starts = dict(schedule.starts)
    for slot, time, found in [
        (Slot(1, "F", 0), 0, "F0 of stage 1 begins before F0, which it needs, ends"),
        (Slot(0, "F", 2), 1, "two slots"),
    ]:
        with pytest.raises(gs.errors.CheckError, match=found):
            dataclasses.replace(schedule, starts={**starts, slot: time}).check()


def test_picture(tmp_path: Any):
    pytest.importorskip("matplotlib", reason="the picture needs matplotlib")
    make_schedule("interleaved", 4, 4, 2).save(tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")
    expected = "'chart.txt': a schedule is written as .png or .svg."
    assert message(gs.errors.ArgumentError, lambda: make_schedule("gpipe", 2, 2).save("chart.txt")) == expected


# What runs


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "zero-bubble"])
def test_a_pipeline_equals_one_device(kind: str):
    plan = assert_pipeline(3, ["CPU:0", "CPU:1", "CPU:2"], devices=["CPU:0"], micro_batches=4, schedule=kind)
    assert plan.rows == (3, 3, 3, 2)
    assert_follows(plan)
    assert f"  schedule {kind}: 3 stages, 4 micro-batches, {plan.schedule.idle_text}" in str(plan).splitlines()


def test_several_stages_a_device():
    places = ["CPU:1", "CPU:2", "CPU:1", "CPU:2"]
    plan = assert_pipeline(4, places, devices=["CPU:0"], micro_batches=4, schedule="interleaved")
    assert plan.schedule.chunks == 2
    assert_follows(plan)


def test_two_pipelines_side_by_side():
    places = [["CPU:0", "CPU:2"], ["CPU:1", "CPU:3"]]
    plan = assert_pipeline(2, places, devices=["CPU:0", "CPU:2"], micro_batches=3, schedule="1f1b", shares=(3, 1))
    assert plan.rows == (3, 3, 2, 1, 1, 1)
    assert_follows(plan)


def test_batches_of_any_size_flow():
    plan = assert_pipeline(
        2, ["CPU:0", "CPU:1"], devices=["CPU:0"], micro_batches=3, schedule="1f1b", tuning={"reduce_retracing": True}
    )
    assert plan.schedule.shards == 3


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_random_pipelines(seed: int):
    check_random_pipeline(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 60))
def test_many_random_pipelines(seed: int):
    check_random_pipeline(seed)


def check_random_pipeline(seed: int) -> None:
    """Stages, micro-batches, schedules, rows and layers that a seed decides, against one device."""
    rng = np.random.default_rng(seed)
    kind = KINDS[rng.integers(len(KINDS))]
    stages = 4 if kind == "interleaved" else int(rng.integers(1, 5))
    names = [f"CPU:{number % 2 if kind == 'interleaved' else number}" for number in range(stages)]
    pipelines = 2 if stages < 3 and rng.random() < 0.5 else 1
    places = [[name, f"CPU:{int(name[-1]) + 2}"][:pipelines] for name in names]
    options = {"micro_batches": int(rng.integers(1, 6)), "schedule": kind, "devices": ["CPU:4", "CPU:3"][:pipelines]}
    if rng.random() < 0.3:
        options["tuning"] = {"reduce_retracing": True}
    layers = [int(rng.integers(1, 4)) for _ in range(stages)]
    weights = [rng.standard_normal((6, 6)) / 3 for _ in range(sum(layers))]
    masked = bool(rng.random() < 0.5)

    def make(place: Any) -> Any:
        variables = [tf.Variable(w) for w in weights]
        given = iter(variables)
        own = [[next(given) for _ in range(count)] for count in layers]

        def stage(number: int) -> Any:
            def run(h):
                for k, w in enumerate(own[number]):
                    h = tf.tanh(h @ w)
                    keep = tf.random.stateless_uniform(tf.shape(h), [number, k], dtype=h.dtype) > 0.2
                    h = tf.where(keep, h, 0) if masked else h + 0.1
                return h

            return place(run, number)

        parts = [stage(number) for number in range(stages)]

        def step(x, y):
            with tf.GradientTape() as tape:
                h = x
                for part in parts:
                    h = part(h)
                loss = tf.reduce_mean((h - y) ** 2)
            for v, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                v.assign_sub(0.1 * gradient)
            return loss, h

        return step, variables

    twins = itertools.cycle([lambda fn, _: fn, lambda fn, number: named(gs.on_device(fn, places[number]), number)])
    calls = [(rows(size, 6), rows(size, 6)) for size in rng.choice([1, 2, 5, 8, 13], 3)]
    plan = assert_law(lambda: make(next(twins)), calls, at_home=None, sharded=["Tanh", "TanhGrad"], **options)
    if plan.mesh.has_turns:
        assert len({phase.task.kind for phase in plan.phases}) > 1  # (one layer backward is a weights' part only)


def test_normalization_in_a_stage_makes_all_wait():
    def make(place: Any):
        keras.utils.set_random_seed(2)
        layers = keras.layers
        parts = [
            keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh"), layers.BatchNormalization()]),
            keras.Sequential([keras.Input((5,)), layers.Dense(4, "tanh")]),
        ]
        called = [place(part, number) for number, part in enumerate(parts)]
        variables = [v for part in parts for v in part.trainable_variables]

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(called[1](called[0](x)) ** 2)
            for v, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                v.assign_sub(gradient)
            return loss

        return step, [v for part in parts for v in part.variables]

    def trained(part: Any) -> Any:
        return lambda x: part(x, training=True)

    staged = lambda part, number: gs.on_device(trained(part), f"CPU:{number}")  # noqa: E731
    twins = itertools.cycle([lambda part, _: trained(part), staged])
    given = tf.cast(rows(11, 6), tf.float32)
    plan = assert_law(lambda: make(next(twins)), [(given,)], devices=["CPU:0"], micro_batches=3, schedule="1f1b")
    assert {phase.level for phase in plan.phases} != {0}


def assert_follows(plan: gs.inspect.Plan) -> None:
    """Assert that what each stage's device runs, in any order that the graph allows, is what the schedule says."""
    graph, schedule = emit(plan), plan.schedule
    base = set(plan.devices)
    places = {node.device for node in graph.nodes if graph.origins[node.name].role == "order"}
    assert places - base == {d for s in plan.program.all_stages() for d in s.devices if d not in base}  # on the spot
    position_of = {phase: number for number, phase in enumerate(plan.phases)}
    by_task = {(p.task.stage, p.task.kind): position_of[p] for p in plan.phases if p.task is not None}
    reads = {node.name: [r.lstrip("^").split(":")[0] for r in node.input] for node in graph.nodes}
    nodes = {(o.op, o.shard): name for name, o in graph.origins.items() if o.role == "op"}

    def before(name: str) -> set[str]:
        found, pending = set(), [name]
        while pending:
            new = [source for source in reads[pending.pop()] if source not in found]
            found.update(new)
            pending += new
        return found

    first = [d for d, position in enumerate(plan.mesh.positions) if position == plan.mesh.positions[0]]
    assert len(first) == schedule.shards
    kinds = "FBW" if schedule.kind == "zero-bubble" else "FB"
    assert set(by_task) == {(stage, kind) for stage in range(schedule.stages) for kind in kinds}
    for device in range(schedule.devices):
        order = [slot for slot in schedule.order(device) if (slot.stage, slot.kind) in by_task]
        for slot, later in itertools.pairwise(order):
            ended = plan.phases[by_task[slot.stage, slot.kind]].ends
            for i in plan.phases[by_task[later.stage, later.kind]].starts:
                waited = before(nodes[i, first[later.shard]])
                assert {nodes[k, first[slot.shard]] for k in ended} <= waited, f"{later} does not wait for {slot}"


def test_turns_against_the_order_are_seen():
    plan = assert_pipeline(2, ["CPU:0", "CPU:1"], devices=["CPU:0"], micro_batches=2, schedule="gpipe")
    with pytest.raises(gs.errors.CheckError, match="before phase 0, on which it may depend"):
        dataclasses.replace(plan, turns=plan.turns[::-1]).check()
    with pytest.raises(gs.errors.CheckError, match="A shard runs a phase twice, or not at all"):
        dataclasses.replace(plan, turns=plan.turns[1:]).check()


def test_a_stage_keeps_what_its_schedule_says():
    """Of eight micro-batches through two stages, the first keeps eight under `gpipe` and two under `1f1b`."""
    alive = {}
    for kind in ("gpipe", "1f1b"):
        step, _ = training(2, lambda fn, number: named(gs.on_device(fn, f"CPU:{number + 1}"), number))
        given = rows(1024, 6), rows(1024, 6)
        plan = gs.parallelize(step, devices=["CPU:0"], micro_batches=8, schedule=kind).plan(*given)
        alive[kind] = live_bytes(plan)["/device:CPU:1"]
    assert alive["1f1b"] < alive["gpipe"] / 2


def test_a_step_runs_in_the_order_of_the_chart():
    """The timeline of a step with stages of equal operations, by the devices on which they run."""
    places = ["CPU:1", "CPU:2"]
    step, _ = training(2, lambda fn, number: named(gs.on_device(fn, places[number]), number))
    parallel = gs.parallelize(step, devices=["CPU:0"], micro_batches=4, schedule="1f1b")
    given = rows(64, 6), rows(64, 6)
    plan = parallel.plan(*given)
    task_of = {plan.program.ops[i].name: phase.task for phase in plan.phases for i in phase.ops}
    seen: dict[str, list[str]] = {}
    for event in sorted(gs.inspect.timeline(parallel, *given).events, key=lambda event: event.start_s):
        shard, _, name = event.name.partition("/")
        if event.type in ("Tanh", "TanhGrad"):
            seen.setdefault(event.device[-5:], []).append(f"{task_of[name].kind}{shard.removeprefix('shard_')}")
    for device, place in enumerate(places):
        assert [slot for slot, _ in itertools.groupby(seen[place])] == list(map(str, plan.schedule.order(device)))


# What a user reads


def test_bad_schedules():
    known = "'gpipe', '1f1b', 'interleaved', 'zero-bubble'"
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(abs, schedule="pipe")) == (
        f"Unknown schedule 'pipe'. Schedules: {known}, or None for no pipeline."
    )
    assert KINDS == ("gpipe", "1f1b", "interleaved", "zero-bubble")


def test_a_schedule_of_one_micro_batch_says_that_it_does_nothing():
    doubled, halved = gs.on_device(lambda x: 2 * x, "CPU:1"), gs.on_device(lambda x: x / 2, "CPU:2")
    text = "schedule='1f1b' has one micro-batch to order, so stages run one after the other"
    for parts, expected in ((1, [text]), (2, [])):
        parallel = gs.parallelize(lambda x: halved(doubled(x)), devices=1, micro_batches=parts, schedule="1f1b")
        assert [note.partition(";")[0] for note in parallel.plan(rows(4, 2)).notes] == expected


def test_a_schedule_without_the_stages_that_it_needs():
    parallel = gs.parallelize(lambda x: 2 * x, devices=1, micro_batches=2, schedule="gpipe")
    assert message(gs.errors.ArgumentError, lambda: parallel(rows(4, 2))) == (
        "schedule='gpipe' is the order in which shards go through stages, and the function has none. Have it cut into "
        "some by stages=, give layers or functions that it calls devices of their own with graphsplit.on_device, or "
        "drop schedule."
    )
    doubled, halved = gs.on_device(lambda x: 2 * x, "CPU:1"), gs.on_device(lambda x: x / 2, "CPU:2")
    named(doubled, 0), named(halved, 1)
    parallel = gs.parallelize(lambda x: halved(doubled(x)), devices=1, micro_batches=2, schedule="interleaved")
    assert message(gs.errors.ArgumentError, lambda: parallel(rows(4, 2))) == (
        "schedule='interleaved' needs several stages on each device, which take turns: CPU:0, CPU:1, CPU:0, CPU:1. The "
        "function has\n  - stage 0: part0 on CPU:1\n  - stage 1: part1 on CPU:2\n"
        "Place them like that, or choose '1f1b'."
    )
    parallel = gs.parallelize(lambda x: doubled(halved(doubled(x))), devices=1, micro_batches=2, schedule="1f1b")
    with pytest.raises(gs.errors.ArgumentError) as error:
        parallel(rows(4, 2))
    assert "part0 on CPU:1 reads at " in str(error.value)
    assert str(error.value).endswith(
        "what follows from part1 on CPU:2, a later stage. Give the second call a stage of its own, or drop schedule."
    )
