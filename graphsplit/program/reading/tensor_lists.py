"""What is known of TensorLists while a graph is read: what their elements are, and how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from graphsplit.core.polynomials import Polynomial, Symbol
from graphsplit.core.sizes import Shape, Size, as_exact, has_sizes, joined_shapes, merged, with_sizes
from graphsplit.core.tensorflow_internals import resource_value
from graphsplit.program.program import Op, Tensor
from graphsplit.program.reading.flat_graphs import Elements
from graphsplit.program.reading.function_bodies import ITEM, KnownArguments, grows
from graphsplit.program.reading.shape_inference import ELEMENT_SHAPE, Findings, known_shape

_EMPTY = frozenset({"EmptyTensorList", "TensorListReserve"})
_AS_LONG = frozenset({"Identity", "TensorListSetItem", "TensorListStack", "ZerosLike"})
_ON_LISTS = frozenset({*ELEMENT_SHAPE, *ITEM, *_AS_LONG})


class Lists:
    """Notes on the lists of a program.

    Args:
      findings: takes what shape inference is to be told of them.

    Attributes:
      held: of lists whose elements are all the same known integers: those.
      counts: how many elements lists have.
    """

    def __init__(self, findings: Findings):
        self._found = findings
        self._elements: dict[Tensor, Elements] = {}
        self.counts: dict[Tensor, int] = {}
        self.held: dict[Tensor, np.ndarray] = {}

    def infer(
        self,
        tensor: Tensor,
        cases: Sequence[tf.Tensor],
        hint: tf.Tensor | None,
        symbols: tuple[Symbol, ...],
        largest: int,
    ) -> None:
        """Note what TensorFlow knows of the elements of a list, for one or several choices of unknown sizes."""
        held_by_cases = [elements for case in cases if (elements := resource_value(case)) is not None]
        if held_by_cases:
            dtype, shape = (
                held_by_cases[0][0],
                joined_shapes([known_shape(elements[1]) for elements in held_by_cases], symbols, largest),
            )
        elif hint is not None and (elements := resource_value(hint)) is not None:
            dtype, shape = elements[0], known_shape(elements[1])
        else:
            return
        if dtype != tf.variant:
            self._elements[tensor] = dtype, shape

    def element_shape(self, tensor: Tensor) -> np.ndarray | None:
        """Return the shape of a list's elements, -1 where it is not known, or None if their rank is not."""
        elements = self._elements.get(tensor)
        if elements is None or elements[1] is None:
            return None
        return np.array([-1 if size is None else as_exact(size) for size in elements[1]], object)

    def given(self, passed: Sequence[Tensor], shapes: Sequence[Shape | None], ops: Sequence[Op]) -> KnownArguments:
        """Return what is known of the arguments of a function, made by `ops`."""
        return KnownArguments(
            shapes,
            {i: self._elements[t] for i, t in enumerate(passed) if t in self._elements},
            {i: self.held[t] for i, t in enumerate(passed) if t in self.held},
            empty=frozenset(i for i, t in enumerate(passed) if ops[t.op].type in _EMPTY),
            counts={i: self.counts[t] for i, t in enumerate(passed) if t in self.counts},
        )

    def carry(self, name: str, carried: KnownArguments, inputs: Sequence[Tensor], ops: Sequence[Op]) -> None:
        """Note what a loop of this name, the operation after `ops`, makes of the lists that it is given."""
        for i, (dtype, shape) in carried.elements.items():
            maker, result = ops[inputs[i].op], Tensor(len(ops), i)
            if has_sizes(shape) and maker.type in ELEMENT_SHAPE:
                self._found.elements[maker.name] = shape
            if has_sizes(shape):
                self._found.carried[name, i] = shape
            hint = self._elements.get(result, (dtype, shape))[1]  # (a loop that was inlined has none)
            self._elements[result] = dtype, shape if has_sizes(shape) else merged(hint, shape)
            if i in carried.kept and inputs[i] in self.counts:
                self.counts[result] = self.counts[inputs[i]]
            if maker.type == "EmptyTensorList" and i in carried.held:
                self.held[result] = carried.held[i]

    def refine(self, op: Op) -> None:
        """Note the elements of a list that something of more rows is put into, is made from a tensor, or is read."""
        if op.type not in _ON_LISTS:
            return
        first_input = op.inputs[0] if op.inputs else None
        self._count(op, first_input)
        lists = [t for t in (Tensor(op.index, 0), first_input) if t in self._elements]
        if not lists:
            return
        dtype, shape = self._elements[lists[0]]
        if first_input in self._elements:
            shape = with_sizes(shape, self._elements[first_input][1])
        if op.type in ITEM:
            put_shape = op.in_shapes[ITEM[op.type]]
            shape = with_sizes(shape, put_shape and put_shape[1:] if op.type == "TensorListFromTensor" else put_shape)
        if op.out_dtypes[0] == tf.variant:
            self._elements[Tensor(op.index, 0)] = dtype, shape
        if op.type in ELEMENT_SHAPE and has_sizes(shape):
            self._found.elements[op.name] = shape

    def _count(self, op: Op, first_input: Tensor | None) -> None:
        """Note how many elements a list has."""
        count: int | None = None
        if op.type == "TensorListReserve" and 1 in op.constants:
            count = Size(Polynomial.of(op.symbols[1][()])) if 1 in op.symbols else int(op.constants[1])
        elif op.type == "TensorListFromTensor":
            count = (op.in_shapes[0] or (None,))[0]
        elif first_input in self.counts and op.type in _AS_LONG and not grows(op):
            count = self.counts[first_input]
        if count is not None and op.type == "TensorListStack":
            self._found.counts[op.name] = count
        elif count is not None:
            self.counts[Tensor(op.index, 0)] = count
