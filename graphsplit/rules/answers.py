"""How an op runs on the shards, from its factors and the layouts of what it reads; and against the dataflow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graphsplit.core.layouts import BATCH, PARTIAL_SUM, REPLICATE, EvenCut, Layout, Partial, Shard
from graphsplit.core.polynomials import UndecidedError
from graphsplit.core.sizes import ROWS, Shape, Size, are_same, as_exact, as_size, is_same, quotient
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dim, Dims, Factors, Shift
from graphsplit.rules.registry import Answer, Rule, Sharded, pass_through, rule_of

_MOST_BLOCKS = 4096  # of an axis: to cut it and to join it takes an operand for each, on every shard


def answer(rule: Rule, op: Op, layouts: Sequence[Layout], sizes: Sequence[int], may_grow: bool = False) -> Answer:
    """Return how `op` runs on the shards, given the layouts (and sizes in bytes) of its inputs.

    Partial sums stay partial where the op is linear in them and that pays (in a loop, where nothing can be reduced, it
    always does: `may_grow`); elsewhere they are wanted whole.
    Among sharded inputs the factor that keeps most bytes where they are wins; the others are resharded to fit.

    A rule that asks what nobody can know before sizes are known has declined.
    """
    try:
        return _answer(rule, _as_rules_see(op), layouts, sizes, may_grow)
    except UndecidedError as question:
        return Declined(f"it depends on {question}, which is only known when it runs")


def _as_rules_see(op: Op) -> Op:
    """Return an operation whose sizes are exact: no rule can take an unknown one for the number it is planned with."""
    if not op.symbols and not _has_sizes(op.in_shapes) and not _has_sizes(op.out_shapes):
        return op
    return replace(
        op,
        in_shapes=tuple(map(_exact, op.in_shapes)),
        out_shapes=tuple(map(_exact, op.out_shapes)),
        constants={**op.constants, **op.symbols},
    )


def _has_sizes(shapes: Sequence[Shape | None]) -> bool:
    for shape in shapes:
        for size in shape or ():
            if type(size) is Size:
                return True
    return False


def _exact(shape: Shape | None) -> Any:
    return None if shape is None else tuple(map(as_exact, shape))


def _answer(rule: Rule, op: Op, layouts: Sequence[Layout], sizes: Sequence[int], may_grow: bool) -> Answer:
    if rule.layouts is not None:
        special = rule.layouts(op, layouts)
        if special is not None:
            return special
    partial = [i for i, layout in enumerate(layouts) if layout == PARTIAL_SUM]
    others_whole = not any(isinstance(layout, Shard) for layout in layouts)
    if partial and others_whole and _is_linear_in(rule, op, partial) and (may_grow or _pays(op, partial)):
        wants = tuple(PARTIAL_SUM if i in partial else REPLICATE for i in range(len(layouts)))
        return Sharded(wants, (PARTIAL_SUM,) * len(op.out_shapes))
    factors = rule.factors(op)
    if isinstance(factors, Declined):
        return factors
    votes: dict[Shard, int] = {}
    for layout, dims, size in zip(layouts, factors.inputs, sizes, strict=True):
        # (an element of a list has other axes than the list's others where its list is going to be read whole)
        if isinstance(layout, Shard) and dims is not None and layout.axis < len(dims):
            factor = _factor_at(dims[layout.axis], layout)
            if factor is not None:
                votes[factor] = votes.get(factor, 0) + size + 1
    for cut in sorted(votes, key=lambda key: -votes[key]):
        sharded = _along(factors, cut)
        if sharded is not None and not _cuts_unknown(op, sharded):
            pieces = max([len(layout.blocks) for layout in sharded.gives if isinstance(layout, Shard)], default=0)
            return sharded if pieces <= _MOST_BLOCKS else Declined(f"each shard would have {pieces} pieces of it")
    return Declined(rule.why_whole)


def _cuts_unknown(op: Op, sharded: Sharded) -> bool:
    """Return whether something would be cut along an axis of unknown size that is no batch: it has other rows."""
    wanted = zip(sharded.wants, op.in_shapes, strict=True)
    for layout, shape in (*wanted, *zip(sharded.gives, op.out_shapes, strict=True)):
        if not isinstance(layout, Shard) or shape is None or layout.axis >= len(shape):
            continue
        if type(shape[layout.axis]) is not int and not _has_rows(shape, layout):
            return True
    return False


def _has_rows(shape: Shape, layout: Shard) -> bool:
    size = shape[layout.axis]
    if layout.partition != BATCH:
        return isinstance(size, int)
    count = None if size is None else quotient(size, sum(layout.blocks))
    return isinstance(size, int) or isinstance(count, int) or is_same(count, ROWS)


def answer_for_output(rule: Rule, op: Op, output: int, layout: Shard) -> Sharded | None:
    """Return how `op` can yield `output` in `layout`, or None: the demand that runs against the dataflow.

    This is how what would be computed whole and then cut (a gradient tiled over the batch, a mask from a constant) is
    made in pieces from the start.
    """
    try:
        factors = rule.factors(_as_rules_see(op))
    except UndecidedError:
        return None
    if isinstance(factors, Declined):
        return None
    dims = factors.outputs[output]
    # (what is joined of branches of several ranks has none that is known, and what is made of it may have none)
    factor = _factor_at(dims[layout.axis], layout) if dims is not None and layout.axis < len(dims) else None
    if factor is None:
        return None
    sharded = _along(factors, factor)
    if sharded is None or sharded.gives[output] != layout:
        return None
    if sharded.draw and len(layout.blocks) > 1:
        return None  # rows of joined batches do not follow each other
    return sharded


def partial_operands(op: Op, may_grow: bool = False) -> Sequence[int]:
    """Return as which operands a partial sum may stay partial through `op`, as far as is known before layouts are.

    Args:
      op: a reader of the sum.
      may_grow: as in `answer`.
    """
    rule = rule_of(op.type)
    if rule is None or op.stateful or not rule.keeps_partial:
        return ()
    if rule.layouts is pass_through:
        return range(len(op.inputs))
    joint = [i for i in range(len(op.inputs)) if i not in op.constants]
    groups = [joint] if rule.joint else [[i] for i in rule.linear if i < len(op.inputs)]
    return [
        i
        for operands in groups
        if _is_linear_in(rule, op, operands) and (may_grow or _pays(op, operands))
        for i in operands
    ]


def _is_linear_in(rule: Rule, op: Op, partial: list[int]) -> bool:
    if rule.joint:
        linear = partial == [i for i in range(len(op.inputs)) if i not in op.constants]
    else:
        linear = len(partial) == 1 and partial[0] in rule.linear
    return linear and all(dtype.is_floating or dtype.is_complex for dtype in op.out_dtypes)


def _pays(op: Op, partial: list[int]) -> bool:
    """Return whether it pays to put off a reduction until after `op`: what is reduced gets smaller, or is only moved.

    Scaling a gradient by a learning rate is linear too, but on the shards it would be done by all of them, and the
    learning rate sent to each. (Unknown sizes count as none.)
    """
    before = sum(_entries(op.in_shapes[i]) for i in partial)
    after = sum(map(_entries, op.out_shapes))
    alone = len(partial) + len(op.constants) == len(op.inputs)
    return after < before or (after == before and alone)


def _entries(shape: Shape | None) -> int:
    return 0 if shape is None or None in shape else math.prod([int(size or 0) for size in shape])


def _factor_at(dim: Dim, layout: Shard) -> Shard | None:
    """Return how a factor is cut when the axis that it is (a part of) lies so; as if the factor were an axis."""
    if dim is None:
        return None
    if isinstance(dim, int):
        return layout.along(dim)
    for factor, outer, inner in dim:
        if not isinstance(outer, int):
            continue  # an unknown number of blocks
        count, remainder = divmod(len(layout.blocks), outer)
        unit = layout.between(0, count)
        inner_blocks = [quotient(block, inner) for block in unit.blocks]
        repeats = not remainder and are_same(unit.blocks * outer, layout.blocks) and unit.parts * outer == layout.parts
        if repeats and None not in inner_blocks:
            return replace(unit, axis=factor, blocks=tuple(map(as_size, inner_blocks)))
    return None


def _axis_of(dims: Dims, cut: Shard) -> Shard | None:
    """Return how an operand lies of which a factor is cut: see `_factor_at`."""
    for axis, dim in enumerate(dims or ()):
        if dim == cut.axis:
            return cut.along(axis)
        if isinstance(dim, tuple):
            for part in dim:
                if part.factor == cut.axis and isinstance(part.outer, int):  # a known number of blocks
                    blocks = tuple([as_size(block * part.inner) for block in cut.blocks])
                    return replace(cut, axis=axis, blocks=blocks).repeated(part.outer)
    return None


def _along(factors: Factors, cut: Shard) -> Sharded | None:
    numbered = factors.numbered.get(cut.axis)
    if numbered and not (isinstance(cut.partition, EvenCut) and len(cut.blocks) == 1):
        return None  # whose numbers of rows may be told apart only where they are known
    wants = tuple([_axis_of(dims, cut) or REPLICATE for dims in factors.inputs])
    gives: list[Layout] = []
    for dims in factors.outputs:
        shard = _axis_of(dims, cut)
        if shard is not None:
            gives.append(shard)
        elif dims is None:
            gives.append(REPLICATE)
        elif cut.axis in factors.contracted:
            gives.append(Partial(factors.contracted[cut.axis]))
        else:
            return None
    shift = {numbered.operand: Shift(cut, others=numbered.others)} if numbered else {}
    return Sharded(wants, tuple(gives), factors.resize.get(cut.axis, ()), draw=factors.draw, shift=shift)
