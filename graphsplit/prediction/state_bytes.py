"""What variables and captured tensors take on each device, as they lie."""

from __future__ import annotations

import tensorflow as tf

from graphsplit.core.layouts import Copied, Cut, MeshDivision
from graphsplit.core.tensorflow_internals import resource_value
from graphsplit.planning.state import State
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace


def state_bytes(trace: Trace, program: Program, state: State, home: str) -> dict[str, int]:
    """Return the bytes of the variables and tensors that a function captured, by device.

    Args:
      trace: of the function.
      program, state: what is planned for it, and where its variables are.
      home: the device of those of which nothing is said.
    """
    held = _held(trace)
    names = [trace.program.ops[position].name for position in trace.program.captures]
    origins = state.parts or tuple([(k, 0) for k in range(len(program.captures))])
    found: dict[str, int] = {}
    for position, (k, part) in zip(program.captures, origins, strict=True):
        device = state.devices.get(program.ops[position].name) or home
        size = _of_part(held[k], state.divisions.get(names[k]) if state.parts else None, part)
        if size:
            found[device] = found.get(device, 0) + size
    return found


def _of_part(size: int, division: MeshDivision | None, part: int) -> int:
    """Return the bytes of a part: of a copy all, of a slice in proportion to its length."""
    return size if division is None else _parts_of(size, division)[part]


def _parts_of(size: int, division: MeshDivision) -> list[int]:
    if isinstance(division, Cut):
        return [size * length // max(sum(division.lengths), 1) for length in division.lengths]
    if isinstance(division, Copied):
        return [size] * division.parts
    pairs = zip(division.rows, _parts_of(size, division.columns), strict=True)
    return [part for own, column in pairs for part in _parts_of(column, own)]


def _held(trace: Trace) -> list[int]:
    """Return the bytes of what each capture of a trace holds."""
    names = {tensor.op.name: tensor for tensor in trace.function.inputs}
    found = []
    for position in trace.program.captures:
        tensor = names.get(trace.program.ops[position].name)
        value = None if tensor is None else (tensor.dtype, tensor.shape)
        if tensor is not None and tensor.dtype == tf.resource:
            value = resource_value(tensor)
        count = value[1].num_elements() if value is not None and value[1].is_fully_defined() else None
        found.append(0 if value is None or count is None else int(count) * int(value[0].size or 0))
    return found
