"""Forward propagation: rows flow from the sharded arguments through the rules, and give every op its natural form.

Some operations that run once have results with rows of the batch, which are cut again: strings, tables, ragged and
sparse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import tensorflow as tf

from graphsplit.core.gpus import can_be_cut
from graphsplit.core.layouts import (
    OWN_MEAN,
    OWN_ROW,
    OWN_VARIANCE,
    PARTIAL_MEAN,
    PARTIAL_SUM,
    REPLICATE,
    SINGLE_DEVICE,
    EvenCut,
    Layout,
    Partial,
    Shard,
    is_whole,
)
from graphsplit.core.sizes import has_sizes
from graphsplit.planning.costs.work import SMALL_BYTES
from graphsplit.planning.variables.laid_variables import of_variable
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.rules import Answer, Declined, Sharded, answer, partial_operands, rule_of
from graphsplit.rules.registry import Rule

_MAKES_DENSE = frozenset({"RaggedTensorToTensor", "SparseTensorDenseMatMul", "SparseToDense"})


def scattered_layout(
    program: Program, op: Op, layout_of: Callable[[Tensor], Layout], batch: int
) -> tuple[Shard, str] | None:
    """Return in which layout the result of an op that runs whole is scattered, and why the op runs whole, or None.

    (The reason is "" if the caller knows it; None: the result stays whole.) A lookup in a table, or in a part of one,
    has a row for each key. Words that `StringSplitV2` made have, once dense, a row for each string that was split. A
    ragged or sparse argument is whole, as its parts have no rows of the batch; once dense it has.

    Args:
      program: what is planned.
      op: one of its operations, that runs once.
      layout_of: the layout in which readers meet a tensor.
      batch: the number of rows; with less than 2, what is made dense stays whole.
    """
    shape, like = op.out_shapes[0] if op.out_shapes else None, _rows_like(program, op)
    if not shape:
        return None
    if like is not None:
        layout, like_shape = layout_of(like), program.shape(like)
        if not isinstance(layout, Shard) or like_shape is None or layout.axis >= len(shape):
            return None
        size = like_shape[layout.axis]
        return (layout, "") if size is not None and size == shape[layout.axis] else None
    reads_no_shards = not any(isinstance(layout_of(tensor), Shard) for tensor in op.inputs)
    if op.type in _MAKES_DENSE and reads_no_shards and int(batch) > 1 and shape[0] == batch:
        return Shard(0), "its rows are only equal once they are dense"
    return None


def _rows_like(program: Program, op: Op) -> Tensor | None:
    """Return a tensor of which the result of `op` has the rows, as far as the type of the op tells."""
    if op.type == "LookupTableFindV2" or (op.type == "GatherV2" and op.device):
        return op.inputs[1]
    if op.type == "RaggedTensorToTensor":
        sliced = program.ops[op.inputs[3].op]
        words = program.ops[sliced.inputs[0].op] if sliced.type == "StridedSlice" else sliced
        return words.inputs[0] if words.type == "StringSplitV2" else None
    return None


_MOST_ENDS = 16  # of one tensor that are looked at
_LINEAR = (PARTIAL_SUM, PARTIAL_MEAN)
_ONLY_THIS = 1 << 50  # bytes: an operand of this size decides the factor

ControlFlowRule = Callable[[Op, Sequence[Layout]], Answer]
"""How loops and branches are answered: they need plans of their bodies, which rules know nothing of."""


@dataclass(frozen=True, eq=False)
class NaturalForms:
    """The natural form of every op, and the layout in which its readers meet each of its outputs.

    Attributes:
      answers: for each op how it runs on the shards, or None if it is naturally run whole.
      reasons: why an op that carries rows runs once.
      seen: for each op, the layouts of its outputs.
      kept_once: ops that must run once, with the reason.
      wanted_whole: the outputs that somebody reads whole.
      whole: what whole values are, of ops that run on whole tensors.
    """

    answers: Sequence[Sharded | None]
    reasons: Sequence[str]
    seen: Sequence[tuple[Layout, ...]]
    kept_once: Mapping[int, str]
    wanted_whole: Collection[Tensor]
    whole: Layout

    def layout(self, tensor: Tensor) -> Layout:
        """Return the layout in which readers meet a tensor."""
        return self.seen[tensor.op][tensor.index]


@dataclass(eq=False)
class ForwardPropagation:
    """The pass that finds the natural forms; `run` does.

    Args:
      program: what is planned.
      input_layouts: the layouts of its arguments.
      control_flow: answers for ops that have bodies.
      whole_outputs: the outputs that are wanted whole.
      kept_once: ops that must run once, with the reason.
      batch: the number of rows.
      cuts: whole values whose readers meet them in pieces.
      settled: how operations run on the shards that have been decided upon, by position; None where nothing has.
      wanted_whole: the outputs that somebody reads whole, if that is known from an earlier pass.
      exchanging: how many shards can send each other parts of what they have; 0 if they cannot.
      in_pieces: whole values that operations on the shards read in pieces, if that is known from an earlier pass.
    """

    program: Program
    input_layouts: Sequence[Layout]
    control_flow: ControlFlowRule
    whole_outputs: Collection[Tensor]
    kept_once: Mapping[int, str] = field(default_factory=dict)
    batch: int = 0
    cuts: Mapping[Tensor, Shard] = field(default_factory=dict)
    settled: Sequence[Sharded | None] = ()
    wanted_whole: Collection[Tensor] | None = None
    exchanging: int = 0
    in_pieces: Collection[Tensor] = ()
    _answers: list[Sharded | None] = field(default_factory=list, init=False)
    _reasons: list[str] = field(default_factory=list, init=False)
    _layouts: list[tuple[Layout, ...]] = field(default_factory=list, init=False)
    _moved: set[tuple[Tensor, Layout]] = field(default_factory=set, init=False)  # what moves for an operation before
    _staying: set[Tensor] = field(default_factory=set, init=False)  # parts of variables, and what follows from them

    whole: ClassVar[Layout] = SINGLE_DEVICE
    """See `NaturalForms`."""

    may_grow: ClassVar[bool] = False
    """Whether partial sums stay partial even where it would pay to reduce them: where nothing can be reduced."""

    by_bytes: ClassVar[bool] = False
    """Whether of operands that are cut otherwise that one stays for which fewest bytes move, and not the largest."""

    def run(self) -> NaturalForms:
        """Return the natural forms."""
        if self.wanted_whole is None:
            self.wanted_whole = self.tensors_wanted_whole()
        arguments = self._arguments()
        for op in self.program.ops:
            argument_layout = arguments.get(op.index)
            if argument_layout is not None:
                self._append(None, "", (self._seen_whole(op, 0) if argument_layout == self.whole else argument_layout,))
            else:
                self._visit(op)
        return NaturalForms(self._answers, self._reasons, self._layouts, self.kept_once, self.wanted_whole, self.whole)

    def _arguments(self) -> dict[int, Layout]:
        return dict(zip(self.program.inputs, self.input_layouts, strict=True))

    def layout(self, tensor: Tensor) -> Layout:
        """Return the layout in which readers meet a tensor."""
        return self._layouts[tensor.op][tensor.index]

    def _append(self, sharding: Sharded | None, reason: str, layouts: tuple[Layout, ...]) -> None:
        self._answers.append(sharding)
        self._reasons.append(reason)
        self._layouts.append(layouts)

    def _seen_whole(self, op: Op, output: int) -> Layout:
        """Return how readers meet what is whole."""
        return self.cuts.get(Tensor(op.index, output), self.whole)

    def _visit(self, op: Op) -> None:
        settled = self.settled[op.index] if self.settled else None
        if settled is not None:
            self._append_sharded(op, settled)
            return
        if isinstance(op.layout, Shard):
            self._append_sharded(op, Sharded((), (op.layout,)))
            return
        if (on_shards := self._of_own_moments(op)) is not None:
            self._append_sharded(op, on_shards)
            return
        layouts = [self.layout(tensor) for tensor in op.inputs]
        of_parts = of_variable(self.program, op, layouts) if self.program.has_parts_in_place else None
        if of_parts is not None:
            self._append_sharded(op, of_parts)
            return
        if all(map(is_whole, layouts)) or op.device or self.program.copies_beside(op):
            self._append_once(op, "")
            return
        sharding = self._answer(op, [REPLICATE if is_whole(layout) else layout for layout in layouts])
        if op.merged in ("difference", "variance") and isinstance(sharding, Sharded):
            sharding = self._around_own_mean(op, sharding)
        turned = self._on_columns(op, layouts) if isinstance(sharding, Declined) and self.exchanging else None
        if turned is not None:
            self._append_sharded(op, turned)
        elif isinstance(sharding, Declined):
            carries_rows = any(isinstance(layout, Shard) for layout in layouts)
            self._append_once(op, sharding.reason if carries_rows else "")
        else:
            self._append_sharded(op, sharding)

    def _around_own_mean(self, op: Op, sharding: Sharded) -> Answer:
        """Return how shards square differences from means of their own rows, or take the mean of these squares.

        Squares that are whole, and cut for whoever reads them, are around the one mean of all rows.
        """
        if op.merged == "difference":
            mean = self._answers[op.inputs[1].op]
            is_own = mean is not None and mean.gives[0] == OWN_MEAN
            return replace(sharding, wants=(sharding.wants[0], OWN_MEAN)) if is_own else sharding
        squares = self._answers[op.inputs[0].op]
        is_own = squares is not None and squares.wants[1] == OWN_MEAN
        return sharding if is_own or OWN_VARIANCE not in sharding.gives else Declined("")

    def _of_own_moments(self, op: Op) -> Sharded | None:
        """Return how shards compute with sums over the same rows of their own; see `planning/weighted_moments.py`."""
        if op.merged not in ("center", "row") or self.settled:  # (what reads them whole is settled, too)
            return None
        answers = [None if i in op.constants else self._answers[tensor.op] for i, tensor in enumerate(op.inputs)]
        layouts = [REPLICATE if sharding is None else sharding.gives[0] for sharding in answers]
        summed = {
            sharding.wants[0] for sharding in answers if sharding is not None and sharding.gives[0] == PARTIAL_SUM
        }
        count = sum(layout in (PARTIAL_SUM, OWN_MEAN, OWN_ROW) for layout in layouts)
        if count + len(op.constants) < len(op.inputs) or len(summed) > 1:
            return None
        return Sharded(tuple(layouts), (OWN_MEAN if op.merged == "center" else OWN_ROW,))

    def _on_columns(self, op: Op, layouts: Sequence[Layout]) -> Sharded | None:
        """Return how an operation that needs all rows runs on columns: of as many rows each shard has some columns.

        What the shards send each other for it, there and back, is less than what one device would get and send.
        """
        first, shape = layouts[0], op.in_shapes[0] if op.in_shapes else None
        if not isinstance(first, Shard) or first != Shard(first.axis) or not shape or None in shape or has_sizes(shape):
            return None
        if any(isinstance(layout, (Shard, Partial)) for layout in layouts[1:]) or set(op.out_shapes) != {shape}:
            return None
        if self.program.bytes(op.inputs[0]) < SMALL_BYTES:
            return None
        for axis, length in enumerate(shape):
            if axis != first.axis and length is not None and length >= self.exchanging:
                columns = Shard(axis, partition=EvenCut(length))
                sharding = self._answer(op, [columns, *[REPLICATE] * (len(layouts) - 1)])
                if isinstance(sharding, Sharded) and sharding.wants[0] == columns and set(sharding.gives) == {columns}:
                    return replace(sharding, turned=True)
        return None

    def _append_sharded(self, op: Op, sharding: Sharded) -> None:
        layouts = (self.layout(op.inputs[0]),) * len(op.out_shapes) if sharding.turned else sharding.gives
        if isinstance(op.layout, Shard) or self._follows_from_parts(op):
            self._staying.update([Tensor(op.index, k) for k in range(len(op.out_shapes))])
        self._append(sharding, "", tuple([self._as_seen(op, k, layout) for k, layout in enumerate(layouts)]))

    def _follows_from_parts(self, op: Op) -> bool:
        """Return whether an operation makes something of parts of a variable, and of nothing else that is cut."""
        cut = [tensor for tensor in op.inputs if not is_whole(self.layout(tensor))] if self._staying else []
        return bool(cut) and self._staying.issuperset(cut)

    def _append_once(self, op: Op, reason: str) -> None:
        rows = scattered_layout(self.program, op, self.layout, self.batch)
        if rows is None:
            self._append(None, reason, tuple([self._seen_whole(op, k) for k in range(len(op.out_shapes))]))
        else:
            layout, why = rows
            self._append(None, reason or why, (layout,))

    def _answer(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        if op.index in self.kept_once:
            return Declined(self.kept_once[op.index])
        if op.type == "LookupTableFindV2":
            return Declined("its table lives on one device")
        if op.stateful:
            flow = CONTROL_FLOW.get(op.type)
            if flow is not None and flow.compiled:
                return Declined("it changes variables or has other effects, and XLA compiles it as a whole")
            return Declined("it has side effects, which happen once")
        if op.bodies:
            return self.control_flow(op, layouts)
        rule = rule_of(op.type)
        if rule is None:
            return Declined(f"no rule for {op.type}")
        by_bytes = self.by_bytes or self.program.has_parts_in_place
        fewest = self._of_fewest_bytes(rule, op, layouts) if by_bytes else None
        sizes = [self.program.bytes(tensor) for tensor in op.inputs]
        return self._if_it_can_be_cut(op, fewest or answer(rule, op, layouts, sizes, self.may_grow))

    def _of_fewest_bytes(self, rule: Rule, op: Op, layouts: Sequence[Layout]) -> Sharded | None:
        """Return how an operation runs, of whose operands some are cut otherwise; None if it cannot, or none is."""
        if len({layout for layout in layouts if isinstance(layout, Shard)}) < 2:
            return None
        answers = [with_operand(rule, op, layouts, i) for i, layout in enumerate(layouts) if isinstance(layout, Shard)]
        sharded_answers = [sharding for sharding in answers if isinstance(sharding, Sharded)]
        if not sharded_answers:
            return None
        sharding = min(sharded_answers, key=lambda sharding: self._bytes_moved(op, layouts, sharding))
        for tensor, layout, want in zip(op.inputs, layouts, sharding.wants, strict=True):
            self._moved.update([(tensor, want)] if want != layout else [])
        return sharding

    def _bytes_moved(self, op: Op, layouts: Sequence[Layout], sharding: Sharded) -> float:
        """Return the bytes that a device sends: of operands that move, and of sums that are added up in parts."""
        shards, total = max(self.exchanging, 1), 0.0
        for tensor, layout, want in zip(op.inputs, layouts, sharding.wants, strict=True):
            if isinstance(layout, Shard) and want != layout and (tensor, want) not in self._moved:
                share = 1.0 if want == REPLICATE else 1 / shards
                size = _ONLY_THIS if tensor in self._staying else self.program.bytes(tensor)
                total += size * (shards - 1) / shards * share
        sums = [k for k, layout in enumerate(sharding.gives) if isinstance(layout, Partial)]
        return total + sum(self.program.bytes(Tensor(op.index, k)) * (shards - 1) / shards for k in sums)

    def _if_it_can_be_cut(self, op: Op, sharding: Answer) -> Answer:
        """Decline what would cut or join tensors of a type for which TensorFlow has no kernels: `int4`, `qint8`."""
        if not isinstance(sharding, Sharded):
            return sharding
        types = map(self.program.dtype, op.inputs)
        for layout, dtype in zip((*sharding.wants, *sharding.gives), (*types, *op.out_dtypes), strict=True):
            if isinstance(layout, Shard) and not can_be_cut(dtype):
                return Declined(f"TensorFlow has no kernels that cut and join {dtype.name}")
        return sharding

    def _as_seen(self, op: Op, output: int, layout: Layout) -> Layout:
        """A partial sum stays partial only while every reader is linear in it: it is reduced once, not twice."""
        if not isinstance(layout, Partial):
            return layout
        stays = layout in _LINEAR and Tensor(op.index, output) not in (self.wanted_whole or ())
        return PARTIAL_SUM if stays else self._seen_whole(op, output)

    def tensors_wanted_whole(self) -> set[Tensor]:
        """Return the outputs that somebody reads whole."""
        wanted = self._read_whole(self.whole_outputs)
        return wanted | forks(self.program, wanted, self.in_pieces.__contains__)

    def _read_whole(self, outputs: Collection[Tensor]) -> set[Tensor]:
        wanted = {*outputs, *[tensor for op in self.program.ops if op.device for tensor in op.inputs]}
        for op in self.program.ops:
            if not op.bodies:
                partial = partial_operands(op, self.may_grow)
                wanted.update([t for i, t in enumerate(op.inputs) if i not in partial] if partial else op.inputs)
        return wanted


def read_in_pieces(program: Program, natural: NaturalForms) -> set[Tensor]:
    """Return the whole values that operations on the shards read in pieces."""
    on_shards = [
        (op, sharding) for op, sharding in zip(program.ops, natural.answers, strict=True) if sharding is not None
    ]
    reads = [(t, want) for op, sharding in on_shards for t, want in zip(op.inputs, sharding.wants, strict=True)]
    return {t for t, want in reads if isinstance(want, Shard) and is_whole(natural.layout(t))}


def with_operand(rule: Rule, op: Op, layouts: Sequence[Layout], operand: int) -> Answer:
    """Return how an operation runs if the layout of one of its operands is preferred to those of all others."""
    return answer(rule, op, layouts, [_ONLY_THIS if k == operand else 0 for k in range(len(layouts))])


class LocalForwardPropagation(ForwardPropagation):
    """Of a body that every shard runs by itself: every shard has whole values of its own, and reduces nothing."""

    whole = REPLICATE
    may_grow = True

    def _append_once(self, op: Op, reason: str) -> None:
        self._append(None, reason, (REPLICATE,) * len(op.out_shapes))

    def tensors_wanted_whole(self) -> set[Tensor]:
        """Return the outputs that somebody reads whole."""
        return self._read_whole(self.whole_outputs)


def forks(program: Program, wanted: Collection[Tensor], behind_moves: Callable[[Tensor], bool]) -> set[Tensor]:
    """Return the tensors that are reduced for no more than what linear readers make of them.

    A partial sum stays partial through linear ops and is reduced behind them. Behind a fork that is more than once (a
    BatchNormalization reads its mean in three shapes); behind ops that only reshape it, once is less than once
    on every shard. (What is taken apart because a variable lies in parts is reduced behind that, each part where its
    part of the variable is.)

    Args:
      program: what is planned.
      wanted: what must be whole anyway.
      behind_moves: whether what only becomes a tensor by being reshaped is reduced behind that: where every device has
        what is whole, that costs no more, and who reads it in pieces has it reduced in pieces.
    """
    fork_tensors: set[Tensor] = set()
    apart = {op.inputs[0] for op in program.ops if op.divides and op.type == "SplitV"}  # parts of variables
    ends: dict[Tensor, dict[Tensor, bool]] = {}  # where it would be reduced if it were partial; added to others before?
    for op in reversed(program.ops):
        behind: dict[Tensor, bool] = {}
        for k, dtype in enumerate(op.out_dtypes):
            tensor = Tensor(op.index, k)
            reached, is_apart = ends.pop(tensor, {}), tensor in apart
            if reached and not is_apart:
                size = program.bytes(tensor)
                is_fork = len(reached) > 1 and 0 < size <= sum(map(program.bytes, reached))
                end = next(iter(reached))
                is_moved = _is_only_moved(program, size, dtype, reached) and end not in apart and not behind_moves(end)
                if is_fork or is_moved:
                    fork_tensors.add(tensor)
            behind.update({tensor: False} if is_apart or tensor in wanted or tensor in fork_tensors else reached)
        if not behind:
            continue
        joins = len(op.inputs) - len(op.constants) > 1
        for tensor in op.inputs:
            reached = ends.setdefault(tensor, {})
            if len(reached) < _MOST_ENDS:
                reached.update(dict.fromkeys(behind, True) if joins else behind)
    return fork_tensors


def _is_only_moved(program: Program, size: int, dtype: tf.DType, reached: Mapping[Tensor, bool]) -> bool:
    """Return whether linear ops, none of which adds anything, make one tensor of the same size and dtype.

    (Another dtype may be there for its precision: gradients in float16 are added up in float32.)
    """
    if len(reached) != 1:
        return False
    [(end, joined)] = reached.items()
    return not joined and program.dtype(end) == dtype and 0 < size <= program.bytes(end)
