"""Who must not wait for what may be dead: nodes of shards without rows, and of sides of branches that are not taken.

Deadness goes along what is read (`program/sides.py`), and along what is waited for: a write that waits for a node of a
side that is not taken is lost, silently. So what such a node would wait for is put behind a node that runs in any case.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.protos import host_of, make_node, source_of
from graphsplit.emission.emitted_graph import ORDER_ROLE, Draft, EmittedGraph, Origin, sides_of_nodes
from graphsplit.emission.node_sides import NodeSides
from graphsplit.errors import CheckError
from graphsplit.planning.plan import Plan
from graphsplit.program.graph.graph import Graph
from graphsplit.program.program import Program
from graphsplit.program.sides import sides_of


def ended_nodes(name: str, controls: Sequence[str], present: str, device: str) -> list[Any]:
    """Return nodes that run when all that they wait for has ended or, for want of rows, is dead; `name` is the last.

    TensorFlow takes a `ControlTrigger`, which does not mind the dead, for a constant: it folds constants that wait for
    one, and lets them wait for what that waits for instead, so they are dead as well, and a loop among whose arguments
    they are never ends. So others wait for a `Merge` of a truth value that is there in any case. (What stands between
    has to be something that TensorFlow's graph optimizer does not reduce to control edges, as it does an `Identity`.)

    Args:
      present: of any shard.
    """
    trigger = make_node(f"{name}/all", "ControlTrigger", controls, device)
    return [trigger, make_node(name, "Merge", [present, f"^{name}/all"], host_of(device), N=1, T=tf.bool)]


def let_nobody_wait_for_the_dead(draft: Draft, program: Program, everywhere: str = "") -> None:
    """Put what nodes wait for that may be dead, where they are not, behind nodes that run in any case.

    Args:
      draft: the nodes, all of them; what they wait for is edited.
      program: what they carry out.
      everywhere: the reference of a truth value that is always there; "" for a predicate.
    """
    predicates = sides_of(program).predicates
    if not predicates:
        return
    graph = Graph(tuple(draft.nodes))
    sides = sides_of_nodes(graph, draft.origins, predicates)
    everywhere = everywhere or _predicate_everywhere(graph, sides)
    ended: dict[tuple[str, ...], str] = {}
    for node in graph.nodes:
        waits = [r for r in node.input if r[0] == "^" and not sides.of(r) <= sides.of_node(node.name)]
        if not waits or node.op == "ControlTrigger":
            continue
        key = tuple(sorted(waits))
        if key not in ended:
            ended[key] = f"{draft.scope}/either_side_{len(ended)}"
            for new in ended_nodes(ended[key], key, everywhere, draft.device_of(key[0][1:])):
                draft.add(new, Origin(None, None, ORDER_ROLE))
        node.input[:] = [*[r for r in node.input if r not in waits], f"^{ended[key]}"]


def _predicate_everywhere(graph: Graph, sides: NodeSides) -> str:
    predicates = [str(graph[name].input[1]) for name in sides.switches]
    return next(reference for reference in predicates if not sides.of(reference))


def check_sides(plan: Plan, graph: EmittedGraph) -> None:
    """Raise `CheckError` unless each node is there whenever the plan says so, by what it reads and waits for.

    What has effects, and what is returned, is there whichever sides of branches are taken.

    Args:
      plan: the decisions.
      graph: what was emitted for it.
    """
    planned = sides_of(plan.program)
    if not planned.predicates:
        return
    sides = graph.sides
    for node in graph.nodes:
        origin, side = graph.origins[node.name], sides.of_node(node.name)
        if origin.role == "op" and origin.op is not None and not side <= planned.of_op(origin.op):
            raise CheckError(f"{node.name!r} reads what may be dead where it is planned to run.")
        if origin.role == "op" and origin.op is not None and plan.program.ops[origin.op].stateful and side:
            raise CheckError(f"{node.name!r} has effects, and may be dead.")
        for reference in node.input if node.op != "ControlTrigger" else ():
            if reference[0] == "^" and not sides.of(reference) <= side:
                name = source_of(reference)
                raise CheckError(f"{node.name!r} waits for {name!r}, which may be dead where it is not.")
    for reference in (*graph.outputs, *[f"^{name}" for name in graph.effects]):
        if sides.of(reference):
            raise CheckError(f"{source_of(reference)!r} has to be there, and may be dead.")
