"""Plan: where every operation of a program runs, and what has to travel. Made once, checked, printed, then emitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction

import tensorflow as tf

from graphsplit.core.errors import CheckError
from graphsplit.core.layouts import REPLICATE, Layout, Replicate, Shard
from graphsplit.core.polynomials import Symbol
from graphsplit.core.symbolic_sizes import ROWS, STAND_IN, Size, symbols_in
from graphsplit.planning.bucketing import check_packs
from graphsplit.planning.scheduling import check_order
from graphsplit.planning.steps import Pack, Reshard, Step
from graphsplit.program.program import Op, Program, Tensor

_FINEST_SHARE = 100  # shares of an unknown number of rows are printed as fractions with at most this denominator


@dataclass(frozen=True, eq=False)
class Plan:
    """The single decision from which the multi-device graph follows.

    Attributes:
      program: the single-device program.
      devices: the device of each shard; only devices that have rows.
      rows: how many rows of the batch each of them has.
      home: the device of whole operations and of variables' updates.
      input_layouts: the layout of each argument.
      steps: one per operation.
      reshards: every change of layout that the live operations need.
      packs: what travels together.
      order: operations on the shards that wait, each for another one that other devices wait for.
      notes: one sentence for each thing a user would not expect.
      output_layouts: for the body of a loop or branch, which each shard runs by itself, the layouts of what it
        returns; None for a whole program, which returns whole values.
      random: `"exact"`: shards draw the numbers of one device; `"independent"`: numbers of their own.
      positions: which of the devices asked for each shard has (those without rows are left out); stages have devices
        of their own at the same positions. Empty: the first, the second, ...
    """

    program: Program = field(repr=False)
    devices: tuple[str, ...]
    rows: tuple[int, ...]
    home: str
    input_layouts: tuple[Layout, ...]
    steps: tuple[Step, ...] = field(repr=False)
    reshards: tuple[Reshard, ...] = field(repr=False)
    packs: tuple[Pack, ...] = field(default=(), repr=False)
    order: Mapping[int, int] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    output_layouts: tuple[Layout, ...] | None = None
    random: str = "exact"
    positions: tuple[int, ...] = ()

    @property
    def local(self) -> bool:
        """Return whether this is a body that each shard runs by itself."""
        return self.output_layouts is not None

    @property
    def batch(self) -> int:
        """Return the number of rows of the whole batch, 0 if nothing is split."""
        return sum(self.rows)

    def rows_sources(self) -> list[tuple[int, int, int]]:
        """Return the arguments on which the rows of a batch of unknown size are counted.

        For each its position, an axis, and how many entries this has per row.
        """
        arguments = len(self.program.inputs) - self.program.seeds
        found = []
        for position, layout in zip(self.program.inputs[:arguments], self.input_layouts, strict=False):
            if isinstance(layout, Shard):
                found.append((position, layout.axis, sum(layout.blocks)))
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
        """Return the operations that run once, at home."""
        return tuple(op for op, step in zip(self.program.ops, self.steps, strict=True) if step.home)

    @property
    def stayed_home(self) -> tuple[tuple[Op, str], ...]:
        """Return the operations that carry rows of the batch and run at home all the same, with the reason.

        None do where home is where the only shard is: a batch of one row needs nothing else.
        """
        if self.devices == (self.home,):
            return ()
        pairs = zip(self.program.ops, self.steps, strict=True)
        return tuple((op, step.reason) for op, step in pairs if step.home and step.reason)

    def gathered(self, op: Op) -> list[Tensor]:
        """Return the tensors that are gathered or reduced to run `op` at home."""
        moved = {r.tensor for r in self.reshards if isinstance(r.target, Replicate)}
        return [tensor for tensor in dict.fromkeys(op.inputs) if tensor in moved]

    def stage_device(self, name: str, shard: int | None) -> str:
        """Return the device that the stage of an operation has for a shard, or (None) at home; "" outside of stages."""
        stage = None if self.local else self.program.stages.of(name)
        if stage is None:
            return ""
        return stage.home if shard is None else stage.device(self.positions[shard] if self.positions else shard)

    def gathered_bytes(self, op: Op) -> int:
        """Return how many bytes are gathered or reduced to run `op` at home."""
        return sum(map(self.program.bytes, self.gathered(op)))

    def check(self) -> None:
        """Raise `CheckError` unless every tensor that is read exists in the layout in which it is read."""
        if self.rows and (min(self.rows) < 1 or len(self.rows) != len(self.devices)):
            raise CheckError(f"Shards of {self.rows} rows on {len(self.devices)} devices.")
        if self.positions and len(self.positions) != len(self.devices):
            raise CheckError(f"{len(self.devices)} shards at positions {self.positions}.")
        moves = {(r.tensor, r.target) for r in self.reshards}
        for op, step in zip(self.program.ops, self.steps, strict=True):
            reads: list[tuple[Tensor, Layout]] = [(t, REPLICATE) for t in op.inputs] if step.home else []
            for body in step.bodies.values():
                body.check()
            if step.shards:
                if op.stateful and not step.shards.draw:
                    raise CheckError(f"{op.name!r} has side effects and would run {len(self.devices)} times.")
                if len(step.shards.wants) != len(op.inputs) or len(step.shards.gives) != len(op.out_shapes):
                    raise CheckError(f"{op.name!r} wants {step.shards.wants} and gives {step.shards.gives}.")
                wanted = enumerate(zip(op.inputs, step.shards.wants, strict=True))
                reads += [read for i, read in wanted if i not in step.shards.makes]
                for body in step.shards.bodies.values():
                    body.check()
                for k, layout in enumerate(step.shards.gives):
                    self._check_size(Tensor(op.index, k), layout)
            for tensor, layout in reads:
                self._check_size(tensor, layout)
                if not self._exists(tensor, layout, moves):
                    raise CheckError(
                        f"{op.name!r} reads {self.program.ops[tensor.op].name!r} as {layout}, which is not made."
                    )
        check_packs(self.program, self.steps, self.packs)
        check_order(self.program, self.steps, self.order)
        layouts = self.output_layouts or (REPLICATE,) * len(self.program.outputs)
        for tensor, layout in zip(self.program.outputs, layouts, strict=True):
            if not self._exists(tensor, layout, moves):
                raise CheckError(f"Output {self.program.ops[tensor.op].name!r} is never made whole.")

    def _check_size(self, tensor: Tensor, layout: Layout) -> None:
        if not isinstance(layout, Shard) or self.program.ops[tensor.op].out_dtypes[tensor.index] == tf.variant:
            return  # (the axes of a list are those of its elements)
        shape = self.program.shape(tensor)
        if shape is None or layout.axis >= len(shape) or shape[layout.axis] != layout.size(self.batch):
            name = self.program.ops[tensor.op].name
            raise CheckError(f"{name!r} of shape {shape} cannot be {layout} over {self.batch} rows.")

    def _exists(self, tensor: Tensor, layout: Layout, moves: set[tuple[Tensor, Layout]]) -> bool:
        step = self.steps[tensor.op]
        if (tensor, layout) in moves or (step.shards and step.shards.gives[tensor.index] == layout):
            return True
        if self.local and tensor.op in self.program.inputs:
            return self.input_layouts[self.program.inputs.index(tensor.op)] == layout
        op = self.program.ops[tensor.op]
        is_whole = isinstance(layout, Replicate)
        return op.type == "Const" or (op.is_constant and is_whole) or (step.home and is_whole)

    def __str__(self) -> str:
        return "\n".join([*self._header(), *self._communication(), *self._at_home(), *self._note_lines()])

    def _header(self) -> list[str]:
        ops, steps = self.program.ops, self.steps
        dead = sum(not (s.home or s.shards) for s in steps)
        lines = [f"Plan: {len(ops) - dead} operations, {len(self.devices)} shards, home {_short_device(self.home)}"]
        lines += [
            f"  shard {d}: {_short_device(name)}, {self._rows_text(n)}"
            for d, (name, n) in enumerate(zip(self.devices, self.rows, strict=True))
        ]
        for name, position, layout in zip(
            self.program.input_names, self.program.inputs, self.input_layouts, strict=True
        ):
            shape, dtype = ops[position].out_shapes[0], ops[position].out_dtypes[0].name
            lines.append(f"  argument {name}: {dtype}{list(shape) if shape is not None else ''} {layout}")
        live = [op.name for op, step in zip(ops, steps, strict=True) if step.home or step.shards]
        found = Counter(stage for name in live if (stage := self.program.stages.of(name)))
        lines += [f"  stage {stage}: {count} operations" for stage, count in found.items()]
        lines.append(f"  on every shard: {_count(self.sharded_ops)}")
        lines.append(f"  once, at home:  {_count(self.home_ops)}")
        return lines

    def _communication(self) -> list[str]:
        lines = []
        for kind in ("split", "zero-fill", "all-gather", "all-to-all", "all-reduce", "reduce-scatter"):
            tensors = [r.tensor for r in self.reshards if r.kind == kind]
            if tensors:
                lines.append(f"  {kind}: {len(tensors)} tensors, {self.size_text(tensors)}")
        for pack in self.packs:
            lines.append(f"  as one, {pack.kind}: {len(pack.tensors)} tensors, {self.size_text(pack.tensors)}")
        if self.order:
            lines.append(f"  after what other devices wait for: {len(self.order)} operations")
        return lines

    def _rows_text(self, rows: int) -> str:
        if not self.program.batch_is_unknown:
            return f"{rows} rows"
        share = Fraction(rows, self.batch).limit_denominator(_FINEST_SHARE)
        return "all rows" if share == 1 else f"{share} of the rows"

    def size_text(self, tensors: Iterable[Tensor]) -> str:
        """Return the size of some tensors, for people: of a batch of unknown size, by how much it grows per row."""
        known, per_row, open_ended = 0, 0, 0
        for tensor in tensors:
            shape, size = self.program.shape(tensor), self.program.bytes(tensor)
            symbols = symbols_in([shape])
            if shape is None or None in shape or set(symbols) - {ROWS}:
                open_ended += 1
            elif symbols:
                per_row += size // STAND_IN
            else:
                known += size
        parts = [format_bytes(known)] if known or not (per_row or open_ended) else []
        parts += [f"{format_bytes(per_row)} a row"] if per_row else []
        parts += [f"{open_ended} of unknown size"] if open_ended else []
        return " and ".join(parts)

    def _at_home(self, most: int = 12) -> list[str]:
        stayed = sorted(self.stayed_home, key=lambda pair: -self.gathered_bytes(pair[0]))
        if not stayed:
            return ["  nothing that carries the batch runs at home"]
        lines = [f"  carry the batch and run at home: {len(stayed)}"]
        for op, reason in stayed[:most]:
            where = self.program.locate(op.name)
            gathered = self.size_text(self.gathered(op))
            lines.append(f"    {op.type} {op.name!r}: {gathered} gathered; {reason}" + (f" ({where})" if where else ""))
        return lines + ([f"    ... and {len(stayed) - most} more"] if len(stayed) > most else [])

    def _note_lines(self) -> list[str]:
        return [f"  note: {note}" for note in (*self.program.notes, *self.notes)]


def format_bytes(count: int) -> str:
    """Return a number of bytes for people.

    >>> format_bytes(2_500_000)
    '2.5 MB'
    """
    size, units = float(count), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"


def _count(ops: tuple[Op, ...]) -> str:
    kinds = Counter(op.type for op in ops if op.type not in ("Const", "Placeholder"))
    common = ", ".join(f"{n} {kind}" for kind, n in kinds.most_common(6))
    return f"{sum(kinds.values())} operations" + (f" ({common}{', ...' if len(kinds) > 6 else ''})" if kinds else "")


def _short_device(name: str) -> str:
    return name.split("device:")[-1]
