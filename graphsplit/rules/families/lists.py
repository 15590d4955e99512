"""TensorLists, in which loops stack what they compute: a list has the layout of its elements.

A list is a scalar of type variant; its `Dims` are those of the elements, whose rank nobody needs to know.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from graphsplit.core.sizes.symbolic_sizes import is_same
from graphsplit.program.program import Op
from graphsplit.rules.factors import ELEMENTS, LIST, Declined, Dims, Factors, Resize
from graphsplit.rules.registry import register

_STACKED: tuple[int, ...] = (LIST, *range(15))
_WITHIN: Dims = (*range(LIST), None)  # a list of which an op takes one element, whichever


def _element_shape(op: Op, operand: int) -> dict[int, tuple[Resize, ...]] | None:
    """Return what to resize in an `element_shape` operand; -1 means unknown and needs nothing."""
    shape = op.constants.get(operand)
    if shape is None:
        return None
    return {i: (Resize(operand, i, shape),) for i, size in enumerate(np.atleast_1d(shape)) if not is_same(size, -1)}


def _rule(op: Op, inputs: tuple[Dims, ...], outputs: tuple[Dims, ...], shape: int | None) -> Factors | Declined:
    resize = {} if shape is None else _element_shape(op, shape)
    if resize is None:
        return Declined("the shape of the list's elements is not known when planning")
    return Factors(inputs, outputs, resize=resize)


@register("EmptyTensorList", "TensorListReserve")
def make_list(op: Op) -> Factors | Declined:
    """A list without elements is whatever its elements will be.

    A shape that is only known at run time (a backward loop recalls the forward list's) is that of whole elements; on
    the shards it is left open.
    """
    if 0 not in op.constants:
        unknown = Resize(0, None, np.array(-1))
        return Factors((None, None), (_WITHIN,), resize=dict.fromkeys(range(LIST), (unknown,)))
    count, found = op.constants.get(1), _rule(op, (None, None), (ELEMENTS,), shape=0)
    if isinstance(found, Declined) or op.type == "EmptyTensorList":
        return found
    if count is None:
        return replace(found, outputs=(_WITHIN,))
    return replace(found, resize={**found.resize, LIST: (Resize(1, (), np.asarray(count)),)})


@register("TensorListFromTensor")
def from_tensor(op: Op) -> Factors | Declined:
    """`tab -> list of ab`; the unstacked axis is whole."""
    return _rule(op, (_STACKED, None), (ELEMENTS,), shape=1)


@register("TensorListStack")
def stack(op: Op) -> Factors | Declined:
    """`list of ab -> tab`; elements whose number is not known are all there."""
    shape = op.out_shapes[0]
    if not shape or shape[0] is None:
        return _rule(op, (_WITHIN, None), ((None, *_STACKED[1:]),), shape=1)
    return _rule(op, (ELEMENTS, None), (_STACKED,), shape=1)


@register("TensorListGetItem")
def get_item(op: Op) -> Factors | Declined:
    """`(list of ab, index, shape) -> ab`."""
    return _rule(op, (_WITHIN, None, None), (_WITHIN,), shape=2)


@register("TensorListSetItem")
def set_item(op: Op) -> Factors | Declined:
    """`(list of ab, index, ab) -> list of ab`."""
    return _rule(op, (_WITHIN, None, _WITHIN), (_WITHIN,), shape=None)


@register("TensorListPushBack")
def push_back(op: Op) -> Factors | Declined:
    """`(list of ab, ab) -> list of ab`."""
    return _rule(op, (_WITHIN, _WITHIN), (_WITHIN,), shape=None)


@register("TensorListPopBack")
def pop_back(op: Op) -> Factors | Declined:
    """`(list of ab, shape) -> list of ab, ab`."""
    return _rule(op, (_WITHIN, None), (_WITHIN, _WITHIN), shape=1)


@register("TensorListLength")
def length(op: Op) -> Factors | Declined:
    """The number of elements, the same on every shard."""
    return Factors((_WITHIN,), (None,))
