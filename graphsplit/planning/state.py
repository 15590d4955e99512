"""Where lives what a program reads and does not compute: variables, tables, large constants."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import tensorflow as tf

from graphsplit.core.devices import canonical_name
from graphsplit.core.layouts import REPLICATE, SINGLE_DEVICE, Layout
from graphsplit.program.program import Op, Program
from graphsplit.tracing.trace import Trace


@dataclass(frozen=True)
class State:
    """Where state lives.

    Attributes:
      devices: of captured variables and tables, by placeholder name; "" for those that are wherever a loader puts
        them: what touches them has no device either. Those not named are at home.
      replicated: captures of which every device of the mesh has a copy, by placeholder name. They are only read.
      largest_constant: constants of more bytes are at home only, and sent; smaller ones every device has for itself.
    """

    devices: Mapping[str, str] = field(default_factory=dict)
    replicated: frozenset[str] = frozenset()
    largest_constant: int | None = None

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
    program = trace.program
    pairs = zip(program.captures, trace.captures, strict=True)
    held = {program.ops[position].name: handle for position, handle in pairs if handle.dtype == tf.resource}
    return State({name: canonical_name(handle.device) for name, handle in held.items() if handle.device})
