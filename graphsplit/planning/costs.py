"""Costs: how long an operation takes, by a roofline: the slower of its arithmetic and of what it reads and writes.

Seconds are those of one machine, whatever the plan's devices are: they are compared with each other. (Williams,
Waterman, Patterson 2009: Roofline.)
"""

from __future__ import annotations

from dataclasses import dataclass

from graphsplit.planning.work import flops_of
from graphsplit.program.program import Op, Program

_PASSED_ON = frozenset(
    {"Const", "ExpandDims", "Identity", "NoOp", "Placeholder", "PreventGradient", "Reshape", "Squeeze", "StopGradient"}
)


@dataclass(frozen=True)
class Machine:
    """What a device can do.

    Attributes:
      flops_per_s: floating-point operations.
      bytes_per_s: read and written in its own memory.
    """

    flops_per_s: float = 19.5e12  # an A100 without tensor cores; per byte, CPUs and newer GPUs do about as many
    bytes_per_s: float = 1.55e12


def seconds_of(program: Program, op: Op, machine: Machine = Machine()) -> float:  # frozen
    """Return how long one execution takes, on all rows; 0 for what only passes on a buffer."""
    if op.type in _PASSED_ON:
        return 0.0
    moved = sum(map(program.bytes, dict.fromkeys(op.inputs))) + sum(op.out_bytes)
    return max(flops_of(op) / machine.flops_per_s, moved / machine.bytes_per_s)
