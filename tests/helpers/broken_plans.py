"""Plans and graphs with one mistake, for checkers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import graphsplit as gs
from graphsplit.emission import EmittedGraph
from graphsplit.planning.steps import Step
from graphsplit.program.program import Program


def position(program: Program, op_type: str) -> int:
    return next(op.index for op in program.ops if op.type == op_type)


def with_op(program: Program, op_type: str, **changes: Any) -> Program:
    at = position(program, op_type)
    ops = list(program.ops)
    ops[at] = dataclasses.replace(ops[at], **changes)
    return dataclasses.replace(program, ops=tuple(ops))


def with_step(plan: gs.inspect.Plan, op_type: str, change: Callable[[Step], Step]) -> gs.inspect.Plan:
    at = position(plan.program, op_type)
    steps = list(plan.steps)
    steps[at] = change(steps[at])
    return dataclasses.replace(plan, steps=tuple(steps))


def sharded(**changes: Any) -> Callable[[Step], Step]:
    return lambda step: dataclasses.replace(step, shards=dataclasses.replace(step.shards, **changes))


def with_nodes(graph: EmittedGraph, change: Callable[[list[Any]], None]) -> EmittedGraph:
    nodes = [type(node)() for node in graph.nodes]
    for copy, node in zip(nodes, graph.nodes, strict=True):
        copy.CopyFrom(node)
    change(nodes)
    return dataclasses.replace(graph, nodes=tuple(nodes))


def edited(edit: Callable[[Any], None], role: str, op_type: str) -> Callable[[EmittedGraph], EmittedGraph]:
    """Return what changes the first node of a type that plays a role."""

    def change(graph: EmittedGraph) -> EmittedGraph:
        def on(nodes: list[Any]) -> None:
            edit(next(n for n in nodes if graph.origins[n.name].role == role and n.op == op_type))

        return with_nodes(graph, on)

    return change


def swap_inputs(node: Any) -> None:
    node.input[0], node.input[1] = node.input[1], node.input[0]


def drop_input(node: Any) -> None:
    del node.input[0]


def read_another_piece(node: Any) -> None:
    node.input[0] = node.input[0].split(":")[0] + ":2"
