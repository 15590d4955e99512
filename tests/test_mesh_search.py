"""The search for meshes and layouts beside an exhaustive one, and at the shapes of a large block."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks import mesh_search
from benchmarks.mesh_search import blocks, compare, machines
from graphsplit.api.layouts.variable_layouts import wanted_layouts
from graphsplit.core.device_mesh import MeshAxes
from graphsplit.core.patterns import fits
from graphsplit.search.candidates import Candidate, meshes_of
from graphsplit.search.mesh_layouts import Variable, patterns


@pytest.mark.parametrize("number", [0, *[pytest.param(k, marks=pytest.mark.long) for k in (4, 6, 10)]])
def test_about_as_good_as_an_exhaustive_search(number: int):
    """`python -m benchmarks.mesh_search` compares twenty."""
    [block] = blocks(1, number)
    for name, found, found_s, best, best_s, count in compare(block, machines()[:: 1 if number else 2]):
        assert found_s <= 1.02 * best_s, (name, str(found), str(best))
        assert count > 20


@pytest.mark.long
def test_a_block_of_70b():
    """Heads, columns and then rows, as in Megatron-LM; what is behind the heads, by what is faster."""
    _, _, plan = mesh_search.large()
    [note] = [note for note in plan.notes if note.startswith("chosen automatically: 8 devices, mesh model 8, ")]
    ways = dict(reversed(text.rsplit(" (", 1)) for text in note.partition(" but ")[2].partition(": ")[0].split("; "))
    named = {way: set(names.split(", ")) for way, names in ways.items()}
    assert named["None, 'model')"] >= {f"block/{own}" for own in ("query", "key", "value", "gate", "up")}
    assert "block/down" in named["'model',)"]
    assert "gathered before it is used" not in str(plan)
    why = next(note for note in plan.notes if note.startswith("along 'model' about "))
    assert "with none cut" in why
    step, x = mesh_search.large_block()
    layout = {f"block/{own}": (None, "model") for own in ("query", "key", "value", "gate", "up")}
    layout |= {"block/output": ("model",), "block/down": ("model",)}
    megatron = gs.predict(step, x, machine="8xH100-SXM5", mesh={"model": 8}, layout={**layout, "*": "home"})
    seconds = float(note.rpartition(" ms, ")[0].rpartition(": ")[2]) / 1e3
    assert seconds <= 1.001 * megatron.step_s


def test_meshes_of_all_devices():
    assert [str(mesh) for mesh in meshes_of(8, 4)] == ["batch 4 x model 2", "batch 2 x model 4", "model 8"]
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
    candidate = Candidate(2, "home", others=(("up", "sharded"),))
    own, other = (tf.Variable(tf.zeros((4, 4)), name=name) for name in ("up", "block/up"))
    assert wanted_layouts([own, other], candidate.layouts, {}) == ["sharded", "home"]
