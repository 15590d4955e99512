"""Two axes of the rows (HSDP): sharded along "fsdp", copied along "data", with one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks.partitions import bytes_between
from graphsplit.core.layouts import cut_in, part_ranges
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.core.variables.arrangements import lying_now
from graphsplit.core.variables.parted_variables import parts_of_variable, read_handle
from graphsplit.emission import check_emitted, emit
from tests.helpers.float64 import float64  # noqa: F401 (a fixture)
from tests.helpers.mesh_cases import (
    WIDTH,
    assert_gradients_from_outside,
    assert_law,
    forward,
    ids_of,
    message,
    numbers,
    perceptron,
    transformer,
    variable,
)

MESH = {"data": 2, "fsdp": 2}
many = pytest.mark.many
Model = tuple[keras.Model, keras.Optimizer, Callable[..., tf.Tensor]]
SIZES = (50, 71, 60, 64, 58, 9)  # (so many are large that one is gathered again for the backward pass)


def adam() -> Model:
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(size, "tanh") for size in SIZES[1:]]
    model = keras.Sequential([keras.layers.Input((SIZES[0],)), *layers])
    optimizer = keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=0.1)
    optimizer.build(model.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )
        return loss

    return model, optimizer, step


def variables_of(model: keras.Model, optimizer: keras.Optimizer) -> list[tf.Variable]:
    return [own.value for own in (*model.variables, *optimizer.variables)]


def batch(rows: int) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.constant(numbers(rows, SIZES[0], seed=1)), tf.constant(numbers(rows, SIZES[-1], seed=2))


def assert_copies_equal(own: tf.Variable, copies: int) -> None:
    """Assert that each part of a variable is on several devices, which have the same bits."""
    parts = parts_of_variable(own)
    assert parts is not None
    assert parts.in_parts
    found: dict[str, list[np.ndarray]] = {}
    handles, ranges = parts.handles(), part_ranges(parts.division, list(map(range, own.shape)))
    for handle, entries in zip(handles, ranges, strict=True):
        found.setdefault(str(entries), []).append(read_handle(handle, own.dtype).numpy())
    assert [len(values) for values in found.values()] == [copies] * cut_in(parts.division).parts
    assert all(np.array_equal(values[0], other) for values in found.values() for other in values[1:])


CASES = [
    MESH,
    pytest.param({"fsdp": 2, "data": 2}, marks=pytest.mark.long),
    pytest.param({"batch": 2, "fsdp": 3}, marks=many),
    pytest.param({"data": 3, "fsdp": 2}, marks=[many, pytest.mark.long]),
]


def test_beside_a_variable_that_lies_in_one_group():
    """Both are cut over the devices of the first group, and only parts of the one have copies."""

    def made() -> tuple[list[tf.Variable], Callable[[tf.Tensor], tf.Tensor]]:
        both = [variable(name, WIDTH, 40) for name in ("copied", "alone")]

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(x @ both[0] + x @ both[1]) ** 2)
            for own, by in zip(both, tape.gradient(loss, both), strict=True):
                own.assign_sub(0.1 * by)
            return loss

        return both, step

    (variables, single), (laid, several) = made(), made()
    gs.set_variable_layout(laid[:1], "sharded", mesh=MESH)
    gs.set_variable_layout(laid[1:], "sharded", 2)
    step = gs.parallelize(several, mesh=MESH)
    for rows in (9, 3):
        x = tf.constant(numbers(rows, WIDTH))
        np.testing.assert_allclose(step(x), single(x), 1e-9)
    for one, own, copies in zip(variables, laid, (2, 1), strict=True):
        np.testing.assert_allclose(one.numpy(), own.numpy(), 1e-9)
        step(x), single(x)  # (which brings the parts back)
        assert_copies_equal(own, copies)


@pytest.mark.sampled(1)
@pytest.mark.usefixtures("float64", "plain_oracle")
@pytest.mark.parametrize("mesh", CASES, ids=str)
def test_adam_with_clipping(mesh: dict[str, int]):
    """State is divided by the devices along "fsdp"; between groups travel gradients that are added up, no weights."""
    (model, optimizer, single), (laid, other, many_devices) = adam(), adam()
    gs.set_variable_layout([laid, other], "sharded", mesh=mesh)
    step = gs.parallelize(many_devices, mesh=mesh)
    with partition_graphs() as graphs:  # (of the first call for these shapes)
        losses = [step(*batch(13))]
    losses += [step(*batch(rows)) for rows in (5, 2, 13)]
    np.testing.assert_allclose(losses, [single(*batch(rows)) for rows in (13, 5, 2, 13)], 1e-9, 1e-12)
    ours = variables_of(laid, other)
    for one, own in zip(variables_of(model, optimizer), ours, strict=True):
        np.testing.assert_allclose(one.numpy(), own.numpy(), 1e-9, 1e-12)
    single(*batch(13)), step(*batch(13))  # (which brings the parts back)

    copies, parts = next(size for axis, size in mesh.items() if axis != "fsdp"), mesh["fsdp"]
    large = [own for own in ours if own.shape.num_elements() > 1000]
    assert len(large) == 12
    for own in [own for own in ours if parts_of_variable(own) is not None]:
        assert_copies_equal(own, copies)
    assert all(lying_now(own).cut.parts == parts for own in large)
    held: dict[str, int] = {}
    for own in ours:
        lying = parts_of_variable(own)
        for device, size in (lying.bytes_on_devices() if lying else {own.device: own.dtype.size}).items():
            held[device] = held.get(device, 0) + size
    every = sum(own.shape.num_elements() * 8 for own in ours)
    assert max(held.values()) < 1.1 * every / parts

    plan = step.plan(*batch(13))
    plan.check()
    check_emitted(plan, emit(plan))
    assert f"{next(iter(set(mesh) - {'fsdp'}))}={copies}, fsdp={parts}" in str(plan)
    groups = lying_now(large[0]).groups
    group_of = {device: k for k, group in enumerate(groups) for device in group}
    between = bytes_between(graphs, plan)
    crossing = sum(size for (a, b), size in between.items() if group_of[a] != group_of[b])
    weights = sum(own.shape.num_elements() * 8 for own in ours if "kernel" in own.name or "bias" in own.name) // 3
    arguments = sum(tensor.shape.num_elements() * 8 for tensor in batch(13))
    assert 2 * (copies - 1) * weights * 0.9 < crossing < 2 * (copies - 1) * weights + arguments + 3000
    inside = sum(between.values()) - crossing
    once = (parts - 1) * copies * weights
    assert 2.15 * once < inside < 2.4 * once + arguments  # gathered, one again, and gradients reduced


LAYOUTS: dict[str, Any] = {
    "sharded": "sharded",
    "a dimension": {"up": (None, "fsdp"), "down": ("fsdp",), "*": "sharded"},
    "ZeRO-1 and others": {"up": "sharded", "down": "replicated", "*": "home"},
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_layouts(layout: Any):
    """Widths that do not divide, fewer rows than devices."""
    assert_law(perceptron, layout, MESH, [tf.constant(numbers(count, WIDTH)) for count in (7, 5, 1)])


OPTIONS = [
    {"micro_batches": 2},
    {"tuning": {"reduce_retracing": True}},
    pytest.param({"jit_compile": True}, marks=pytest.mark.long),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_transformer(options: dict[str, Any]):
    assert_law(lambda: transformer(3), "sharded", MESH, [ids_of(5), ids_of(7)], **options)


@many
@pytest.mark.parametrize(
    "mesh", [{**MESH, "model": 2}, pytest.param({"model": 3, **MESH}, marks=pytest.mark.long)], ids=str
)
def test_beside_layers(mesh: dict[str, int]):
    layout = {
        "up": ((None, "model"), "sharded"),
        "down": ("model", "fsdp"),
        "inner": (("model",), "replicated"),
        "*": "sharded",
    }
    assert_law(perceptron, layout, mesh, [tf.constant(numbers(count, WIDTH)) for count in (7, 3)])


@many
@pytest.mark.long  # `test_transformer` of test_mesh_stages.py has more axes
def test_beside_stages():
    mesh = {"stage": 2, **MESH}
    assert_law(perceptron, "sharded", mesh, [tf.constant(numbers(7, WIDTH))], micro_batches=2)


def orthogonalizing() -> tuple[list[tf.Variable], Callable[..., Any]]:
    """Updates that follow from products of a weight's parts with each other, as of Muon."""
    own, momentum = variable("own", WIDTH, 40), tf.Variable(tf.zeros((WIDTH, 40), tf.float64), name="momentum")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ own) ** 2)
        momentum.assign(0.9 * momentum + tape.gradient(loss, own))
        update = momentum / (tf.norm(momentum) + 1e-7)
        for _ in range(2):
            square = update @ tf.transpose(update)
            update = 2.0 * update - 1.5 * (square @ update) + 0.5 * (square @ (square @ update))
        own.assign_sub(0.1 * update)
        return loss

    return [own, momentum], step


def test_what_is_computed_once():
    """Of what one device computes, each device is sent its part."""
    batches = [tf.constant(numbers(count, WIDTH)) for count in (7, 3)]
    plan = assert_law(orthogonalizing, "sharded", MESH, batches).plan(batches[0])
    ops = plan.program.ops
    assert any(op.type == "SplitV" and plan.steps[op.index].once for op in ops)
    assert not any(ops[i].type == "SplitV" for i in plan.owners.groups)


def test_a_plan_is_searched_with_variables_laid_out():
    """On a mesh without another axis than those of the rows and of stages."""
    for mesh in (MESH, {"stage": 2, "batch": 2}):
        variables, _ = perceptron()
        gs.set_variable_layout(variables, "sharded", mesh=mesh)
        apply = gs.parallelize(forward(variables), mesh=mesh, memory="1GB")
        x = tf.constant(numbers(7, WIDTH))
        np.testing.assert_allclose(apply(x), forward(perceptron()[0])(x), 1e-9, 1e-12)


def test_a_tape_outside():
    assert_gradients_from_outside("sharded", MESH)


def tied() -> tuple[list[tf.Variable], Callable[..., Any]]:
    """A table whose rows are written by their numbers, each more than once."""
    table, last = variable("table", 300, WIDTH), variable("last", WIDTH, 7)

    def step(ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = tf.gather(table, ids)
            tape.watch(rows)
            loss = tf.reduce_mean(tf.tanh(rows @ last) ** 2)
        by_rows, by_last = tape.gradient(loss, [rows, last])
        last.assign_sub(0.1 * by_last)
        flat = tf.reshape(ids, [-1])
        table.scatter_sub(tf.IndexedSlices(0.1 * tf.reshape(by_rows, [-1, WIDTH]), flat))
        return loss

    return [table, last], step


def test_rows_of_a_table():
    parallel = assert_law(tied, "sharded", MESH, [ids_of(5), ids_of(7)])
    variables = list(parallel._variables_so_far())
    assert any(lying_now(own).cut.parts == 2 for own in variables)
    for own in variables:
        parallel(ids_of(5))
        assert_copies_equal(own, 2)


@pytest.mark.usefixtures("float64", "plain_oracle")
def test_checkpoints_from_layout_to_layout(tmp_path: Any):
    """Written in one layout and read in another; the next step is one device's."""
    layouts = [(None, None), ("sharded", MESH), ("sharded", {"fsdp": 4})]
    x, y = batch(6)
    model, optimizer, single = adam()
    single(x, y)
    path = tf.train.Checkpoint(model=model, optimizer=optimizer).write(str(tmp_path / "0"))
    for number, (layout, mesh) in enumerate(layouts):
        laid, other, step = adam()
        if layout is not None:
            gs.set_variable_layout([laid, other], layout, mesh=mesh)
            step = gs.parallelize(step, mesh=mesh)
        kept = tf.train.Checkpoint(model=laid, optimizer=other)
        kept.read(path).assert_existing_objects_matched()
        np.testing.assert_allclose(step(x, y), single(x, y), 1e-9, 1e-12)
        path = kept.write(str(tmp_path / f"{number + 1}"))
        for one, own in zip(variables_of(model, optimizer), variables_of(laid, other), strict=True):
            np.testing.assert_allclose(one.numpy(), own.numpy(), 1e-9, 1e-12)


def test_a_layout_is_set_again():
    own = variable("own", 40, 30)
    value = own.numpy()
    shapes = []
    for layout, mesh in [("sharded", {"batch": 4}), ("sharded", MESH), ("replicated", MESH), ("sharded", MESH)]:
        gs.set_variable_layout(own, layout, mesh=mesh)
        shapes.append([shape[0] for shape in parts_of_variable(own).shapes])
        np.testing.assert_array_equal(own.numpy(), value)
    assert shapes == [[10] * 4, [20] * 4, [40] * 4, [20] * 4]
    text = str(gs.visualize_layout(own))
    assert "sharded along axis 0 over 2 devices, 2 copies" in text
    assert "CPU:0, CPU:2  0:20" in text
    assert "CPU:1, CPU:3  20:40" in text


def test_predicted_and_scaled():
    """What is predicted is the plan that runs; more devices are more groups."""
    through_one = {"exchange_bytes": 0}  # (between GPUs sums go from each to each)
    step = gs.parallelize(perceptron()[1], mesh=MESH, tuning=through_one)
    spec = tf.TensorSpec([64, WIDTH], tf.float64)
    found = gs.predict(step, spec, machine="8xA100-SXM4-80GB", devices=4, variables="sharded")
    variables, other = perceptron()
    gs.set_variable_layout(variables, "sharded", mesh=MESH)
    plan = gs.parallelize(other, mesh=MESH, tuning=through_one).plan(spec)
    assert [str(move).replace("GPU", "CPU") for move in found.plan.moves] == [str(move) for move in plan.moves]
    curve = gs.scaling(step, spec, machine="dgx-a100", devices=[2, 4, 8], variables=["sharded"], kinds=["strong"])
    assert [point.devices for point in curve.points] == [2, 4, 8]
    assert "is no multiple" in message(
        gs.errors.ArgumentError, lambda: gs.scaling(step, spec, machine="dgx-a100", devices=[3])
    )


def test_what_is_refused():
    own = variable("own", 8, 6)
    for layout, said in [
        (("data",), "copies along 'data' what is cut along 'fsdp'. Write 'fsdp'"),
        ((gs.cut("fsdp", in_place=True),), "in_place=True is for parts of which there is one each"),
    ]:
        assert said in message(
            gs.errors.ArgumentError, lambda own_layout=layout: gs.set_variable_layout(own, own_layout, mesh=MESH)
        )
