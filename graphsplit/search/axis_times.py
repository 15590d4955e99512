"""Axis times: about what a step takes with variables cut along an axis of a mesh, from the plan of that axis alone.

Operations count one after the other, each with the part of it that a device does, and so do the moves. That is rough
and cheap: it says which layouts are worth to be planned on all devices and replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.axes.plans import planned_along
from graphsplit.core.layouts import Layout, Partial, Shard
from graphsplit.costs.families import MATRIX, family_of
from graphsplit.costs.machine import Link, Machine
from graphsplit.costs.seconds import Costs
from graphsplit.costs.work import Work, bytes_moved, flops_of
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program


@dataclass(frozen=True)
class AxisTime:
    """About what a step takes.

    Attributes:
      computing_s: of it, in which a device computes.
      sending_s: in which devices of the axis send each other something, or sums travel along the batch's axis.
      sent_bytes: what the busiest device of the axis sends and receives.
    """

    computing_s: float
    sending_s: float
    sent_bytes: float

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.computing_s + self.sending_s


class AxisTimes:
    """Times of layouts along an axis.

    Args:
      program: the function.
      axis: what the axis is called.
      machine: whose devices they are.
      weights: the shapes of its variables: what has one of these does not depend on the batch.
      written: bytes of the variables that are written, by placeholder name.
    """

    def __init__(
        self,
        program: Program,
        axis: str,
        machine: Machine,
        weights: Collection[tuple[int, ...]],
        written: Mapping[str, int],
    ):
        self._program = program
        self._axis = axis
        self._machine = machine
        self._weights = {tuple(shape) for shape in weights if shape}
        self._written = written
        self._costs = Costs(machine.device)
        self._known: dict[tuple[str, float, float], float] = {}
        self._flops: dict[str, int] = {}

    def of(self, laid: Mapping[str, Layout], rows: int, columns: int) -> AxisTime:
        """Return about what a step takes.

        Args:
          laid: how variables lie along the axis, by the names of their placeholders.
          rows, columns: of the mesh.
        """
        plan = planned_along(self._program, self._axis, columns, laid)
        threads = self._machine.threads(rows * columns) if self._machine.device.kind == "CPU" else rows * columns
        in_turns = max(1.0, rows * columns / threads)  # (devices that share threads compute one after the other)
        pairs = zip(plan.program.ops, plan.steps, strict=True)
        computing = sum([self._seconds(plan, op, step, rows, columns) for op, step in pairs])
        sending, sent = self._sending(plan, rows)
        own = sum([size / (columns if isinstance(laid.get(n), Shard) else 1) for n, size in self._written.items()])
        along_batch = 2 * own * (rows - 1) / rows / self._link(rows * columns).bytes_per_s
        return AxisTime(computing * in_turns, sending + along_batch, sent)

    def _seconds(self, plan: Plan, op: Op, step: Step, rows: int, columns: int) -> float:
        if not step.home and step.shards is None:
            return 0.0
        wants, gives = (step.shards.wants, step.shards.gives) if step.shards is not None else ((), ())
        is_cut = any(isinstance(layout, Shard) for layout in (*wants, *gives))
        program, whole = plan.program, [1.0] * (len(op.inputs) + len(op.out_bytes))
        own = [1 / columns if isinstance(layout, Shard) else 1.0 for layout in (*wants, *gives)] or whole
        share = self._rows_share(op, rows)
        sizes = [program.bytes(t) for t in op.inputs], list(op.out_bytes)
        moved = bytes_moved(op.type, [int(n * part) for n, part in zip([*sizes[0], *sizes[1]], own, strict=True)])
        flops = self._flops_of(op) * (1 / columns if is_cut else 1.0)
        key = op.type, flops * share, moved * share
        if key not in self._known:
            dtype = op.out_dtypes[0].name if op.out_dtypes else ""
            self._known[key] = self._costs.seconds(Work(family_of(op.type), dtype, key[1], key[2]))
        return self._known[key]

    def _flops_of(self, op: Op) -> int:
        if op.name not in self._flops:
            self._flops[op.name] = flops_of(op)
        return self._flops[op.name]

    def _rows_share(self, op: Op, rows: int) -> float:
        """Return which part of an operation a row of the mesh does: all of what is done to weights."""
        made = {tuple(shape) for shape in op.out_shapes if shape}
        return 1.0 if family_of(op.type) not in MATRIX and made <= self._weights else 1 / rows

    def _sending(self, plan: Plan, rows: int) -> tuple[float, float]:
        """Return how long the moves along the axis take, and what the busiest device sends and receives."""
        seconds, most = 0.0, 0.0
        link = self._link(plan.mesh.shards)
        for collective in plan.collectives:
            out, into, total = dict[str, float](), dict[str, float](), 0.0
            share = self._rows_share(plan.program.ops[collective.moves[0].tensor.op], rows)
            for _, (source, target, size) in collective.transfers():
                out[source] = out.get(source, 0.0) + size * share
                into[target] = into.get(target, 0.0) + size * share
                total += size * share
            busiest = max([*out.values(), *into.values()], default=0.0)
            most += busiest
            seconds += (total * rows if link.shared else busiest) / link.bytes_per_s
            seconds += 2 * link.latency_s if total else 0.0
            added = [m for m in collective.moves if isinstance(m.source, Partial)]
            read = sum(plan.program.bytes(m.tensor) * share for m in added)
            seconds += 2 * read / self._machine.device.bytes_per_s
        return seconds, most

    def _link(self, devices: int) -> Link:
        """Return what joins so many devices: the network, if they are on several hosts."""
        machine = self._machine
        return machine.network if devices > machine.devices and machine.network is not None else machine.link


def written_bytes(program: Program, sizes: Mapping[int, int]) -> dict[str, int]:
    """Return the bytes of captured variables that a program writes, by placeholder name.

    Args:
      program: the function.
      sizes: bytes of captured variables, by position.
    """
    writing: Sequence[Op] = [op for op in program.ops if op.stateful and op.type != "ReadVariableOp"]
    found = {t.op for op in writing for t in op.inputs if t.op in sizes}
    return {program.ops[i].name: sizes[i] for i in found}
