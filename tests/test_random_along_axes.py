"""Random numbers along an axis of a mesh: each device draws its own part of a mask, with the bits of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import check_emitted, emit
from graphsplit.errors import CheckError
from tests.helpers.mesh_cases import devices_of
from tests.helpers.mesh_loops import flows

SEED = tf.constant([3, 5])

Draw = Callable[[Any], tf.Tensor]
DRAWS: dict[str, Draw] = {
    "uniform": lambda shape: tf.random.stateless_uniform(shape, SEED),
    "normal": lambda shape: tf.random.stateless_normal(shape, SEED),
    "truncated normal": lambda shape: tf.random.stateless_truncated_normal(shape, SEED),
    "uniform float64": lambda shape: tf.random.stateless_uniform(shape, SEED, dtype=tf.float64),
    "normal float16": lambda shape: tf.random.stateless_normal(shape, SEED, dtype=tf.float16),
    "integers": lambda shape: tf.random.stateless_uniform(shape, SEED, -5, 90, tf.int32),
    "all integers": lambda shape: tf.random.stateless_uniform(shape, SEED, None, None, tf.int64),
}
MESHES = [{"model": 3}, {"batch": 2, "model": 2}, {"batch": 1, "model": 2}]


def laid(name: str, shape: tuple[int, ...], axis: int, dtype: tf.DType, mesh: dict[str, int]) -> tf.Variable:
    variable = tf.Variable(tf.ones(shape, dtype), name=name)
    layout = (*[None] * axis, "model")
    gs.set_variable_layout(variable, layout, devices_of(mesh), mesh=mesh)
    return variable


def drawing(plan: gs.inspect.Plan) -> list[tuple[int, ...]]:
    """Return the shapes of what is drawn."""
    ops = [op for op in (*plan.sharded_ops, *plan.ops_once) if op.type.startswith("Stateless") and "Get" not in op.type]
    return [op.out_shapes[0] for op in dict.fromkeys(ops)]


def check(plan: gs.inspect.Plan) -> None:
    plan.check()
    check_emitted(plan, emit(plan))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("kind", DRAWS)
def test_bits_of_one_device(kind: str, mesh: dict[str, int]):
    """Seven heads of 43 by 45, so that no run of numbers begins where a counter does; rows are uneven."""
    draw, shape = DRAWS[kind], (5, 7, 43, 45)
    scale = laid("scale", (7, 1, 45), 0, draw(()).dtype, mesh)

    def masked(x: tf.Tensor) -> tf.Tensor:
        return scale * draw(shape) * tf.cast(x[:, None, None, None], scale.dtype)

    parallel = gs.parallelize(masked, mesh=mesh, devices=devices_of(mesh))
    x = tf.ones(5)
    plan = parallel.plan(x)
    check(plan)
    np.testing.assert_array_equal(parallel(x), draw(shape))
    heads = {3, 2} if mesh["model"] == 3 else {4, 3}
    assert {own[1] for own in drawing(plan)} == heads


@pytest.mark.parametrize("axis", [0, 2])
def test_other_axes(axis: int):
    """The first one, whose part is one run; and one behind others, of each of whose entries it is a run."""
    mesh, shape = {"model": 3}, (4, 3, 40, 401)
    scale = laid("scale", tuple(size if k >= axis else 1 for k, size in enumerate(shape)), axis, tf.float32, mesh)
    parallel = gs.parallelize(lambda: scale * DRAWS["normal"](shape), mesh=mesh, devices=devices_of(mesh))
    check(parallel.plan())
    np.testing.assert_array_equal(parallel(), DRAWS["normal"](shape))
    assert {own[axis] for own in drawing(parallel.plan())} == {-(-shape[axis] // 3), shape[axis] // 3}


@pytest.mark.parametrize(
    ("shape", "axis"), [((5, 4, 6, 6), 1), ((8, 300, 64), 2)], ids=["small runs", "more runs than are worth it"]
)
def test_drawn_whole(shape: tuple[int, ...], axis: int):
    mesh = {"batch": 2, "model": 2}
    scale = laid("scale", shape[axis : axis + 1] + (1,) * (len(shape) - 1 - axis), 0, tf.float32, mesh)
    parallel = gs.parallelize(lambda: scale * DRAWS["uniform"](shape), mesh=mesh, devices=devices_of(mesh))
    np.testing.assert_array_equal(parallel(), DRAWS["uniform"](shape))
    assert {own[axis] for own in drawing(parallel.plan())} == {shape[axis]}


def test_in_a_loop():
    """What a loop draws is drawn whole by each device, which may run the loop as it is."""
    mesh = {"model": 2}
    scale = laid("scale", (4, 1, 1), 0, tf.float32, mesh)

    def turns(x: tf.Tensor) -> tf.Tensor:
        def turn(i: tf.Tensor, x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            drawn = tf.random.stateless_uniform((3, 4, 50, 60), tf.stack([i, 1]))
            return i + 1, x * scale * drawn

        return tf.while_loop(lambda i, _: i < 3, turn, (0, x))[1]

    x = tf.ones((3, 4, 50, 60))
    parallel = gs.parallelize(turns, mesh=mesh, devices=devices_of(mesh))
    plan = parallel.plan(x)
    check(plan)
    bodies = [body for loop in flows(plan.program) for body in loop.bodies.values()]
    drawn = [op.out_shapes[0] for body in bodies for op in body.ops if op.type == "StatelessRandomUniformV2"]
    assert set(drawn) == {(3, 4, 50, 60)}
    np.testing.assert_array_equal(parallel(x), turns(x))


def test_numbers_of_another_part_are_noticed():
    """A part that nobody expands is an error, and so is one that is drawn elsewhere."""
    mesh = {"model": 2}
    scale = laid("scale", (4, 1, 1), 0, tf.float32, mesh)
    parallel = gs.parallelize(lambda: scale * DRAWS["uniform"]((3, 4, 50, 60)), mesh=mesh, devices=devices_of(mesh))
    plan = parallel.plan()
    graph = emit(plan)
    node = next(node for node in graph.nodes if node.op == "StatelessRandomUniformV2")
    node.attr["_graphsplit_part"].list.i.extend([1, 0, 4])
    with pytest.raises(CheckError, match="draws numbers that are not those of its part"):
        check_emitted(plan, graph)


class Block(keras.layers.Layer):
    """Attention with dropout between its products, behind heads that are cut."""

    def __init__(self, heads: int, size: int, **options: Any):
        super().__init__(**options)
        self.heads, self.size = heads, size
        self.dropout = keras.layers.Dropout(0.3, seed=4)

    def build(self, shape: Any) -> None:
        self.into = self.add_weight(shape=(shape[-1], self.heads, self.size), name="into")
        self.out = self.add_weight(shape=(self.heads, self.size, shape[-1]), name="out")

    def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
        h = tf.einsum("btd,dhe->bhte", x, self.into)
        scores = tf.nn.softmax(tf.einsum("bhte,bhse->bhts", h, h))
        return x + tf.einsum("bhts,bhse,hed->btd", self.dropout(scores, training=training), h, self.out)


def test_a_keras_dropout():
    """Training steps with the mask of one device, of which each device has the part of its heads."""
    mesh, x = {"batch": 2, "model": 2}, np.random.default_rng(0).normal(size=(6, 64, 8)).astype("float32")
    losses: list[list[float]] = []
    for where in (None, mesh):
        keras.utils.set_random_seed(2)
        net = keras.Sequential([keras.Input((64, 8)), Block(4, 4, name="block"), keras.layers.Dense(3)])
        layout = {"block/into": (None, "model"), "block/out": ("model",), "*": "home"}
        model: Any = net
        if where is not None:
            model = gs.multi_gpu_model(net, mesh=mesh, variables=layout)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        losses.append([float(model.train_on_batch(x, x[..., :3])) for _ in range(3)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
    plan = model.plan(x, x[..., :3])
    assert drawing(plan) == [(6, 2, 64, 64)] * 2
