"""Slots lie where their variables lie, as the optimizer itself knows whose they are, whatever they are called."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.api.layouts.variable_layouts import slots_of, variables_of
from graphsplit.core import structures
from graphsplit.core.layouts import Cut
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.device_bytes import traffic
from graphsplit.planning.variables.updates import updated_together
from graphsplit.tracing.trace import captured_variables, trace_function
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import Optimizer, X, Y, adam, held_by_device, weights_and_slots

DEVICES = 3
SEVERAL = pytest.param(
    "several", 4, marks=pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="an older Keras")
)
SHAPES = ((90,), (90,), (90,), (900, 40), (200, 40), (90,))


def variables(keras_3: bool) -> list[Any]:
    """Return variables all of one name, several of one shape."""
    make = keras.Variable if keras_3 else tf.Variable
    return [make(np.ones(shape, np.float32), name="same") for shape in SHAPES]


def built(kind: str, own: list[Any]) -> Any:
    """Return an optimizer with slots for variables, in another order than theirs."""
    order = own[::-1]
    if kind == "legacy":
        optimizer = tf_keras.optimizers.legacy.Adam()
        optimizer._create_all_weights(order)
    elif kind == "tf_keras":
        optimizer = tf_keras.optimizers.Adam(amsgrad=True)
        optimizer.build(order)
    elif kind == "several":  # one for matrices, one for all else
        matrices, others = (keras.optimizers.Adam(amsgrad=True, use_ema=True) for _ in "ab")
        optimizer = keras.optimizers.MultiOptimizer(lambda v: matrices if len(v.shape) == 2 else others)
        optimizer.build(order)
    else:
        optimizer = keras.optimizers.Adam(amsgrad=True, use_ema=True)
        optimizer.build(order)
    return optimizer


def where(variable: Any) -> tuple[Any, tuple[str, ...]]:
    parts = parts_of_variable(variable)
    return (None, ()) if parts is None else (parts.division, parts.devices)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("first", ["together", "variables first"])
@pytest.mark.parametrize(("kind", "each"), [("keras", 4), SEVERAL, ("tf_keras", 3), ("legacy", 2)])
def test_slots_lie_with_their_variables(kind: str, each: int, first: str):
    own = variables(kind in ("keras", "several"))
    optimizer = built(kind, own)
    if first == "variables first":
        gs.set_variable_layout(own, "sharded", DEVICES)
    gs.set_variable_layout([own, optimizer], "sharded", DEVICES)
    everything = variables_of([own, optimizer])
    slots, plain = slots_of([own, optimizer], everything), variables_of(own)
    assert len(slots) == each * len(SHAPES)
    for variable in everything:
        if id(variable) in slots:
            assert slots[id(variable)].shape == variable.shape
            assert where(variable) == where(slots[id(variable)])
    assert {len(where(variable)[1]) for variable in plain} == {0, 1, DEVICES}  # where it was, on another device, cut


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("layout", "table", "slots"),
    [
        ({"table": "sharded"}, "sharded", "sharded"),
        ({"table": "sharded", "*": "home"}, "sharded", "sharded"),
        ({"adam*": "home", "table": "sharded"}, "sharded", None),
        ({"adam*": "sharded"}, None, "sharded"),
    ],
)
def test_slots_fit_what_their_variables_fit(layout: dict[str, str], table: str | None, slots: str | None):
    own = [tf.Variable(tf.ones((90, 8)), name=name) for name in ("table", "other")]
    optimizer = keras.optimizers.Adam(0.5)
    optimizer.build(own)
    gs.set_variable_layout([own, optimizer], layout, DEVICES)
    held = {id(v): getattr(parts_of_variable(v), "layout", None) for v in variables_of([own, optimizer])}
    found = slots_of([own, optimizer], variables_of([own, optimizer]))
    assert held[id(own[0])] == table
    assert [held[slot] for slot, head in found.items() if head is own[0]] == [slots] * 2
    others = {held[slot] for slot, head in found.items() if head is own[1]} | {held[id(own[1])]}
    assert others == ({None, "sharded"} if layout == {"adam*": "sharded"} else {None})

    @gs.parallelize(devices=DEVICES)
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((x @ own[0]) ** 2) + tf.reduce_sum(x @ own[1])
        optimizer.apply(tape.gradient(loss, own), own)
        return loss

    x = tf.random.stateless_normal((7, 90), (1, 2))
    assert gs.verify(step, x).passed
    prediction = gs.predict(step, x, machine="8xA100-SXM4-80GB", devices=DEVICES, variables=layout)
    state = [memory.state_bytes for device, memory in prediction.memory.items() if "GPU" in device]
    divided = 4 if layout == {"adam*": "sharded"} else (table is not None) + 2 * (slots is not None)
    assert state[1:] == [divided * 90 * 8 * 4 // DEVICES] * (DEVICES - 1)


def test_no_slots():
    variable = tf.Variable(tf.ones(90))
    assert slots_of([variable, {"a": keras.optimizers.SGD(0.1)}], [variable]) == {}


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_slots_made_in_a_block_lie_with_their_variables(library: Any):
    """The first variables of a block are cut where later ones of their size are not: slots do as theirs did."""
    with gs.variable_layout("sharded", DEVICES):
        widths = (90, 90, 900, 90, 300, 90, 90)
        layers = [
            layer for width in widths for layer in (library.layers.Dense(width), library.layers.BatchNormalization())
        ]
        model = library.Sequential([library.layers.Input((90,)), *layers])
        optimizer = library.optimizers.Adam(amsgrad=True)
        optimizer.build(model.trainable_variables)
    everything = variables_of([model, optimizer])
    slots = slots_of([model, optimizer], everything)
    assert len(slots) == 3 * len(model.trainable_variables)
    for slot in [variable for variable in everything if id(variable) in slots]:
        assert where(slot) == where(slots[id(slot)]), slot.name
    sizes = {len(where(variable)[1]) for variable in variables_of(model)}
    assert sizes == {0, 1, DEVICES}  # where it was, on another device, cut
    owned = dict.fromkeys(range(DEVICES), 0)
    for variable in everything:
        parts = parts_of_variable(variable)
        for device, size in ({} if parts is None else parts.bytes_on_devices()).items():
            owned[int(device[-1])] += size
    uncut = max(v.shape.num_elements() * 4 for v in everything if len(where(v)[1]) < DEVICES)
    assert max(owned.values()) <= sum(owned.values()) / DEVICES + 4 * uncut  # with its three slots


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["made in a block", "on a mesh", "tf_keras"])
def test_slots_made_later_lie_with_their_variables(kind: str):
    """The optimizer of a compiled model makes its slots in the first step of `fit`, after the layout of the model."""
    library = tf_keras if kind == "tf_keras" else keras
    mesh = {"batch": 2, "model": 2} if kind == "on a mesh" else None
    layout: Any = {"*embeddings": ("model",), "*kernel": (None, "model")} if mesh else "sharded"
    over: dict[str, Any] = {"mesh": mesh} if mesh else {"devices": DEVICES}
    x = np.random.default_rng(0).integers(0, 50, (23, 6))

    def trained(lay: bool) -> tuple[Any, Any, list[float]]:
        library.utils.set_random_seed(1)
        layers = library.layers
        made = gs.variable_layout(layout, **over) if lay and kind == "made in a block" else contextlib.nullcontext()
        with made:
            model = library.Sequential(
                [layers.Input((6,)), layers.Embedding(50, 20), layers.Flatten(), layers.Dense(40), layers.Dense(2)]
            )
        if lay and kind != "made in a block":
            gs.set_variable_layout(model, layout, **over)
        wrapped = gs.multi_gpu_model(model, None if mesh else DEVICES, mesh=mesh) if lay else model
        wrapped.compile(library.optimizers.Adam(0.01, use_ema=True), "mse")
        return model, wrapped, wrapped.fit(x, x[:, :2] / 50, 10, epochs=1, verbose=0).history["loss"]

    model, wrapped, losses = trained(True)
    np.testing.assert_allclose(losses, trained(False)[2], rtol=1e-5)
    everything = variables_of(model)
    slots = slots_of(model, everything)
    assert len(slots) == 3 * 5
    for variable in everything:
        if id(variable) in slots:
            assert where(variable) == where(slots[id(variable)]), variable.name
    own = [variable for variable in everything if id(variable) in slots]
    held, size = held_by_device(own), sum(4 * variable.shape.num_elements() for variable in own)
    assert sum(held.values()) == size
    assert max(held.values()) < 1.1 * size / len(held)
    assert len(held) == (2 if mesh else DEVICES)
    notes = wrapped.plan(x[:10], x[:10, :2] / 50).notes
    assert any("lie on the devices of the variables that are updated with them" in note for note in notes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_slots_of_ones_own_are_found_by_what_a_step_computes(layout: str):
    """They lie apart, as their names say nothing, until the first call; then with their variables, bytes balanced."""
    devices = 4
    (own, step), (plain, plain_step) = weights_and_slots("abc"), weights_and_slots("abc")
    every = [variable for group in own for variable in group]
    slots = [slot for _, *slots in own for slot in slots]
    gs.set_variable_layout([weight for weight, *_ in own], layout, devices)
    gs.set_variable_layout(slots, "sharded", devices)
    assert any(len({where(variable) for variable in group[1:]}) > 1 for group in own)
    parallel = gs.parallelize(step, devices=devices)
    x = tf.random.stateless_normal((5, 40), (1, 2))
    first = parallel.plan(x)
    assert any("lie on the devices of the variables that are updated with them" in note for note in first.notes)
    for _ in range(3):
        parallel(x)
        plain_step(x)
    for variable, expected in zip(every, [v for group in plain for v in group], strict=True):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), 1e-5, 1e-6)
    plan, size = parallel.plan(x), sum(4 * weight.shape.num_elements() for weight, *_ in own)
    assert not any("updated with them" in note for note in parallel.plan(x[:3]).notes)  # once
    for group in own:
        lie = {where(variable) for variable in (group if layout == "sharded" else group[1:])}
        assert len(lie) == 1
    held = dict.fromkeys(range(devices), 0)
    for slot in slots:
        parts = parts_of_variable(slot)
        owned = {slot.device: 4 * slot.shape.num_elements()} if parts is None else parts.bytes_on_devices()
        for device, count in owned.items():
            held[int(device[-1])] += count
    assert max(held.values()) <= sum(held.values()) / devices + 2 * 4 * 30 * 30
    _, sent, received = traffic(plan).busiest
    each = 2 if layout == "replicated" else 3  # weights that are gathered again for the backward pass
    assert max(sent, received) <= 1.25 * each * (devices - 1) / devices * size


def test_trainable_slots_made_after_the_layout_lie_with_their_weights():
    """Variables are trainable unless somebody says otherwise: what is multiplied, or added to rows, is the weight."""
    received = {}
    for laid in ("none", "weights", "all"):
        (own, plain), changes = (
            (Optimizer(adam), Optimizer(adam)),
            {"none": (), "all": "variables", "weights": "weights"},
        )
        if changes[laid]:
            gs.set_variable_layout(getattr(own, changes[laid]), "sharded", DEVICES)
        parallel = gs.parallelize(own.step, devices=DEVICES)
        for _ in range(2):
            assert_close(parallel(X, Y), plain.step(X, Y))
        for variable, expected in zip(own.variables, plain.variables, strict=True):
            np.testing.assert_allclose(variable, expected, 1e-4, 1e-5)
        received[laid] = traffic(parallel.plan(X, Y)).busiest[2]
        alike = [
            {where(variable) for variable in (weight, *slots)}
            for weight, slots in zip(own.weights, own.slots, strict=True)
        ]
        assert all(len(group) == 1 for group in alike)
    assert received["weights"] == received["all"] < 0.7 * received["none"]


def test_updates_that_go_entry_by_entry():
    a, b, c, d, e = (tf.Variable(tf.ones((20, 20)), name=name) for name in "abcde")
    count = tf.Variable(1.0)

    def step(x: tf.Tensor, more: tf.Tensor) -> None:
        a.assign_sub(tf.matmul(x, b, transpose_a=True) * count)  # a product: no update of b
        c.assign(tf.cond(more[0, 0] > 0, lambda: c + d, lambda: c - 1.0))
        tf.cond(more[0, 0] > 0, lambda: e.assign(tf.sqrt(a)), lambda: e + 0.0)
        count.assign_add(tf.reduce_sum(b))

    x = tf.ones((20, 20))
    _, call = structures.flatten(((x, x), {}))
    trace = trace_function(step, call, ["x", "more"]).read(["x", "more"], [(20, 20), (20, 20)])
    names = {i: "abcde".find(variable.name[0]) for i, variable in captured_variables(trace).items()}
    found = updated_together(trace.program, names)
    assert sorted(map(sorted, found)) == [[0, 4], [2, 3]]


class TwoOptimizers(keras.Model):
    """Trains each of its layers by an optimizer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.both = [keras.layers.Dense(64), keras.layers.Dense(33)]

    def call(self, x: Any) -> Any:
        return self.both[1](self.both[0](x))

    def compile(self, optimizers: Any, **options: Any) -> None:
        super().compile(**options)
        self.optimizers = optimizers

    def train_step(self, data: Any) -> dict[str, Any]:
        weights = [layer.trainable_variables for layer in self.both]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(data[0]) - data[1]) ** 2)
        for optimizer, gradients, own in zip(self.optimizers, tape.gradient(loss, weights), weights, strict=True):
            optimizer.apply(gradients, own)
        return {"loss": loss}


def trained_by_two(variables: dict[str, str] | None, *names: str) -> tuple[list[float], list[str]]:
    """Return the losses, and the names of the optimizers whose slots are cut."""
    keras.utils.set_random_seed(1)
    x, model = np.random.default_rng(0).normal(size=(33, 20)).astype(np.float32), TwoOptimizers()
    model(x)
    model = model if variables is None else gs.multi_gpu_model(model, DEVICES, variables=variables)
    model.compile([keras.optimizers.Adam(0.1, name=name) for name in names])
    losses = model.fit(x, x[:, :1] + np.ones(33, np.float32), batch_size=16, epochs=2, verbose=0).history["loss"]
    slots = {own.name: [v.value for v in own.variables if len(v.shape) == 2] for own in model.optimizers}
    return losses, [name for name, own in slots.items() if all(isinstance(where(v)[0], Cut) for v in own)]


@pytest.mark.long
@pytest.mark.parametrize(("pattern", "expected"), [("adam*", ["adam", "adam_1"]), ("adam_1/*", ["adam_1"])])
def test_a_pattern_names_one_of_two_optimizers_or_both(pattern: str, expected: list[str]):
    losses, in_parts = trained_by_two({pattern: "sharded"}, "adam", "adam_1")
    np.testing.assert_allclose(losses, trained_by_two(None, "adam", "adam_1")[0], rtol=1e-5)
    assert in_parts == expected


def test_a_pattern_of_another_optimizers_name_says_which_is_near():
    with pytest.raises(gs.errors.ArgumentError, match=r"Similar to 'adam/\*': .*'adam_1/\*'"):
        trained_by_two({"adam/*": "sharded"}, "adam_1", "adam_2")


def test_slots_that_keras_makes_elsewhere_than_their_copies_stay():
    keras.utils.set_random_seed(1)
    with tf.device("CPU:1"):
        template = keras.Sequential([keras.Input((5,)), keras.layers.Dense(3)])
    gs.set_variable_layout(template, "replicated", devices=["CPU:1", "CPU:2"])
    model = gs.multi_gpu_model(template, ["CPU:1", "CPU:2"])
    model.compile(keras.optimizers.Adam(0.1), "mse")
    x = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    losses = model.fit(x, x[:, :3], batch_size=7, epochs=2, verbose=0).history["loss"]
    assert losses[1] < losses[0]
