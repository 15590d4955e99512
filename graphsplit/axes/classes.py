"""Softmax, cross entropy and the largest of classes that are cut along an axis of the mesh, by parts.

TensorFlow has one kernel for each, which needs all classes of a row at once, though all that a row's classes share is
their largest logit, the sum of their exponentials and the logit of the label: three numbers, whatever the vocabulary.
(Megatron-LM does the same, Shoeybi et al. 2019, section 3.) Where the classes are cut, such an operation is written as
ordinary ones before the axis is planned, and rules do the rest; elsewhere the kernel stays.

What is -infinity is as in the kernels, and so is a label out of range: an error, or (on GPUs) NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import EvenCut, Shard
from graphsplit.planning.program_writing import ProgramWriter
from graphsplit.planning.propagation.forward_propagation import NaturalForms
from graphsplit.program.program import Op, Program, Tensor

_BY_SUMS = frozenset({"LogSoftmax", "Softmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"})
_PLACES = frozenset({"ArgMax", "ArgMin"})


def with_cut_classes(program: Program, forward: Callable[[Program], NaturalForms]) -> tuple[Program, NaturalForms]:
    """Return a program whose operations over classes that are cut are taken apart, and its natural forms.

    Args:
      program: what is planned along the axis.
      forward: returns the natural forms of a program along it.
    """
    natural = forward(program)
    # (what follows from one may be cut, too)
    while over_cut_classes := [op for op in program.ops if _is_cut(op, natural)]:
        program = _ClassWriter(program, over_cut_classes).write()
        natural = forward(program)
    return program, natural


def _is_cut(op: Op, natural: NaturalForms) -> bool:
    """Return whether an operation works on classes that are cut."""
    if op.type not in _BY_SUMS | _PLACES or op.controls or op.out_shapes[-1] is None or not op.in_shapes[0]:
        return False
    if op.type in _PLACES and tf.as_dtype(op.attr("T").type) == tf.bool:  # of which no kernel finds the largest
        return False
    layout, axis = natural.layout(op.inputs[0]), _axis_of(op)
    if not isinstance(layout, Shard) or not isinstance(layout.partition, EvenCut) or len(layout.blocks) > 1:
        return False
    return layout.axis == axis and (op.type != "SoftmaxCrossEntropyWithLogits" or op.in_shapes[0] == op.in_shapes[1])


def _axis_of(op: Op) -> int | None:
    """Return the axis of the classes; None if it is not known."""
    rank, axis = len(op.in_shapes[0] or ()), op.constants.get(1) if op.type in _PLACES else np.array(-1)
    return None if axis is None else int(axis) % rank


class _ClassWriter(ProgramWriter):
    """Writes a program again, with some operations over classes taken apart."""

    def __init__(self, program: Program, over_cut_classes: Sequence[Op]):
        super().__init__(program)
        self._found = {op.index for op in over_cut_classes}

    def _visit(self, op: Op) -> None:
        if op.index not in self._found:
            super()._visit(op)
            return
        results = self._taken_apart(op, [self._result(tensor) for tensor in op.inputs])
        self._note(op, results, [results[0].op])

    def _taken_apart(self, op: Op, inputs: Sequence[Tensor]) -> list[Tensor]:
        if op.type in _PLACES:
            return [self._place(op, inputs[0])]
        result_dtype, narrow = op.out_dtypes[0], op.out_dtypes[0].size < 4
        logits = self._cast(f"{op.name}/wide", inputs[0], tf.float32) if narrow else inputs[0]  # as sums over many are
        if op.type == "SparseSoftmaxCrossEntropyWithLogits":
            results = self._sparse(op.name, logits, inputs[1])
        elif op.type == "SoftmaxCrossEntropyWithLogits":
            labels = self._cast(f"{op.name}/labels", inputs[1], tf.float32) if narrow else inputs[1]
            results = self._dense(op.name, logits, labels)
        else:
            results = [self._softmax(op.name, logits, logarithm=op.type == "LogSoftmax")]
        return (
            [self._cast(f"{op.name}/narrow_{k}", r, result_dtype) for k, r in enumerate(results)] if narrow else results
        )

    def _place(self, op: Op, tensor: Tensor) -> Tensor:
        """Return the place of the largest entry, or the smallest: of several that are equal, the first."""
        name, axis, dtype = op.name, _axis_of(op) or 0, self._type_of(tensor)
        shape, largest = self._shape_of(tensor), op.type == "ArgMax"
        if dtype.is_floating:  # what is not a number is passed over
            unordered = self._made("IsNan", self._unused(f"{name}/nan"), [tensor], [(shape, tf.bool)], {}, T=dtype)
            last = self._number(f"{name}/last", -math.inf if largest else math.inf, tensor)
            tensor = self._select(f"{name}/ordered", unordered, last, tensor, shape)
        best = self._reduced("Max" if largest else "Min", f"{name}/best", tensor, keep=True, axis=axis)
        are_best = self._made("Equal", self._unused(f"{name}/equal"), [tensor, best], [(shape, tf.bool)], {}, T=dtype)
        count = int(shape[axis])
        numbers = np.arange(count, dtype=np.int32).reshape([count, *[1] * (len(shape) - 1 - axis)])
        places = self._constant(f"{name}/places", numbers, tf.int32)
        beyond = self._constant(f"{name}/beyond", np.array(count, np.int32), tf.int32)
        candidates = self._select(f"{name}/candidates", are_best, places, beyond, shape)
        first = self._reduced("Min", f"{name}/first", candidates, keep=False, axis=axis)
        return self._cast(f"{name}/result", first, op.out_dtypes[0])

    def _softmax(self, name: str, logits: Tensor, *, logarithm: bool) -> Tensor:
        _, shifted, powers, total = self._powers(name, logits)
        if logarithm:
            return self._made_of("Sub", f"{name}/result", shifted, self._made_of("Log", f"{name}/log", total))
        return self._made_of("RealDiv", f"{name}/result", powers, total)

    def _powers(self, name: str, logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the largest logit, what others have less, the exponentials of that, and their sum."""
        largest = self._reduced("Max", f"{name}/largest", logits, keep=True)
        shifted = self._made_of("Sub", f"{name}/shifted", logits, largest)
        powers = self._made_of("Exp", f"{name}/powers", shifted)
        return largest, shifted, powers, self._reduced("Sum", f"{name}/total", powers, keep=True)

    def _dense(self, name: str, logits: Tensor, labels: Tensor) -> list[Tensor]:
        _, shifted, powers, total = self._powers(name, logits)
        less = self._made_of("Sub", f"{name}/less", shifted, self._made_of("Log", f"{name}/log", total))
        weighted = self._made_of("Mul", f"{name}/weighted", less, labels)
        loss = self._made_of("Neg", f"{name}/loss", self._reduced("Sum", f"{name}/sum", weighted, keep=False))
        probabilities = self._made_of("RealDiv", f"{name}/probabilities", powers, total)
        return [loss, self._made_of("Sub", f"{name}/gradient", probabilities, labels)]

    def _sparse(self, name: str, logits: Tensor, labels: Tensor) -> list[Tensor]:
        classes = int(self._shape_of(logits)[-1])
        largest, _, powers, total = self._powers(name, logits)
        picked = self._picked(f"{name}/picked", logits, labels)
        total = self._if_valid(name, labels, total, classes)
        highest = self._squeezed(f"{name}/highest", largest)
        log = self._squeezed(f"{name}/log", self._made_of("Log", f"{name}/logs", total))
        loss = self._made_of("Sub", f"{name}/loss", log, self._made_of("Sub", f"{name}/below", picked, highest))
        probabilities = self._made_of("RealDiv", f"{name}/probabilities", powers, total)
        hot = self._one_hot(f"{name}/hot", labels, classes, self._type_of(logits))
        # (who only reads the gradient is told of labels out of range, too)
        return [loss, self._made_of("Sub", f"{name}/gradient", probabilities, hot, controls=(picked.op,))]

    def _made_of(self, kind: str, name: str, *tensors: Tensor, controls: tuple[int, ...] = ()) -> Tensor:
        return self._plain(kind, name, tensors, T=True, controls=controls)

    def _if_valid(self, name: str, labels: Tensor, total: Tensor, classes: int) -> Tensor:
        """Return a sum, NaN for a label out of range: kernels on GPUs say nothing else of those."""
        compared = [
            self._compared(kind, f"{name}/{word}", labels, bound)
            for kind, word, bound in (("GreaterEqual", "from", 0), ("Less", "below", classes))
        ]
        valid = self._widened(f"{name}/column", self._plain("LogicalAnd", f"{name}/valid", compared))
        return self._select(f"{name}/sum", valid, total, self._number(f"{name}/nan", math.nan, total))

    def _picked(self, name: str, logits: Tensor, labels: Tensor) -> Tensor:
        axis, dtype, indices = np.array(1, np.int32), self._type_of(logits), self._type_of(labels)
        operands = [logits, labels, self._constant(f"{name}/axis", axis, tf.int32)]
        types = {"Tparams": dtype, "Tindices": indices, "Taxis": tf.int32, "batch_dims": 1}
        return self._made(
            "GatherV2", self._unused(name), operands, [(self._shape_of(labels), dtype)], {2: axis}, **types
        )

    def _one_hot(self, name: str, labels: Tensor, classes: int, dtype: tf.DType) -> Tensor:
        depth = np.array(classes, np.int32)
        numbers = [np.array(value, dtype.as_numpy_dtype) for value in (1, 0)]
        operands = [labels, self._constant(f"{name}/depth", depth, tf.int32)]
        operands += [self._constant(f"{name}/{word}", n, dtype) for word, n in zip(("on", "off"), numbers, strict=True)]
        shape = (*(self._shape_of(labels) or ()), classes)
        types = {"T": dtype, "TI": self._type_of(labels), "axis": -1}
        return self._made("OneHot", self._unused(name), operands, [(shape, dtype)], {1: depth}, **types)

    def _reduced(self, kind: str, name: str, tensor: Tensor, *, keep: bool, axis: int = -1) -> Tensor:
        shape, dtype = self._shape_of(tensor) or (), self._type_of(tensor)
        at = axis % len(shape)
        axes = np.array([at], np.int32)
        operands = [tensor, self._constant(f"{name}/axes", axes, tf.int32)]
        result = [((*shape[:at], *((1,) if keep else ()), *shape[at + 1 :]), dtype)]
        return self._made(kind, self._unused(name), operands, result, {1: axes}, T=dtype, Tidx=tf.int32, keep_dims=keep)

    def _squeezed(self, name: str, tensor: Tensor) -> Tensor:
        shape, dtype = self._shape_of(tensor) or (), self._type_of(tensor)
        axes = [len(shape) - 1]
        return self._made(
            "Squeeze", self._unused(name), [tensor], [(shape[:-1], dtype)], {}, T=dtype, squeeze_dims=axes
        )

    def _cast(self, name: str, tensor: Tensor, dtype: tf.DType) -> Tensor:
        result = [(self._shape_of(tensor), dtype)]
        return self._made("Cast", self._unused(name), [tensor], result, {}, SrcT=self._type_of(tensor), DstT=dtype)
