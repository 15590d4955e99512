"""The words for layouts: one is written everywhere, another is understood everywhere, and what is near is named."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable

X = tf.ones((5, 4))
MESH = {"batch": 2, "model": 2}


@pytest.mark.parametrize("word", ["replicated", "mirrored"])
def test_both_words_mean_the_same_everywhere(word):
    weights = [tf.Variable(tf.ones((4, 6)), name=name) for name in ("up", "down")]
    step = gs.parallelize(lambda x: x @ weights[0] + x @ weights[1], devices=2)
    for layout in (word, {"up": word, "*": "replicated"}):
        gs.set_variable_layout(weights, layout, devices=2)
        assert [parts_of_variable(own).layout for own in weights] == ["replicated"] * 2
    assert "  variables replicated: 2, on CPU:0, CPU:1" in str(step.plan(X))
    gs.set_variable_layout(weights, "home")
    gs.set_variable_layout(weights, ((None, "model"), word), mesh=MESH)
    assert parts_of_variable(weights[0]).layout == ((None, "model"), "replicated")
    with gs.variable_layout(word, devices=2):
        assert parts_of_variable(tf.Variable(lambda: tf.ones((4, 6)))).layout == "replicated"
    model = gs.multi_gpu_model(keras.Sequential([keras.Input((4,)), keras.layers.Dense(30)]), 2, variables=word)
    model.predict(np.ones((5, 4)), verbose=0)
    assert parts_of_variable(model.layers[0].kernel.value).layout == "replicated"
    asked = {"machine": "8xA100-SXM4-80GB", "devices": 2, "variables": word}
    assert gs.predict(lambda x: x @ tf.ones((4, 6)), X, **asked).layout == "replicated"
    with pytest.raises(gs.errors.ArgumentError, match=f"{word!r} is a layout; give the axis another name"):
        gs.parallelize(lambda x: x, mesh={word: 2})


def test_an_unknown_layout_names_what_is_near():
    weight = tf.Variable(tf.ones((4, 6)))
    known = "Layouts: 'home', 'replicated', 'sharded', 'host'."
    for layout in ("replicatd", {"*": "replicatd"}):
        with pytest.raises(gs.errors.ArgumentError) as raised:
            gs.set_variable_layout(weight, layout, devices=2)
        assert str(raised.value) == f"Unknown layout 'replicatd'. Did you mean 'replicated'? {known}"
    with pytest.raises(gs.errors.ArgumentError, match=r"Unknown layout 'zero'\. Layouts: "):
        gs.set_variable_layout(weight, "zero", devices=2)


@pytest.mark.parametrize(
    ("word", "layout"),
    [("fsdp", "'sharded'"), ("ZeRO-3", "'sharded'"), ("DDP", "'replicated'"), ("cpu_offload", "'host'")],
)
def test_a_word_of_the_field_says_which_layout_it_is(word: str, layout: str):
    with pytest.raises(gs.errors.ArgumentError) as raised:
        gs.set_variable_layout(tf.Variable(tf.ones((4, 6))), word, devices=2)
    assert str(raised.value).startswith(f"Unknown layout {word!r}. Here it is {layout}. Layouts: 'home', ")
    zero_1 = r"Here it is \{\"slots of \*\": \"sharded\", \"\*\": \"replicated\"\}\. Layouts"
    with pytest.raises(gs.errors.ArgumentError, match=zero_1):
        gs.set_variable_layout(tf.Variable(tf.ones((4, 6))), "zero1", devices=2)
