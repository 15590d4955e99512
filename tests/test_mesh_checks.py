"""Checkers see what is broken along an axis of a mesh: in its plan, in what is written for it, and in both together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import MOVES, REPLICATE
from graphsplit.core.protos import constant_node
from graphsplit.emission import EmittedGraph, check_emitted, emit
from graphsplit.planning.communication.transfers import Concatenation, Read, Slice, Sum
from tests.helpers.broken_plans import drop_input, edited, read_another_piece, swap_inputs, with_nodes
from tests.helpers.mesh_cases import (
    HIDDEN,
    LENGTH,
    WIDTH,
    Made,
    assert_law,
    axes_checked,
    numbers,
    transformer,
    variable,
)
from tests.helpers.mesh_cases import TRANSFORMER as LAYOUT
from tests.helpers.mesh_loops import DECODING, decoding

MESH = {"batch": 1, "model": 2}
Graph = Callable[[EmittedGraph], EmittedGraph]


def sequence() -> Made:
    """Activations that are cut by words between layers, and by their width after one."""
    up, down = variable("up", WIDTH, HIDDEN), variable("down", HIDDEN, WIDTH)

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        with tf.GradientTape() as tape:
            x = tf.tanh(gs.with_layout(x, ("batch", "model", None)))
            y = tf.nn.relu(gs.with_layout(x, ("batch", None, None)) @ up) @ down
            y = tf.sin(gs.with_layout(y, ("batch", "model", None)))
            loss = tf.reduce_sum(gs.with_layout(y, ("batch", None, "model")) ** 2)
        return loss, y, *tape.gradient(loss, [up, down])

    return [up, down], step


def adding() -> Made:
    """A loop that adds sums over what columns have to what it is given, which one of them has."""
    up, down = variable("up", WIDTH, HIDDEN), variable("down", HIDDEN, WIDTH)

    def turn(i: tf.Tensor, y: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, ...]:
        return i + 1, tf.sin(y), total + tf.nn.relu(y @ up) @ down

    def step(x: tf.Tensor) -> tuple[tf.Tensor, ...]:
        _, _, total = tf.while_loop(lambda i, *_: i < 3, turn, [0, x, tf.tanh(x)])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.nn.relu(x @ up) @ down * total)
        return total, *tape.gradient(loss, [up, down])

    return [up, down], step


ADDING = {"up": (None, "model"), "down": ("model",)}
MADE: dict[str, tuple[Callable[[], Made], dict[str, Any], tf.TensorSpec]] = {
    "heads": (lambda: transformer(3), LAYOUT, tf.TensorSpec((5, LENGTH), tf.int64)),
    "sequence": (sequence, {"up": (None, "model"), "down": ("model",)}, tf.TensorSpec((5, LENGTH, WIDTH), tf.float64)),
    "adding": (adding, ADDING, tf.TensorSpec((5, WIDTH), tf.float64)),
    "decoding": (lambda: decoding("scatter"), {**DECODING, "*": "home"}, tf.TensorSpec([5], tf.int64)),
}
PLANS: dict[str, tuple[gs.inspect.Plan, gs.inspect.Plan]] = {}


def plans(name: str) -> tuple[gs.inspect.Plan, gs.inspect.Plan]:
    """Return the plan of the axis, and that of the rows of what is written for it."""
    if name not in PLANS:
        make, layout, given = MADE[name]
        variables, step = make()
        gs.set_variable_layout(variables, layout, mesh=MESH)
        with axes_checked() as found:
            plan = gs.parallelize(step, mesh=MESH).plan(given)
        PLANS[name] = found[-1], plan
    return PLANS[name]


def to_the_other(node: Any) -> None:
    node.device = node.device[:-1] + str(1 - int(node.device[-1]))


def ones(node: Any) -> None:
    node.CopyFrom(constant_node(node.name, np.ones((5, WIDTH)), tf.float64, node.device))


MOVED = [
    ("heads", "reduce", "AddN", drop_input),
    ("heads", "reduce", "AddN", to_the_other),
    ("heads", "reduce-scatter", "SplitV", read_another_piece),
    ("heads", "reduce-scatter", "AddN", swap_inputs),
    ("heads", "all-gather", "ConcatV2", swap_inputs),
    ("heads", "all-gather", "ConcatV2", to_the_other),
    ("sequence", "scatter", "SplitV", to_the_other),
    ("sequence", "local slice", "SplitV", to_the_other),
    ("sequence", "all-to-all", "SplitV", to_the_other),
    ("sequence", "all-to-all", "ConcatV2", swap_inputs),
    ("sequence", "gather", "ConcatV2", swap_inputs),
    ("adding", "zero-fill", "Const", ones),
    ("adding", "zero-fill", "Const", to_the_other),
]


@pytest.mark.parametrize(("name", "role", "kind", "edit"), MOVED)
def test_moves_along_an_axis_that_move_something_else(name: str, role: str, kind: str, edit: Callable[[Any], None]):
    plan, _ = plans(name)
    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, edited(edit, role, kind)(emit(plan)))


def with_bodies(plan: gs.inspect.Plan, graph: EmittedGraph) -> Iterator[tuple[gs.inspect.Plan, EmittedGraph]]:
    """Yield a plan and its graph, and those of what loops do in each turn."""
    yield plan, graph
    for own, emitted in graph.bodies.values():
        yield from with_bodies(own, emitted)


READ = [("heads", "broadcast"), ("heads", "local copy")]  # nothing is written for them: readers read what there is


@pytest.mark.parametrize(("name", "kind"), READ)
def test_reads_of_something_else(name: str, kind: str):
    """Of another tensor that is broadcast; of what another column has made of the same one."""
    plan, _ = plans(name)
    graph = emit(plan)
    [first, second, *_] = [move.tensor.op for move in plan.moves if move.kind == kind]
    place = {(origin.op, origin.shard): name for name, origin in graph.origins.items() if origin.role == "op"}
    read, other = (
        (place[first, None], place[second, None]) if kind == "broadcast" else (place[first, 0], place[first, 1])
    )

    def change(nodes: list[Any]) -> None:
        found = [(node, i) for node in nodes for i, r in enumerate(node.input) if r.partition(":")[0] == read]
        node, i = next((n, i) for n, i in found if graph.origins[n.name].shard == (1 if kind == "broadcast" else None))
        node.input[i] = other

    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, with_nodes(graph, change))


def test_each_kind_of_move_is_broken_once():
    """All that there are but what an axis has no use for.

    It has one home, so that nothing is sent from one to another, and adds up in parts what all columns need of a sum.
    """
    made = [own for name in MADE for own in with_bodies(plans(name)[0], emit(plans(name)[0]))]
    planned = {move.kind for plan, _ in made for move in plan.moves}
    written = {origin.role for _, graph in made for origin in graph.origins.values()}
    assert planned == {*MOVES.values()} - {"send", "all-reduce"}
    assert planned == {role for _, role, *_ in MOVED} | {kind for _, kind in READ}
    assert written & planned == {role for _, role, *_ in MOVED}


@pytest.mark.parametrize("rows", [1, 2])
def test_what_is_added_to_a_sum_is_added_once(rows: int):
    assert_law(adding, ADDING, {"batch": rows, "model": 2}, [tf.constant(numbers(5, WIDTH))])


@pytest.mark.parametrize("kind", ["broadcast", "zero-fill"])
def test_moves_of_whole_values_that_give_something_else(kind: str):
    plan, _ = plans({"broadcast": "heads", "zero-fill": "adding"}[kind])
    at = next(at for at, c in enumerate(plan.collectives) if c.kind == kind)
    own = plan.collectives[at]
    for reads in (own.reads[0][::-1], own.reads[0][:1], own.reads[0][:1] * 2):
        broken = dataclasses.replace(own, reads=(reads, *own.reads[1:]))
        collectives = (*plan.collectives[:at], broken, *plan.collectives[at + 1 :])
        with pytest.raises(gs.errors.CheckError, match=f"^The {kind} of .* is read on "):
            dataclasses.replace(plan, collectives=collectives).check()
    if kind == "zero-fill":
        exchanged = tuple(
            [Read(value.value, read.device) for value, read in zip(own.reads[0][::-1], own.reads[0], strict=True)]
        )
        collectives = (
            *plan.collectives[:at],
            dataclasses.replace(own, reads=(exchanged,)),
            *plan.collectives[at + 1 :],
        )
        with pytest.raises(gs.errors.CheckError, match="gives /device:COLUMN:0 something else than"):
            dataclasses.replace(plan, collectives=collectives).check()


@pytest.mark.parametrize("kind", [Slice, Concatenation, Sum])
def test_plans_of_an_axis_whose_moves_make_something_else(kind: type):
    """What each value of a move is made of is derived again, apart from how moves are carried out."""
    plan, _ = plans("sequence")
    collectives = list(plan.collectives)
    at, k = next((at, k) for at, c in enumerate(collectives) for k, own in enumerate(c.values) if type(own) is kind)
    own = collectives[at].values[k]
    change = (
        {"piece": 1 - own.piece} if kind is Slice else {"of": own.of[::-1] if kind is Concatenation else own.of[:1]}
    )
    values = [dataclasses.replace(own, **change) if i == k else value for i, value in enumerate(collectives[at].values)]
    collectives[at] = dataclasses.replace(collectives[at], values=tuple(values))
    with pytest.raises(gs.errors.CheckError, match="gives /device:COLUMN:0 something else than"):
        dataclasses.replace(plan, collectives=tuple(collectives)).check()


def test_parts_that_are_taken_for_all():
    plan, _ = plans("heads")
    steps = list(plan.steps)
    at = next(op.index for op in plan.program.ops if op.type == "ReadVariableOp" and steps[op.index].shards)
    shards = dataclasses.replace(steps[at].shards, gives=(REPLICATE,))
    steps[at] = dataclasses.replace(steps[at], shards=shards)
    with pytest.raises(gs.errors.CheckError, match=r"The local slice of .* from replicated to .* is missing"):
        dataclasses.replace(plan, steps=tuple(steps)).check()


def in_a_turn(graph: EmittedGraph, change: Graph) -> EmittedGraph:
    """Return a graph in whose loop something is changed."""
    name = next(
        name for name, (_, own) in graph.bodies.items() if any(o.role == "reduce" for o in own.origins.values())
    )
    plan, own = graph.bodies[name]
    return dataclasses.replace(graph, bodies={**graph.bodies, name: (plan, change(own))})


def test_what_a_turn_moves():
    plan, _ = plans("decoding")
    graph = emit(plan)
    check_emitted(plan, in_a_turn(graph, lambda own: own))
    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, in_a_turn(graph, edited(drop_input, "reduce", "AddN")))
    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, edited(swap_last, "op", "StatelessWhile")(graph))


def swap_last(node: Any) -> None:
    """Give each column of a loop what the other has of the last that it carries."""
    node.input[-2], node.input[-1] = node.input[-1], node.input[-2]


@pytest.mark.parametrize("kind", ["BatchMatMulV2", "AddN"])
def test_columns_that_read_what_another_has(kind: str):
    """In what is written in the end, for the rows of both columns."""
    _, plan = plans("heads")
    graph = emit(plan)
    check_emitted(plan, graph)
    made = [(node, graph.origins[node.name]) for node in graph.nodes if node.op == kind]
    ops = [(node, plan.program.ops[origin.op]) for node, origin in made if origin.role == "op"]
    first, other = next(
        (a, b)
        for a, one in ops
        for b, two in ops
        if (one.provenance.column, two.provenance.column) == (0, 1) and one.provenance.origin == two.provenance.origin
    )

    def cross(nodes: list[Any]) -> None:
        node = next(node for node in nodes if node.name == first.name)
        node.input[0], node.input[1] = other.input[0], other.input[1]

    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, with_nodes(graph, cross))
