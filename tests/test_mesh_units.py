"""Dimensions that are made of units: heads merged with their width, fused queries, keys and values, gate and up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.axes import units
from graphsplit.axes.units import UnitSearch
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.mesh_cases import Made, assert_law, devices_of, message, numbers, sgd, variable
from tests.helpers.mesh_units import ALIKE, FUSED, HEADS, HIDDEN, LENGTH, MERGED, SIZE, WIDTH, block, by_name, trained

ACTIVATIONS = LENGTH * WIDTH * 8  # bytes of a row
TWO = {"batch": 2, "model": 2}


APART = {**{f"{name}*": (None, HEADS) for name in "qkv"}, **ALIKE}


def along_model(plan: Any) -> str:
    return next(line for line in str(plan).splitlines() if "along 'model': " in line)


CASES = [
    pytest.param(4, 0, True, {"batch": 1, "model": 2}, marks=pytest.mark.long),
    pytest.param(4, 0, False, {"batch": 2, "model": 1}, marks=pytest.mark.long),
    pytest.param(3, 0, True, TWO),
    pytest.param(3, 0, False, {"batch": 3, "model": 2}, marks=[pytest.mark.long, pytest.mark.many]),
    pytest.param(4, 2, False, TWO, marks=pytest.mark.long),
    pytest.param(4, 2, False, {"batch": 1, "model": 4}, marks=pytest.mark.long),
    pytest.param(4, 1, False, {"batch": 1, "model": 2}, marks=pytest.mark.long),
    pytest.param(4, 1, False, {"model": 4}, marks=pytest.mark.long),
]


@pytest.mark.parametrize("is_told", [pytest.param(True, marks=pytest.mark.long), False], ids=["told", "found"])
@pytest.mark.parametrize(("heads", "shared", "fused", "mesh"), CASES, ids=str)
def test_a_block(heads: int, shared: int, fused: bool, mesh: dict[str, int], is_told: bool):
    """A training step, uneven rows, fewer rows than devices; nothing but sums of activations moves along the axis."""
    batches = [tf.constant(numbers(rows, LENGTH, WIDTH)) for rows in (5, 1)]
    layout = MERGED if fused else APART
    layout = layout if is_told else by_name(layout)
    parallel = assert_law(lambda: trained(heads, shared, fused), layout, mesh, batches)
    if mesh["model"] > 1:
        plan = parallel.plan(batches[0])
        assert not plan.state.gathered
        few_heads = shared and shared < mesh["model"]
        others = {0: "", 1: ", 2 reduces", 2: ", 2 all-gathers"}[shared if few_heads else 0]
        assert f"along 'model': 3 all-reduces{others}, " in along_model(
            plan
        )  # 2 forward, 1 backward: `x` has no gradient


OTHER_AXIS = {
    **{name: own for name, own in by_name(APART).items() if name[0] in "qkvo"},
    "gate_up*": (None, "expert"),
    "down*": ("expert",),
    "*": "home",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("mesh", "layout"),
    [({"model": 2, "expert": 2}, OTHER_AXIS), ({"stage": 2, "model": 2}, by_name(APART))],
    ids=["two axes", "stages"],
)
def test_units_beside_another_axis(mesh: dict[str, int], layout: dict[str, Any]):
    """Uneven heads along one axis, two blocks along the other; in stages, in the first and in the second one."""
    batch = tf.constant(numbers(3, LENGTH, WIDTH))
    parallel = assert_law(lambda: trained(3), layout, mesh, [batch])
    plan = parallel.plan(batch)
    assert not plan.state.gathered
    assert "units of 4" in str(plan)
    assert "2 blocks" in next(line for line in str(plan).splitlines() if "gate_up: [" in line)
    moves = [line for line in str(plan).splitlines() if line.startswith("  along '")]
    assert len(moves) >= len(mesh.keys() - {"stage"})
    assert not any("gather" in line for line in moves)  # sums of activations, and nothing else


@pytest.mark.parametrize(
    ("heads", "shared", "mesh"),
    [
        (6, 3, TWO),
        pytest.param(4, 2, {"model": 2}, marks=pytest.mark.long),
        pytest.param(8, 4, {"model": 3}, marks=pytest.mark.long),
        pytest.param(9, 3, {"batch": 2, "model": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_blocks_that_differ(heads: int, shared: int, mesh: dict[str, int], tmp_path: Path):
    """Fewer keys and values than queries in one dimension: queries lie with the keys that they meet."""
    cut = gs.cut("model", unit=SIZE, blocks=(heads, shared, shared))
    rest = {**ALIKE, "o*": (gs.cut("model", unit=SIZE * heads // shared),)}
    layout: dict[str, Any] = {"qkv*": (None, cut), "bias*": (cut,), **rest}
    batch = tf.constant(numbers(5, LENGTH, WIDTH))
    parallel = assert_law(lambda: trained(heads, shared, True), layout, mesh, [batch])
    plan = parallel.plan(batch)
    assert not plan.state.gathered
    assert "along 'model': 3 all-reduces, " in along_model(plan)
    assert f"units of 4; blocks of {heads}, {shared}, {shared}), computed in place" in str(plan)
    own, _ = block(heads, shared, True)
    value = own["qkv"].numpy()
    gs.set_variable_layout(own["qkv"], layout["qkv*"], devices_of(mesh), mesh=mesh)
    path = tf.train.Checkpoint(own=own["qkv"]).save(tmp_path / "own")
    plain = tf.Variable(tf.zeros_like(value))
    tf.train.Checkpoint(own=plain).restore(path)
    np.testing.assert_array_equal(plain.numpy(), value)  # a file of one device


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_told", [True, False], ids=["told", "found"])
@pytest.mark.parametrize(
    ("heads", "shared", "fused", "columns"),
    [(4, 0, True, 2), (3, 0, True, 2), (3, 0, False, 2), (4, 2, False, 2), (4, 2, False, 4), (4, 1, False, 4)],
)
def test_no_activation_is_gathered_forward(heads: int, shared: int, fused: bool, columns: int, is_told: bool):
    """Two sums over the columns, in TensorFlow's partition graphs too, and each device has its part of each weight."""
    mesh, x = {"batch": 1, "model": columns}, tf.constant(numbers(3, LENGTH, WIDTH))
    own, run = block(heads, shared, fused)
    expected = run(x)
    layout = {name: cut for name, cut in (MERGED if fused else APART).items() if name == "*" or name.strip("*") in own}
    layout = layout if is_told else by_name(layout)
    gs.set_variable_layout(own, layout, devices_of(mesh), mesh=mesh)
    parallel = gs.parallelize(run, mesh=mesh, devices=devices_of(mesh))
    np.testing.assert_allclose(parallel(x), expected, 1e-9, 1e-10)
    assert "along 'model': 1 all-reduce, 1 reduce, " in along_model(parallel.plan(x))  # (what is returned is reduced)
    ran = gs.placement(parallel, x, actual=True)
    sent = 4 * (columns - 1) * 3 * ACTIVATIONS  # `x` to the other columns, twice for the all-reduce, once for the other
    assert 0 <= sum(transfer.bytes for transfer in ran.transfers) - sent <= 64  # (integers of shapes)
    for name, weight in own.items():
        parts = parts_of_variable(weight)
        is_copied = name in "kv" and 0 < shared < columns
        assert sum(parts.bytes_on_devices().values()) == weight.shape.num_elements() * 8 * (columns if is_copied else 1)
        assert len({device for device, size in parts.bytes_on_devices().items() if size}) == columns


def test_each_part_has_its_units_of_every_block():
    own, mesh = variable("qkv", 2, 3 * 3 * SIZE), devices_of(TWO)
    gs.set_variable_layout(own, (None, FUSED), mesh, mesh=TWO)
    parts = parts_of_variable(own)
    np.testing.assert_array_equal(own.numpy(), numbers(2, 3 * 3 * SIZE))  # put together
    parts.take_apart()
    heads = numbers(2, 3 * 3 * SIZE).reshape(2, 3, 3, SIZE)
    for part, chosen in zip(parts._parts, (heads[:, :, :2], heads[:, :, 2:]), strict=True):
        np.testing.assert_array_equal(part.numpy(), chosen.reshape(2, -1))
    parts.take(tf.constant(heads[::-1].reshape(2, -1)))
    np.testing.assert_array_equal(own.numpy(), heads[::-1].reshape(2, -1))
    gs.set_variable_layout(own, ("batch", FUSED), mesh, mesh=TWO)
    assert ":, 0:8 12:20 24:32" not in str(gs.visualize_layout(own))
    assert "0:1, 0:8 12:20 24:32" in str(gs.visualize_layout(own))
    for layout in ((None, FUSED), ((None, FUSED), "replicated"), ("batch", FUSED), ((None, FUSED), "sharded")):
        gs.set_variable_layout(own, layout, mesh, mesh=TWO)
        assert parts_of_variable(own).layout == layout
        np.testing.assert_array_equal(own.numpy(), heads[::-1].reshape(2, -1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", [((None, FUSED), "replicated"), ((None, FUSED), "sharded"), ("batch", FUSED)])
def test_gradients_from_outside(layout: Any):
    found, x = [], tf.constant(numbers(5, LENGTH, WIDTH))
    for mesh in (None, TWO):
        own, run = block(3, fused=True)
        function: Callable[..., Any] = run
        if mesh is not None:
            gs.set_variable_layout(own, {**MERGED, "qkv*": layout}, devices_of(mesh), mesh=mesh)
            function = gs.parallelize(run, mesh=mesh, devices=devices_of(mesh))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) ** 2)
        found.append([loss, *tape.gradient(loss, list(own.values()))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-9)


@pytest.mark.long
def test_files_are_those_of_one_device(tmp_path: Path):
    def made() -> keras.Model:
        keras.utils.set_random_seed(3)
        layers = [keras.layers.Dense(2 * HIDDEN, name="gate_up"), keras.layers.Dense(WIDTH, name="down")]
        return keras.Sequential([keras.Input((WIDTH,)), *layers])

    layout = {
        "gate_up/kernel": (None, gs.cut("model", blocks=2)),
        "gate_up/bias": (gs.cut("model", blocks=2),),
        "*": "home",
    }
    x = numbers(7, WIDTH).astype(np.float32)
    found = []
    for mesh in (None, TWO):
        template = made()
        template.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2), "mse")
        model = template if mesh is None else gs.multi_gpu_model(template, mesh=mesh, variables=layout)
        model.fit(x, x, batch_size=5, epochs=2, shuffle=False, verbose=0)
        found.append(template)
    for one, other in zip(found[0].get_weights(), found[1].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-6)
    kernel = found[1].get_layer("gate_up").kernel.value
    slots = [v.value for v in found[1].optimizer.variables if v.shape == kernel.shape]
    assert [parts_of_variable(v).division for v in slots] == [parts_of_variable(kernel).division] * 2
    found[1].save_weights(tmp_path / "model.weights.h5")
    plain = made()
    plain.load_weights(tmp_path / "model.weights.h5")
    for one, other in zip(found[1].get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def lays(layout: Any) -> Callable[[], None]:
    own = variable("qkv", WIDTH, 3 * 4 * SIZE)
    return lambda: gs.set_variable_layout(own, layout, devices_of(TWO), mesh=TWO)


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lays((None, gs.cut("model", unit=5))),
            "qkv: dimension 1 has 48 entries, which are not units of 5; unit=4 divides them",
        ),
        (
            lays((None, gs.cut("model", unit=5, blocks=3))),
            "dimension 1 has 16 entries in each of 3 blocks, which are not units of 5; unit=4 divides them",
        ),
        (
            lays((None, gs.cut("model", blocks=5))),
            "has 48 entries, which are not 5 equal blocks; blocks=4 divides them",
        ),
        (
            lays((None, gs.cut("model", unit=4, blocks=(6, 2, 2)))),
            "dimension 1 has 48 entries, and blocks=(6, 2, 2) units of 4 are 40",
        ),
        (
            lays((None, gs.cut("model", unit=4, blocks=(10, 1, 1)))),
            "dimension 1 has blocks=(10, 1, 1), which are 1 group of units, and 'model' has 2 devices",
        ),
        (lambda: gs.cut("model", blocks=(4, 0)), "cut('model', blocks=0): blocks must be a number of at least 1"),
        (lays((None, gs.cut("modle", unit=4))), "has no axis 'modle'; it has 'batch', 'model'. Did you mean 'model'?"),
        (lays((None, gs.cut("batch", unit=4))), "has no units. Write 'batch'"),
        (lays((None, gs.cut("batch", unit=4, in_place=True))), "has no units. Write 'batch'"),
        (lays((gs.cut("model"), HEADS)), "names axis 'model' twice"),
        (lays((HEADS, "replicated")), "has no axis 'replicated'"),
        (lambda: gs.cut("model", unit=0), "cut('model', unit=0): unit must be a number of at least 1"),
        (lambda: gs.cut("model", blocks=1.5), "blocks=1.5): blocks must be a number of at least 1"),
    ],
)
def test_what_cannot_be_meant(call: Callable[[], Any], expected: str):
    assert expected in message(gs.errors.ArgumentError, call)


def attention_of_keras(heads: int, shared: int) -> keras.Model:
    keras.utils.set_random_seed(1)
    x = keras.Input((LENGTH, WIDTH))
    if shared:
        layer: Any = keras.layers.GroupQueryAttention(SIZE, heads, shared, name="attention")
    else:
        layer = keras.layers.MultiHeadAttention(heads, SIZE, name="attention")
    return keras.Model(x, layer(x, x))


@pytest.mark.long
@pytest.mark.parametrize(("heads", "shared", "columns"), [(4, 0, 2), (3, 0, 2), (4, 2, 2), (4, 2, 4), (4, 1, 2)])
def test_attention_of_keras(heads: int, shared: int, columns: int):
    cut, x = gs.cut("model"), numbers(7, LENGTH, WIDTH).astype(np.float32)
    layout = {"*query/kernel": (None, "model"), "*query/bias": ("model",), "*output/kernel": ("model",)}
    layout |= {
        f"*{name}/{kind}": (None, cut)[kind == "bias" :] for name in ("key", "value") for kind in ("kernel", "bias")
    }
    found = []
    for mesh in (None, {"batch": 4 // columns, "model": columns}):
        template = attention_of_keras(heads, shared)
        template.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2), "mse")
        model = template if mesh is None else gs.multi_gpu_model(template, mesh=mesh, variables={**layout, "*": "home"})
        model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append(template)
    for one, other in zip(found[0].get_weights(), found[1].get_weights(), strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-6)
    plan = gs.parallelize(lambda x: found[1](x), mesh=mesh).plan(x)
    assert "along 'model': 1 reduce, " in along_model(plan)
    assert str(plan).count("replicated along 'model'") == (4 if 0 < shared < columns else 0)


TAKEN_APART: dict[str, Callable[[tf.Tensor], list[tf.Tensor]]] = {
    "split": lambda x: [tf.reshape(own, (-1, LENGTH, 3, SIZE)) for own in tf.split(x, 3, -1)],
    "slices": lambda x: [tf.reshape(x[..., k * 12 : k * 12 + 12], (-1, LENGTH, 3, SIZE)) for k in range(3)],
    "unstacked": lambda x: tf.unstack(tf.reshape(x, (-1, LENGTH, 3, 3, SIZE)), axis=2),
    "indexed": lambda x: [tf.transpose(tf.reshape(x, (-1, LENGTH, 3, 3, SIZE)), (2, 0, 1, 3, 4))[k] for k in range(3)],
    "in each head": lambda x: tf.split(tf.reshape(x, (-1, LENGTH, 3, 3 * SIZE)), 3, -1),
}


@pytest.mark.long
@pytest.mark.parametrize(
    "how", ["split", *[pytest.param(own, marks=pytest.mark.long) for own in list(TAKEN_APART)[1:]]]
)
def test_units_are_found_however_products_are_taken_apart(how: str):
    """Forward, then in a step that clips by a norm; any number of rows in one graph; both axes cut the kernel."""

    def made() -> Made:
        qkv, bias, out = variable("qkv", WIDTH, 36), variable("bias", 36), variable("out", 12, WIDTH)

        def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                q, k, v = TAKEN_APART[how](x @ qkv + bias)
                weights = tf.nn.softmax(tf.einsum("bthe,bshe->bhts", q, k))
                y = tf.reshape(tf.einsum("bhts,bshe->bthe", weights, v), (-1, LENGTH, 12)) @ out
                loss = tf.reduce_mean((x - y) ** 2)
            return loss, sgd([qkv, bias, out], loss, tape)

        return [qkv, bias, out], step

    layout = {"qkv": ("batch", "model"), "bias": ("model",), "out": (("model",), "replicated")}
    batches = [tf.constant(numbers(rows, LENGTH, WIDTH)) for rows in (5, 1, 3)]
    parallel = assert_law(made, layout, TWO, batches, tuning={"reduce_retracing": True})
    text = str(parallel.plan(batches[0]))
    unit, blocks = (3 * SIZE, "") if how == "in each head" else (SIZE, "; 3 blocks")
    assert f"qkv: [-, model], 24 + 12 (units of {unit}{blocks}), computed in place" in text
    assert f"out: [model, -], 8 + 4 (units of {SIZE}), computed" in text


def merged() -> keras.Model:
    """Attention and SwiGLU as a layer with merged kernels."""
    keras.utils.set_random_seed(3)
    x = keras.Input((LENGTH, WIDTH))
    q, k, v = keras.ops.split(keras.layers.Dense(36, name="qkv")(x), 3, -1)
    heads = [keras.ops.reshape(own, (-1, LENGTH, 3, SIZE)) for own in (q, k, v)]
    weights = keras.ops.softmax(keras.ops.einsum("bthe,bshe->bhts", *heads[:2]))
    mixed = keras.ops.reshape(keras.ops.einsum("bhts,bshe->bthe", weights, heads[2]), (-1, LENGTH, 12))
    gate, up = keras.ops.split(
        keras.layers.Dense(2 * HIDDEN, name="gate_up")(keras.layers.Dense(WIDTH, name="out")(mixed)), 2, -1
    )
    return keras.Model(x, keras.layers.Dense(WIDTH, name="down")(keras.ops.silu(gate) * up))


KERAS = {
    "qkv/kernel": (None, "model"),
    "qkv/bias": ("model",),
    "out/kernel": ("model",),
    "gate_up/kernel": (None, "model"),
}
KERAS |= {"gate_up/bias": ("model",), "down/kernel": ("model",), "*": "home"}


@pytest.mark.long
def test_a_model_with_merged_kernels(tmp_path: Path):
    """Its units are found once, and the slots of an optimizer that comes later have them; predictions know them too."""
    found, x = [], numbers(7, LENGTH, WIDTH).astype(np.float32)
    for mesh in (None, TWO):
        template = merged()
        if mesh is not None:  # before anything is laid out
            function = tf.function(lambda x: template(x))  # noqa: B023
            options = {"machine": "8xH100-SXM5", "mesh": {"batch": 1, "model": 2}}
            prediction = gs.predict(function, tf.TensorSpec((8, LENGTH, WIDTH)), variables=KERAS, **options)
            sums = 4 * 8 * LENGTH * WIDTH * 4  # an all-reduce, a reduce, and the input
            assert 0 <= prediction.sent_bytes - sums <= 2 * 4 * WIDTH  # (biases)
        model = template if mesh is None else gs.multi_gpu_model(template, mesh=mesh, variables=KERAS)
        before = model.predict(x, verbose=0)
        kernel = template.get_layer("qkv").kernel.value
        division = getattr(parts_of_variable(kernel), "division", None)
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2), "mse")
        model.fit(x, x, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append((template, before, model.predict(x, verbose=0)))
        assert getattr(parts_of_variable(kernel), "division", None) == division
    pairs = [[*own.get_weights(), *predictions] for own, *predictions in found]
    for one, other in zip(*pairs, strict=True):
        np.testing.assert_allclose(one, other, 1e-4, 1e-5)
    assert (division.block, division.blocks, division.lengths) == (SIZE, 3, (24, 12))
    slots = [v.value for v in template.optimizer.variables if v.shape == kernel.shape and v.shape[0] != v.shape[1]]
    assert [parts_of_variable(v).division for v in slots] == [division] * 2
    template.save_weights(tmp_path / "model.weights.h5")
    plain = merged()
    plain.load_weights(tmp_path / "model.weights.h5")
    for one, other in zip(template.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_units_are_found_that_only_the_condition_of_a_loop_tells():
    def made() -> Made:
        wide = variable("wide", WIDTH, 3 * SIZE)

        def step(x: tf.Tensor) -> tf.Tensor:
            def goes_on(i: tf.Tensor, _: tf.Tensor) -> tf.Tensor:
                heads = tf.reshape(x @ wide, (-1, LENGTH, 3, SIZE))
                return tf.reduce_max(tf.reduce_sum(heads, 3)) > tf.cast(i, tf.float64) - 3.0

            return tf.while_loop(goes_on, lambda i, y: (i + 1, tf.tanh(y)), (0, x))[1]

        return [wide], step

    batch = tf.constant(numbers(5, LENGTH, WIDTH))
    parallel = assert_law(made, {"wide": (None, "model")}, TWO, [batch])
    assert "wide: [-, model], 8 + 4 (units of 4)" in str(parallel.plan(batch))


def test_functions_that_tell_other_units():
    """The first that is called counts; another one has the same numbers, and may gather."""
    (laid, _), (own, _) = trained(3), trained(3)
    kernel, mesh = laid[0], {"batch": 1, "model": 2}
    gs.set_variable_layout(kernel, (None, "model"), devices_of(mesh), mesh=mesh)
    x = tf.constant(numbers(3, WIDTH))
    for width in (SIZE, 2):
        functions = [
            lambda x, w=w, width=width: tf.reduce_max(tf.reshape(x @ w, (-1, 12 // width, width)), 2)
            for w in (own[0], kernel)
        ]
        parallel = gs.parallelize(functions[1], mesh=mesh, devices=devices_of(mesh))
        np.testing.assert_allclose(parallel(x), functions[0](x), 1e-9, 1e-10)
        assert parts_of_variable(kernel).division.block == SIZE


def test_the_search_looks_anew_only_where_it_found_something():
    """Heads of 3 do not fit units of 2 that were asked for. An operation is asked once for each of its operands."""
    told = [variable(f"told_{k}", WIDTH, 18 * (2 * k + 1)) for k in range(3)]
    plain = [variable(f"plain_{k}", WIDTH, 12) for k in range(6)]

    def run(x: tf.Tensor) -> list[tf.Tensor]:
        heads = [tf.reduce_max(tf.reshape(x @ own, (-1, own.shape[1] // 3, 3)), 2) for own in told]
        return [*heads, tf.add_n([x @ own for own in plain])]

    mesh, looked, x = {"model": 2}, list[Any](), tf.constant(numbers(3, WIDTH))
    layout = {"told*": (None, gs.cut("model", unit=2)), "plain*": (None, "model")}
    gs.set_variable_layout([*told, *plain], layout, devices_of(mesh), mesh=mesh)
    parallel, asked = gs.parallelize(run, mesh=mesh, devices=devices_of(mesh)), UnitSearch._asked
    with (
        mock.patch.object(UnitSearch, "_asked", lambda *given: looked.append(asked(*given)) or looked[-1]),
        mock.patch.object(units, "with_operand", mock.Mock(wraps=units.with_operand)) as asking,
    ):
        parallel.plan(x)
    assert [len(found) for found in looked] == [3]
    assert 6 <= asking.call_count < 6 * 5, "of the sum alone there are so many pairs"


JOINED: dict[str, Callable[..., tf.Tensor]] = {
    "kernels": lambda x, a, b: x @ tf.concat([a, b, b], 1),
    "products": lambda x, a, b: 2.0 * tf.concat([x @ a, x @ b, x @ b], -1),
    "one kernel": lambda x, a, b: tf.concat([x @ a, x @ b, tf.reverse(x @ b, [-1])], -1),
}


@pytest.mark.long
@pytest.mark.parametrize("how", ["kernels", *[pytest.param(own, marks=pytest.mark.long) for own in list(JOINED)[1:]]])
@pytest.mark.parametrize(("heads", "mesh"), [(3, TWO), (4, {"batch": 1, "model": 4})], ids=str)
def test_blocks_of_different_sizes(how: str, heads: int, mesh: dict[str, int]):
    """What is joined and split again has no units that could be told; the numbers are one device's."""

    def made() -> Made:
        a, b, out = variable("a", WIDTH, heads * SIZE), variable("b", WIDTH, SIZE), variable("out", heads * SIZE, WIDTH)

        def step(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.GradientTape() as tape:
                parts = tf.split(JOINED[how](x, a, b), [heads * SIZE, SIZE, SIZE], -1)
                q, k, v = (tf.reshape(own, (-1, LENGTH, own.shape[-1] // SIZE, SIZE)) for own in parts)
                weights = tf.nn.softmax(tf.einsum("bthe,bsge->bhts", q, k))
                y = tf.reshape(tf.einsum("bhts,bsge->bthe", weights, v), (-1, LENGTH, heads * SIZE)) @ out
                loss = tf.reduce_mean((x - y) ** 2)
            return loss, sgd([a, b, out], loss, tape)

        return [a, b, out], step

    layout = {"a": (None, "model"), "b": (None, "model"), "out": ("model",)}
    assert_law(made, layout, mesh, [tf.constant(numbers(rows, LENGTH, WIDTH)) for rows in (5, 1)])
