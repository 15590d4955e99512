"""Plan: the single decision from which the multi-device graph follows. Made once, checked, printed, then emitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.layouts import PARTIAL_SUM, Layout, Replicate, Shard, is_whole
from graphsplit.core.notebooks import text_html
from graphsplit.core.sizes.polynomials import Symbol
from graphsplit.core.sizes.symbolic_sizes import ROWS, Size, symbols_in
from graphsplit.errors import CheckError
from graphsplit.planning.amounts import size_text
from graphsplit.planning.communication.bucketing import check_buckets
from graphsplit.planning.communication.moves import find_moves
from graphsplit.planning.communication.transfer_checks import check_transfers
from graphsplit.planning.communication.transfers import Collective
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.options import Options
from graphsplit.planning.propagation.flow import Flow
from graphsplit.planning.propagation.owners import Owners
from graphsplit.planning.propagation.sharding_checks import check_size, check_step
from graphsplit.planning.schedule.automatic_stages import StageCuts, check_stage_cuts
from graphsplit.planning.schedule.phases import Phase, check_phases
from graphsplit.planning.schedule.schedules import Schedule
from graphsplit.planning.schedule.scheduling import check_order
from graphsplit.planning.schedule.turns import Turn, check_turns_taken
from graphsplit.planning.shares import shares_of
from graphsplit.planning.state import State
from graphsplit.planning.steps import Move, Step
from graphsplit.planning.text.plan_comparison import compare
from graphsplit.planning.text.plan_text import describe
from graphsplit.program.program import Op, Program, Tensor


class Divide(Protocol):
    """Returns a program in the columns and parts in which its variables lie, and where these are."""

    def __call__(self, state: State, *, reshard: bool, mesh: Mesh) -> tuple[Program, State]: ...  # noqa: D102


@dataclass(frozen=True, eq=False)
class Start:
    """What planning begins with, beside what it is about.

    Attributes:
      homes: the devices of which one becomes home, unless one that has the variables does; empty if it is given.
      divide: writes the program as its variables lie; None for one that is planned as it is.
      drops: whether sharded variables are put together again whenever they are read, and not kept in between.
      plan: what the first pass is given.
      decisions: the passes, in order.
    """

    homes: tuple[str, ...] = ()
    divide: Divide | None = None
    drops: bool = True
    plan: Any = None
    decisions: tuple[Callable[[Plan], Plan], ...] = ()


@dataclass(frozen=True, eq=False)
class Plan:
    """Where every operation of a program runs, and what has to travel: print it, check it.

    Attributes:
      program: the single-device program.
      mesh: the shards.
      home: the device of whole values that belong to nobody.
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
      stage_cuts: the stages into which the program was cut, if that was asked for.
      output_layouts: of what it returns; empty if each is on one device.
      input_devices: where each argument lies that the caller gives; empty if all are at home.
      start: what it began with, beside these.
    """

    program: Program = field(repr=False)
    mesh: Mesh
    home: str
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
    asked: Options = field(default_factory=Options, repr=False)
    state: State = field(default_factory=State, repr=False)
    stage_cuts: StageCuts | None = field(default=None, repr=False)
    output_layouts: tuple[Layout, ...] = ()
    input_devices: tuple[str, ...] = ()
    start: Start = field(default_factory=Start, repr=False)

    @property
    def buckets(self) -> tuple[Collective, ...]:
        """What moves several small tensors as one."""
        return tuple([collective for collective in self.collectives if collective.is_bucket])

    @property
    def random(self) -> str:
        """Which numbers shards draw: `"exact"`, those of one device, or `"independent"` ones."""
        return self.asked.tuning["random"]

    @property
    def jit_compile(self) -> bool:
        """Whether XLA compiles what a shard, or home, computes between two moves."""
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
        """Return the arguments on which the rows of a batch of unknown size are counted.

        For each its position, an axis, and how many entries this has per row.
        """
        arguments = len(self.program.inputs) - self.program.seeds
        found = []
        for position, layout in zip(self.program.inputs[:arguments], self.input_layouts, strict=False):
            if isinstance(layout, Shard):
                found.append((position, layout.axis, sum(layout.blocks)))
        return found or self._rows_of_whole_arguments()[:1]

    def _rows_of_whole_arguments(self) -> list[tuple[int, int, int]]:
        found = []
        for position in self.program.inputs:
            for axis, size in enumerate(self.program.ops[position].out_shapes[0] or ()):
                terms = size.polynomial.terms if isinstance(size, Size) else {}
                if set(terms) == {(ROWS,)}:
                    found.append((position, axis, terms[ROWS,]))
        return found

    def length_sources(self) -> dict[Symbol, tuple[int, int]]:
        """Return, for each size of a sequence that is not known, an argument (by position) and the axis that has it."""
        found: dict[Symbol, tuple[int, int]] = {}
        for position in self.program.inputs:
            for axis, size in enumerate(self.program.ops[position].out_shapes[0] or ()):
                terms = size.polynomial.terms if isinstance(size, Size) else {}
                for symbol in symbols_in([(size,)]):
                    if symbol != ROWS and terms == {(symbol,): 1}:
                        found.setdefault(symbol, (position, axis))
        return found

    @property
    def sharded_ops(self) -> tuple[Op, ...]:
        """Return the operations that run on the shards."""
        return tuple(op for op, step in zip(self.program.ops, self.steps, strict=True) if step.shards)

    @property
    def home_ops(self) -> tuple[Op, ...]:
        """Return the operations that run once, on whole tensors."""
        return tuple(op for op, step in zip(self.program.ops, self.steps, strict=True) if step.home)

    @cached_property
    def copies(self) -> Mapping[Tensor, Replicate]:
        """What is whole on each device of a group, made or moved there, and on which."""
        groups, ops = self.owners.groups, self.program.ops
        made = {Tensor(i, k): group for i, group in groups.items() for k in range(len(ops[i].out_shapes))}
        return {m.tensor: m.target for m in self.moves if isinstance(m.target, Replicate) and m.target.devices} | made

    @property
    def turns_split(self) -> tuple[int, ...]:
        """Return the loops and branches that run once and whose turns are split over the devices, by position."""
        return tuple(k for k, step in enumerate(self.steps) if step.home and step.bodies)

    @property
    def stayed_home(self) -> tuple[tuple[Op, str], ...]:
        """Return the operations that work on rows of the batch and run on one device, with the reason.

        Those in the turns of a loop that is one loop for all shards are among them, and not the loop. None do where
        home is where the only shard is: a batch of one row needs nothing else.
        """
        if self.devices == (self.home,):
            return ()
        pairs = [pair for plan in self._all_plans() for pair in zip(plan.program.ops, plan.steps, strict=True)]
        return tuple((op, step.reason) for op, step in pairs if step.home and step.reason and not step.bodies)

    def _all_plans(self) -> Iterable[Plan]:
        """Return this and the plans of turns of loops, and of loops in them."""
        yield self
        for step in self.steps:
            for body in step.bodies.values():
                yield from body._all_plans()

    def _plan_of(self, op: Op) -> Plan:
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
        found = self.gathered(op)
        return size_text(self._plan_of(op).program, found) if found else "nothing"

    def shard_device(self, op: Op, shard: int) -> str:
        """Return the device on which a shard runs an operation: the shard's, or the one that its stage has for it."""
        return self.mesh.device_of(shard, op)

    def size_text(self, tensors: Iterable[Tensor]) -> str:
        """Return the size of some tensors, for people: of a batch of unknown size, by how much it grows per row."""
        return size_text(self.program, tensors)

    @property
    def flow(self) -> Flow:
        """What depends on what."""
        return Flow(self.program, self.steps, self.state, self.order)

    @collection_paused()
    def check(self) -> None:
        """Raise `CheckError` unless every tensor is made in, or moved into, the layouts in which it is read.

        Plans of what loops and branches do in each turn are checked as well.
        """
        self.mesh.check()
        for step in self.steps:
            for body in (*step.bodies.values(), *(step.shards.bodies.values() if step.shards else ())):
                if isinstance(body, Plan):
                    body.check()
        for op, step in zip(self.program.ops, self.steps, strict=True):
            for tensor, layout in check_step(self.program, op, step, self.mesh):
                check_size(self.program, tensor, layout, self.mesh)
        self._check_made()
        self._check_moves()
        check_buckets(self.program, self.steps, self.buckets)
        check_transfers(self.program, self.mesh, self.home, self.moves, self.collectives)
        check_order(self.program, self.steps, self.order)
        if self.stage_cuts is not None:
            check_stage_cuts(self.program, self.steps, self.stage_cuts)
        if self.mesh.has_turns:
            check_phases(self.flow, self.collectives, self.phases)
            check_turns_taken(self.phases, self.mesh, self.turns)
        for schedule in self.schedules.values():
            schedule.check()

    def _check_made(self) -> None:
        """Raise `CheckError` if something is read of an operation that does not run."""
        read = [(op.name, t) for op, step in zip(self.program.ops, self.steps, strict=True) for t in _read(op, step)]
        for reader, tensor in [*read, *(("the result", tensor) for tensor in self.program.outputs)]:
            op, step = self.program.ops[tensor.op], self.steps[tensor.op]
            if not (step.home or step.shards or self.state.is_everywhere(op) or op.type == "Const"):
                raise CheckError(f"{reader!r} reads {op.name!r}, which is not made.")

    def _check_moves(self) -> None:
        """Raise `CheckError` unless the moves are those that follow from the steps."""
        expected = find_moves(self.program, self.mesh, self.steps, self.owners, self.state, self.output_layouts)
        missing, idle = set(expected) - set(self.moves), set(self.moves) - set(expected)
        for move in [*missing, *idle]:
            name, what = self.program.ops[move.tensor.op].name, "is missing" if move in missing else "serves nobody"
            raise CheckError(f"The {move.kind} of {name!r} from {move.source} to {move.target} {what}.")
        if len(set(self.moves)) < len(self.moves):
            raise CheckError("A move is made twice.")
        bucketed = [move for bucket in self.buckets for move in bucket.moves]
        if any(len({(m.source, m.target) for m in bucket.moves}) > 1 for bucket in self.buckets):
            raise CheckError("A bucket holds moves between different places.")
        if any(move.kind != "broadcast" and move.source != PARTIAL_SUM for move in bucketed):
            raise CheckError("A bucket holds moves that cannot be made as one.")

    @property
    def sharded_fraction(self) -> float:
        """The fraction of the floating-point operations that are sharded, as the first line says; 1 if there are none.

        `assert step.plan(x).sharded_fraction > 0.9` keeps a later change from taking work off the devices.
        """
        shares = shares_of(self)
        return shares.sharded_flops / shares.flops if shares.flops else 1.0

    def compare(self, other: Plan) -> str:
        """Return how another plan of the same function differs: what devices compute, send and store."""
        return compare(self, other)

    def explain(self) -> str:
        """Explain the plan: one line for each thing that you might not expect.

        For `plan="auto"`: what was chosen, what it was compared with, and what the predictions assume.
        """
        notes = (*self.program.notes, *self.notes)
        if not any(note.startswith("chosen automatically") for note in notes):
            notes += ('no other plan was compared: give parallelize, or multi_gpu_model, plan="auto" to compare some',)
        return "\n".join(notes)

    def __str__(self) -> str:
        return describe(self)

    __repr__ = __str__  # what a prompt, and an assertion that fails, show

    def _repr_html_(self) -> str:
        return text_html(str(self), "the whole plan")


def _read(op: Op, step: Step) -> list[Tensor]:
    if step.home:
        return list(op.inputs)
    if step.shards:
        return [tensor for i, tensor in enumerate(op.inputs) if i not in step.shards.makes]
    return []
