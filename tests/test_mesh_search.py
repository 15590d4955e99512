"""The search for meshes and layouts beside an exhaustive one, and at the shapes of a large block."""

from __future__ import annotations

import pytest

import graphsplit as gs
from benchmarks import mesh_search
from benchmarks.mesh_search import blocks, compare, machines
from graphsplit.core.device_mesh import MeshAxes
from graphsplit.search.candidates import meshes_of
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
    assert patterns([(own, 1) for own in variables[:2]], names) == (("block_*/up", 1),)
    assert patterns([(own, 0) for own in variables[4:6]], names) == (("dense*/kernel", 0),)
    assert patterns([(variables[1], 1)], names) == (("block_1/up", 1),)
    assert patterns([(variables[6], 0)], names) == (("a[[]0]", 0),)
    assert [pattern for pattern, _ in patterns([(own, 1) for own in (*variables[:2], variables[3])], names)] == [
        "block_*/up",  # before what fits its end
        "up",
    ]
