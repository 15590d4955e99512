"""Plans that are chosen on a mesh: layouts along its axis are found, the mesh itself is; the law holds for both."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.automatic_plans import machine_of
from tests.helpers.layout_cases import held_by_device


def numbers(*shape: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [len(shape), 7], dtype=tf.float64)


class Perceptron:
    """Two layers with biases, and a step of training with momentum."""

    def __init__(self, width: int = 6, hidden: int = 15):
        shapes = {"up": (width, hidden), "bias": (hidden,), "down": (hidden, width)}
        self.weights = [tf.Variable(numbers(*own) / 4, name=f"layer/{name}") for name, own in shapes.items()]
        zeros = [(f"{own.name[:-2]}/momentum", tf.zeros_like(own)) for own in self.weights]
        self.slots = [tf.Variable(own, name=name, trainable=False) for name, own in zeros]

    def step(self, x):
        up, bias, down = self.weights
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ up + bias) @ down - 1) ** 2)
        for own, slot, gradient in zip(self.weights, self.slots, tape.gradient(loss, self.weights), strict=True):
            slot.assign(0.9 * slot + gradient)
            own.assign_sub(0.1 * slot)
        return loss


RATES = {"float32": 1e6, "float64": 1e6}
DEVICE = replace(machine_of().device, matrix_flops_per_s=RATES, vector_flops_per_s=RATES)
FAST = replace(machine_of(link=1e12), device=DEVICE)
"""So slow to compute, and so fast to send, that large products are worth sharing."""


def chosen(plan: gs.inspect.Plan) -> str:
    [note] = [note for note in plan.notes if note.startswith("chosen automatically: ")]
    return note.removeprefix("chosen automatically: ")


def assert_law(model: Perceptron, step: gs.ParallelFunction, x: tf.Tensor) -> None:
    alone = fresh(model)
    for _ in range(3):
        np.testing.assert_allclose(step(x), alone.step(x), rtol=1e-9)
    for own, expected in zip([*model.weights, *model.slots], [*alone.weights, *alone.slots], strict=True):
        np.testing.assert_allclose(own, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    "mesh",
    [{"model": 2}, {"data": 2, "tp": 2}, pytest.param({"batch": 2, "model": 2}, marks=pytest.mark.long)],
    ids=str,
)
def test_layouts_are_found_on_a_mesh(mesh: dict[str, int]):
    model, x = Perceptron(), numbers(5, 6)
    options = {"mesh": mesh, "plan": FAST}
    step = gs.parallelize(model.step, **options)
    plan, axis = step.plan(x), list(mesh)[-1]
    assert all(parts_of_variable(own) is None for own in model.weights), "nothing ran"
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.items())
    assert f"mesh ({sizes}), variables " in chosen(plan)
    assert_law(model, step, x)
    for own in model.weights:  # (which dimension of `down` is cut makes little difference)
        lines = [line for line in str(plan).splitlines() if line.strip().startswith(f"{own.name[:-2]}: [")]
        assert [axis in line and ", computed in place" in line for line in lines] == [True]
        assert lines[0].replace(":", "/momentum:", 1) in str(plan)
    up = "[model, -], 3 + 3" if mesh == {"model": 2} else f"[-, {axis}], 8 + 7"  # by 3 %
    assert f"layer/up: {up}" in str(plan)
    assert f"layer/bias: [{axis}], 8 + 7" in str(plan)
    held = held_by_device([*model.weights, *model.slots])
    assert len(held) >= 2
    assert max(held.values()) <= 8 / 15 * sum(held.values()), "each column has its part, and nobody all"
    assert_law(model, step, x[:3])  # as variables lie now
    assert f"mesh ({sizes}), variables as they are" in chosen(step.plan(x[:2]))


def fresh(model: Perceptron) -> Perceptron:
    """Return a model on one device with the numbers of another one."""
    alone = Perceptron(*model.weights[0].shape.as_list())
    for own, before in zip([*alone.weights, *alone.slots], [*model.weights, *model.slots], strict=True):
        own.assign(before)
    return alone


@pytest.mark.long
def test_the_mesh_is_found():
    """One row: there is nothing to share out but the weights."""
    model, x = Perceptron(64, 255), numbers(1, 64)
    step = gs.parallelize(model.step, devices=4, plan=FAST)
    plan = step.plan(x)
    assert chosen(plan).startswith("4 devices, mesh (model=4), variables ")
    [why] = [note for note in plan.notes if note.startswith("along 'model' about ")]
    assert " layouts; with none cut " in why
    assert why in plan.explain().splitlines()
    assert_law(model, step, x)
    held = held_by_device([*model.weights, *model.slots])
    assert len(held) == 4
    assert max(held.values()) <= 0.3 * sum(held.values())
    other = gs.parallelize(model.step, devices=4, plan=FAST)
    assert_law(model, other, numbers(3, 64))  # it finds variables along an axis, and takes that mesh
    assert chosen(other.plan(numbers(3, 64))).startswith("4 devices, mesh (model=4), variables as they are")


def test_a_slow_link_is_not_crossed():
    model, x = Perceptron(64, 255), numbers(1, 64)
    machine = replace(FAST, link=replace(FAST.link, bytes_per_s=1.0))
    plan = gs.parallelize(model.step, devices=4, plan=machine).plan(x)
    assert "mesh" not in chosen(plan)
    assert not any(note.startswith("along ") for note in plan.notes)


@pytest.mark.long
def test_under_a_memory_on_a_mesh():
    model, x = Perceptron(64, 255), numbers(8, 64)
    mesh, whole = {"batch": 2, "model": 2}, sum(held_by_device([*model.weights, *model.slots]).values())
    step = gs.parallelize(model.step, mesh=mesh, memory=1.5 * whole, plan=FAST)
    assert "mesh (batch=2, model=2), variables " in chosen(step.plan(x))
    assert_law(model, step, x)
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.parallelize(Perceptron(64, 255).step, mesh=mesh, memory=1000, plan=replace(FAST, devices=8)).plan(x)
    first = str(error.value).splitlines()[0]
    assert "the smallest, 4 devices, mesh (batch=2, model=2), variables sharded but layer/" in first, first


def test_blocks_are_laid_out_alike():
    """They are told by the numbers in their names; a kernel of the same shape that is no block's is apart."""
    blocks = [[variable(f"block_{k}/{n}", *own) for n, own in (("up", (8, 33)), ("down", (33, 8)))] for k in range(3)]
    head = variable("head", 8, 33)

    def step(x):
        for up, down in blocks:
            x = x + tf.tanh(x @ up) @ down
        return x @ head

    x = numbers(1, 8)
    parallel = gs.parallelize(step, devices=2, plan=FAST)
    expected, plan = step(x), parallel.plan(x)
    assert "block_*/up" in chosen(plan)
    np.testing.assert_allclose(parallel(x), expected, rtol=1e-9)
    axes = [[parts.division.axis for own in block if (parts := parts_of_variable(own))] for block in blocks]
    assert axes == [axes[0]] * 3, axes
    assert len(axes[0]) == 2


def variable(name: str, *shape: int) -> tf.Variable:
    return tf.Variable(numbers(*shape) / 6, name=name)


@pytest.mark.long
def test_a_model_is_fitted_and_predicts_on_the_mesh_that_was_found():
    keras = pytest.importorskip("keras")
    x, y = np.ones((6, 48), np.float32), np.zeros((6, 48), np.float32)

    def made():
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(333, "relu", name="up"), keras.layers.Dense(48, name="down")]
        return keras.Sequential([keras.Input((48,)), *layers])

    alone, template = made(), made()
    machine = replace(FAST, host=replace(FAST.host, threads=1))  # (on many, one device may update all as fast)
    model = gs.multi_gpu_model(template, mesh={"batch": 2, "model": 2}, plan=machine)
    for own in (alone, model):
        own.compile(keras.optimizers.Adam(epsilon=1e-2), "mse")  # (else what has no gradient but rounding moves)
    own, expected = (one.fit(x, y, epochs=3, verbose=0).history["loss"] for one in (model, alone))
    np.testing.assert_allclose(own, expected, rtol=1e-4)
    np.testing.assert_allclose(model.predict(x, verbose=0), alone.predict(x, verbose=0), rtol=1e-4, atol=1e-5)
    held = held_by_device([own.value for own in [*template.variables, *template.optimizer.variables]])
    assert max(held.values()) <= 0.6 * sum(held.values())
    assert "computed in place" in str(model.plan(x, y))
