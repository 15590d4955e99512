"""Decisions: what a plan consists of, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from graphsplit.core.layouts import Layout, Replicate, Shard, is_whole
from graphsplit.core.polynomials import Symbol
from graphsplit.core.sizes import ROWS, Size, has_sizes, symbols_in
from graphsplit.core.variables.arrangements import FirstMove
from graphsplit.planning.amounts import size_text
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.places import Owners, Places
from graphsplit.planning.planning_options import PlanningOptions
from graphsplit.planning.propagation.flow import Flow
from graphsplit.planning.rows_kept import rows_kept
from graphsplit.planning.schedule.automatic_stages import StageStarts
from graphsplit.planning.schedule.phases import Phase, Turn
from graphsplit.planning.schedule.schedules import Schedule
from graphsplit.planning.state import State
from graphsplit.planning.steps import Move, Step
from graphsplit.program.program import Op, Program, Tensor


@dataclass(frozen=True, eq=False)
class Decisions:
    """Where every operation of a program runs, and what has to travel.

    Attributes:
      program: the single-device program.
      mesh: the shards.
      default_device: the device of whole values that belong to nobody.
      input_layouts: the layout of each argument.
      steps: one per operation.
      owners: the devices of whole values.
      moves: every change of layout that the live operations need, each once.
      collectives: what carries them out; several moves together where they are made as one.
      order: operations on the shards that wait, each for another one that other devices wait for.
      phases: what shards of one device do one after the other; empty if no device has several.
      turns: in which order.
      schedules: by which shards go through stages, for each number of shards that a device has; empty for none.
      notes: one sentence for each thing a user would not expect.
      asked: what the user asks of it.
      state: where variables, tables and large constants live.
      stage_starts: the stages into which the program was cut, if that was asked for.
      first_move: the variables that the first call moves to where the plan has them, if some lie otherwise.
      output_layouts: of what it returns; empty if each is on one device.
      input_devices: where each argument lies that the caller gives; empty if all are on the default device.
      default_devices: the devices of which one becomes the default one, unless one that has the variables does; empty
        if it is given.
      start: what the first pass was given.
    """

    program: Program = field(repr=False)
    mesh: Mesh
    default_device: str
    input_layouts: tuple[Layout, ...]
    steps: tuple[Step, ...] = field(repr=False)
    owners: Owners = field(repr=False)
    moves: tuple[Move, ...] = field(repr=False)
    collectives: tuple[Collective, ...] = field(default=(), repr=False)
    order: Mapping[int, int] = field(default_factory=dict, repr=False)
    phases: tuple[Phase, ...] = field(default=(), repr=False)
    turns: tuple[Turn, ...] = field(default=(), repr=False)
    schedules: Mapping[int, Schedule] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    asked: PlanningOptions = field(default_factory=PlanningOptions, repr=False)
    state: State = field(default_factory=State, repr=False)
    stage_starts: StageStarts | None = field(default=None, repr=False)
    first_move: FirstMove | None = None
    output_layouts: tuple[Layout, ...] = ()
    input_devices: tuple[str, ...] = ()
    default_devices: tuple[str, ...] = ()
    start: Decisions | None = field(default=None, repr=False)

    @cached_property
    def places(self) -> Places:
        """On which devices operations run, and values are."""
        return Places(self.mesh, self.default_device, self.owners)

    @property
    def buckets(self) -> tuple[Collective, ...]:
        """What moves several small tensors as one."""
        return tuple([collective for collective in self.collectives if collective.is_bucket])

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles what a shard, or the default device, computes between two moves."""
        return self.asked.jit_compile

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each shard; only devices that have rows."""
        return self.mesh.devices

    @property
    def rows(self) -> tuple[int, ...]:
        """How many rows of the batch each shard has; empty if that is not known when planning."""
        return self.mesh.rows

    @property
    def schedule(self) -> Schedule | None:
        """The order in which shards go through the stages, on the device that has most shards; `print` it."""
        return self.schedules[max(self.schedules)] if self.schedules else None

    @property
    def batch(self) -> int:
        """Return the number of rows of the whole batch, 0 if nothing is split."""
        return self.mesh.batch

    def rows_sources(self) -> list[tuple[int, int, int]]:
        """Return the arguments whose shapes tell the number of rows of the batch.

        These are the sharded ones, but gradients of outputs; if there are none, the first of which an axis is a
        multiple of the unknown batch. For each the position of its operation, an axis, and the entries of that per row.
        """
        count = len(self.program.inputs) - self.program.seeds
        sources = []
        for position, layout in zip(self.program.inputs[:count], self.input_layouts, strict=False):
            if isinstance(layout, Shard) and not has_sizes(layout.blocks):  # (else rows times a length)
                sources.append((position, layout.axis, sum(layout.blocks)))
        return sources or self._rows_of_whole_arguments()[:1]

    def _rows_of_whole_arguments(self) -> list[tuple[int, int, int]]:
        sources = []
        for position in self.program.inputs:
            for axis, size in enumerate(self.program.ops[position].out_shapes[0] or ()):
                terms = size.polynomial.terms if isinstance(size, Size) else {}
                if set(terms) == {(ROWS,)}:
                    sources.append((position, axis, terms[ROWS,]))
        return sources

    def length_sources(self) -> dict[Symbol, tuple[int, int]]:
        """Return, for each size of a sequence that is not known, an argument (by position) and the axis that has it."""
        source_by_symbol: dict[Symbol, tuple[int, int]] = {}
        for position in self.program.inputs:
            for axis, size in enumerate(self.program.ops[position].out_shapes[0] or ()):
                terms = size.polynomial.terms if isinstance(size, Size) else {}
                for symbol in symbols_in([(size,)]):
                    if symbol != ROWS and terms == {(symbol,): 1}:
                        source_by_symbol.setdefault(symbol, (position, axis))
        return source_by_symbol

    @property
    def sharded_ops(self) -> tuple[Op, ...]:
        """Return the operations that run on the shards."""
        return tuple(op for op, step in zip(self.program.ops, self.steps, strict=True) if step.shards)

    @property
    def ops_once(self) -> tuple[Op, ...]:
        """Return the operations that run once, on whole tensors."""
        return tuple(op for op, step in zip(self.program.ops, self.steps, strict=True) if step.once)

    @cached_property
    def copies(self) -> Mapping[Tensor, Replicate]:
        """What is whole on each device of a group, made or moved there, and on which."""
        groups, ops = self.owners.groups, self.program.ops
        made_in_groups = {Tensor(i, k): group for i, group in groups.items() for k in range(len(ops[i].out_shapes))}
        return {
            m.tensor: m.target for m in self.moves if isinstance(m.target, Replicate) and m.target.devices
        } | made_in_groups

    @property
    def loops_split(self) -> tuple[int, ...]:
        """Return the loops and branches that run once and whose iterations are split over the devices, by position."""
        return tuple(k for k, step in enumerate(self.steps) if step.once and step.bodies)

    @property
    def unsharded_ops(self) -> tuple[tuple[Op, str], ...]:
        """Return the operations that work on rows of the batch and run on one device, with the reason.

        Those in the iterations of a loop that is one loop for all shards are among them, and not the loop. None do
        where the default device is where the only shard is: a batch of one row needs nothing else. Those that only
        bring rows into variables, `rows_kept`, are not among them.
        """
        if self.devices == (self.default_device,):
            return ()
        pairs = [pair for plan in self._all_plans() for pair in zip(plan.program.ops, plan.steps, strict=True)]
        kept_ids = set(map(id, self.rows_kept))
        return tuple(
            [
                (op, step.reason)
                for op, step in pairs
                if step.once and step.reason and not step.bodies and id(op) not in kept_ids
            ]
        )

    @cached_property
    def rows_kept(self) -> tuple[Op, ...]:
        """The operations that bring rows of the batch into variables, which keep them, and run once."""
        return tuple(rows_kept(self.program, self.steps, self.moves))

    def _all_plans(self) -> Iterable[Decisions]:
        """Return this and the plans of bodies of loops, and of loops in them."""
        yield self
        for step in self.steps:
            for body in step.bodies.values():
                yield from body._all_plans()

    def _plan_of(self, op: Op) -> Decisions:
        """Return the plan of the program that an operation is of."""
        plans = self._all_plans()
        return next(p for p in plans if op.index < len(p.program.ops) and p.program.ops[op.index] is op)

    def gathered(self, op: Op) -> list[Tensor]:
        """Return the tensors that are gathered or reduced to run `op` once."""
        moves = self._plan_of(op).moves
        moved = {move.tensor for move in moves if is_whole(move.target) and not is_whole(move.source)}
        return [tensor for tensor in dict.fromkeys(op.inputs) if tensor in moved]

    def gathered_bytes(self, op: Op) -> int:
        """Return how many bytes are gathered or reduced to run `op` once."""
        return sum(map(self._plan_of(op).program.bytes, self.gathered(op)))

    def gathered_text(self, op: Op) -> str:
        """Return how many bytes are gathered or reduced to run `op` once, for people."""
        tensors = self.gathered(op)
        return size_text(self._plan_of(op).program, tensors) if tensors else "nothing"

    def shard_device(self, op: Op, shard: int) -> str:
        """Return the device on which a shard runs an operation: the shard's, or the one that its stage has for it."""
        return self.places.on(op, shard)

    def size_text(self, tensors: Iterable[Tensor]) -> str:
        """Return the size of some tensors, for people: of a batch of unknown size, by how much it grows per row."""
        return size_text(self.program, tensors)

    @property
    def flow(self) -> Flow:
        """What depends on what."""
        return Flow(self.program, self.steps, self.state, self.order)
