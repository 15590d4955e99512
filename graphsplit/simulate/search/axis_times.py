"""Axis times: about what a step takes with variables cut along an axis of a mesh, from the plan of that axis alone.

Operations count one after the other, each with the part of it that a device does, and so do the moves. That is rough
and cheap: it says which layouts are worth to be planned on all devices and replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from graphsplit.core.layouts import Layout, Partial, Shard
from graphsplit.emission.axes.plans import AxisPlanner
from graphsplit.emission.shards.sizes import described_on
from graphsplit.planning.costs.families import MATRIX, family_of
from graphsplit.planning.costs.machine import Link, Machine
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.costs.work import flops_of_all, work_of
from graphsplit.planning.mesh import Mesh
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
      planner: of the axis.
      rows: the shards of the batch.
      machine: whose devices they are.
      weights: the shapes of its variables: what has one of these does not depend on the batch.
      gradients: bytes of the sums that travel along the batch's axis, by the placeholders of whom they are added to.
    """

    def __init__(
        self,
        program: Program,
        planner: AxisPlanner,
        rows: Mesh,
        machine: Machine,
        weights: Collection[tuple[int, ...]],
        gradients: Mapping[str, int],
    ):
        self._program = program
        self._planner = planner
        self._rows = max(rows.shards, 1)
        self._largest_share = max([rows.share(d) for d in range(rows.shards)], default=1.0)
        self._machine = machine
        self._weights = {tuple(shape) for shape in weights if shape}
        self._gradients = gradients
        self._costs = Costs(machine.device)
        self._known: dict[object, float] = {}

    def of(self, laid: Mapping[str, Layout]) -> AxisTime:
        """Return about what a step takes.

        Args:
          laid: how variables lie along the axis, by the names of their placeholders.
        """
        plan, columns = self._planner.plan(self._program, laid), self._planner.columns
        devices = self._rows * columns
        threads = self._machine.threads(devices) if self._machine.device.kind == "CPU" else devices
        in_turns = max(1.0, devices / threads)  # (devices that share threads compute one after the other)
        computing = sum([self._seconds(plan, op, step) for op, step in zip(plan.program.ops, plan.steps, strict=True)])
        sending, sent = self._sending(plan)
        own = sum([size / (columns if isinstance(laid.get(n), Shard) else 1) for n, size in self._gradients.items()])
        along_batch = 2 * own * (self._rows - 1) / self._rows / self._link(devices).bytes_per_s
        return AxisTime(computing * in_turns, sending + along_batch, sent)

    def _seconds(self, plan: Plan, op: Op, step: Step) -> float:
        if not step.home and step.shards is None:
            return 0.0
        layouts = (step.shards.wants, step.shards.gives) if step.shards is not None else ((), ())
        if (op.name, layouts) not in self._known:
            is_cut = any(isinstance(layout, Shard) for own in layouts for layout in own)
            inside = sum(map(flops_of_all, op.bodies.values())) / (self._planner.columns if is_cut else 1)
            work = work_of(op.type, op.attr, *described_on(plan.program, op, step.shards, plan.rows, 0))
            work = replace(work, flops=work.flops + inside).times(self._share_of_rows(op))
            self._known[op.name, layouts] = self._costs.seconds(work)
        return self._known[op.name, layouts]

    def _share_of_rows(self, op: Op) -> float:
        """Return which part of an operation the row of the mesh does that has most: all of what is done to weights."""
        made = {tuple(shape) for shape in op.out_shapes if shape}
        is_done_to_weights = family_of(op.type) not in MATRIX and made <= self._weights
        return 1.0 if is_done_to_weights else self._largest_share

    def _sending(self, plan: Plan) -> tuple[float, float]:
        """Return how long the moves along the axis take, and what the busiest device sends and receives."""
        seconds, most = 0.0, 0.0
        link = self._link(plan.mesh.shards)
        for collective in plan.collectives:
            out, into, total = dict[str, float](), dict[str, float](), 0.0
            share = self._share_of_rows(plan.program.ops[collective.moves[0].tensor.op])
            for _, (source, target, size) in collective.transfers():
                out[source] = out.get(source, 0.0) + size * share
                into[target] = into.get(target, 0.0) + size * share
                total += size * share
            busiest = max([*out.values(), *into.values()], default=0.0)
            most += busiest
            seconds += (total * self._rows if link.shared else busiest) / link.bytes_per_s
            seconds += 2 * link.latency_s if total else 0.0
            added = [m for m in collective.moves if isinstance(m.source, Partial)]
            read = sum(plan.program.bytes(m.tensor) * share for m in added)
            seconds += 2 * read / self._machine.device.bytes_per_s
        return seconds, most

    def _link(self, devices: int) -> Link:
        """Return what joins so many devices: the network, if they are on several hosts."""
        machine = self._machine
        return machine.network if devices > machine.devices and machine.network is not None else machine.link
