"""Automatic stages: cut by time, room and bytes sent; forward and backward together; one device's results."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core import gpus
from graphsplit.planning.schedule.automatic_stages import start_stages
from graphsplit.planning.schedule.chains import Chain, Room, Sent, cut
from graphsplit.planning.schedule.schedules import KINDS
from tests.helpers.law import assert_close, assert_law, rows
from tests.helpers.messages import message
from tests.helpers.stages import perceptron, training

pytestmark = pytest.mark.sampled(quick=6)

# The pure function


@pytest.mark.parametrize("seed", range(40))
def test_no_cut_is_better(seed: int):
    """Against all cuts: the slowest part within 2 % of the best, and of such cuts the one that sends least."""
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 11))
    count = int(rng.integers(1, min(size, 4) + 1))
    seconds = tuple(map(float, rng.choice([0.5, 1.0, 2.0, 5.0, rng.random()], size)))
    firsts = rng.integers(0, size, size)
    sent = tuple(Sent(int(a), int(rng.integers(a, size)), int(rng.integers(100))) for a in firsts)
    chain = Chain(seconds, sent, tuple(map(int, rng.integers(0, 9, size))), tuple(map(int, rng.integers(0, 9, size))))
    room = Room(float(rng.uniform(15, 60)), tuple(rng.random(count))) if seed % 2 else None
    crossing, possible = chain.crossing(), []
    for inner in itertools.combinations(range(1, size), count - 1):
        parts = [slice(a, b) for a, b in itertools.pairwise([0, *inner, size])]
        if room is None or all(
            sum(chain.weights[p]) + sum(chain.kept[p]) * alive <= room.bytes
            for p, alive in zip(parts, room.alive, strict=True)
        ):
            possible.append((max(sum(seconds[p]) for p in parts), sum(crossing[k] for k in inner), (0, *inner)))
    found = cut(chain, count, room)
    if not possible:
        assert found is None
        return
    best = min(slowest for slowest, _, _ in possible)
    [(slowest, bytes_sent)] = [(s, b) for s, b, starts in possible if starts == found]
    assert slowest <= 1.02 * best
    assert bytes_sent <= min(b for s, b, _ in possible if s <= best)


def test_layers_side_by_side_are_cut_as_they_were_traced():
    weights = [rows(32, width) / 9 for width in (96, 128, 96)]

    def forward(x, variables):
        return tf.add_n([tf.reduce_sum(tf.tanh(x @ w), 1, keepdims=True) for w in variables])

    given = rows(64, 32), rows(64, 1)
    options: dict[str, Any] = {"devices": 2, "stages": 2, "micro_batches": 3, "schedule": "1f1b"}
    plan = assert_law(lambda: training(weights, forward), [given], **options)
    ran = [op for op in plan.sharded_ops if op.stage is not None and not op.provenance.backward]
    names = [op.stage.name for op in ran]
    assert names == sorted(names)
    assert set(names) == {"0", "1"}


def test_parts_without_work_are_none():
    assert cut(Chain((0.0, 1.0, 0.0, 0.0, 2.0)), 2) is not None
    assert cut(Chain((0.0, 1.0, 0.0, 0.0, 2.0)), 3) is None


def test_of_equal_cuts_one_where_something_begins():
    assert cut(Chain((1.0, 0.0, 0.0, 1.0), seams=(0, 2, 0, 1)), 2) == (0, 2)


# What runs


@pytest.mark.parametrize(
    ("stages", "options"),
    [
        (3, {"devices": 3, "micro_batches": 4, "schedule": "1f1b"}),
        (2, {"devices": 4, "micro_batches": 3, "schedule": "zero-bubble", "shares": (3, 1)}),
        (4, {"devices": 2, "micro_batches": 4, "schedule": "interleaved"}),
        (2, {"devices": 2}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_stages_equal_one_device(stages: int, options: dict[str, Any]):
    given = rows(11, 6), rows(11, 6)
    plan = assert_law(perceptron(6), [given, given], sharded=["Tanh", "TanhGrad"], stages=stages, **options)
    assert len({plan.shard_device(op, 0) for op in plan.sharded_ops}) == min(stages, options["devices"])
    if "schedule" in options:
        assert plan.schedule.stages == stages
    assert plan.stage_starts.balance <= 1.25  # six layers for four stages leave two with twice as many


def test_forward_and_backward_run_on_their_stages_device():
    step, _ = perceptron(4, 16)()
    parallel = gs.parallelize(step, devices=2, stages=2, micro_batches=2, schedule="1f1b")
    given = rows(64, 16), rows(64, 16)
    placement = parallel.placement(*given, actual=True)
    placement.assert_colocated_gradients()
    found: dict[str, set[str]] = {}
    for name, op in placement.ops.items():
        if op.type == "MatMul" and op.ran:
            layer = next(part for part in name.split("/") if part.startswith("matmul"))
            found.setdefault(layer, set()).add(op.device[-5:])
    assert all(len(devices) == 1 for devices in found.values())
    assert found["matmul"] | found["matmul_3"] == {"CPU:0", "CPU:1"}


def test_a_variable_of_two_stages():
    """A tied embedding: the first and the last layer are the same variable."""
    weights = [rows(8, 6) / 3, rows(6, 6) / 3, rows(6, 6) / 3]

    def forward(h, variables):
        table, *inner = variables
        h = h @ table
        for w in inner:
            h = tf.tanh(h @ w)
        return tf.matmul(h, table, transpose_b=True)

    given = rows(9, 8), rows(9, 8)
    plan = assert_law(lambda: training(weights, forward), [given, given], devices=2, stages=2, micro_batches=3)
    products = [op for op in plan.sharded_ops if op.type == "MatMul" and not op.provenance.backward]
    table = products[0].inputs[1]
    assert [plan.shard_device(op, 0) for op in products if table in op.inputs] == ["/device:CPU:0", "/device:CPU:1"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("linear", [False, True])
def test_tapes_around_the_call(linear: bool):
    """The gradients of a linear function read nothing of it: there is nothing to cut, and they are right."""
    weights = [tf.Variable(rows(6, 6) / 3) for _ in range(4)]

    def forward(x):
        for w in weights:
            x = x @ w if linear else tf.tanh(x @ w)
        return x

    parallel, x = gs.parallelize(forward, devices=2, stages=2, micro_batches=2, schedule="gpipe"), rows(7, 6)

    def gradients(fn):
        with tf.GradientTape() as second:
            second.watch(x)
            with tf.GradientTape() as first:
                first.watch(x)
                loss = tf.reduce_sum(fn(x) ** 2)
            by_x = first.gradient(loss, x)
        return loss, by_x, second.gradient(by_x, [x, *weights])

    assert_close(gradients(parallel), gradients(forward))


def test_what_is_not_split_has_no_stages():
    parallel = gs.parallelize(lambda x: 2 * x, devices=2, stages=2, micro_batches=2, schedule="1f1b")
    assert float(parallel(tf.constant(3.0))) == 6
    assert "  no stages: nothing runs on the shards" in str(parallel.plan(tf.constant(3.0))).splitlines()


@pytest.mark.long
def test_fewer_stages_for_a_batch_of_which_less_runs_on_the_shards():
    """The loop of a recurrent layer over one row stays at home."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((4, 3)), layers.LSTM(5), layers.Dense(2)])
    parallel = gs.parallelize(model, devices=2, stages=2, micro_batches=2, schedule="1f1b")
    x = tf.random.stateless_normal((5, 4, 3), [1, 2])
    for count, stages in [(5, 2), (1, 1)]:
        assert_close(parallel(x[:count]), model(x[:count]))
        assert len(parallel.plan(x[:count]).stage_starts.stages) == stages
    assert "  cut into 1 stage instead of 2, as too little runs on the shards, " in str(parallel.plan(x[:1]))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
def test_random_stages(seed: int):
    check_random_stages(seed)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2, 60))
def test_many_random_stages(seed: int):
    check_random_stages(seed)


def check_random_stages(seed: int) -> None:
    """Layers, skips, shared weights, masks, stages, schedules, pipelines and rows that a seed decides."""
    rng = np.random.default_rng(seed)
    kind = [*KINDS, None][rng.integers(len(KINDS) + 1)]
    stages = 4 if kind == "interleaved" else int(rng.integers(1, 5))
    pipelines = 2 if kind != "interleaved" and stages < 3 and rng.random() < 0.5 else 1
    devices = 2 if kind == "interleaved" else stages * pipelines
    layers = [str(name) for name in rng.choice(["dense", "skip", "mask", "norm", "shared"], rng.integers(5, 9))]
    weights = [rng.standard_normal((6, 6)) / 3 for _ in layers]

    def forward(h, variables):
        first = h
        for number, (layer, w) in enumerate(zip(layers, variables, strict=True)):
            h = tf.tanh(h @ (variables[0] if layer == "shared" else w))
            if layer == "skip":
                h, first = h + first * 0.5, h
            if layer == "mask":
                keep = tf.random.stateless_uniform(tf.shape(h), [number, 3], dtype=h.dtype) > 0.2
                h = tf.where(keep, h, 0)
            if layer == "norm":
                mean, variance = tf.nn.moments(h, [0])
                h = (h - mean) / tf.sqrt(variance + 0.1)
        # (a layer whose variable nobody reads has no gradient)
        return h + tf.add_n([0 * tf.reduce_sum(w) for w in variables])

    options: dict[str, Any] = {"micro_batches": int(rng.integers(1, 6)), "stages": stages, "schedule": kind}
    if rng.random() < 0.3:
        options["tuning"] = {"reduce_retracing": True}
    calls = [(rows(size, 6), rows(size, 6)) for size in rng.choice([1, 2, 5, 8, 13], 3)]
    plan = assert_law(lambda: training(weights, forward), calls, devices=devices, at_home=None, **options)
    assert len(plan.stage_starts.stages) == stages


@pytest.mark.long
def test_a_keras_network_with_normalization_and_skips():
    def make():
        keras.utils.set_random_seed(3)
        layers = keras.layers
        image = keras.Input((8, 8, 3), dtype="float64")
        down = layers.Conv2D(4, 3, padding="same", activation="silu")(image)  # a gradient of its own, without a name
        h = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", use_bias=False)(layers.MaxPool2D()(down)))
        h = layers.Concatenate()([layers.UpSampling2D()(layers.Dropout(0.2)(h)), down])
        model = keras.Model(image, layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3, padding="same")(h)))

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x, training=True) ** 2)
            gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, model.trainable_variables), 0.5)
            for v, gradient in zip(model.trainable_variables, gradients, strict=True):
                v.assign_sub(0.1 * gradient)
            return loss

        return step, model.variables

    keras.config.set_floatx("float64")
    try:
        calls = [(rows(5, 8, 8, 3),)]
        plan = assert_law(make, calls, devices=2, stages=2, micro_batches=3, schedule="1f1b")
    finally:
        keras.config.set_floatx("float32")
    assert_together(plan)
    assert plan.stage_starts.balance <= 1.15


def assert_together(plan: gs.inspect.Plan) -> None:
    """Check by TensorFlow's names of gradients that convolutions' are where these are."""
    stage_of = {op.name: op.stage for op in plan.sharded_ops}
    pairs = [(n, n.removeprefix("gradient_tape/").rpartition("/")[0]) for n in stage_of if "Conv2DBackprop" in n]
    assert pairs
    assert [name for name, forward in pairs if stage_of[name] != stage_of[forward]] == []


# What a user reads


def test_stages_begin_at_layers_and_scopes_by_name():
    """In the order of the layers, whatever the order of the names; outside of a model's own `fit`."""

    def make():
        keras.utils.set_random_seed(2)
        layers = [
            keras.layers.Dense(6, "tanh", dtype="float64", name=name)
            for name in ("block_1", "block_2", "block_20", "out")
        ]
        model = keras.Sequential([keras.Input((6,), dtype="float64"), *layers[:3]])
        layers[3].build((None, 6))

        variables = [variable.value for variable in (*model.variables, *layers[3].variables)]

        def step(x, y):
            with tf.GradientTape() as tape:
                h = model(x)
                with tf.name_scope("joint"):
                    h = tf.sin(h)
                loss = tf.reduce_mean((layers[3](h) - y) ** 2)
            for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
                variable.assign_sub(0.1 * gradient)
            return loss

        return step, variables

    options: dict[str, Any] = {"stages": ["joint", "block_2"], "micro_batches": 2, "schedule": "1f1b"}
    given = rows(7, 6), rows(7, 6)
    plan = assert_law(make, [given, given], devices=3, sharded=["Tanh", "Sin"], **options)
    assert [cut.asked for cut in plan.stage_starts.stages] == ["", "block_2", "joint"]
    first = [plan.program.ops[cut.first].name for cut in plan.stage_starts.stages]
    assert "/block_2_1/" in first[1], first
    assert first[2] == "joint/Sin"
    with pytest.raises(
        gs.errors.ArgumentError, match=re.escape("stages=['blok_2']: no operation is in a layer whose name")
    ):
        gs.parallelize(make()[0], devices=2, stages=["blok_2"]).plan(*given)


def test_the_plan_says_where_and_why():
    step, _ = perceptron(4, 16)()
    plan = gs.parallelize(step, devices=2, stages=2, micro_batches=2).plan(rows(64, 16), rows(64, 16))
    lines = str(plan).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("  cut into"))
    name = "(stages.py:"
    found = [line.partition(name)[0] + line.partition(name)[2].partition(")")[2] for line in lines[first : first + 3]]
    assert found == [
        "  cut into 2 stages, the slowest takes 1.02 times the mean; 16.4 kB sent between them",
        "    stage 0 on CPU:0: from MatMul 'matmul' ; 51.1 % of the time, receives 8.2 kB",
        "    stage 1 on CPU:1: from Tanh 'Tanh_2' ; 48.9 % of the time, receives 8.2 kB, reads 2.0 kB of variables "
        "from CPU:0",
    ]


def test_a_broken_cut_is_seen():
    step, _ = perceptron(4)()
    plan = gs.parallelize(step, devices=2, stages=2, micro_batches=2).plan(rows(4, 6), rows(4, 6))
    last = next(op for op in plan.sharded_ops if op.name.startswith("Tanh_3"))
    for stage, expected in [
        (None, "'Tanh_3' runs on the shards and is of no stage."),
        (plan.program.stages[0], "'Tanh_3' of stage 0 on CPU:0 follows from a later stage."),
    ]:
        ops = list(plan.program.ops)
        ops[last.index] = dataclasses.replace(last, provenance=dataclasses.replace(last.provenance, stage=stage))
        program = dataclasses.replace(plan.program, ops=tuple(ops))
        assert message(gs.errors.CheckError, dataclasses.replace(plan, program=program).check) == expected


@pytest.mark.parametrize("stages", [0, -1, 1.5, True, "2", [], [3]])
def test_bad_numbers(stages: Any):
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(abs, stages=stages)) == (
        "stages must be the number of pipeline stages, at least 1; or patterns of names of the layers at which new "
        f"stages begin, ['block4_*', 'block9_*']; or None for no stages. Got {stages!r}."
    )


def test_devices_that_make_no_pipelines():
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(abs, stages=2, devices=3)) == (
        "stages=2 on 3 devices: each of 2 stages has a device of its own in each pipeline, so they need 2, 4 or more "
        "devices. Choose other devices or stages, or schedule='interleaved', which has several stages on each device."
    )
    assert message(
        gs.errors.ArgumentError, lambda: gs.parallelize(abs, stages=3, devices=2, schedule="interleaved")
    ) == (
        "stages=3 with schedule='interleaved' on 2 devices: each device has several stages, 4, 6 or more altogether. "
        "Choose one of these numbers, or '1f1b'."
    )
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(abs, stages=2, devices=4, shares=[1, 2, 3])) == (
        "shares=[1, 2, 3] has 3 entries for 2 pipelines; give one for each pipeline."
    )


def test_more_stages_than_can_be_cut():
    parallel = gs.parallelize(lambda x: tf.square(2 * x), devices=3, stages=3)
    assert message(gs.errors.ArgumentError, lambda: parallel(rows(4, 2))) == (
        "stages=3: the function has 2 forward operations with work, and each stage needs at least one. Choose "
        "fewer stages."
    )


def test_stages_of_a_function_that_has_some():
    inner = gs.on_device(tf.square, "CPU:1")
    parallel = gs.parallelize(lambda x: inner(2 * x), devices=2, stages=2)
    assert message(gs.errors.ArgumentError, lambda: parallel(rows(4, 2))) == (
        "stages=2 would cut the function into stages, but it already has stages from on_device:\n"
        "  - square on CPU:1\n"
        "Drop the stages, or on_device."
    )


def test_the_memory_of_gpus(monkeypatch: Any):
    monkeypatch.setattr(gpus, "smallest_memory_mb", lambda: 16)
    assert gpus.gpu_memory_bytes(["/device:GPU:0", "/device:GPU:1"]) == 16 * 2**20
    assert gpus.gpu_memory_bytes(["/device:GPU:0", "/device:CPU:0"]) is None
    monkeypatch.setattr(gpus, "smallest_memory_mb", lambda: None)
    assert gpus.gpu_memory_bytes(["/device:GPU:0"]) is None


def test_stages_for_which_devices_have_no_room():
    step, _ = perceptron(4)()
    plan = gs.parallelize(step, devices=2, stages=2, micro_batches=2).plan(rows(4, 6), rows(4, 6))
    asked = dataclasses.replace(plan.stage_starts.asked, memory=2000)
    assert len(start_stages(plan.program, plan.steps, plan.mesh, asked, "gpipe").stages) == 2
    asked = dataclasses.replace(asked, memory=1000)
    assert message(
        gs.errors.ArgumentError, lambda: start_stages(plan.program, plan.steps, plan.mesh, asked, "gpipe")
    ) == (
        "stages=2: no cut lets each stage fit into the 1.0 kB available on its device; together they need 2.5 "
        "kB. Choose more stages, more micro_batches, or schedule='1f1b', which keeps fewer of them alive."
    )
