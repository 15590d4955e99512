"""Updates: which variables a program updates together, each entry of one by the same entry of others.

So an optimizer's slots are found whatever they are called: what is written to a weight, or to a slot, follows from
values of variables of its shape, through operations that go entry by entry, and through branches. Gradients end the way
back: a product or a sum makes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import tensorflow as tf

from graphsplit.core.sizes import has_sizes
from graphsplit.planning.variables.laid_variables import READS, WRITES
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import rule_of
from graphsplit.rules.factors import Factors


def updated_together(program: Program, variables: Mapping[int, int]) -> list[list[int]]:
    """Return groups of variables that are updated together, each in the order of the captures.

    Args:
      program: the function.
      variables: a number for each captured variable, by the position of its handle's placeholder.
    """
    groups: dict[int, list[int]] = {}
    for first, other in [(variables[i], variables[k]) for i, k in _pairs(program) if {i, k} <= variables.keys()]:
        first_group, its = groups.setdefault(first, [first]), groups.setdefault(other, [other])
        if first_group is not its:
            first_group += its
            groups.update(dict.fromkeys(its, first_group))
    order = {variable: k for k, variable in enumerate(dict.fromkeys(variables.values()))}
    several = {id(group): sorted(group, key=order.__getitem__) for group in groups.values() if len(group) > 1}
    return list(several.values())


def used_beyond_updates(program: Program, variables: Mapping[int, int]) -> set[int]:
    """Return the variables from whose values something of another shape is made: a product, a sum, some of the rows.

    So a weight is known among what is updated together, and nothing is said of an optimizer's slots.

    Args:
      program, variables: as of `updated_together`.
    """
    used, variable_by_read = set[int](), dict[int, int]()
    for op in program.ops:
        for tensor in op.inputs:
            if tensor.op in variable_by_read and any(shape != program.shape(tensor) for shape in op.out_shapes):
                used.add(variable_by_read[tensor.op])
            elif tensor.op in variables and op.type in READS:
                variable_by_read[op.index] = variables[tensor.op]
            elif tensor.op in variables and not (op.type in WRITES or "Apply" in op.type or op.bodies):
                used.add(variables[tensor.op])
    return used


def _pairs(program: Program) -> Iterator[tuple[int, int]]:
    """Yield the handles of variables that are written, each with all from whose values that follows entry by entry."""
    for op in program.ops:
        handles = [tensor.op for tensor in op.inputs if program.dtype(tensor) == tf.resource]
        if op.type in WRITES:
            yield from [(handles[0], i) for i in _followed(program, op.inputs[1])]
        elif "Apply" in op.type:  # (a fused kernel updates them)
            yield from [(handle, handles[0]) for handle in handles]
        for called in _given(op) if handles else ():
            for written, source in _pairs(called.body):
                yield from [(called.inputs[written].op, i) for i in _outside(program, called.inputs[source])]


def _outside(program: Program, tensor: Tensor) -> Iterator[int]:
    """Yield what a value follows from that is handed to a function, see `_followed`; of a handle itself."""
    if program.dtype(tensor) == tf.resource:
        yield tensor.op
    else:
        yield from _followed(program, tensor)


def _followed(program: Program, written: Tensor) -> Iterator[int]:
    """Yield the handles, and arguments, from whose values a value follows entry by entry, by their positions."""
    shape, seen, pending = program.shape(written), set[Tensor](), [written]
    while pending and shape and None not in shape and not has_sizes(shape):
        tensor = pending.pop()
        op = program.ops[tensor.op]
        if tensor in seen or program.shape(tensor) != shape:
            continue
        seen.add(tensor)
        if op.type in READS:
            yield op.inputs[0].op
        elif op.type == "Placeholder":
            yield op.index
        elif _is_elementwise(op):
            pending += op.inputs
        for called in () if op.bodies and CONTROL_FLOW[op.type].loops else _given(op):
            for i in _followed(called.body, called.body.outputs[tensor.index]):
                yield from _outside(program, called.inputs[i])


class _CalledBody(NamedTuple):
    """A function that an operation calls, and what is handed to it by the positions of its arguments."""

    body: Program
    inputs: Mapping[int, Tensor]


def _given(op: Op) -> Iterator[_CalledBody]:
    handed = op.inputs[CONTROL_FLOW[op.type].chooses :] if op.bodies else ()
    for body in op.bodies.values():
        yield _CalledBody(body, dict(zip(body.inputs, handed, strict=True)))


def _is_elementwise(op: Op) -> bool:
    rule = rule_of(op.type)
    factors = rule.factors(op) if rule is not None else None
    if not isinstance(factors, Factors) or len(factors.outputs) != 1:
        return False
    dims = factors.outputs[0] or ()
    return all(isinstance(dim, int) for dim in dims) and any(operand_dims == dims for operand_dims in factors.inputs)
