"""Where lives what a program reads and does not compute: variables, tables, large constants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import tensorflow as tf

from graphsplit.core.devices import canonical_name
from graphsplit.core.layouts import REPLICATE, SINGLE_DEVICE, Copied, Division, Layout
from graphsplit.core.parted_variables import parts_of, parts_of_variable
from graphsplit.planning.division import Divided, divide
from graphsplit.program.program import Op, Program
from graphsplit.tracing.trace import Trace

_INSIDE = "the function is called inside of a tf.function, which may use the variable itself"


@dataclass(frozen=True)
class State:
    """Where state lives.

    Attributes:
      devices: of captured variables and tables, by placeholder name; "" for those that are wherever a loader puts
        them: what touches them has no device either. Those not named are at home.
      replicated: captures of which every device of the mesh has a copy, by placeholder name. They are only read.
      largest_constant: constants of more bytes are at home only, and sent; smaller ones every device has for itself.
      parts: for each capture of a program whose variables lie in parts, which capture of the traced function it stands
        for, and which part of that; empty if no variable does.
      copied: those captures of the traced function of which each part is the whole.
      whole: variables that lie in parts and have to be put together for a call, by placeholder name, and why.
    """

    devices: Mapping[str, str] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    largest_constant: int | None = None
    parts: tuple[tuple[int, int], ...] = ()
    copied: frozenset[int] = frozenset()
    whole: Mapping[str, str] = field(default_factory=dict)

    def is_everywhere(self, op: Op) -> bool:
        """Return whether every device has the value of an op, or makes it from nothing but sizes."""
        if op.name in self.replicated:
            return True
        return op.is_constant and (self.largest_constant is None or sum(op.out_bytes) <= self.largest_constant)

    def layouts(self, program: Program) -> dict[int, Layout]:
        """Return the layouts of the captures of a program, by position."""
        names = {position: program.ops[position].name for position in program.captures}
        return {i: REPLICATE if name in self.replicated else SINGLE_DEVICE for i, name in names.items()}


def state_of(trace: Trace) -> State:
    """Return where the variables and tables are that a traced function captured."""
    return State(_devices(trace))


def program_of(
    trace: Trace, find_state: Callable[[Trace], State] = state_of, reshard: bool = True
) -> tuple[Program, State]:
    """Return what is planned for a traced function: its program, in parts where its variables are; and its state.

    Args:
      trace: the function.
      find_state: says where variables and tables of a trace live.
      reshard: see `divide`.
    """
    pairs = list(zip(trace.program.captures, trace.captures, strict=True))
    held = {trace.program.ops[i].name: parts.division for i, handle in pairs if (parts := parts_of(handle)) is not None}
    if not held:
        state = find_state(trace)
        inside = {v.name: _INSIDE for v in trace.variables if parts_of_variable(v) is not None}
        return trace.program, replace(state, whole=inside) if inside else state
    return _in_parts(trace.program, held, _devices(trace), reshard)


def program_as_if(trace: Trace, held: Mapping[str, Division], home: str, reshard: bool = True) -> tuple[Program, State]:
    """Return what is planned for a traced function as if its variables lay otherwise, on devices that need not exist.

    Args:
      trace: the function.
      held: how variables would be cut or copied, by the names of their placeholders.
      home: the device of all others.
      reshard: see `divide`.
    """
    pairs = zip(trace.program.captures, trace.captures, strict=True)
    devices = {trace.program.ops[i].name: home for i, handle in pairs if handle.dtype == tf.resource}
    return _in_parts(trace.program, held, devices, reshard) if held else (trace.program, State(devices))


def _in_parts(
    program: Program, held: Mapping[str, Division], others: Mapping[str, str], reshard: bool
) -> tuple[Program, State]:
    """Return a program whose variables lie in parts, and where: `others` are the devices of those that do not."""
    names = [program.ops[i].name for i in program.captures]
    whole: dict[str, str] = {}
    while True:  # until no operation takes a variable whole, or variables of different devices, that lie in parts
        cuts = {name: division for name, division in held.items() if name not in whole}
        divided = divide(program, cuts, reshard)
        devices = _devices_of_parts(divided, names, cuts, others)
        obstacles = divided.obstacles or _apart(divided, devices, names, cuts)
        if not obstacles:
            copied = frozenset([k for k, name in enumerate(names) if isinstance(cuts.get(name), Copied)])
            return divided.program, State(devices, parts=divided.origins, copied=copied, whole=whole)
        whole.update(obstacles)


def _devices_of_parts(
    divided: Divided, names: Sequence[str], cuts: Mapping[str, Division], others: Mapping[str, str]
) -> dict[str, str]:
    """Return where the variables and tables are, by the placeholders' names in a program in parts."""
    devices = {}
    for position, (k, part) in zip(divided.program.captures, divided.origins, strict=True):
        name, division = divided.program.ops[position].name, cuts.get(names[k])
        if division is not None:
            devices[name] = canonical_name(division.devices[part])
        elif names[k] in others:
            devices[name] = others[names[k]]
    return devices


def _apart(divided: Divided, devices: Mapping[str, str], names: Sequence[str], cuts: Collection[str]) -> dict[str, str]:
    """Return the variables that an operation takes together with others, which lie on other devices."""
    origins = dict(zip(divided.program.captures, divided.origins, strict=True))
    found = {}
    for op in divided.program.ops:
        taken = [tensor.op for tensor in op.inputs if tensor.op in origins]
        if len({devices.get(divided.program.ops[i].name) for i in taken} - {None}) > 1:
            reason = f"{op.type} {op.name!r} takes it together with variables on other devices"
            found.update({name: reason for i in taken if (name := names[origins[i][0]]) in cuts})
    return found


def _devices(trace: Trace) -> dict[str, str]:
    pairs = zip(trace.program.captures, trace.captures, strict=True)
    held = {trace.program.ops[position].name: handle for position, handle in pairs if handle.dtype == tf.resource}
    return {name: canonical_name(handle.device) for name, handle in held.items() if handle.device}
