"""Loops whose number of iterations is known: counters from 0, one more in each iteration, that end at a known bound.

It may follow from unknown sizes: a loop over the rows of a batch iterates once for each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from graphsplit.core.sizes import Size, as_size, is_same
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.graph.graph import reached

_PASSES = frozenset({"Identity"})


class Iterations(NamedTuple):
    """What is known of a loop.

    Attributes:
      number: how often its body runs; a `Size` if that follows from unknown ones.
      counters: which of the carried values count the iterations before.
      carried_bounds, constant_bounds: what they are compared with: positions of carried values, and operations of the
        condition.
    """

    number: int
    counters: frozenset[int]
    carried_bounds: tuple[int, ...]
    constant_bounds: tuple[int, ...]


def origin(program: Any, tensor: Any) -> Any:
    """Return the tensor that some identities pass on."""
    while program.ops[tensor.op].type in _PASSES:
        tensor = program.ops[tensor.op].inputs[0]
    return tensor


def number_at(op: Any, operand: int) -> int | None:
    """Return the number that an operand is, a `Size` if it follows from unknown ones; None if it is not known."""
    value = op.symbols.get(operand, op.constants.get(operand))
    return None if value is None or np.ndim(value) else as_size(value.item())


def iterations_of(op: Any) -> Iterations | None:
    """Return what is known of the iterations of a loop, or None."""
    if not op.bodies or not CONTROL_FLOW[op.type].loops:
        return None
    condition_name, body_name = function_names(op.node)
    condition, body = op.bodies[condition_name], op.bodies[body_name]
    counters = frozenset(k for k in range(len(op.inputs)) if _counts(op, body, k))
    comparisons = _comparisons(condition)
    if not comparisons:
        return None
    bounds, carried, constant = [], [], []
    for less in comparisons:
        counter, bound = (origin(condition, tensor) for tensor in less.inputs)
        if counter.op not in condition.inputs or condition.inputs.index(counter.op) not in counters:
            return None
        if bound.op in condition.inputs:
            k = condition.inputs.index(bound.op)
            value = _unchanged(op, body, k)
            carried.append(k)
        else:
            value = number_at(less, 1)
            constant.append(less.index)
        if value is None:
            return None
        bounds.append(value)
    number = _least(bounds)
    return None if number is None else Iterations(number, counters, tuple(carried), tuple(constant))


def times_run(op: Any) -> int | None:
    """Return how often an operation runs what it calls: a loop's iterations, as planned with; None if nobody knows."""
    if not op.bodies or not CONTROL_FLOW[op.type].loops:
        return 1
    iterations = iterations_of(op)
    return None if iterations is None else int(iterations.number)


def _least(bounds: Sequence[int]) -> int | None:
    """Return the least of some numbers, or 0; None where it is not the same one for all sizes, 0 included."""
    first = bounds[0]
    if not any(isinstance(bound, Size) for bound in bounds):
        return max(min(bounds), 0)
    if not isinstance(first, Size) or not all(is_same(bound, first) for bound in bounds):
        return None
    return first if min(first.polynomial.terms.values()) > 0 else None


def _counts(op: Any, body: Any, k: int) -> bool:
    """Return whether a carried value is 0 before the first iteration, and one more after each."""
    end = origin(body, body.outputs[k])
    if number_at(op, k) != 0:
        return False
    added = body.ops[end.op]
    if added.type != "AddV2" or origin(body, added.inputs[0]).op != body.inputs[k]:
        return False
    step = number_at(added, 1)
    if step is None and (addend := origin(body, added.inputs[1]).op) in body.inputs:
        step = _unchanged(op, body, body.inputs.index(addend))
    return step == 1


def _unchanged(op: Any, body: Any, k: int) -> int | None:
    """Return a carried number that is known, and the same in every iteration; else None."""
    return number_at(op, k) if origin(body, body.outputs[k]).op == body.inputs[k] else None


def _comparisons(condition: Any) -> list[Any]:
    """Return the comparisons that must all hold for another iteration; none if it asks anything else."""

    def asked_by(position: int) -> list[int]:
        op = condition.ops[position]
        return [origin(condition, tensor).op for tensor in op.inputs] if op.type == "LogicalAnd" else []

    conditions = [condition.ops[i] for i in reached([origin(condition, condition.outputs[0]).op], asked_by)]
    comparisons = [op for op in conditions if op.type == "Less"]
    return comparisons if all(op.type in ("Less", "LogicalAnd") for op in conditions) else []


def pushed_counters(op: Any, iterations: Iterations) -> list[int]:
    """Return the carried lists onto which each iteration pushes its number."""
    body, lists = op.bodies[function_names(op.node)[1]], []
    counters = {body.inputs[k] for k in iterations.counters}
    for k, tensor in enumerate(body.outputs):
        last = body.ops[origin(body, tensor).op]
        pushes = last.type == "TensorListPushBack" and origin(body, last.inputs[0]).op == body.inputs[k]
        if pushes and origin(body, last.inputs[1]).op in counters:
            lists.append(k)
    return lists
