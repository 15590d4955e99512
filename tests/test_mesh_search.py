"""The search for meshes and layouts beside an exhaustive one, and at the shapes of a large block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks import mesh_search
from benchmarks.mesh_search import Block, blocks, compare, machines, question_of, training
from graphsplit.api.layouts.variable_layouts import wanted_layouts
from graphsplit.axes.units import Partners
from graphsplit.core.device_mesh import MeshAxes
from graphsplit.core.patterns import fits
from graphsplit.planning.mesh import mesh_of
from graphsplit.simulate.calls import predicted_call
from graphsplit.simulate.search import mesh_layouts
from graphsplit.simulate.search.candidates import Candidate, meshes_of
from graphsplit.simulate.search.chosen_plans import choose, variables_to_cut
from graphsplit.simulate.search.mesh_layouts import AxisTime, AxisTimes, MeshLayouts, Variable, patterns


@pytest.mark.parametrize("number", [0, *[pytest.param(k, marks=pytest.mark.long) for k in (1, 2, 3, 6)]])
def test_about_as_good_as_an_exhaustive_search(number: int):
    """`python -m benchmarks.mesh_search` compares twenty; the first four are one of each kind."""
    [block] = blocks(1, number)
    assert block.kind.split()[1].strip(",") == ["perceptron", "gated", "chain", "attention"][number % 4]
    for name, found, found_s, best, best_s, count in compare(block, machines()[:: 1 if number else 2]):
        assert found_s <= 1.02 * best_s, (name, str(found), str(best))
        assert count > 20


CUBE = MeshAxes((("batch", 2), ("model", 2), ("expert", 2)))


def test_along_all_axes_together():
    """Each large variable of a perceptron, where that is the fastest, and it is said."""
    [block] = blocks(1, 0)
    call = predicted_call(block.step, [block.x], {})
    make_plan = lambda names, own: call.plan(names, own.layouts, **own.options)  # noqa: E731
    choice = choose(question_of(call, block, machines()[0], make_plan, CUBE))
    both = ("model", "expert")
    assert choice.chosen.layouts == {"block/up": (None, both), "block/down": (both,), "*": "home"}
    assert {own.axes for own in choice.looked} >= {both, ("model",), ("expert",)}
    assert choice.why.startswith("along 'model' and 'expert' about ")


@pytest.mark.long
@pytest.mark.parametrize("number", [0, 1, 3])
def test_several_axes(number: int):
    """Along all of them or one, whichever is faster."""
    [block] = blocks(1, number)
    [(_, found, found_s, best, best_s, count)] = compare(block, machines()[:1], CUBE)
    assert found_s <= 1.05 * best_s, (str(found), str(best))
    assert found.mesh == CUBE
    assert found.axes
    assert count > 20


@pytest.mark.long
def test_a_block_of_70b():
    """Heads, columns and then rows, as in Megatron-LM; what is behind the heads, by what is faster."""
    _, _, plan = mesh_search.large()
    [note] = [note for note in plan.notes if note.startswith("chosen automatically: 8 devices, mesh (model=8), ")]
    lines = [line.strip().partition("]")[0] for line in str(plan).splitlines()]
    assert {f"block/{own}: [-, model" for own in ("query", "key", "value", "gate", "up")} <= set(lines)
    assert "block/down: [model, -" in lines
    assert "gathered before it is used" not in str(plan)
    why = next(note for note in plan.notes if note.startswith("along 'model' about "))
    assert "with none cut" in why
    step, x = mesh_search.large_block()
    layout = {f"block/{own}": (None, "model") for own in ("query", "key", "value", "gate", "up")}
    layout |= {"block/output": ("model",), "block/down": ("model",)}
    megatron = gs.predict(step, x, machine="8xH100-SXM5", mesh={"model": 8}, variables={**layout, "*": "home"})
    seconds = float(note.rpartition(" ms, ")[0].rpartition(": ")[2]) / 1e3
    assert seconds <= 1.001 * megatron.step_s


def layouts_of(step: Callable[[tf.Tensor], Any], x: tf.TensorSpec, rows: int = 2, columns: int = 2) -> MeshLayouts:
    traced, machine = predicted_call(step, [x], {}).trace, machines()[2]
    mesh = mesh_of([""] * rows, int(x.shape[0]))
    return MeshLayouts(traced.program, variables_to_cut(traced), machine, "model", columns, mesh)


def uncut(found: MeshLayouts) -> AxisTime:
    return next(laid.time for laid in found.found() if not laid.along)


def test_sums_along_the_batch_are_those_of_gradients():
    """A variable with two slots has one gradient, and a table that is only looked up has none."""
    kernel, table = (tf.Variable(tf.ones((64, 64)), name=name) for name in ("kernel", "table"))
    slots = [tf.Variable(tf.zeros((64, 64)), name=f"kernel_{slot}", trainable=False) for slot in "mv"]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((tf.gather(table, tf.range(4)) + x) @ kernel)
        gradient = tape.gradient(loss, kernel)
        for slot in slots:
            slot.assign(0.9 * slot + gradient)
        kernel.assign_sub(slots[0] / (1.0 + slots[1]))
        return loss

    layouts = layouts_of(step, tf.TensorSpec((4, 64)))
    assert {own.name: (own.bytes, own.slot_bytes) for own in layouts.variables} == {
        "kernel": (2**14, 2**15),
        "table": (2**14, 0),
    }
    assert uncut(layouts).sending_s == pytest.approx(2**14 / layouts.machine.link.bytes_per_s)


def test_the_row_of_the_mesh_that_has_most_tells_how_long_it_takes():
    """Of five rows of the batch over two of the mesh one has three, as of six."""
    kernel = tf.Variable(tf.ones((4, 4)), name="kernel")
    five, six = (
        uncut(layouts_of(lambda x: tf.tanh(x) @ kernel, tf.TensorSpec((rows, 2**18, 4)))).computing_s for rows in (5, 6)
    )
    assert five == pytest.approx(six, rel=0.01)


def test_equal_work_in_another_precision_takes_another_time(monkeypatch: pytest.MonkeyPatch):
    [fast, *_] = machines()
    peaks = {"float32": 1e12, "float64": 1e9}
    slow = replace(fast, device=replace(fast.device, matrix_flops_per_s=peaks, curves={}, samples={}))
    monkeypatch.setitem(globals(), "machines", lambda: [slow] * 3)
    kernel, whole = tf.Variable(tf.ones((64, 64), tf.float64)), tf.ones((64, 64), tf.int64)

    def computing_s(integers: bool, floats: bool) -> float:
        def step(x: tf.Tensor) -> Any:
            return (tf.matmul(x, whole),) * integers + (tf.cast(x, tf.float64) @ kernel,) * floats

        return uncut(layouts_of(step, tf.TensorSpec((64, 64), tf.int64))).computing_s

    assert computing_s(True, True) > 0.9 * (computing_s(True, False) + computing_s(False, True))


def test_what_is_not_looked_at_is_said(monkeypatch: pytest.MonkeyPatch):
    weights = {name: tf.Variable(tf.ones((32, 32)), name=name) for name in ("a", "b")}
    step, x = training(lambda x, w: tf.sort(tf.sort(x @ w["a"]) @ w["b"]), weights), tf.TensorSpec((4, 32))
    whole = layouts_of(step, x)
    assert {along[0][0] for laid in whole.found() if len(along := laid.along) == 1} == {"a", "b"}
    assert not whole.left_out
    monkeypatch.setattr(mesh_layouts, "_OPERATIONS", 0)
    monkeypatch.setattr(mesh_layouts, "_FEWEST", 6)
    part = layouts_of(step, x)
    assert len(part.found()) < len(whole.found())
    assert part.left_out == "ways to cut 1 large variable: b"
    call = predicted_call(step, [x], {})
    question = question_of(
        call, Block("block", step, x, 4), machines()[2], lambda names, own: call.plan(names, own.layouts, **own.options)
    )
    assert "not compared: mesh (batch=2, model=2): ways to cut 1 large variable: b" in choose(question).notes


def test_each_layout_is_found_and_estimated_once():
    weights = {name: tf.Variable(tf.ones((32, 32)), name=name) for name in ("a", "b")}
    layouts = layouts_of(training(lambda x, w: tf.tanh(x @ w["a"]) @ w["b"], weights), tf.TensorSpec((4, 32)))
    cut, laid = list[object](), list[object]()

    def noting(method: Callable[..., Any], into: list[object]) -> Callable[..., Any]:
        return lambda own, *given: into.append(str(given)) or method(own, *given)

    with (
        mock.patch.object(Partners, "alone", noting(Partners.alone, cut)),
        mock.patch.object(AxisTimes, "of", noting(AxisTimes.of, laid)),
    ):
        found = layouts.found()
    assert len(cut) == len(set(cut)) == 4, "two dimensions of two variables"
    assert len(laid) == len(set(laid)) == len(found) - 1


def test_meshes_of_all_devices():
    assert [str(mesh) for mesh in meshes_of(8, 4)] == ["(batch=4, model=2)", "(batch=2, model=4)", "(model=8)"]
    assert meshes_of(8, 0) == (MeshAxes((("model", 8),)),), "nothing is split"
    assert meshes_of(1, 4) == ()


def test_patterns_fit_what_is_cut_and_nothing_else():
    names = ["block_0/up", "block_1/up", "block_1/down", "up", "dense/kernel", "dense_1/kernel", "a[0]"]
    variables = [Variable(name, (4, 4), 64, (k,)) for k, name in enumerate(names)]
    for chosen, expected in [
        ([0, 1], ["block_*/up"]),
        ([4, 5], ["dense*/kernel"]),
        ([1], ["block_1/up"]),
        ([6], ["a[[]0]"]),
        ([3], ["/up"]),  # (other names end like it)
        ([0, 1, 3], ["block_*/up", "/up"]),
    ]:
        found = patterns([(variables[k], 1) for k in chosen], names)
        assert found == tuple([(pattern, 1) for pattern in expected])
        assert [k for k, name in enumerate(names) if any(fits(name, own) for own, _ in found)] == chosen


def test_a_single_variable_that_lies_otherwise_is_not_another_one():
    """The search's layouts are carried out by `set_variable_layout`."""
    candidate = Candidate(2, "home", exceptions=(("up", "sharded"),))
    own, other = (tf.Variable(tf.zeros((4, 4)), name=name) for name in ("up", "block/up"))
    assert wanted_layouts([own, other], candidate.layouts, {}) == ["sharded", "home"]
