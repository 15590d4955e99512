"""`parallelize(variables=...)` with a layout, or layouts by patterns: set in the first call, for what has none yet."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.law import assert_close

ROWS, WIDE = 7, 12


class Step(tf.Module):
    """A training step with momentum, whose slots are made in the first call."""

    def __init__(self) -> None:
        super().__init__()
        values = np.random.default_rng(0)
        self.up = tf.Variable(values.normal(size=(WIDE, 40)), name="up")
        self.down = tf.Variable(values.normal(size=(40, 3)), name="down")
        self.slots: list[tf.Variable] = []

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        weights = [self.up, self.down]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.tanh(x @ self.up) @ self.down) ** 2)
        if not self.slots:
            with tf.init_scope():
                self.slots = [tf.Variable(tf.zeros(w.shape, w.dtype), name=f"{w.name[:-2]}/momentum") for w in weights]
        for weight, slot, gradient in zip(weights, self.slots, tape.gradient(loss, weights), strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        return loss


def batch(rows: int = ROWS) -> tf.Tensor:
    return tf.constant(np.random.default_rng(1).normal(size=(rows, WIDE)))


def layouts_of(step: Step) -> dict[str, Any]:
    return {v.name[:-2]: None if (p := parts_of_variable(v)) is None else p.layout for v in [*step.variables]}


BY_PATTERNS = {"up*": "replicated", "*": "sharded"}
CUT = {"up": (None, "model"), "down": ("model", None)}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("variables", "options", "expected"),
    [
        ("sharded", {"devices": 3}, {"up": "sharded", "down": "sharded", "up/momentum": "sharded"}),
        ("replicated", {"devices": 2}, {"up": "replicated", "down": "replicated", "down/momentum": "replicated"}),
        (BY_PATTERNS, {"devices": 3, "micro_batches": 2}, {"up": "replicated", "up/momentum": "replicated"}),
        (CUT, {"mesh": {"batch": 2, "model": 2}}, {"up": (None, "model"), "down/momentum": ("model", None)}),
        ("sharded", {"devices": 4, "stages": 2}, {"up": "sharded", "down": "sharded"}),
    ],
    ids=["sharded", "replicated", "patterns", "axes", "stages"],
)
def test_a_first_call_lays_them_out(
    variables: Any, options: Mapping[str, Any], expected: Mapping[str, Any], request: pytest.FixtureRequest
):
    plain, split = Step(), Step()
    parallel = gs.parallelize(split, variables=variables, **options)
    for _ in range(3):
        assert_close(parallel(batch()), plain(batch()))
    for own, other in zip(split.variables, plain.variables, strict=True):
        assert_close(tf.identity(own), tf.identity(other))
    assert expected.items() <= layouts_of(split).items()
    assert f"variables={variables!r}" in str(parallel.plan(batch()))
    parallel.plan(batch()).check()
    together = {"axes": 2, "stages": 2}.get(request.node.callspec.id, len(parallel.devices))
    assert len({device for v in split.variables for device in parts_of_variable(v).devices}) >= together


def test_what_has_a_layout_keeps_it():
    split = Step()
    gs.set_variable_layout(split.up, "replicated", devices=2)
    gs.set_variable_layout(split.down, "home")
    parallel = gs.parallelize(split, devices=2, variables="sharded")
    plain = Step()
    assert_close(parallel(batch()), plain(batch()))
    assert layouts_of(split)["up"] == "replicated"
    assert layouts_of(split)["down"] is None
    assert "variables that had a layout keep it" in str(parallel.plan(batch()))


def test_a_plan_and_a_prediction_say_where_they_would_be():
    split = Step()
    split(batch())
    parallel = gs.parallelize(split, devices=["GPU:0", "GPU:1"], variables="sharded")
    assert "variables='sharded'" in str(parallel.plan(batch()))
    assert layouts_of(split) == dict.fromkeys(layouts_of(split))  # (nothing moves)
    here = gs.parallelize(split, devices=2, variables="sharded")
    predicted = gs.predict(here, batch(), machine="8xA100-SXM4-40GB")
    home = gs.predict(gs.parallelize(split, devices=2), batch(), machine="8xA100-SXM4-40GB")
    assert str(predicted) != str(home)


def test_each_stage_of_a_mesh_has_its_variables_and_a_prediction_keeps_layouts():
    first, second = (tf.Variable(np.eye(WIDE), name=name) for name in ("first", "second"))

    mesh = {"stage": 2, "batch": 2}
    parallel = gs.parallelize(lambda x: tf.tanh(tf.tanh(x @ first) @ second), mesh=mesh, variables="sharded")
    before = {line for line in str(parallel.plan(batch())).splitlines() if "variables" in line}
    assert [parts_of_variable(v) for v in (first, second)] == [None, None]
    assert_close(parallel(batch()), tf.tanh(tf.tanh(batch())))
    assert {line for line in str(parallel.plan(batch())).splitlines() if "variables sharded" in line} <= before
    assert len({device for v in (first, second) for device in parts_of_variable(v).devices}) == 4
    gs.set_variable_layout([first, second], "home")
    at_home = gs.parallelize(lambda x: tf.tanh(x @ first), devices=2, variables="sharded")
    predicted = gs.predict(at_home, batch(), machine="8xA100-SXM4-40GB")
    assert predicted.step_s == gs.predict(at_home, batch(), machine="8xA100-SXM4-40GB", variables="home").step_s


def test_heads_stay_whole_from_the_first_call():
    weights = {name: tf.Variable(np.random.default_rng(3).normal(size=(WIDE, WIDE)), name=name) for name in "qko"}

    def attend(x: tf.Tensor) -> tf.Tensor:
        q, k = (tf.reshape(x @ weights[name], [-1, 5, 3, 4]) for name in "qk")
        scores = tf.nn.softmax(tf.einsum("btha,bsha->bhts", q, k))
        return tf.reshape(tf.einsum("bhts,bsha->btha", scores, k), [-1, 5, WIDE]) @ weights["o"]

    cut = {"q": (None, "model"), "k": (None, "model"), "o": ("model", None)}
    parallel = gs.parallelize(attend, mesh={"batch": 2, "model": 2}, variables=cut)
    x = tf.constant(np.random.default_rng(1).normal(size=(ROWS, 5, WIDE)))
    expected = attend(x)
    assert_close(parallel(x), expected)
    lines = [line for line in str(parallel.plan(x)).splitlines() if "computed in place" in line]
    assert len(lines) == 3
    assert all("8 + 4 (units of 4)" in line for line in lines)


def test_in_a_graph_it_says_what_to_do():
    split = Step()
    split(batch())
    parallel = gs.parallelize(split, devices=2, variables="sharded")
    with pytest.raises(gs.errors.UnsupportedError, match=r"variables='sharded' lays variables out in the first call"):
        tf.function(lambda x: parallel(x))(batch())
    parallel(batch())
    plain = Step()
    plain(batch())
    plain(batch())
    assert_close(tf.function(lambda x: parallel(x))(batch()), plain(batch()))


def test_a_pattern_that_fits_nothing():
    with pytest.raises(gs.errors.ArgumentError, match=r"No variable's name fits 'kernel\*'"):
        gs.parallelize(Step(), devices=2, variables={"kernel*": "sharded"})(batch())
