"""Loops and branches whose values lie along an axis of a mesh: one for all columns, which meet in each iteration."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.costs.machine import Device, Link, Machine
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.plan import Plan
from graphsplit.planning.tasks import HANDED_ON, tasks_of
from graphsplit.simulate.prediction.task_writing import machine_tasks
from tests.helpers.mesh_cases import HIDDEN, VOCABULARY, WIDTH, Made, assert_law, devices_of, numbers, sgd, variable
from tests.helpers.mesh_loops import DECODING, LSTM, TURNS, WAYS, decoding, flows, recurrent

ONE_ROW, ONE_COLUMN, TWO = {"batch": 1, "model": 2}, {"batch": 2, "model": 1}, {"batch": 2, "model": 2}
ALL = [
    TWO,
    *[pytest.param(mesh, marks=pytest.mark.long) for mesh in (ONE_ROW, ONE_COLUMN)],
    pytest.param({"batch": 3, "model": 2}, marks=[pytest.mark.many, pytest.mark.long]),
]


def moved_inside(plan: Plan) -> Counter[str]:
    """Return what loops and branches move along the axis, by kind; each tensor once in each function."""
    bodies = [body for op in flows(plan.program) for body in op.bodies.values()]
    moved = {(id(body), op.provenance.origin, op.provenance.role) for body in bodies for op in body.ops}
    return Counter(
        role for *_, role in moved if role not in ("op", "constant", "part", "relay", "shift", "sizes", "local slice")
    )


def assert_in_parts(plan: Plan, mesh: dict[str, int], cut: Sequence[tuple[int, ...]]) -> None:
    """Raise unless loops are one for all columns, and weights of these shapes are whole nowhere, nor in any turn."""
    loops = [op for op in flows(plan.program) if op.has_columns]
    assert loops
    assert not plan.state.whole
    turns = [line for line in str(plan).splitlines() if "in each iteration of" in line or line.startswith("    in ")]
    assert len(turns) == len([op for op in plan.program.ops if op.has_columns])
    if mesh["model"] > 1:
        assert not plan.state.gathered
        assert "gathered before" not in str(plan)
        bodies = [plan.program, *[body for loop in loops for body in loop.bodies.values()]]
        assert not {shape for body in bodies for op in body.ops for shape in op.out_shapes} & set(cut)
        for body in bodies[1:]:
            given = [op for op in body.ops if op.type == "Placeholder" and op.out_dtypes[0] != tf.resource]
            assert {op.provenance.column for op in given} == set(range(mesh["model"]))


def perceptrons() -> Made:
    """What a turn makes is whole: one sum in each turn, forward and back."""
    up, down, outer = variable("up", WIDTH, HIDDEN), variable("down", HIDDEN, WIDTH), variable("outer", WIDTH)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            y = tf.while_loop(
                lambda i, _: i < TURNS, lambda i, h: (i + 1, tf.nn.relu(h @ up) @ down * 0.3 + x + outer), (0, x)
            )[1]
            loss = tf.reduce_mean(y**2)
        return loss, sgd([up, down, outer], loss, tape), y

    return [up, down, outer], step


@pytest.mark.parametrize("mesh", ALL, ids=str)
def test_a_loop_around_a_perceptron(mesh: dict[str, int]):
    """Uneven rows, widths that do not divide, fewer rows than devices."""
    batches = [tf.constant(numbers(count, WIDTH)) for count in (5, 1)]
    parallel = assert_law(perceptrons, {"up": (None, "model"), "down": ("model", None), "*": "home"}, mesh, batches)
    plan = parallel.plan(batches[0])
    assert_in_parts(plan, mesh, [(WIDTH, HIDDEN), (HIDDEN, WIDTH)])
    if mesh["model"] == 2:
        assert moved_inside(plan) == {"reduce": 2}  # the rows of one turn, forward and back, and no weight
        assert "in each iteration of StatelessWhile 'while': 1 reduce" in str(plan)


@pytest.mark.parametrize("mesh", ALL, ids=str)
def test_an_lstm(mesh: dict[str, int]):
    x = tf.constant(numbers(5, 3, WIDTH))
    plan = assert_law(recurrent, LSTM, mesh, [x]).plan(x)
    assert_in_parts(plan, mesh, [(WIDTH, 4, HIDDEN), (HIDDEN, 4, HIDDEN), (HIDDEN, WIDTH)])
    if mesh["model"] == 2:  # the state, which all units read, forward and back
        assert moved_inside(plan) == {"all-gather": 2, "reduce": 1}


def test_lists_are_predicted_where_their_columns_are():
    """What a loop hands on to another column is as large there as it is made, lists by what is in them, and is free."""
    weights, step = recurrent()
    for own, layout in zip(weights, LSTM.values(), strict=True):
        gs.set_variable_layout(own, layout, devices_of(ONE_ROW), mesh=ONE_ROW)
    x = tf.constant(numbers(5, 3, WIDTH))
    plan = gs.parallelize(step, devices=devices_of(ONE_ROW), mesh=ONE_ROW).plan(x)
    core = Device("core", "CPU", {"float64": 1e9}, {"float64": 1e9}, 1e9, 1e9)
    found = machine_tasks(plan, Machine("two cores", core, 2, Link("memory", 1e9, 0.0)), Costs(core))
    planned = tasks_of(plan).tasks
    loop = next(op for op in plan.program.ops if op.has_columns)
    handed_on = [task.reads[0].index for task in planned if (task.kind, task.op) == (HANDED_ON, loop.index)]
    first, second = (
        [own.bytes for own in found.buffers if own.name == f"shard_0/{loop.name}" and own.device.endswith(device)]
        for device in devices_of(ONE_ROW)
    )
    assert second == [first[k] for k in handed_on]
    lists = [k for k in handed_on if loop.out_dtypes[k] == tf.variant and first[k]]
    assert len(lists) > 1
    costs = [task.seconds for task in found.tasks if task.name == f"shard_0/{loop.name}"]
    assert [seconds > 0 for seconds in costs] == [True, *[False] * len(handed_on)]


@pytest.mark.parametrize("mesh", ALL, ids=str)
@pytest.mark.parametrize("way", ["scatter", *[pytest.param(way, marks=pytest.mark.long) for way in list(WAYS)[1:]]])
def test_decoding(way: str, mesh: dict[str, int]):
    """Four sums in each turn, two for each block; the cache stays with its heads, three of them over two devices."""
    ids = tf.constant(np.random.default_rng(1).integers(0, VOCABULARY, 5))
    parallel = assert_law(lambda: decoding(way), {**DECODING, "*": "home"}, mesh, [ids])
    plan = parallel.plan(ids)
    cut = [(WIDTH, 3, 4), (3, 4, WIDTH), (WIDTH, HIDDEN), (HIDDEN, WIDTH), (TURNS, 5, 3, 4)]
    assert_in_parts(plan, mesh, cut[: 4 + bool(plan.rows == (5,))])
    if mesh["model"] == 2:
        assert moved_inside(plan) == {"reduce": 4}
        [loop] = [op for op in plan.program.ops if op.has_columns]
        caches = Counter(shape for shape in loop.in_shapes if shape is not None and len(shape) == 4)
        assert caches == {(TURNS, 5, 2, 4): 4, (TURNS, 5, 1, 4): 4}


def branch() -> Made:
    weight, other = variable("weight", WIDTH, HIDDEN), variable("other", HIDDEN, WIDTH)

    def step(x: tf.Tensor) -> tf.Tensor:
        h = x @ weight
        y = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.tanh(h @ other), lambda: tf.sin((2.0 * h) @ other))
        back = [lambda: tf.cos(tf.sin(y @ weight) @ other), lambda: tf.exp(y @ weight @ other)]
        return tf.switch_case(tf.cast(y[0, 0] > 0.0, tf.int32), back)

    return [weight, other], step


@pytest.mark.parametrize("mesh", ALL, ids=str)
def test_branches(mesh: dict[str, int]):
    batches = [sign * tf.constant(numbers(count, WIDTH)) for count, sign in ((5, 1.0), (5, -1.0), (1, 1.0))]
    plan = assert_law(branch, {"weight": (None, "model"), "other": ("model", None)}, mesh, batches).plan(batches[0])
    assert_in_parts(plan, mesh, [(WIDTH, HIDDEN), (HIDDEN, WIDTH)])
    if mesh["model"] == 2:
        assert moved_inside(plan) == {"reduce": 4}  # one in each branch


def scaled() -> Made:
    """Dynamic loss scaling: one branch writes weights and momenta, the other the scale."""
    weights = [variable("up", WIDTH, HIDDEN), variable("down", HIDDEN, WIDTH)]
    momenta = [tf.Variable(tf.zeros_like(own), name=f"{own.name[:-2]}/momentum") for own in weights]
    scale, steps = tf.Variable(8.0, dtype=tf.float64, name="scale"), tf.Variable(0, name="steps")

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ weights[0]) @ weights[1]) ** 2)
            times = loss * scale
        gradients = [gradient / scale for gradient in tape.gradient(times, weights)]
        are_finite = tf.reduce_all([tf.reduce_all(tf.math.is_finite(gradient)) for gradient in gradients])

        def apply() -> tf.Tensor:
            for own, momentum, gradient in zip(weights, momenta, gradients, strict=True):
                momentum.assign(0.9 * momentum + gradient)
                own.assign_sub(0.1 * momentum)
            return steps.assign_add(1)

        def skip() -> tf.Tensor:
            scale.assign(scale / 2.0)
            return tf.identity(steps)

        return loss, tf.cond(are_finite, apply, skip)

    return [*weights, *momenta, scale, steps], step


@pytest.mark.parametrize("mesh", ALL, ids=str)
def test_a_branch_that_writes(mesh: dict[str, int]):
    """Weights and momenta are written where their parts are, and nothing moves for it; a step that overflows is not."""
    layout = {"up*": (None, "model"), "down*": ("model", None), "*": "home"}
    batches = [tf.constant(numbers(count, WIDTH) * by) for count, by in ((5, 1.0), (5, np.inf), (1, 1.0))]
    plan = assert_law(scaled, layout, mesh, batches).plan(batches[0])
    assert_in_parts(plan, mesh, [(WIDTH, HIDDEN), (HIDDEN, WIDTH)])
    assert not moved_inside(plan)


def counting() -> Made:
    """A loop that writes a variable in parts, and reads it in each turn."""
    weight = variable("weight", WIDTH, HIDDEN)

    def step(x: tf.Tensor) -> tf.Tensor:
        def turn(i: tf.Tensor, y: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            weight.assign_add(0.1 * tf.ones_like(weight) * tf.reduce_mean(y))
            return i + 1, y + tf.reduce_sum(tf.tanh(x @ weight), 1, keepdims=True)

        return tf.while_loop(lambda i, _: i < 3, turn, (0, x))[1]

    return [weight], step


@pytest.mark.parametrize("mesh", ALL, ids=str)
def test_a_loop_that_writes(mesh: dict[str, int]):
    x = tf.constant(numbers(5, WIDTH))
    plan = assert_law(counting, {"weight": (None, "model")}, mesh, [x]).plan(x)
    assert_in_parts(plan, mesh, [(WIDTH, HIDDEN)])
    if mesh["model"] == 2:
        assert moved_inside(plan) == {"reduce": 1}


def nested() -> Made:
    """A branch in a loop, which each column takes by itself, in a loop that all columns run as one."""
    up, down = variable("up", WIDTH, HIDDEN), variable("down", HIDDEN, WIDTH)

    def step(x: tf.Tensor) -> tf.Tensor:
        def inner(h: tf.Tensor) -> tf.Tensor:
            return tf.while_loop(
                lambda j, _: j < 2,
                lambda j, h: (j + 1, tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.sin(h), lambda: 2.0 * h)),
                (0, h),
            )[1]

        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.tanh(inner(y @ up) @ down)), (0, x))[1]

    return [up, down], step


def test_a_branch_in_a_loop_in_a_loop():
    batches = [tf.constant(numbers(5, WIDTH)), tf.constant(-numbers(5, WIDTH))]
    plan = assert_law(nested, {"up": (None, "model"), "down": ("model", None)}, TWO, batches).plan(batches[0])
    assert_in_parts(plan, TWO, [(WIDTH, HIDDEN), (HIDDEN, WIDTH)])


def test_what_does_not_settle_is_whole():
    """A turn that cuts what it carries along another dimension each time; a list that is read whole."""
    square, mesh = variable("square", WIDTH, WIDTH), ONE_ROW

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        y = tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, tf.transpose(y @ square)), (0, x))[1]
        rows = tf.TensorArray(x.dtype, 3)
        _, rows = tf.while_loop(lambda i, _: i < 3, lambda i, r: (i + 1, r.write(i, x @ square)), (0, rows))
        return y, tf.linalg.qr(rows.stack())[0]

    def made() -> Made:
        own = tf.Variable(square, name="square")
        return [own], lambda x: step_with(own, x)

    def step_with(own: tf.Variable, x: tf.Tensor) -> Any:
        nonlocal square
        square = own
        return step(x)

    x = tf.constant(numbers(WIDTH, WIDTH))
    parallel = assert_law(made, {"square": (None, "model")}, mesh, [x])
    assert "computed in place" in str(parallel.plan(x))


@pytest.mark.long
def test_a_bias_that_is_whole_joins_gates():
    """Kernels in parts, and a bias at home: each turn exchanges something once, and kernels stay where they are."""
    layout = {"recurrent/*/kernel": (None, "model"), "recurrent/*/recurrent_kernel": (None, "model"), "*": "home"}
    x, y = numbers(7, 6, WIDTH).astype(np.float32), numbers(7, 3).astype(np.float32)
    found = []
    for split in (False, True):
        template = keras_model("LSTM")
        model = gs.multi_gpu_model(template, mesh=ONE_ROW, variables=layout) if split else template
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append([history, model.predict(x, verbose=0)])
    plan = gs.parallelize(lambda x: template(x), mesh=ONE_ROW).plan(tf.constant(x))
    assert_in_parts(plan, ONE_ROW, [(WIDTH, 40), (10, 40)])
    assert sum(moved_inside(plan).values()) == 1
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)  # float32


def keras_model(kind: str) -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    middle = getattr(layers, kind)(10, name="recurrent")
    return keras.Sequential([keras.Input((6, WIDTH)), middle, layers.Dense(3, name="last")])


@pytest.mark.parametrize("mesh", [ONE_ROW, pytest.param(TWO, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), pytest.param("GRU", 3, marks=pytest.mark.long)])
def test_keras_recurrent_layers(kind: str, gates: int, mesh: dict[str, int]):
    """Gates are one dimension of kernels, which is cut in each gate: what each turn exchanges is the state."""
    layout = {"*/kernel": (None, "model"), "*/recurrent_kernel": (None, "model"), "last/*": "home"}
    layout["recurrent/*/bias"] = ("model",) if kind == "LSTM" else (None, "model")
    x, y = numbers(7, 6, WIDTH).astype(np.float32), numbers(7, 3).astype(np.float32)
    found = []
    for split in (False, True):
        template = keras_model(kind)
        model = gs.multi_gpu_model(template, mesh=mesh, variables=layout) if split else template
        model.compile(keras.optimizers.SGD(0.1), "mse")
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append([history, model.predict(x, verbose=0)])
    plan = gs.parallelize(lambda x: template(x), mesh=mesh).plan(tf.constant(x))
    width = 10 * gates
    assert_in_parts(plan, mesh, [(WIDTH, width), (10, width), (5, width), (3, width), (2, width)])
    assert moved_inside(plan) == {"all-gather": 1}
    assert str(plan).count(f"{gates} blocks), computed in place") == 3
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)  # float32


@pytest.mark.long
@pytest.mark.parametrize("mesh", [ONE_ROW, pytest.param(TWO, marks=pytest.mark.long)], ids=str)
def test_keras_loss_scaling(mesh: dict[str, int]):
    """Branches without results that write weights and slots, one of them in the other; a batch that overflows."""
    layout = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None), "*": "home"}
    x, y, layers = numbers(11, WIDTH).astype(np.float32), numbers(11, 3).astype(np.float32), keras.layers
    x[5] = np.inf
    found = []
    for split in (False, True):
        keras.utils.set_random_seed(3)
        wide = layers.Dense(HIDDEN, "tanh", name="up")
        template = keras.Sequential([keras.Input((WIDTH,)), wide, layers.Dense(3, name="down")])
        model = gs.multi_gpu_model(template, mesh=mesh, variables=layout) if split else template
        scaled = keras.optimizers.LossScaleOptimizer(
            keras.optimizers.Adam(1e-2, epsilon=1e-2), initial_scale=4.0, dynamic_growth_steps=2
        )
        model.compile(scaled, keras.losses.MeanSquaredError())
        model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append([own.numpy() for own in [*template.variables, *scaled.variables]])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-5, 1e-6)  # float32
    inner = scaled.inner_optimizer.variables
    in_parts = [own.path for own in inner if (parts := parts_of_variable(own.value)) is not None and parts.in_parts]
    assert len(in_parts) == 6  # momentum and velocity of what is cut
