"""Weighted moments: sums of weights, of weighted entries and of their squared differences from a mean, sent at once.

A weighted variance adds up `w (x - a)^2`, and its mean `a` follows from the sums of `w` and `w x`. Taken literally,
shards wait for these sums, and then for that one. But each can take squares around a center `c` of its own rows. From
its sums `W` of `w`, `S` of `w x` and `V` of `w (x - c)^2` follows the sum around any `a`: as `w (x - c)` adds up to
`S - W c`, it is the sum over all shards of

    V + (c - a) (2 S - W (c + a))

So each sends `S`, `W`, `V` and `c`, and whoever has those of all computes the rest. This holds for all weights,
negative ones and a `W` of 0 too. It is as exact as in two steps if `c` is among the entries, as the shard's mean
`S / W` is where no weight is negative: those of a mask. Of other weights, `c` is the mean by their absolute values. A
gradient by `a`, which adds up `w (x - a)`, is the sum of `S - W a`: it needs no exchange of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos import constant_value, make_node
from graphsplit.core.sizes import are_same
from graphsplit.planning.costs.exchanges import has_few_bytes
from graphsplit.planning.moments import PASSED_ON, is_square, varies_along
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.sides import sides_of

_PARTS = 4  # of what a shard sends
_SQUARED = 2  # times a difference
_EXACT = frozenset({tf.float32, tf.float64})  # (in others a number of entries is rounded)
_FINITE = frozenset({"kept", "minus", "truth"})  # (what a mask keeps of truth values is one)
_DEEPEST = 6  # as many operations are looked at behind each other
_BROADCASTING = frozenset({"BroadcastTo", "Tile", *PASSED_ON})
_RESHAPING = frozenset({"ExpandDims", "Reshape", "Squeeze", "StridedSlice", *_BROADCASTING})

Product = Counter[tuple[Any, ...]]
"""What is multiplied, how often: `("entry", tensor)`, `("difference", x, a)`, `("truth", mask)`, which is 1 or 0,
`("kept", mask)`, whose other entries are 0 whatever all factors were, `("minus",)`."""


@dataclass(frozen=True, eq=False)
class _Weighting:
    """The sums from which a weighted mean follows.

    Attributes:
      x: the entries.
      weights: by what each is multiplied.
      entries, total: the sums, of weighted entries and of weights.
    """

    x: Tensor
    weights: Product
    entries: Op
    total: Op

    @property
    def is_mask(self) -> bool:
        """Return whether some entries are left out, whatever they are."""
        return any(kind == "kept" for kind, *_ in self.weights)


@dataclass(frozen=True, eq=False)
class _Deviations:
    """What a sum amounts to: weighted differences from a mean, or their squares, times what is whole along its axes."""

    weighting: _Weighting
    around: Tensor
    are_squared: bool
    factors: tuple[Tensor, ...] = ()
    is_negative: bool = False


def with_weighted_moments(program: Program, cut: Collection[int], few_bytes: int) -> Program:
    """Return a program in which weighted moments follow from what the shards have of their own rows.

    Args:
      program: which.
      cut: the axes along which its arguments are cut.
      few_bytes: the most that a shard sends of the moments of one tensor; see `Mesh.few_bytes`.
    """
    deviations: dict[int, _Deviations] = {}
    weightings: dict[tuple[Any, ...], _Weighting] = {}
    for op in program.ops:
        rank = len(op.in_shapes[0] or ()) if op.type == "Sum" and not op.controls else 0
        if not rank or {*cut}.isdisjoint([axis % rank for axis in np.ravel(op.constants.get(1, ()))]):
            continue
        if not _is_broadcast_back(op, rank):
            continue
        factors = _factors(program, op.inputs[0])
        differences = [(factor, times) for factor, times in factors.items() if factor[0] == "difference"]
        if len(differences) != 1 or (times := differences[0][1]) > _SQUARED:
            continue
        [(difference, _)], other_factors = differences, factors - Counter(dict(differences))
        if times == _SQUARED and has_few_bytes(program, Tensor(op.index, 0), few_bytes // _PARTS):
            new_weighting = _weighting(program, op, difference, other_factors)
            weightings |= {difference: new_weighting} if new_weighting and difference not in weightings else {}
            deviations |= {op.index: _Deviations(new_weighting, difference[2], True)} if new_weighting else {}
        elif times == 1 and (weighting := weightings.get(difference)):
            sums = _differences(program, op, difference, other_factors, weighting)
            deviations |= {op.index: sums} if sums else {}
    return _WeightedWriter(program, deviations).write() if deviations else program


def _weighting(program: Program, op: Op, difference: tuple[Any, ...], weights: Product) -> _Weighting | None:
    """Return the sums by which a mean is made, if an operation adds up squares of differences from it so weighted."""
    _, x, around = difference
    numbers = Counter(
        {("truth", *factor[1:]) if factor[0] == "kept" else factor: times for factor, times in weights.items()}
    )
    sums = [sum_op for sum_op in (op, *_sums_behind(program, around)) if _is_alike(program, sum_op, op, x)]
    entries = [sum_op for sum_op in sums if _factors(program, sum_op.inputs[0]) == weights + _factors(program, x)]
    entries = [sum_op for sum_op in entries if program.ops[sum_op.inputs[0].op].inputs.count(x) == 1]
    totals = [sum_op for sum_op in sums if _factors(program, sum_op.inputs[0]) == numbers]
    if not weights or not entries or not totals or not _is_whole(program, around, op) or op not in sums:
        return None
    sides = sides_of(program)
    is_one_side = len({sides.of_op(sum_op.index) for sum_op in (op, entries[0], totals[0])}) == 1
    return _Weighting(x, weights, entries[0], totals[0]) if is_one_side else None


def _differences(
    program: Program, op: Op, difference: tuple[Any, ...], product: Product, weighting: _Weighting
) -> _Deviations | None:
    """Return what an operation adds up that are differences, if they are weighted so, and over the same axes."""
    excess = product - weighting.weights  # the factors besides the weights
    factors = tuple([factor[1] for factor in excess.elements() if factor[0] == "entry"])
    is_over_same = np.array_equal(np.ravel(op.constants[1]), np.ravel(weighting.entries.constants[1]))
    if excess + weighting.weights != product or len(factors) + excess["minus",] != excess.total() or not is_over_same:
        return None
    if not are_same(op.in_shapes[0], weighting.entries.in_shapes[0]) or not all(
        _is_whole(program, t, op) for t in factors
    ):
        return None
    return _Deviations(weighting, difference[2], False, factors, excess["minus",] % 2 == 1)


def _is_whole(program: Program, tensor: Tensor, op: Op) -> bool:
    """Return whether a tensor is the same for all that an operation adds up, and can be multiplied with the sum."""
    return not varies_along(program, tensor, op) and len(program.shape(tensor) or ()) <= len(op.out_shapes[0] or ())


def _is_broadcast_back(op: Op, rank: int) -> bool:
    """Return whether a sum, broadcast to what it adds up, is beside the entries of which it is the sum."""
    axes = {axis % rank for axis in np.ravel(op.constants[1])}
    return op.attr("keep_dims").b or axes == {*range(len(axes))}


def _is_alike(program: Program, op: Op, like: Op, x: Tensor) -> bool:
    """Return whether an operation adds up as many entries as a tensor has, over the same axes as another one."""
    axes, shape = op.constants.get(1), program.shape(x)
    is_exact = op.out_shapes == like.out_shapes and op.out_dtypes == like.out_dtypes and op.out_dtypes[0] in _EXACT
    is_over_same = axes is not None and np.array_equal(np.ravel(axes), np.ravel(like.constants[1]))
    return is_exact and is_over_same and shape is not None and are_same(op.in_shapes[0], shape)


def _sums_behind(program: Program, tensor: Tensor) -> Iterable[Op]:
    """Yield the sums from which a mean follows, the last ones."""
    reached = {tensor.op: None}
    for _ in range(_DEEPEST):
        ops = [program.ops[i] for i in reached]
        yield from [op for op in ops if op.type == "Sum"]
        reached = {operand.op: None for op in ops if op.type != "Sum" for operand in op.inputs}


def _factors(program: Program, tensor: Tensor, depth: int = 0) -> Product:
    """Return what is multiplied to make a tensor, or something that is broadcast to it."""
    op = program.ops[tensor.op]
    if depth == _DEEPEST:
        return _one("entry", tensor)

    def of(operand: int) -> Product:
        return _factors(program, op.inputs[operand], depth + 1)

    if op.type in ("Sub", "SquaredDifference"):
        difference = _one("difference", *[_passed_on(program, tensor_read) for tensor_read in op.inputs])
        product = difference if op.type == "Sub" else difference + difference
    elif op.type == "Mul" or is_square(program, op):
        product = _multiplied(of(0), of(1 if op.type == "Mul" else 0))
    elif op.type == "SelectV2" and _is_zero(program, op.inputs[2]):
        mask = op.inputs[0]
        product = of(1) | _one("kept", mask)
        del product["truth", mask]
    elif op.type == "Cast" and program.dtype(op.inputs[0]) == tf.bool:
        product = _one("truth", op.inputs[0])
    elif op.type == "Neg":
        product = of(0) + _one("minus")
    elif op.type in _BROADCASTING or (op.type == "AddV2" and _is_zero(program, op.inputs[1])):
        product = of(0)
    else:
        product = _one("entry", tensor)
    return Counter({factor: 1 if factor[0] in ("kept", "truth") else times for factor, times in product.items()})


def _multiplied(left: Product, right: Product) -> Product:
    """Return the product. A mask stays one if the other factors are finite; else it multiplies, as 0 * nan is nan."""

    def as_it_counts(factor: tuple[Any, ...], beside: Product) -> tuple[Any, ...]:
        is_kept = factor in beside or {kind for kind, *_ in beside} <= _FINITE
        return ("truth", *factor[1:]) if factor[0] == "kept" and not is_kept else factor

    sides = (left, right), (right, left)
    return Counter([as_it_counts(factor, beside) for product, beside in sides for factor in product.elements()])


def _one(*factor: Any) -> Product:
    return Counter([factor])


def _passed_on(program: Program, tensor: Tensor) -> Tensor:
    while (op := program.ops[tensor.op]).type in PASSED_ON:
        tensor = op.inputs[0]
    return tensor


def _is_zero(program: Program, tensor: Tensor) -> bool:
    op = program.ops[tensor.op]
    return op.type == "ZerosLike" or (op.type == "Const" and not np.any(constant_value(op.node)))


def _is_truth(program: Program, weight: tuple[Any, ...]) -> bool:
    """Return whether a weight is 1 or 0, in another shape perhaps."""
    if weight[0] != "entry":
        return weight[0] in ("kept", "truth")
    op = program.ops[weight[1].op]
    while op.type in _RESHAPING:
        op = program.ops[op.inputs[0].op]
    return bool(op.type == "Cast" and program.dtype(op.inputs[0]) == tf.bool)


class _WeightedWriter(ProgramWriter):
    def __init__(self, program: Program, deviations: dict[int, _Deviations]):
        super().__init__(program)
        self._deviations = deviations
        self._weightings = {
            deviation.weighting.entries.index: deviation.weighting for deviation in reversed(deviations.values())
        }
        self._of_shards: dict[int, list[Tensor]] = {}  # by sum of entries: `S`, `W`, `V` and `c`, a row for each shard
        self._parts: dict[int, Tensor] = {}  # sums of which each shard sends its part

    def _visit(self, op: Op) -> None:
        if op.index in self._deviations:
            result = self._added_up(op, self._deviations[op.index])
            self._note(op, [result], [result.op])
        else:
            super()._visit(op)
        for weighting in self._weightings.values():
            if op.index == max(weighting.entries.index, weighting.total.index):
                self._exchange(weighting)

    def _exchange(self, weighting: _Weighting) -> None:
        """Let each shard send what it has, and let the sums of entries and of weights follow from that."""
        sums, x, name = (
            (weighting.entries, weighting.total),
            self._result(weighting.x),
            f"{weighting.entries.name}/of_shards",
        )
        entries, total = (self._parts.setdefault(op.index, self._result(Tensor(op.index, 0))) for op in sums)
        center = self._plain(
            "DivNoNan", f"{name}/center", self._sums_for_center(weighting, entries, total, name), T=True
        )
        difference = self._plain("SquaredDifference", f"{name}/difference", [x, center], T=True)
        weighted = self._program.ops[weighting.entries.inputs[0].op]
        inputs = [difference if operand == weighting.x else self._result(operand) for operand in weighted.inputs]
        weighted_squares = self._append(weighted, self._unused(f"{name}/squares"), inputs, ())
        squares = self._summed(weighting.entries, f"{name}/sum", weighted_squares)
        dtype, shape = self._type_of(entries), self._shape_of(entries)
        parts, packed_shape = [entries, total, squares, center], (_PARTS, *shape)
        packed = self._made("Pack", self._unused(name), parts, [(packed_shape, dtype)], {}, N=_PARTS, T=dtype, axis=0)
        row = self._widened(f"{name}/row", packed, 0)
        for tensor, merged in ((center, "center"), (difference, "difference"), (packed, "row"), (row, "row")):
            self._lay(tensor.op, merged=merged)
        node = make_node(self._unused(f"{name}/apart"), "Unpack", [], num=_PARTS, T=dtype, axis=1)
        apart = self._new(node, [row], [((1, *shape), dtype)] * _PARTS, {})
        self._of_shards[weighting.entries.index] = [Tensor(apart.op, k) for k in range(_PARTS)]
        for k, op in enumerate(sums):
            if self._result(Tensor(op.index, 0)) == self._parts[op.index]:
                self._results[Tensor(op.index, 0)] = self._over_shards(op, Tensor(apart.op, k))

    def _sums_for_center(self, weighting: _Weighting, entries: Tensor, total: Tensor, name: str) -> list[Tensor]:
        """Return what is divided by what for a mean among the entries."""
        if all(_is_truth(self._program, weight) for weight in weighting.weights):
            return [entries, total]
        sizes = self._plain("Abs", f"{name}/sizes", [self._result(weighting.total.inputs[0])], T=True)
        weighted = self._plain("Mul", f"{name}/weighted", [sizes, self._result(weighting.x)], T=True)
        return [
            self._summed(weighting.entries, f"{name}/sum_{k}", summed) for k, summed in enumerate((weighted, sizes))
        ]

    def _summed(self, like: Op, name: str, tensor: Tensor) -> Tensor:
        return self._append(like, self._unused(name), [tensor, self._result(like.inputs[1])], ())

    def _over_shards(self, op: Op, tensor: Tensor) -> Tensor:
        """Append the sum over all shards, in the shape in which an operation made it."""
        name, dtype, axis = self._unused(f"{op.name}/over_shards"), self._type_of(tensor), np.array(0, np.int32)
        operands, shape = [tensor, self._constant(f"{name}/axis", axis, tf.int32)], self._shape_of(tensor)[1:]
        summed = self._made("Sum", name, operands, [(shape, dtype)], {1: axis}, T=dtype, Tidx=tf.int32)
        return summed if shape == op.out_shapes[0] else self._reshaped(op, summed)

    def _added_up(self, op: Op, deviation: _Deviations) -> Tensor:
        """Append what an operation adds up of all shards. (Where a mask keeps nothing there may be no mean.)"""
        entries, total, squares, center = self._of_shards[deviation.weighting.entries.index]
        around = self._result(deviation.around)

        def of(kind: str, tensor: Tensor, other: Tensor) -> Tensor:
            return self._plain(kind, f"{op.name}/{kind}", [tensor, other], T=True)

        if deviation.weighting.is_mask:
            apart = of("SquaredDifference" if deviation.are_squared else "Sub", center, around)
            result = of("MulNoNan", apart, total)
        elif deviation.are_squared:
            twice = of("Sub", of("AddV2", entries, entries), of("Mul", total, of("AddV2", center, around)))
            result = of("Mul", of("Sub", center, around), twice)
        else:
            result = of("Sub", entries, of("Mul", total, around))
        result = self._over_shards(op, of("AddV2", squares, result) if deviation.are_squared else result)
        for factor in deviation.factors:
            result = of("Mul", result, self._result(factor))
        return self._plain("Neg", f"{op.name}/minus", [result], T=True) if deviation.is_negative else result
