"""TensorLists, in which loops stack what they compute: a list has the layout of its elements.

A list is a scalar of type variant; its `Dims` are those of the elements, whose rank nobody needs to know.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphsplit.core.sizes import is_same
from graphsplit.program.program import Op
from graphsplit.program.reading.shape_inference import ELEMENT_SHAPE
from graphsplit.rules.factors import ELEMENTS, LIST, Dims, Factors, Resize
from graphsplit.rules.known import known, resized_axes
from graphsplit.rules.registry import register

_STACKED: tuple[int, ...] = (LIST, *range(15))
_WITHIN: Dims = (*range(LIST), None)  # a list of which an op takes one element, whichever

_TABLE: dict[str, tuple[tuple[Dims, ...], tuple[Dims, ...]]] = {  # operands and results
    "TensorListFromTensor": ((_STACKED, None), (ELEMENTS,)),
    "TensorListGetItem": ((_WITHIN, None, None), (_WITHIN,)),
    "TensorListLength": ((_WITHIN,), (None,)),  # the same on every shard
    "TensorListPopBack": ((_WITHIN, None), (_WITHIN, _WITHIN)),
    "TensorListPushBack": ((_WITHIN, _WITHIN), (_WITHIN,)),
    "TensorListSetItem": ((_WITHIN, None, _WITHIN), (_WITHIN,)),
}


@register(*_TABLE)
def of_elements(op: Op) -> Factors:
    """`(list of ab, ab) -> list of ab` and the like, by the table."""
    return _factors(op, *_TABLE[op.type])


@register("TensorListStack")
def stack(op: Op) -> Factors:
    """`list of ab -> tab`; elements whose number is not known are all there."""
    shape = op.out_shapes[0]
    if not shape or shape[0] is None:
        return _factors(op, (_WITHIN, None), ((None, *_STACKED[1:]),))
    return _factors(op, (ELEMENTS, None), (_STACKED,))


@register("EmptyTensorList", "TensorListReserve")
def make_list(op: Op) -> Factors:
    """A list without elements is whatever its elements will be.

    A shape that is only known at run time (a backward loop recalls the forward list's) is that of whole elements; on
    the shards it is left open.
    """
    if 0 not in op.constants:
        unknown = Resize(0, None, np.array(-1))
        return Factors((None, None), (_WITHIN,), resize=dict.fromkeys(range(LIST), (unknown,)))
    count, factors = op.constants.get(1), _factors(op, (None, None), (ELEMENTS,))
    if op.type == "EmptyTensorList":
        return factors
    if count is None:
        return replace(factors, outputs=(_WITHIN,))
    return replace(factors, resize={**factors.resize, LIST: (Resize(1, (), np.asarray(count)),)})


def _factors(op: Op, inputs: tuple[Dims, ...], outputs: tuple[Dims, ...]) -> Factors:
    """Return factors; an operand with the shape of elements is resized, where that is not -1: unknown."""
    if op.type not in ELEMENT_SHAPE:
        return Factors(inputs, outputs)
    operand = ELEMENT_SHAPE[op.type]
    shape = known(op.constants.get(operand), "the shape of the list's elements is")
    axes = [i for i, size in enumerate(np.atleast_1d(shape)) if not is_same(size, -1)]
    return Factors(inputs, outputs, resize=resized_axes(operand, shape, axes))
