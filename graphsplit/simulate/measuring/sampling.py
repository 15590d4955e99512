"""Samples: how long each kind of operation took in steps that TensorFlow's profiler recorded."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.shards.sizes import sizes_of
from graphsplit.inspect.recorded import Timeline
from graphsplit.planning.costs.families import FREE, PASSED_ON
from graphsplit.planning.costs.machine import Sample
from graphsplit.planning.costs.seconds import sample_key
from graphsplit.planning.costs.work import Described, Work, work_of
from graphsplit.planning.plan import Plan
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import Op
from graphsplit.simulate.prediction.task_costs import body_operations

_INSIDE = {"cond": "cond", "body": "body", "then_branch": "then", "else_branch": "else"}
_OF_SHARD = "/shard_/"  # in the names of what a body's copy for a shard has of its own


class Kind(NamedTuple):
    """What tells an operation from others that take another time.

    Attributes:
      key: see `sample_key`.
      work: of one execution.
      in_body: whether a loop or branch runs it.
    """

    key: str
    work: Work
    in_body: bool


def samples_of(recorded: Timeline, kinds: Mapping[str, Kind]) -> dict[str, Sample]:
    """Return the median time of each kind of operation, by `sample_key`.

    What never ran takes no time: TensorFlow computes what is constant beforehand. (Of what did not run in a body
    nothing is known: its branch may be taken another time.)

    Args:
      recorded: one or more steps.
      kinds: of the operations, by name.
    """
    seconds: dict[str, list[float]] = {}
    ran = set()
    for event in recorded.events:
        name = event.name.replace(_OF_SHARD, "/")
        kind = kinds.get(name)
        if kind is not None and not event.copied:
            ran.add(name)
            seconds.setdefault(kind.key, []).append(event.duration_s)
    for name, kind in kinds.items():
        if name not in ran and not kind.in_body:
            seconds.setdefault(kind.key, []).append(0.0)
    works = {kind.key: kind.work for kind in kinds.values()}
    return {key: Sample(works[key], statistics.median(durations_s)) for key, durations_s in seconds.items()}


def kinds_of(plan: Plan, graph: EmittedGraph) -> dict[str, Kind]:
    """Return the kind of each operation of an emitted graph that takes time, by the name under which it is recorded.

    Operations of loops and branches are named by where they are, `shard_0/while/body/MatMul`. What they read and make
    is what the plan says: TensorFlow knows few sizes there.
    """
    sizes = sizes_of(plan, graph)
    kind_by_name: dict[str, Kind] = {}
    for node in graph.nodes:
        origin = graph.origins[node.name]
        if origin.op is not None and origin.role == "op" and plan.program.ops[origin.op].bodies:
            step = plan.steps[origin.op]
            plans = step.shards.bodies if origin.shard is not None and step.shards else {}
            shard = origin.shard if plans else None
            kind_by_name.update(_in_bodies(node.name, plan.program.ops[origin.op], plans, plan.rows, shard))
        else:
            _add(kind_by_name, node.name, node, sizes.inputs_of(node), sizes[node.name], in_body=False)
    return kind_by_name


def _add(
    kind_by_name: dict[str, Kind],
    name: str,
    node: Any,
    reads: Sequence[Described],
    makes: Sequence[Described],
    *,
    in_body: bool,
) -> None:
    work = work_of(node.op, lambda attribute: node.attr[attribute], reads, makes)
    if work.family not in (FREE, PASSED_ON):
        kind_by_name[name] = Kind(sample_key(node, reads, makes), work, in_body)


def _in_bodies(
    name: str, op: Op, plans: Mapping[str, Any], rows: tuple[int, ...], shard: int | None
) -> dict[str, Kind]:
    """Return the kinds of operations of the functions that an operation runs, and of those that they run."""
    kind_by_name: dict[str, Kind] = {}
    for inside, function in _named_bodies(op):
        body = op.bodies.get(function)
        for inner_op, inner, reads, makes in body_operations(body, plans.get(function), rows, shard) if body else ():
            own_name = f"{name}/{inside}/{inner_op.name}"
            if inner_op.bodies:
                kind_by_name.update(_in_bodies(own_name, inner_op, inner, rows, shard if inner else None))
            else:
                _add(kind_by_name, own_name, inner_op.node, reads, makes, in_body=True)
    return kind_by_name


def _named_bodies(op: Op) -> Iterator[tuple[str, str]]:
    """Yield the functions of an operation, each with what TensorFlow calls it where it inlines them."""
    flow = CONTROL_FLOW.get(op.type)
    if flow is None:
        return
    for number, function in enumerate(function_names(op.node)):
        attribute = flow.functions[number] if len(flow.functions) > 1 else ""
        yield _INSIDE.get(attribute, f"branch{number}"), function
