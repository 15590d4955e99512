"""Slots lie where their variables lie, as the optimizer itself knows whose they are, whatever they are called."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.api.layouts.layout_targets import slots_of, variables_of
from graphsplit.core.variables.parted_variables import parts_of_variable

DEVICES = 3
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
    else:
        optimizer = keras.optimizers.Adam(amsgrad=True, use_ema=True)
        optimizer.build(order)
    return optimizer


def where(variable: Any) -> tuple[Any, tuple[str, ...]]:
    parts = parts_of_variable(variable)
    return (None, ()) if parts is None else (parts.division, parts.devices)


@pytest.mark.parametrize("first", ["together", "variables first"])
@pytest.mark.parametrize(("kind", "each"), [("keras", 4), ("tf_keras", 3), ("legacy", 2)])
def test_slots_lie_with_their_variables(kind: str, each: int, first: str):
    own = variables(kind == "keras")
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
    prediction = gs.predict(step, x, machine="8xA100-SXM4-80GB", devices=DEVICES, layout=layout)
    state = [memory.state_bytes for memory in prediction.memory.values()]
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
