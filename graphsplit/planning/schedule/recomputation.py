"""Recomputation: what the forward pass made is dropped, and made again when the backward pass comes to it.

A program -> the program with copies of forward operations among its backward ones. What a backward operation reads of a
block's values, it reads of the block's copies. They compute from what the block was given, which is kept, and wait for
the gradient with which the backward pass enters the block. So between the two passes TensorFlow has no reader left for
what the block made, and frees it. (Chen et al. 2016, "Training deep nets with sublinear memory cost".)

Only what may run twice is copied: no draw of a stateful generator, no effect, no variable that is read. What is small
for its block is kept, statistics above all: so what all rows have added up to is not added up again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import tensorflow as tf

from graphsplit.core.intervals import alive
from graphsplit.core.patterns import scopes_fitting, scopes_of
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.costs.seconds import seconds_of
from graphsplit.planning.costs.work import data_in
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.planning.schedule.gradient_pairs import backward_ops
from graphsplit.program.graph.graph import in_order
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.sides import EVERYWHERE, MERGE, Sides, sides_of

Recompute = str | float | tuple[str, ...] | None
"""`"blocks"`; a share of the bytes, above 0 and up to 1; or patterns of layers' names. None: nothing is recomputed."""

_SMALL = 1 / 32  # of the largest value of a block: what has fewer bytes is kept
_SHARES = [2 ** (-k / 2) for k in range(2, 15)]  # of all bytes: the most that a block may make


@dataclass(frozen=True)
class Block:
    """Forward operations that are recomputed together.

    Attributes:
      ops: their positions.
      copied: those of them that run again.
      waits_for: the backward operation whose gradient enters the block.
      first: the first backward operation that reads what the block makes, and that gradient.
      saved: bytes that are not kept.
      seconds: that running them again takes, by the costs of a reference device.
    """

    ops: frozenset[int]
    copied: tuple[int, ...]
    waits_for: int
    first: int
    saved: int
    seconds: float


def recomputed(program: Program, recompute: Recompute, batch: int) -> tuple[Program, list[str]]:
    """Return the program that recomputes what is asked for, and what is to be said of it.

    Args:
      program: of a whole training step, or of a function and its gradients.
      recompute: see `Recompute`.
      batch: the number of rows.

    Raises:
      ArgumentError: if no operation is in a layer of such a name.
    """
    passes = _passes_of(program, batch)
    if not passes.backward or not passes.active:
        return program, ["nothing is recomputed: the function has no backward pass"]
    members = _named(passes, recompute) if isinstance(recompute, tuple) else _between_seams(passes)
    blocks = [block for ops in members if (block := _block(passes, frozenset(ops))) is not None]
    if not isinstance(recompute, tuple):  # the last block's backward pass comes at once: one block is whole at any time
        blocks = blocks[:-1]
    if isinstance(recompute, float):
        blocks = _of_share(blocks, recompute, passes.kept_bytes)
    if not blocks:
        return program, ["nothing is recomputed: the backward pass begins where the forward pass keeps something"]
    saved, again = sum(block.saved for block in blocks), sum(block.seconds for block in blocks)
    forward = sum(seconds_of(program, program.ops[i]) for i in passes.active)
    share = f"{again / forward:.0%} of the forward pass" if forward else f"{len(blocks)} blocks"
    count = f"{len(blocks)} block{'' if len(blocks) == 1 else 's'}"
    note = (
        f"recomputing: {format_bytes(saved)} of {format_bytes(passes.kept_bytes)} that the backward pass reads are "
        f"dropped and recomputed, in {count}, which runs {share} again"
    )
    return _CopyWriter(passes, blocks).write(), [note]


@dataclass(frozen=True, eq=False)
class _Passes:
    """The forward and the backward pass of a program.

    Attributes:
      program: see there.
      backward: positions of backward operations.
      active: positions, in order, of forward operations that follow from data, not from variables alone.
      latest: of each operation, the last active one that it follows from, itself included; -1 for none.
      read_back: the bytes of each operation's results that backward operations read.
      sides: on which sides of branches operations are: what may be dead, and what brings it to life, runs once.
    """

    program: Program
    backward: Set[int]
    active: Sequence[int]
    latest: Sequence[int]
    read_back: Sequence[int]
    sides: Sides

    @property
    def kept_bytes(self) -> int:
        """How many bytes backward operations read of what was made forward."""
        return sum(self.read_back)

    def may_repeat(self, op: Op) -> bool:
        """Return whether an operation may run twice, and gives the same then."""
        opaque = {tf.resource, tf.variant}
        is_of_branch = op.type == MERGE or self.sides.of_op(op.index) != EVERYWHERE
        return not (op.stateful or op.writes or opaque.intersection(op.out_dtypes) or is_of_branch)

    def read_outside(self, ops: frozenset[int]) -> set[int]:
        """Return which of some operations others of the forward pass read, or the caller."""
        positions_read = {tensor.op for tensor in self.program.outputs}
        for i in self.active:
            if i not in ops:
                positions_read.update(tensor.op for tensor in self.program.ops[i].inputs)
        return positions_read & ops


def _passes_of(program: Program, batch: int) -> _Passes:
    backward, has_data = backward_ops(program, range(len(program.ops))), data_in(program, batch)
    is_active = [is_data and op.type != "Placeholder" for is_data, op in zip(has_data, program.ops, strict=True)]
    active = [i for i, is_active_op in enumerate(is_active) if is_active_op and i not in backward]
    among, latest, read_back = frozenset(active), list[int](), [0] * len(program.ops)
    for op in program.ops:
        latest.append(op.index if op.index in among else max((latest[i] for i in op.sources), default=-1))
    for tensor in {tensor for i in backward for tensor in program.ops[i].inputs if tensor.op in among}:
        read_back[tensor.op] += program.bytes(tensor)
    return _Passes(program, backward, active, latest, read_back, sides_of(program))


def _between_seams(passes: _Passes) -> list[list[int]]:
    """Return blocks between seams, where few bytes pass: those that keep least, seams and one block at a time."""
    crossing, total = _crossing(passes), passes.kept_bytes
    candidates = [_blocks_of(passes, crossing, total * share) for share in _SHARES]

    def most_kept(cuts: Sequence[int]) -> float:
        sizes = [
            sum(passes.read_back[passes.active[k]] for k in numbers) for numbers in _ranges(cuts, len(passes.active))
        ]
        return sum(crossing[k] for k in cuts) + max(sizes)

    cuts = min(candidates, key=most_kept)
    return [[passes.active[k] for k in numbers] for numbers in _ranges(cuts, len(passes.active))]


def _ranges(cuts: Sequence[int], count: int) -> list[range]:
    ends = [*[k + 1 for k in cuts], count]
    return [range(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _crossing(passes: _Passes) -> list[int]:
    """Return for each active operation how many bytes of it and of those before later ones read."""
    number = {i: k for k, i in enumerate(passes.active)}
    last: dict[Tensor, int] = {}
    for k, i in enumerate(passes.active):
        last.update({tensor: k for tensor in passes.program.ops[i].inputs if tensor.op in number})
    spans = [(number[tensor.op], k, passes.program.bytes(tensor)) for tensor, k in last.items()]
    steps = dict(alive([*spans, *[(k, k, 0) for k in number.values()]]))
    return [steps[k] for k in number.values()]


def _blocks_of(passes: _Passes, crossing: Sequence[int], most: float) -> list[int]:
    """Return after which active operations to cut, so that a block makes at most so many bytes that are read back."""
    cuts: list[int] = []
    begin, made_bytes = 0, 0
    for k, i in enumerate(passes.active):
        made_bytes += passes.read_back[i]
        if made_bytes > most and k > begin:
            cut = min(range(begin, k), key=lambda n: (crossing[n], -n))
            cuts.append(cut)
            begin = cut + 1
            made_bytes = sum(passes.read_back[n] for n in passes.active[begin : k + 1])
    return cuts


def _named(passes: _Passes, patterns: Sequence[str]) -> list[list[int]]:
    """Return the operations of each layer whose name a pattern fits: of the outermost such layer."""
    named = [passes.program.ops[i] for i in passes.active]
    scopes = {op.index: scopes_of(op.provenance.origin or op.name) for op in named}
    names = list(dict.fromkeys(name for scopes_of_op in scopes.values() for name in scopes_of_op))
    fitting = scopes_fitting("recompute", patterns, names)
    chosen = set().union(*fitting.values())
    ops_by_layer: dict[str, list[int]] = {}
    for i, scopes_of_op in scopes.items():
        for name in [name for name in scopes_of_op if name in chosen][:1]:
            ops_by_layer.setdefault(name, []).append(i)
    return list(ops_by_layer.values())


def _of_share(blocks: Sequence[Block], share: float, kept_bytes: int) -> list[Block]:
    """Return the blocks that save most bytes for a second until a share of all bytes is saved, in order."""
    chosen, saved = [], 0
    for block in sorted(blocks, key=lambda block: block.seconds / block.saved):
        if saved < share * kept_bytes:
            chosen.append(block)
            saved += block.saved
    return [block for block in blocks if block in chosen]


def _block(passes: _Passes, ops: frozenset[int]) -> Block | None:
    """Return how some operations are recomputed; None if nothing would be saved."""
    program, outside = passes.program, passes.read_outside(ops)
    largest = max(sum(program.ops[i].out_bytes) for i in ops)
    may = {
        i
        for i in ops - outside
        if passes.may_repeat(program.ops[i]) and sum(program.ops[i].out_bytes) > _SMALL * largest
    }
    entry = _entry(passes, may, max(ops))
    if entry is None:
        return None
    wanted = {t.op for i in passes.backward for t in program.ops[i].inputs} & may
    saved = sum(passes.read_back[i] for i in wanted)
    pending = list(wanted)
    while pending:
        newly_wanted = {t.op for t in program.ops[pending.pop()].inputs} & may - wanted
        wanted |= newly_wanted
        pending += newly_wanted
    seconds = sum(seconds_of(program, program.ops[i]) for i in wanted)
    return Block(ops, tuple(sorted(wanted)), *entry, saved, seconds) if saved else None


def _entry(passes: _Passes, block: set[int], end: int) -> tuple[int, int] | None:
    """Return the backward operation whose gradient enters a block, and the first one that reads it and the block.

    What a backward operation makes of the block's values alone waits for no gradient, and moves behind it.

    Args:
      passes: of the program.
      block: its operations.
      end: the last of them.
    """
    of_block: set[int] = set()  # backward, and of nothing but the block
    for i in sorted(passes.backward):
        sources = passes.program.ops[i].sources
        if any(source in block or source in of_block for source in sources):
            late = [s for s in sources if s in passes.backward and s not in of_block and passes.latest[s] > end]
            if late:
                return late[-1], i
            of_block.add(i)
    return None


OpOrCopy = tuple[int, bool]
"""An operation of the program, by position, and whether its copy is meant."""


class _CopyWriter(ProgramWriter):
    """Writes the operations of a program, and the copies before those that read them."""

    def __init__(self, passes: _Passes, blocks: Sequence[Block]):
        super().__init__(passes.program)
        self._passes = passes
        self._blocks = blocks
        self._copies = {i: block for block in blocks for i in block.copied}

    def write(self) -> Program:
        """Return the program."""
        arranged = list(self._arranged())
        number = {entry: k for k, entry in enumerate(arranged)}
        sources = [[number[source] for source in self._sources(*entry)] for entry in arranged]
        place: dict[OpOrCopy, int] = {}
        for k in in_order(sources, [self._program.ops[i].name for i, _ in arranged]):
            i, is_copy = arranged[k]
            place[arranged[k]] = self._write(self._program.ops[i], is_copy, place)
        for op in self._program.ops:
            results = [Tensor(place[op.index, False], k) for k in range(len(op.out_shapes))]
            self._note(op, results, [place[entry] for entry in ((op.index, False), (op.index, True)) if entry in place])
        return self._written()

    def _arranged(self) -> Iterator[OpOrCopy]:
        """Yield each operation, in the order of the program, and the copies of a block before what first reads them."""
        copies_before: dict[int, list[int]] = {}
        for block in self._blocks:
            copies_before.setdefault(block.first, []).extend(block.copied)
        for op in self._program.ops:
            yield from ((i, True) for i in copies_before.get(op.index, ()))
            yield op.index, False

    def _reads(self, op: Op, is_copy: bool) -> list[tuple[Tensor, bool]]:
        """Return what an operation reads, and whether it reads a copy's."""
        if is_copy:
            copy_of_block = self._copies[op.index]
            return [(tensor, self._copies.get(tensor.op) is copy_of_block) for tensor in op.inputs]
        return [(tensor, op.index in self._passes.backward and tensor.op in self._copies) for tensor in op.inputs]

    def _waits(self, op: Op, is_copy: bool) -> list[int]:
        """Return what an operation waits for. A copy that reads what was kept waits for the gradient."""
        if not is_copy:
            return list(op.controls)
        block = self._copies[op.index]
        reads_kept = any(not copied and self._passes.latest[tensor.op] >= 0 for tensor, copied in self._reads(op, True))
        is_first = reads_kept or not any(copied for _, copied in self._reads(op, True))
        return [*op.controls, *([block.waits_for] if is_first else [])]

    def _sources(self, i: int, is_copy: bool) -> list[OpOrCopy]:
        """Return what is written before an operation or its copy: what that reads, and what it waits for."""
        op = self._program.ops[i]
        data_sources = [(tensor.op, copied) for tensor, copied in self._reads(op, is_copy)]
        return [*data_sources, *[(control, False) for control in self._waits(op, is_copy)]]

    def _write(self, op: Op, is_copy: bool, place: Mapping[OpOrCopy, int]) -> int:
        inputs = [Tensor(place[tensor.op, copied], tensor.index) for tensor, copied in self._reads(op, is_copy)]
        controls = [place[control, False] for control in self._waits(op, is_copy)]
        name = self._unused(f"{op.name}/again") if is_copy else op.name
        if is_copy:
            op = replace(op, provenance=replace(op.provenance, backward=True, is_gradient=True))
        return self._append(op, name, inputs, controls).op
