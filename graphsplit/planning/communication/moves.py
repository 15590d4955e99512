"""Moves: every change of a tensor's layout, derived once from what is made and what is read.

What is read in a layout in which it is not made moves to it: from each shard to each where that is possible, else
through one device, gathered or reduced, then cut or sent. Emission executes these moves, and derives none.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat

from graphsplit.core.layouts import (
    MOMENTS,
    OWN_MEAN,
    OWN_ROW,
    OWN_VARIANCE,
    PARTIAL_SUM,
    REPLICATE,
    SINGLE_DEVICE,
    Layout,
    Partial,
    Replicate,
    Shard,
    SingleDevice,
    evenly,
    group_of,
    is_whole,
)
from graphsplit.planning.costs.exchanges import is_exchanged
from graphsplit.planning.costs.work import COPY_BYTES
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.places import Places
from graphsplit.planning.state import State
from graphsplit.planning.steps import Move, Step
from graphsplit.program.program import Op, Program, Tensor


def find_moves(
    program: Program, steps: Sequence[Step], places: Places, state: State, outputs: Sequence[Layout] = ()
) -> tuple[Move, ...]:
    """Return every move, each after those it follows from.

    Args:
      program: what is planned.
      steps: what becomes of each op.
      places: of the shards, and where whole values are made.
      state: where lives what the program does not compute.
      outputs: the layouts in which it returns what it returns, if not each on one device.
    """
    finder = _MoveFinder(program, steps, places, state)
    reads = [read for op, step in zip(program.ops, steps, strict=True) for read in reads_of(op, step, places)]
    finder.copied = {
        tensor: read_layout
        for tensor, read_layout in reads
        if isinstance(read_layout, Replicate) and read_layout.devices
    }
    finder.spread = {
        tensor for tensor, read_layout in reads if read_layout == REPLICATE and finder.is_exchanged(tensor)
    }
    for tensor, layout in reads:
        finder.read(tensor, layout)
    for tensor, layout in zip(program.outputs, outputs or repeat(SINGLE_DEVICE)):  # noqa: B905
        finder.read(tensor, layout)
    return tuple(finder.moves)


def is_direct(source: Layout, target: Layout, mesh: Mesh) -> bool:
    """Return whether the shards send each other what they need, without one device that has it all in between.

    They do if each can cut what it has for the others: along an axis that is whole on each.
    """
    if not mesh.exchanging:
        return False
    if isinstance(source, Shard):
        across = isinstance(target, Shard) and target.axis != source.axis and len(source.blocks) == 1
        return across or target == REPLICATE
    return isinstance(source, Partial) and source == PARTIAL_SUM and isinstance(target, Shard)


def is_added_up_by_each(program: Program, mesh: Mesh, tensor: Tensor, copies: Replicate) -> bool:
    """Return whether each device of a group adds up all of a sum, and none a part for all: it is not worth a thought.

    (Nobody waits for the gradient of a larger variable but its update, and there bytes count.)
    """
    return mesh.few_bytes > 0 and not copies.readers and program.bytes(tensor) <= COPY_BYTES


def reads_of(op: Op, step: Step, places: Places) -> Iterable[tuple[Tensor, Layout]]:
    """Return what an op reads, in which layouts: once, where it runs once, and on the shards."""
    if step.once:
        yield from ((tensor, places.layout(op)) for tensor in op.inputs)
    if step.shards:
        for i, (tensor, want) in enumerate(zip(op.inputs, step.shards.wants, strict=True)):
            if i not in step.shards.makes:
                yield tensor, want


def made_in(op: Op, step: Step, output: int, places: Places) -> list[Layout]:
    """Return the layouts in which an output is made."""
    layouts: list[Layout] = [places.layout(op)] if step.once else []
    if step.shards:
        layouts.append(step.shards.gives[output])
    return layouts


@dataclass
class _MoveFinder:
    program: Program
    steps: Sequence[Step]
    places: Places
    state: State
    moves: dict[Move, None] = field(default_factory=dict)
    copied: dict[Tensor, Replicate] = field(default_factory=dict)  # what all devices of a group read
    spread: Collection[Tensor] = ()  # small sums that all shards read

    def __post_init__(self) -> None:
        self.mesh = self.places.mesh
        self._needed_by_parts = {tensor for op in self.program.ops if op.device for tensor in op.inputs}

    def is_exchanged(self, tensor: Tensor) -> bool:
        """Return whether the shards send what they have of a sum from each to each."""
        op, step = self.program.ops[tensor.op], self.steps[tensor.op]
        made_layouts = made_in(op, step, tensor.index, self.places)
        return len(made_layouts) == 1 and is_exchanged(self.program, tensor, made_layouts[0], self.mesh.few_bytes)

    def read(self, tensor: Tensor, layout: Layout) -> None:
        """Add what it takes to read a tensor in a layout. (No device: wherever it is made whole.)"""
        op, step = self.program.ops[tensor.op], self.steps[tensor.op]
        made_layouts = made_in(op, step, tensor.index, self.places)
        if layout in made_layouts or (
            is_whole(layout) and (self.state.is_everywhere(op) or any(map(group_of, made_layouts)))
        ):
            return  # (of copies each reads the nearest)
        if op.type == "Const" and isinstance(layout, Shard):
            self._move(tensor, REPLICATE, layout)
            return
        source = next((made_layout for made_layout in made_layouts if is_whole(made_layout)), None)
        if (tensor in self.spread or (made_layouts and made_layouts[0] in (*MOMENTS, OWN_ROW))) and not isinstance(
            layout, Partial
        ):
            if op.merged == "variance" and made_layouts[0] == OWN_VARIANCE:
                self._move(self.program.ops[op.inputs[0].op].inputs[1], OWN_MEAN, REPLICATE)
            self._move(tensor, made_layouts[0], REPLICATE)
            source = REPLICATE
        if source is None and made_layouts and (source := self.copied.get(tensor)):
            self._copied(tensor, made_layouts[0], source)
            if is_whole(layout):
                return
        if (
            source is None
            and made_layouts
            and (is_direct(made_layouts[0], layout, self.mesh) or self._is_for_a_part(tensor, made_layouts[0], layout))
        ):
            self._move(tensor, made_layouts[0], layout)
            return
        if (
            source is None
            and made_layouts
            and layout == REPLICATE
            and (between := self._added_up_in(tensor, made_layouts[0]))
        ):
            self._move(tensor, made_layouts[0], between)
            self._move(tensor, between, layout)
            return
        if source is None and made_layouts:
            source = self.places.whole(tensor)
            self._move(tensor, made_layouts[0], source)
        if source is not None and layout not in (source, SINGLE_DEVICE):
            self._move(tensor, source, layout)

    def _copied(self, tensor: Tensor, made_layout: Layout, copies: Replicate) -> None:
        """Bring what the shards have to all devices of a group, sums in parts."""
        is_in_parts = made_layout == PARTIAL_SUM and copies.cut(self.program.shape(tensor)) is not None
        is_whole_sum = isinstance(made_layout, Partial) and is_added_up_by_each(self.program, self.mesh, tensor, copies)
        is_direct = is_in_parts or is_whole_sum or (isinstance(made_layout, Shard) and len(made_layout.blocks) == 1)
        path = [made_layout, *([] if is_direct else [self.places.whole(tensor)]), copies]
        for source, target in pairwise(path):
            self._move(tensor, source, target)

    def _added_up_in(self, tensor: Tensor, source: Layout) -> Shard | None:
        """Return how a sum is cut that is added up in parts, which all devices of an axis then get.

        It is cut along its longest known axis, and rather not along the first, which may have the batch's rows. If it
        is as long as several of an argument's, it is not cut: whoever shares out the rows would put them together.
        """
        shape = self.program.shape(tensor)
        if not self.mesh.axis or source != PARTIAL_SUM or self.program.bytes(tensor) <= COPY_BYTES:
            return None
        lengths = {k: size for k, size in enumerate(shape or ()) if type(size) is int and size >= self.mesh.shards}
        if not lengths:
            return None
        axis = max(lengths, key=lambda k: (k > 0, lengths[k], k))
        if axis == 0 and any(rows > 1 and lengths[0] % rows == 0 for rows in self._rows):
            return None
        return evenly(axis, lengths[axis], self.mesh.shards)

    @functools.cached_property
    def _rows(self) -> frozenset[int]:
        """How long the first axes of arguments are, one of which may be shared out later."""
        shapes = [self.program.ops[i].out_shapes[0] for i in self.program.inputs]
        return frozenset([shape[0] for shape in shapes if shape and type(shape[0]) is int])

    def _is_for_a_part(self, tensor: Tensor, source: Layout, target: Layout) -> bool:
        """Return whether rows are put together where a part of a table is: each of several does, and none for all."""
        named = isinstance(target, SingleDevice) and target.device != ""
        return isinstance(source, Shard) and named and tensor in self._needed_by_parts

    def _move(self, tensor: Tensor, source: Layout, target: Layout) -> None:
        if source != target:
            self.moves[Move(tensor, source, target)] = None
