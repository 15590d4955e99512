"""Layouts along an axis of a mesh: which variables are cut along which dimension, found from what a program does.

Each large variable, cut along each of its dimensions, has partners (`Partners`); together they are one choice, and
so is the variable alone. Equal blocks of a network, told by the numbers in their names, are cut alike. Choices are put
together by descent: each is added, or taken back, while that makes the step faster by `AxisTimes`.

These tell about what a step takes with variables cut so, from the plan of that axis alone. Operations count one after
the other, each with the part of it that a device does, and so do the moves. That is rough and cheap: it says which
layouts are worth to be planned on all devices and replayed.
"""

from __future__ import annotations

import functools
import glob
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphsplit.axes.plans import AxisPlanner
from graphsplit.axes.units import Partners
from graphsplit.core.layouts import Layout, Partial, Shard
from graphsplit.core.patterns import fits, pattern_of
from graphsplit.emission.shards.sizes import described_on
from graphsplit.planning.amounts import count_text
from graphsplit.planning.costs.families import MATRIX, family_of
from graphsplit.planning.costs.machine import Link, Machine
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.costs.work import flops_of_all, work_of
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.plan import Plan
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program

Cuts = Mapping[int, Shard]
"""How captures are cut that are, by position."""

Along = tuple[tuple[str, int], ...]
"""Patterns of names, and the dimension that is cut of the variables that they fit."""

_LARGE = 1 / 50  # of all bytes, of a variable and those like it: smaller ones are cut only as partners
_OPERATIONS, _FEWEST = 100_000, 12  # of a program, as often as a layout of it is estimated: about ten seconds
_NAMED = 3  # variables, of those that are not looked at
_NUMBER = re.compile(r"_?(\d+)$")


@dataclass(frozen=True)
class Variable:
    """A variable that may be cut.

    Attributes:
      name: by which users know it.
      shape: of it.
      bytes: of it.
      captures: all that lies as it does: the positions of its captures, and those of its slots.
      slot_bytes: of its slots.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    captures: tuple[int, ...]
    slot_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """Those of its slots, too."""
        return self.bytes + self.slot_bytes

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """The scopes of its name, and the last word, without numbers."""
        return tuple([_NUMBER.sub("", word) for word in self.name.split("/")])

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers at the ends of these; 0 where there is none, as Keras calls the first of several."""
        return tuple([int(number[1]) if (number := _NUMBER.search(word)) else 0 for word in self.name.split("/")])


@dataclass(frozen=True)
class Laid:
    """A layout along an axis.

    Attributes:
      along: as patterns.
      time: about what a step takes.
      bytes: that lie in parts.
    """

    along: Along
    time: AxisTime
    bytes: int


@dataclass(eq=False)
class MeshLayouts:
    """Finds layouts; `found` does.

    Args:
      program: the function.
      variables: those that may be cut.
      machine: by which speed is told.
      axis: what the axis is called.
      columns: how many devices it has.
      rows: the shards of the batch, along the other axis.

    Attributes:
      left_out: what was not looked at because the function is large; "" if everything was.
    """

    program: Program
    variables: Sequence[Variable]
    machine: Machine
    axis: str
    columns: int
    rows: Mesh
    left_out: str = field(default="", init=False)
    _estimates: dict[frozenset[tuple[int, Shard]], tuple[dict[int, Shard], AxisTime]] = field(
        default_factory=dict, init=False
    )

    def found(self) -> list[Laid]:
        """Return layouts, the fastest first, those that were met on the way.

        The one that cuts nothing is among them. The last one is once more the one that cuts most.
        """
        best, seconds_before = dict[int, Shard](), math.inf
        self._seconds(best)
        choices = sorted(self._choices(), key=self._seconds)
        while self._seconds(best) < seconds_before:
            seconds_before = self._seconds(best)
            for choice in choices:  # it is taken, whatever was cut otherwise, or taken back
                other_cuts = {i: cut for i, cut in best.items() if choice.get(i) != cut}
                best = min([best, *self._affordable({**best, **choice}, other_cuts)], key=self._seconds)
        most = dict(best)
        for choice in sorted(choices, key=self._bytes, reverse=True):
            most.update(choice if not any(most.get(i, cut) != cut for i, cut in choice.items()) else {})
        self._seconds(most)
        ordered = sorted(self._estimates.values(), key=lambda pair: pair[1].seconds)
        last = self._estimates[frozenset(most.items())]
        return [self._laid(*pair) for pair in [*ordered, last]]

    def _seconds(self, cuts: Cuts) -> float:
        """Return about what a step takes; each layout is estimated once."""
        key = frozenset(cuts.items())
        if key not in self._estimates:
            self._estimates[key] = dict(cuts), self._times.of(self._partners.laid(cuts))
        return self._estimates[key][1].seconds

    def _affordable(self, *layouts: dict[int, Shard]) -> list[dict[int, Shard]]:
        """Return the layouts whose times are known, and others as long as few have been estimated."""
        affordable = [cuts for cuts in layouts if self._looks_left > 0 or frozenset(cuts.items()) in self._estimates]
        if len(affordable) < len(layouts):
            self.left_out = self.left_out or "some combinations of variables that are cut"
        return affordable

    @property
    def _looks_left(self) -> int:
        """How many layouts may be estimated still."""
        return max(_OPERATIONS // len(self.program.ops), _FEWEST) - len(self._estimates)

    def _choices(self) -> list[dict[int, Shard]]:
        """Return what may be cut together: variables alone, and with their partners, in all equal blocks alike."""
        choices, alone, together = dict[object, dict[int, Shard]](), set[tuple[int, int]](), set[tuple[int, int]]()
        keys = [
            (variable, k) for variable in self._large() for k, size in enumerate(variable.shape) if size >= self.columns
        ]
        half = self._looks_left // 2  # (the others are for combinations)
        missed = dict[str, None]()
        for variable, dimension in keys:
            key = variable.captures[0], dimension
            if key in alone and key in together:
                continue
            if len(choices) >= half:
                missed[variable.name] = None
                continue
            cuts_alone = self._partners.alone(*key)
            ways = [(alone, cuts_alone)] if key not in alone else []
            ways += [(together, self._partners.of(cuts_alone))] if key not in together else []
            for met, cuts in ways:
                everywhere = self._in_all_blocks(variable, cuts)
                met.update((i, cut.axis) for i, cut in everywhere.items())
                choices.setdefault(frozenset(everywhere.items()), everywhere)
        if missed:
            named = ", ".join([*list(missed)[:_NAMED], *(["..."] if len(missed) > _NAMED else [])])
            self.left_out = f"ways to cut {count_text(len(missed), 'large variable')}: {named}"
        return list(choices.values())

    def _large(self) -> list[Variable]:
        """Return those of which there is much, the largest first."""
        total, sums = sum(variable.all_bytes for variable in self.variables), Counter[object]()
        for variable in self.variables:
            sums[variable.words, variable.shape] += variable.all_bytes
        large = [variable for variable in self.variables if sums[variable.words, variable.shape] >= _LARGE * total]
        return sorted(large, key=lambda variable: -variable.all_bytes)

    def _in_all_blocks(self, variable: Variable, cuts: Cuts) -> dict[int, Shard]:
        """Return cuts of one block, of a variable and its partners, in all blocks that are like it."""
        all_cuts, named = dict(cuts), {(v.words, v.numbers, v.shape): v for v in self.variables}
        kinds = Counter((v.words, v.shape) for v in self.variables)
        owners = [(v, cuts[v.captures[0]]) for v in self.variables if v.captures[0] in cuts]
        for like in self.variables:
            apart = [k for k, (a, b) in enumerate(zip(like.numbers, variable.numbers, strict=False)) if a != b]
            if (like.words, like.shape) != (variable.words, variable.shape) or len(apart) != 1:
                continue
            [k] = apart
            shift, cuts_of_block = like.numbers[k] - variable.numbers[k], list[tuple[Variable | None, Shard]]()
            for owner, cut in owners:
                moved = owner.words, _moved(owner.numbers, k, shift), owner.shape
                cuts_of_block.append((owner if kinds[owner.words, owner.shape] == 1 else named.get(moved), cut))
            fitting = {
                i: cut for moved_owner, cut in cuts_of_block if moved_owner is not None for i in moved_owner.captures
            }
            if all(moved_owner is not None for moved_owner, _ in cuts_of_block) and all(
                all_cuts.get(i, c) == c for i, c in fitting.items()
            ):
                all_cuts |= fitting
        return all_cuts

    @functools.cached_property
    def _planner(self) -> AxisPlanner:
        return AxisPlanner(self.axis, self.columns)

    @functools.cached_property
    def _partners(self) -> Partners:
        shapes = {i: variable.shape for variable in self.variables for i in variable.captures}
        alike = {i: variable.captures for variable in self.variables for i in variable.captures}
        return Partners(self.program, self._planner, shapes, alike)

    @functools.cached_property
    def _times(self) -> AxisTimes:
        ops, shapes = self.program.ops, [variable.shape for variable in self.variables]
        written = {tensor.op for i in self.program.writes for tensor in ops[i].inputs}
        changed = [variable for variable in self.variables if not written.isdisjoint(variable.captures)]
        gradients = {
            ops[variable.captures[0]].name: variable.bytes for variable in changed
        }  # (slots are made of the same sum)
        return AxisTimes(self.program, self._planner, self.rows, self.machine, shapes, gradients)

    def _bytes(self, cuts: Cuts) -> int:
        return sum(variable.all_bytes for variable in self.variables if variable.captures[0] in cuts)

    def _laid(self, cuts: Cuts, time: AxisTime) -> Laid:
        dimensions = [
            (variable, cuts[variable.captures[0]].axis) for variable in self.variables if variable.captures[0] in cuts
        ]
        return Laid(patterns(dimensions, [variable.name for variable in self.variables]), time, self._bytes(cuts))


def _beginning(words: Iterable[str]) -> str:
    """Return with what all of some words begin.

    >>> _beginning(["block_0", "block_12"])
    'block_'
    """
    first, last = min(words), max(words)
    return first[: next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _moved(numbers: Sequence[int], k: int, shift: int) -> tuple[int, ...]:
    """Return the numbers in a name of another block."""
    return tuple([number + shift if i == k else number for i, number in enumerate(numbers)])


def patterns(cut: Iterable[tuple[Variable, int]], names: Sequence[str]) -> Along:
    """Return variables, and the dimension that is cut of each, as few patterns: one for those of equal blocks.

    Args:
      cut: the variables that are cut.
      names: of all variables, of which a pattern must fit no other ones.
    """
    groups: dict[tuple[tuple[str, ...], int], list[str]] = {}
    for variable, dimension in cut:
        groups.setdefault((variable.words, dimension), []).append(variable.name)
    dimension_by_pattern: list[tuple[str, int]] = []
    for (_, dimension), members in groups.items():
        scopes = [set(scope) for scope in zip(*[name.split("/") for name in members], strict=True)]
        starts = [(glob.escape(_beginning(scope)), len(scope) > 1) for scope in scopes]
        pattern = "/".join([f"{start}*" if differs else start for start, differs in starts])
        if {name for name in names if fits(name, pattern)} == set(members):
            dimension_by_pattern.append((pattern, dimension))
            continue
        for name in members:
            is_an_end = sum(fits(other, glob.escape(name)) for other in names) > 1
            dimension_by_pattern.append((pattern_of(name) if is_an_end else glob.escape(name), dimension))
    return tuple(dimension_by_pattern)


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
        self._seconds_by_op: dict[object, float] = {}

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
        gradient_bytes = sum(
            [size / (columns if isinstance(laid.get(n), Shard) else 1) for n, size in self._gradients.items()]
        )
        along_batch = 2 * gradient_bytes * (self._rows - 1) / self._rows / self._link(devices).bytes_per_s
        return AxisTime(computing * in_turns, sending + along_batch, sent)

    def _seconds(self, plan: Plan, op: Op, step: Step) -> float:
        if not step.once and step.shards is None:
            return 0.0
        layouts = (step.shards.wants, step.shards.gives) if step.shards is not None else ((), ())
        if (op.name, layouts) not in self._seconds_by_op:
            is_cut = any(isinstance(layout, Shard) for side in layouts for layout in side)
            inside = sum(map(flops_of_all, op.bodies.values())) / (self._planner.columns if is_cut else 1)
            work = work_of(op.type, op.attr, *described_on(plan.program, op, step.shards, plan.rows, 0))
            work = replace(work, flops=work.flops + inside).times(self._share_of_rows(op))
            self._seconds_by_op[op.name, layouts] = self._costs.seconds(work)
        return self._seconds_by_op[op.name, layouts]

    def _share_of_rows(self, op: Op) -> float:
        """Return which part of an operation the row of the mesh does that has most: all of what is done to weights."""
        result_shapes = {tuple(shape) for shape in op.out_shapes if shape}
        is_done_to_weights = family_of(op.type) not in MATRIX and result_shapes <= self._weights
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
            bytes_read = sum(plan.program.bytes(m.tensor) * share for m in added)
            seconds += 2 * bytes_read / self._machine.device.bytes_per_s
        return seconds, most

    def _link(self, devices: int) -> Link:
        """Return what joins so many devices: the network, if they are on several hosts."""
        machine = self._machine
        return machine.network if devices > machine.devices and machine.network is not None else machine.link
