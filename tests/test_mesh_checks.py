"""Checkers see what is broken along an axis of a mesh: in its plan, in what is written for it, and in both together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import REPLICATE
from graphsplit.emission import EmittedGraph, check_emitted, emit
from graphsplit.planning.communication.transfers import Concatenation, Slice, Sum
from tests.test_checkers import drop_input, edited, read_another_piece, swap_inputs, with_nodes
from tests.test_mesh import HIDDEN, LENGTH, WIDTH, Made, axes_checked, transformer, variable
from tests.test_mesh import TRANSFORMER as LAYOUT
from tests.test_mesh_loops import DECODING, decoding

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


MADE: dict[str, tuple[Callable[[], Made], dict[str, Any], tf.TensorSpec]] = {
    "heads": (lambda: transformer(3), LAYOUT, tf.TensorSpec((5, LENGTH), tf.int64)),
    "sequence": (sequence, {"up": (None, "model"), "down": ("model",)}, tf.TensorSpec((5, LENGTH, WIDTH), tf.float64)),
    "decoding": (lambda: decoding("scatter"), {**DECODING, "*": "home"}, tf.TensorSpec([5], tf.int64)),
}
PLANS: dict[str, tuple[gs.Plan, gs.Plan]] = {}


def plans(name: str) -> tuple[gs.Plan, gs.Plan]:
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
]


@pytest.mark.parametrize(("name", "role", "kind", "edit"), MOVED)
def test_moves_along_an_axis_that_move_something_else(name: str, role: str, kind: str, edit: Callable[[Any], None]):
    plan, _ = plans(name)
    with pytest.raises(gs.CheckError, match="and the plan says"):
        check_emitted(plan, edited(edit, role, kind)(emit(plan)))


def test_each_kind_of_move_is_broken_once():
    written = {origin.role for name in MADE for origin in emit(plans(name)[0]).origins.values()}
    written |= {o.role for _, graph in emit(plans("decoding")[0]).bodies.values() for o in graph.origins.values()}
    assert written - {"op", "constant", "sizes", "shift", "part"} == {role for _, role, *_ in MOVED}


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
    with pytest.raises(gs.CheckError, match="gives /device:COLUMN:0 something else than"):
        dataclasses.replace(plan, collectives=tuple(collectives)).check()


def test_parts_that_are_taken_for_all():
    plan, _ = plans("heads")
    steps = list(plan.steps)
    at = next(op.index for op in plan.program.ops if op.type == "ReadVariableOp" and steps[op.index].shards)
    shards = dataclasses.replace(steps[at].shards, gives=(REPLICATE,))
    steps[at] = dataclasses.replace(steps[at], shards=shards)
    with pytest.raises(gs.CheckError, match=r"The local slice of .* from replicated to .* is missing"):
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
    with pytest.raises(gs.CheckError, match="and the plan says"):
        check_emitted(plan, in_a_turn(graph, edited(drop_input, "reduce", "AddN")))
    with pytest.raises(gs.CheckError, match="and the plan says"):
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

    with pytest.raises(gs.CheckError, match="and the plan says"):
        check_emitted(plan, with_nodes(graph, cross))
