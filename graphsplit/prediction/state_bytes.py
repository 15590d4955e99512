"""What variables take on each device, as they lie."""

from __future__ import annotations

from graphsplit.core.tensorflow_internals import resource_value
from graphsplit.planning.state import State
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace


def state_bytes(trace: Trace, program: Program, state: State, home: str) -> dict[str, int]:
    """Return the bytes of the variables that a function captured, by device.

    Args:
      trace: of the function.
      program, state: what is planned for it, and where its variables are.
      home: the device of those of which nothing is said.
    """
    held = _held(trace)
    origins = state.parts or tuple([(k, 0) for k in range(len(program.captures))])
    parts: dict[int, int] = {}
    for k, _ in origins:
        parts[k] = parts.get(k, 0) + 1
    found: dict[str, int] = {}
    for position, (k, _) in zip(program.captures, origins, strict=True):
        device = state.devices.get(program.ops[position].name) or home
        size = held[k] if k in state.copied else -(-held[k] // parts[k])
        if size:
            found[device] = found.get(device, 0) + size
    return found


def _held(trace: Trace) -> list[int]:
    """Return the bytes of what each capture of a trace holds."""
    names = {tensor.op.name: tensor for tensor in trace.function.inputs}
    found = []
    for position in trace.program.captures:
        tensor = names.get(trace.program.ops[position].name)
        value = resource_value(tensor) if tensor is not None and tensor.dtype == "resource" else None
        count = value[1].num_elements() if value is not None and value[1].is_fully_defined() else None
        found.append(0 if value is None or count is None else int(count) * int(value[0].size))
    return found
