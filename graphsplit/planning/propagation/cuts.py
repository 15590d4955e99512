"""Cuts: which whole values are split, because the work that follows pays for it.

Rows flow from the sharded arguments. But rows are also born inside of a function (noise, labels), come out of an
operation that runs once (an augmentation without a rule), or belong to another batch than the one that made the shards.
Any split of any value is exact, so whether to split is a question of cost. A hypothetical pass splits whatever could
be; what runs on the shards in addition falls into components that share nothing but whole values, and each component is
kept if it spreads more work than its moves cost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import tensorflow as tf

from graphsplit.core.layouts import Layout, OtherRows, Shard, is_whole
from graphsplit.core.sizes import Shape, is_same, quotient
from graphsplit.planning.costs.work import (
    COPY_BYTES,
    FLOPS_PER_BYTE,
    LEAST_OTHER_BYTES,
    LEAST_OTHER_FLOPS,
    LEAST_SHARE,
    flops_of,
    is_data,
)
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.propagation.forward_propagation import ForwardPropagation, NaturalForms, read_in_pieces
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.undefined_outputs import undefined_outputs
from graphsplit.rules import Answer, Sharded, answer_for_output
from graphsplit.rules.registry import rule_of

Pass = Callable[..., ForwardPropagation]
"""Makes a forward pass of a class over the program, given the class and its further arguments."""


def with_cuts(program: Program, mesh: Mesh, make: Pass) -> NaturalForms:
    """Return the natural forms in which whole values are cut where that pays.

    Args:
      program: what is planned.
      mesh: the shards.
      make: see `Pass`.
    """
    natural = _reduced_in_pieces(program, mesh, make, make(ForwardPropagation).run())
    if mesh.shards < 2 or _share_once(program, natural) < LEAST_SHARE:
        return natural
    wanted_whole = natural.wanted_whole
    hope = make(_Hopeful, settled=natural.answers, wanted_whole=wanted_whole, mesh=mesh)
    assert isinstance(hope, _Hopeful)
    answers, cuts = _Components(program, natural, hope.run(), hope.lengths, mesh).that_pay()
    if not answers:
        return natural
    settled = [answers.get(op.index, natural.answers[op.index]) for op in program.ops]
    return make(ForwardPropagation, settled=settled, wanted_whole=wanted_whole, cuts=cuts).run()


def _reduced_in_pieces(program: Program, mesh: Mesh, make: Pass, natural: NaturalForms) -> NaturalForms:
    """Return the natural forms in which sums that shards read in pieces are reduced in pieces, even if moved."""
    again = make(ForwardPropagation, in_pieces=read_in_pieces(program, natural)) if mesh.exchanging else None
    return natural if again is None or again.tensors_wanted_whole() == natural.wanted_whole else again.run()


def _share_once(program: Program, natural: NaturalForms) -> float:
    """Return the share of all floating-point operations that is naturally done whole: an optimizer's, mostly."""
    work = [flops_of(op) for op in program.ops]
    whole = [flops for flops, answer in zip(work, natural.answers, strict=True) if answer is None]
    return sum(whole) / (sum(work) or 1)


@dataclass(eq=False)
class _Hopeful(ForwardPropagation):
    """A pass in which all is cut that can be, and that an earlier pass did not put onto the shards anyway."""

    mesh: Mesh = field(default_factory=Mesh)
    lengths: set[int] = field(default_factory=set, init=False)
    _has_data: list[bool] = field(default_factory=list, init=False)

    def run(self) -> NaturalForms:
        """Return the natural forms."""
        self.lengths = _lengths_of_arguments(self.program) if self.mesh.rows else set()
        return super().run()

    def _append(self, *args: object) -> None:
        super()._append(*args)  # type: ignore[arg-type]
        self._has_data.append(self._is_data(self.program.ops[len(self._has_data)]))

    def _is_data(self, op: Op) -> bool:
        return is_data(op, self._has_data, self.program, self.mesh.batch)

    def _answer(self, op: Op, layouts: Sequence[Layout]) -> Answer:
        """Answer for an operation; if it cannot run with its operands as they are, with one cut along another axis."""
        answer = super()._answer(op, layouts)
        if isinstance(answer, Sharded) or op.stateful or op.bodies:
            return answer
        for i, layout in enumerate(layouts):
            for turned in self._turned(op.in_shapes[i], layout):
                other = super()._answer(op, [*layouts[:i], turned, *layouts[i + 1 :]])
                if isinstance(other, Sharded):
                    return other
        return answer

    def _turned(self, shape: Shape | None, layout: Layout) -> list[Shard]:
        """Return how an operand may be cut instead: along other axes that have the batch's rows."""
        if not isinstance(layout, Shard):
            return []
        axes = [axis for axis, size in enumerate(shape or ()) if is_same(size, self.mesh.batch)]
        return [Shard(axis) for axis in axes if axis != layout.axis]

    def _append_once(self, op: Op, reason: str) -> None:
        if reason and self.mesh.rows:  # it reads rows; what it makes of them are rows, as many as there may be
            self.lengths.update(shape[0] for shape in op.out_shapes if shape and shape[0] is not None)
        super()._append_once(op, reason)

    def _seen_whole(self, op: Op, output: int) -> Layout:
        return self._cut(op, output) or self.whole

    def _cut(self, op: Op, output: int) -> Shard | None:
        """Return along what a whole value is cut, if along anything."""
        shape, dtype = op.out_shapes[output], op.out_dtypes[output]
        if not shape or dtype in (tf.resource, tf.variant) or output in undefined_outputs(op.node):
            return None
        if not op.is_constant and not self._is_data(op):
            return None
        batch = self.mesh.batch
        axes_of_batch = [axis for axis, size in enumerate(shape) if is_same(size, batch)]
        if axes_of_batch:  # (an argument that has so many rows, and is whole, was asked to be)
            return None if op.index in self.program.inputs else Shard(axes_of_batch[0])
        count = None if op.is_constant or shape[0] is None else quotient(shape[0], batch)
        if isinstance(count, int) and count:
            return Shard(0, (count,))
        other = [axis for axis, size in enumerate(shape) if size in self.lengths]
        if other:
            return self._of_other_rows(other[0], shape[other[0]])
        if op.is_constant or op.out_bytes[output] < LEAST_OTHER_BYTES:
            return None
        return self._of_other_rows(0, shape[0])

    def _of_other_rows(self, axis: int, size: int | None) -> Shard | None:
        """Return the cut into rows that are not the batch's, if there are some for each shard.

        (Of a size that is open, nobody knows when planning how many each would have.)
        """
        if not self.mesh.rows or type(size) is not int or min(OtherRows(size).counts(self.mesh.rows)) < 1:
            return None
        return Shard(axis, (1,), OtherRows(size))


def _lengths_of_arguments(program: Program) -> set[int]:
    """Return the sizes of the arguments' first axes."""
    shapes = [program.ops[i].out_shapes[0] for i in program.inputs]
    return {shape[0] for shape in shapes if shape and shape[0] is not None}


@dataclass
class _Component:
    """Operations that run on the shards together or not at all.

    Attributes:
      cuts: what must be cut for them.
      flops: what they compute.
      bytes: what moves for them, less what need not move any more.
      ordinary: whether all of these cuts are of the batch's rows, or an argument's.
    """

    cuts: dict[Tensor, Shard] = field(default_factory=dict)
    flops: int = 0
    bytes: int = 0
    ordinary: bool = True


@dataclass(eq=False)
class _Components:
    program: Program
    natural: NaturalForms
    hopeful: NaturalForms
    lengths: Collection[int]
    mesh: Mesh
    _parents: dict[Tensor | int, Tensor | int] = field(default_factory=dict)

    @functools.cached_property
    def _new(self) -> list[Op]:
        return [op for op in self.program.ops if self._is_new(op.index)]

    def that_pay(self) -> tuple[dict[int, Sharded], dict[Tensor, Shard]]:
        """Return how the operations run of the components that are worth it, and what is cut for them."""
        for op in self._new:
            for tensor in op.inputs:
                if not is_whole(self.hopeful.layout(tensor)) and self._belongs(tensor):
                    self._join(op.index, self._node(tensor))
        component_by_root: dict[Tensor | int, _Component] = {}
        for op in self._new:
            self._add_to_component(op, component_by_root.setdefault(self._root(op.index), _Component()))
        self._count_exits(component_by_root)
        paying = {root: component for root, component in component_by_root.items() if self._pays(component)}
        answers = {op.index: self.hopeful.answers[op.index] for op in self._new if self._root(op.index) in paying}
        cuts = {tensor: cut for component in paying.values() for tensor, cut in component.cuts.items()}
        return {i: answer for i, answer in answers.items() if answer is not None}, cuts

    def _pays(self, component: _Component) -> bool:
        spread = component.flops * (1 - 1 / self.mesh.shards)
        enough = component.ordinary or component.flops >= LEAST_OTHER_FLOPS
        return enough and spread > max(component.bytes, 0) * FLOPS_PER_BYTE

    def _is_new(self, position: int) -> bool:
        return self.natural.answers[position] is None and self.hopeful.answers[position] is not None

    def _is_cut(self, tensor: Tensor) -> bool:
        """Return whether a tensor is cut only here: its op does not make it like that."""
        answer = self.hopeful.answers[tensor.op]
        layout = self.hopeful.layout(tensor)
        is_made = answer is not None and answer.gives[tensor.index] == layout
        return isinstance(layout, Shard) and not is_made and layout != self.natural.layout(tensor)

    def _belongs(self, tensor: Tensor) -> bool:
        return self._is_new(tensor.op) or self._is_cut(tensor)

    def _node(self, tensor: Tensor) -> Tensor | int:
        return tensor if self._is_cut(tensor) else tensor.op

    def _root(self, node: Tensor | int) -> Tensor | int:
        while (parent := self._parents.get(node, node)) != node:
            self._parents[node] = self._parents.get(parent, parent)
            node = parent
        return node

    def _join(self, a: Tensor | int, b: Tensor | int) -> None:
        self._parents[self._root(a)] = self._root(b)

    def _add_to_component(self, op: Op, component: _Component) -> None:
        """Add an operation's FLOPs to its component, and the bytes that are cut or resharded so that shards can run it.

        Less what then need not be gathered; broadcasts do not count.
        """
        hoped = self.hopeful.answers[op.index]
        assert hoped is not None
        component.flops += flops_of(op)
        for i, (tensor, want) in enumerate(zip(op.inputs, hoped.wants, strict=True)):
            layout, size = self.hopeful.layout(tensor), self.program.bytes(tensor)
            if self._is_cut(tensor) and tensor not in component.cuts:
                assert isinstance(layout, Shard)
                component.cuts[tensor] = layout
                component.ordinary &= self._is_ordinary(layout)
                component.bytes += self._bytes_to_cut(tensor, layout)
            elif i in hoped.makes:
                continue
            elif is_whole(layout) and isinstance(want, Shard):
                component.bytes += self._bytes_to_cut(tensor, want)
            elif not is_whole(layout):
                component.bytes += size * (want != layout)  # all-gathered, or resharded along another axis
                saves_gather = self.natural.reasons[op.index] and layout == self.natural.layout(tensor)
                component.bytes -= size * bool(saves_gather)

    def _is_ordinary(self, cut: Shard) -> bool:
        return all(not isinstance(part, OtherRows) or part.length in self.lengths for part in cut.parts)

    def _bytes_to_cut(self, tensor: Tensor, layout: Shard) -> int:
        """Return what moves when a whole value is cut: nothing of what each shard makes for itself."""
        op = self.program.ops[tensor.op]
        rule = rule_of(op.type)
        if op.is_constant:
            return 0
        if rule is not None and not op.stateful:
            answer = answer_for_output(rule, op, tensor.index, layout)
            if answer is not None and all(self.program.bytes(t) <= COPY_BYTES for t in op.inputs):
                return 0
        return self.program.bytes(tensor)

    def _count_exits(self, component_by_root: Mapping[Tensor | int, _Component]) -> None:
        """Add what is gathered of the components' results, and take off what need not be cut for others any more."""
        for tensor in dict.fromkeys(self._read_whole()):
            if self._is_new(tensor.op) and isinstance(self.hopeful.layout(tensor), Shard):
                component_by_root[self._root(tensor.op)].bytes += self.program.bytes(tensor)
        for tensor, want in dict.fromkeys(self._read_on_shards()):
            if self._is_new(tensor.op) and isinstance(layout := self.hopeful.layout(tensor), Shard):
                bytes_before = self._bytes_to_cut(tensor, want) if isinstance(want, Shard) else 0
                bytes_after = self.program.bytes(tensor) if want != layout else 0
                component_by_root[self._root(tensor.op)].bytes += bytes_after - bytes_before

    def _read_whole(self) -> Sequence[Tensor]:
        """Return what is read by operations that run once, or returned."""
        answers = self.hopeful.answers
        operands = [tensor for op in self.program.ops if answers[op.index] is None for tensor in op.inputs]
        return [*operands, *self.program.outputs]

    def _read_on_shards(self) -> list[tuple[Tensor, Layout]]:
        """Return what operations that are on the shards anyway read, and in which layout."""
        reads: list[tuple[Tensor, Layout]] = []
        for op in self.program.ops:
            answer = self.natural.answers[op.index]
            if answer is not None:
                numbered_pairs = enumerate(zip(op.inputs, answer.wants, strict=True))
                reads += [pair for i, pair in numbered_pairs if i not in answer.makes]
        return reads
