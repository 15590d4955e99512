"""Meshes of several axes beside the batch's: weights in parts along each, and the numbers of one device."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.device_bytes import along, traffic
from tests.helpers.float64 import float64  # noqa: F401 (a fixture)
from tests.helpers.law import compiled_calls
from tests.helpers.mesh_cases import (
    HEAD,
    HIDDEN,
    LENGTH,
    VOCABULARY,
    WIDTH,
    Made,
    assert_gradients_from_outside,
    assert_law,
    boxes,
    bytes_of,
    devices_of,
    ids_of,
    message,
    numbers,
    perceptron,
    sgd,
    variable,
)

long = pytest.mark.long
FLAT = {"model": 2, "expert": 2}
CUBE = {"batch": 2, "model": 2, "expert": 2}
WIDE = {"batch": 2, "model": 3, "expert": 2}
THIN = {"batch": 1, "model": 2, "expert": 3}
AMID = {"expert": 2, "data": 2, "model": 2}
NAMES = ("flat", FLAT), ("cube", CUBE), ("wide", WIDE), ("thin", THIN), ("amid", AMID)


def needs(mesh: dict[str, int], *marks: Any) -> Any:
    many = [] if mesh is FLAT else [pytest.mark.many]
    return pytest.param(mesh, marks=[*many, *marks], id=next(name for name, own in NAMES if own == mesh))


MESHES = [needs(FLAT), needs(CUBE), needs(WIDE, long), needs(THIN, long), needs(AMID, long)]


SPELLINGS: dict[str, dict[str, Any]] = {
    "one each": {"up": (None, "model"), "down": ("expert",), "*": "home"},
    "two dimensions": {"up": ("expert", "model"), "down": ("model", "expert"), "inner": ("model",), "*": "home"},
    "one dimension": {
        "up": (None, ("model", "expert")),
        "down": (("model", "expert"),),
        "inner": ("expert",),
        "*": "home",
    },
    "copied": {"up": ((None, "expert"), "replicated"), "down": (("expert",), "replicated"), "*": "replicated"},
    "shared out": {"up": ((None, "model"), "sharded"), "down": (("expert",), "sharded"), "*": "sharded"},
}
WITH_ROWS: dict[str, dict[str, Any]] = {
    "gathered": {
        "up": ("batch", "model"),
        "down": ("expert", "batch"),
        "inner": (("batch",), "sharded"),
        "*": "sharded",
    },
    "gathered in two": {"up": ("expert", ("model", "batch")), "down": (("model", "expert"), "batch"), "*": "home"},
    "gathered and copied": {"up": (("batch", "model"), "replicated"), "down": (("batch",), "replicated"), "*": "home"},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", [needs(FLAT), needs(CUBE, long), needs(WIDE, long), needs(THIN, long)])
@pytest.mark.parametrize("layout", SPELLINGS.values(), ids=SPELLINGS)
def test_every_spelling(layout: dict[str, Any], mesh: dict[str, int]):
    """Widths that do not divide, uneven rows, fewer rows than devices."""
    assert_law(perceptron, layout, mesh, [tf.constant(numbers(count, WIDTH)) for count in (5, 1)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("mesh", [needs(CUBE), needs(WIDE, long)])
@pytest.mark.parametrize("layout", WITH_ROWS.values(), ids=WITH_ROWS)
def test_with_the_batchs_axis(layout: dict[str, Any], mesh: dict[str, int]):
    assert_law(perceptron, layout, mesh, [tf.constant(numbers(count, WIDTH)) for count in (5, 1)])


def experts(count: int) -> Made:
    """A transformer block whose perceptron is one of several experts, with its embedding tied to the last layer."""
    table, gate = variable("table", VOCABULARY, WIDTH), variable("gate", WIDTH, count)
    q, k, v = (variable(name, WIDTH, 3, HEAD, seed=seed) for seed, name in enumerate("qkv"))
    o, scale = variable("o", 3, HEAD, WIDTH), variable("scale", WIDTH)
    up, down = variable("experts/up", count, WIDTH, HIDDEN), variable("experts/down", count, HIDDEN, WIDTH)
    variables = [table, gate, q, k, v, o, scale, up, down]

    def step(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            x = tf.gather(table, ids)
            queries, keys, values = (tf.einsum("btd,dhe->bhte", x * scale, own) for own in (q, k, v))
            weights = tf.nn.softmax(tf.einsum("bhte,bhse->bhts", queries, keys) / 2.0)
            x += tf.einsum("bhte,hed->btd", tf.einsum("bhts,bhse->bhte", weights, values), o)
            hidden = tf.nn.gelu(tf.einsum("btd,xdf->btxf", x, up))
            chosen = tf.nn.softmax(x @ gate)[..., None]
            x += tf.reduce_sum(tf.einsum("btxf,xfd->btxd", hidden, down) * chosen, 2)
            logits = tf.einsum("btd,vd->btv", x, table)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids, logits))
        return loss, sgd(variables, loss, tape)

    return variables, step


HEADS = {"q": (None, "model"), "k": (None, "model"), "v": (None, "model"), "o": ("model",)}
EXPERTS: dict[str, dict[str, Any]] = {
    "experts": {**HEADS, "experts/*": ("expert",), "gate": (None, "expert"), "*": "home"},
    "experts in two dimensions": {
        **HEADS,
        "experts/up": ("expert", None, "model"),
        "experts/down": ("expert", "model"),
        "table": (("model", "expert"),),
        "*": "home",
    },
    "all": {
        **{name: (own, "sharded") for name, own in HEADS.items()},
        "experts/*": (("expert",), "sharded"),
        "table": (("model",), "sharded"),
        "*": "sharded",
    },
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("layout", EXPERTS.values(), ids=EXPERTS)
def test_a_transformer_with_experts(layout: dict[str, Any], mesh: dict[str, int]):
    """Three heads over two devices, five experts over three, ZeRO inside; each axis moves what only it is cut along."""
    parallel = assert_law(lambda: experts(5), layout, mesh, [ids_of(5)])
    plan, size = parallel.plan(ids_of(5)), 5 * LENGTH * WIDTH * 8
    sends = traffic(plan).by_kind
    assert not plan.state.gathered
    assert all(sends[along(axis)] >= size for axis in ("model", "expert"))
    assert all(f"along {axis!r}: " in str(plan) for axis in ("model", "expert"))
    if layout is EXPERTS["experts"]:  # (no dimension is cut along both)
        for axis, other in (("model", "expert"), ("expert", "model")):
            alone = {name: own if other not in str(own) else "home" for name, own in layout.items()}
            own, step = experts(5)
            only = {name: count for name, count in mesh.items() if name != other}
            gs.set_variable_layout(own, alone, devices_of(only), mesh=only)
            without = traffic(gs.parallelize(step, mesh=only, devices=devices_of(only)).plan(ids_of(5))).by_kind
            assert sends[along(axis)] <= mesh[other] * without[along(axis)]  # no device sends more


@pytest.mark.parametrize("mesh", [needs(CUBE)])
def test_what_each_device_has(mesh: dict[str, int]):
    own, grid = variable("w", 6, 5), devices_of(mesh)

    def lies(layout: Any) -> dict[str, tuple[int, ...]]:
        gs.set_variable_layout(own, layout, grid, mesh=mesh)
        parts = parts_of_variable(own)
        assert parts is not None
        assert parts.layout == layout
        np.testing.assert_array_equal(own.numpy(), numbers(6, 5))
        own.assign_add(tf.zeros_like(own))  # put together, and apart again
        parts.take_apart()
        np.testing.assert_array_equal(own.numpy(), numbers(6, 5))
        return boxes(own)

    names = [f"CPU:{d}" for d in range(8)]
    assert lies((None, "expert")) == {"CPU:0": (6, 3), "CPU:1": (6, 2)}
    assert lies((None, "model")) == {"CPU:0": (6, 3), "CPU:2": (6, 2)}
    assert lies(("expert", "model")) == {"CPU:0": (3, 3), "CPU:1": (3, 3), "CPU:2": (3, 2), "CPU:3": (3, 2)}
    assert lies((("model", "expert"), None)) == {"CPU:0": (2, 5), "CPU:1": (1, 5), "CPU:2": (2, 5), "CPU:3": (1, 5)}
    assert lies(((None, "expert"), "replicated")) == dict(zip(names, [(6, 3), (6, 2)] * 4, strict=True))
    assert lies(("batch", "model")) == {"CPU:0": (3, 3), "CPU:4": (3, 3), "CPU:2": (3, 2), "CPU:6": (3, 2)}
    assert lies((("batch", "model"), "sharded")) == {
        **dict.fromkeys(["CPU:0", "CPU:4", "CPU:1", "CPU:5"], (2, 3)),
        **dict.fromkeys(["CPU:2", "CPU:6", "CPU:3", "CPU:7"], (2, 2)),
    } | {"CPU:5": (1, 3), "CPU:7": (1, 2), "CPU:1": (2, 3), "CPU:3": (2, 2), "CPU:4": (1, 3), "CPU:6": (1, 2)}


@pytest.mark.parametrize("mesh", [needs(CUBE)])
def test_state_is_divided(mesh: dict[str, int]):
    """Each of eight devices holds an eighth of a matrix that is cut along two axes and shared out along the third."""
    up, down = variable("up", 64, 96), variable("down", 96, 64)
    layout = {"up": (("expert", "model"), "sharded"), "down": (("model",), "sharded")}
    gs.set_variable_layout([up, down], layout, devices_of(mesh), mesh=mesh)
    held = bytes_of([up, down])
    assert len(held) == 8
    assert set(held.values()) == {2 * 64 * 96 * 8 // 8}


def test_micro_batches():
    layout = {"up": ("expert", "model"), "down": ("model",), "*": "home"}
    assert_law(perceptron, layout, FLAT, [tf.constant(numbers(5, WIDTH))], micro_batches=2)


@pytest.mark.parametrize("mesh", [needs(FLAT), needs(CUBE)])
def test_any_number_of_rows_in_one_graph(mesh: dict[str, int]):
    layout = {"up": ("expert", "model"), "down": ("model",), "*": "home"}
    batches = [tf.constant(numbers(count, WIDTH)) for count in (5, 1, 8)]
    parallel = assert_law(perceptron, layout, mesh, batches, tuning={"reduce_retracing": True})
    assert len({id(parallel.plan(batch)) for batch in batches[1:]}) == 1


@pytest.mark.parametrize("mesh", [needs(FLAT), needs(CUBE)])
def test_gradients_from_outside(mesh: dict[str, int]):
    layout = {
        "up": ("expert", "model"),
        "down": (("model",), "replicated"),
        "inner": (("expert",), "sharded"),
        "*": "home",
    }
    assert_gradients_from_outside(layout, mesh)


@pytest.mark.parametrize("mesh", [needs(FLAT), needs(CUBE, long)])
def test_xla_compiles_what_is_in_columns(mesh: dict[str, int]):
    layout, batch = {"up": ("expert", "model"), "down": ("model",), "*": "home"}, tf.constant(numbers(5, WIDTH))
    parallel = assert_law(perceptron, layout, mesh, [batch], jit_compile=True)
    [found] = re.findall(r"compiled by XLA between moves: (\d+) of (\d+) operations", str(parallel.plan(batch)))
    assert found[0] == found[1]
    assert len(compiled_calls(parallel, batch)) == len(devices_of(mesh))


def turning() -> Made:
    """A loop and a branch on activations that are cut along one axis, with weights that are cut along another."""
    weight, other, inside = (
        variable("weight", WIDTH, HIDDEN),
        variable("other", HIDDEN, WIDTH),
        variable("inside", WIDTH),
    )

    def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            h = x * inside
            for_all = lambda i, h: (i + 1, tf.tanh(h @ weight) @ other + h)  # noqa: E731
            _, h = tf.while_loop(lambda i, _: i < 3, for_all, (0, h))
            h = tf.cond(tf.reduce_sum(x) > 0.0, lambda: tf.tanh(h @ weight), lambda: 2.0 * (h @ weight))
            loss = tf.reduce_mean((h @ other) ** 2)
        return loss, sgd([weight, other, inside], loss, tape)

    return [weight, other, inside], step


@pytest.mark.parametrize("mesh", [needs(FLAT), needs(CUBE, long)])
def test_loops_and_branches(mesh: dict[str, int]):
    layout = {"weight": ("expert", "model"), "other": ("model", "expert"), "inside": ("expert",)}
    assert_law(turning, layout, mesh, [tf.constant(numbers(5, WIDTH))])


@pytest.mark.parametrize("mesh", [needs(FLAT), needs(CUBE, long)])
def test_what_is_asked_of_activations(mesh: dict[str, int]):
    """`with_layout` along two axes, of which no variable lies along one."""

    def asking() -> Made:
        (up, down, *biases), _ = perceptron()

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                h = gs.with_layout(tf.nn.relu(x @ up + biases[0]), (None, "model"))
                h = tf.tanh(gs.with_layout(h, ("expert", "model")))
                loss = tf.reduce_mean((h @ down + biases[1]) ** 2)
            return loss, sgd([up, down, *biases], loss, tape)

        return [up, down, *biases], step

    parallel = assert_law(asking, {"up": (None, "model"), "*": "home"}, mesh, [tf.constant(numbers(5, WIDTH))])
    plan = parallel.plan(tf.constant(numbers(5, WIDTH)))
    shapes = {op.out_shapes[0] for op in (*plan.sharded_ops, *plan.ops_once) if op.type == "Tanh"}
    assert shapes == {(3, 8), (3, 7), (2, 8), (2, 7)}


def recurrent() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((LENGTH, 7)),
            layers.LSTM(5, return_sequences=True, name="lstm"),
            layers.Dropout(0.3, seed=7),
            layers.BatchNormalization(name="norm"),
            layers.Dense(11, "tanh", name="up"),
            layers.Dropout(0.2, seed=8),
            layers.GlobalAveragePooling1D(),
            layers.Dense(3, name="last"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=0.5), "mse")
    return model


def convolutional() -> keras.Model:
    keras.utils.set_random_seed(3)
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((6, 7, 3)),
            layers.Conv2D(5, 3, activation="relu", name="one"),
            layers.BatchNormalization(name="norm"),
            layers.Conv2D(7, 3, activation="relu", name="two"),
            layers.Flatten(),
            layers.Dense(3, name="last"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=0.5), "mse")
    return model


MODELS: dict[str, tuple[Callable[[], keras.Model], tuple[int, ...], dict[str, Any]]] = {
    "recurrent": (
        recurrent,
        (LENGTH, 7),
        {
            "lstm/lstm_cell/*kernel": ("expert", gs.cut("model", blocks=4)),
            "lstm/lstm_cell/bias": (gs.cut("model", blocks=4),),
            "norm/*": (("expert",), "replicated"),
            "up/kernel": (None, ("model", "expert")),
            "up/bias": ("expert",),
            "last/kernel": (("model",), "sharded"),
            "*": "home",
        },
    ),
    "convolutional": (
        convolutional,
        (6, 7, 3),
        {
            "one/kernel": (None, None, None, "model"),
            "norm/*": ("model",),
            "two/kernel": (None, None, "model", "expert"),
            "two/bias": (("expert",), "sharded"),
            "last/kernel": ("expert", "model"),
            "*": "sharded",
        },
    ),
}


@pytest.mark.long
@pytest.mark.usefixtures("float64", "plain_oracle")
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, *own.values, marks=own.marks, id=f"{name}-{own.id}")
        for name, own in [
            ("convolutional", needs(FLAT)),
            ("recurrent", needs(CUBE, long)),
            ("recurrent", needs(FLAT, long)),
            ("convolutional", needs(CUBE, long)),
            ("recurrent", needs(WIDE, long)),
            ("convolutional", needs(WIDE, long)),
        ]
    ],
)
def test_a_keras_model(name: str, mesh: dict[str, int], tmp_path: Path):
    """Adam with clipping by the norm of all gradients; a checkpoint of one mesh is read on others."""
    make, shape, layout = MODELS[name]
    x, y = numbers(12, *shape), numbers(12, 3)
    found, templates = [], []
    for own in (None, mesh):
        template = make()
        model = template if own is None else gs.multi_gpu_model(template, mesh=own, variables=layout)
        history = model.fit(x, y, batch_size=5, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append([history, model.predict(x[:5], verbose=0), *[v.numpy() for v in template.optimizer.variables]])
        found[-1] += template.get_weights()
        templates.append(template)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-10)
    laid = Counter(parts_of_variable(v.value) is not None for v in templates[1].optimizer.variables)
    assert laid[True] > 6
    path = tf.train.Checkpoint(model=templates[1]).write(str(tmp_path / "checkpoint"))
    for own in (None, {"expert": 2, "model": 2}):
        again = make()
        again.optimizer.build(again.trainable_variables)
        if own is not None:
            gs.set_variable_layout(again, layout, mesh=own)
        tf.train.Checkpoint(model=again).read(path).assert_consumed()
        for one, other in zip(again.get_weights(), templates[0].get_weights(), strict=True):
            np.testing.assert_allclose(one, other, 1e-9, 1e-10)
        assert own is None or parts_of_variable(again.get_layer("last").kernel.value) is not None


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ({"one": (("model", "expert"),)}, "one: dimension 0 has 1 entries in a part, and 'expert' has 2 devices"),
        ({"inner": ("expert", "model")}, "has 2 dimensions, the variable 1"),
        ({"up": (("expert", "model"), "sharded")}, "the dimensions name all axes of mesh (model=2, expert=2)"),
        ({"up": ("expert", ("model", "expert"))}, "names axis 'expert' twice"),
    ],
)
def test_what_cannot_be_meant(layout: dict[str, Any], expected: str):
    own = [*perceptron()[0], variable("one", 3)]
    assert expected in message(
        gs.errors.ArgumentError, lambda: gs.set_variable_layout(own, layout, devices_of(FLAT), mesh=FLAT)
    )


def test_a_function_on_another_mesh():
    """The same axes in another order, or one of them alone."""
    own, step = perceptron()
    gs.set_variable_layout(own, {"up": ("expert", "model"), "*": "home"}, devices_of(FLAT), mesh=FLAT)
    for mesh in ({"expert": 2, "model": 2}, {"model": 2}, {"model": 2, "experts": 2}):
        call = functools.partial(gs.parallelize(step, mesh=mesh), numbers(5, WIDTH))
        assert "cut along an axis of another mesh" in message(gs.errors.ArgumentError, call)
