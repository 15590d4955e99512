"""Floating-point operations of one execution of an operation, from its type, attributes and static shapes.

A multiplication and an addition are two. Formulas as in TensorFlow's own `flops_registry.py` where it has one;
transcendental functions count as one, as there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from graphsplit.core.sizes import Shape

Shapes = Sequence[Shape | None]
Formula = Callable[[Callable[[str], Any], Shapes, Shapes], int]
"""Counts, given attributes, shapes of operands and of results; raises where these say too little."""

_PER_OUTPUT = {
    1: "Add AddV2 Sub Mul Div RealDiv DivNoNan Maximum Minimum Pow Neg Abs Square Sqrt Rsqrt Reciprocal Inv Exp Expm1 "
    "Log Log1p Sin Cos Tan Tanh Sigmoid Relu Relu6 Elu Selu LeakyRelu Erf Erfc Floor Ceil Round BiasAdd ReluGrad "
    "Relu6Grad Sign SquaredDifference FloorDiv FloorMod Select SelectV2 BiasAddV1 XlaDynamicSlice",
    2: "TanhGrad SigmoidGrad RsqrtGrad SqrtGrad ReciprocalGrad EluGrad SeluGrad Softplus Softsign LeakyReluGrad",
    5: "Softmax LogSoftmax",
}
_PER_INPUT = {
    1: "Sum Mean Prod Max Min L2Loss EuclideanNorm BiasAddGrad ArgMax ArgMin Cumsum SegmentSum UnsortedSegmentSum "
    "AddN MaxPoolGrad AvgPoolGrad",
    6: "SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits",
    10: "FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3",
}


def has_flops(op_type: str) -> bool:
    """Return whether there is a formula for a type."""
    return op_type in _FORMULAS


def count_flops(op_type: str, attr: Callable[[str], Any], inputs: Shapes, outputs: Shapes) -> int | None:
    """Return the floating-point operations of one execution, or None where type or shapes say too little.

    Args:
      op_type: `MatMul`.
      attr: attribute name -> `AttrValue`.
      inputs, outputs: static shapes.
    """
    formula = _FORMULAS.get(op_type)
    if formula is None:
        return None
    try:
        return formula(attr, inputs, outputs)
    except (TypeError, IndexError, _UnknownError):  # an unknown size or rank somewhere
        return None


class _UnknownError(Exception):
    """A size that a formula needs is not known."""


def _size(shape: Shape | None) -> int:
    if shape is None or None in shape:
        raise _UnknownError
    return math.prod(int(d or 0) for d in shape)


def _dim(shape: Shape | None, axis: int) -> int:
    if shape is None or shape[axis] is None:
        raise _UnknownError
    return int(shape[axis] or 0)


def _matmul(attr: Callable[[str], Any], inputs: Shapes, outputs: Shapes) -> int:
    contracted = _dim(inputs[0], -2 if attr("transpose_a").b or attr("adj_x").b else -1)
    return 2 * contracted * _size(outputs[0])


def _einsum(attr: Callable[[str], Any], inputs: Shapes, _: Shapes) -> int:
    """Multiply the sizes of all labels, and of the broadcast axes (`...`), which are aligned at their right ends."""
    operands = attr("equation").s.decode().replace(" ", "").split("->")[0].split(",")
    sizes: dict[str | int, int] = {}
    for labels, shape in zip(operands, inputs, strict=True):
        if shape is None:
            raise _UnknownError
        head, dots, tail = labels.partition("...")
        spare = len(shape) - len(head) - len(tail) if dots else 0
        named: list[str | int] = [*head, *range(spare, 0, -1), *tail]
        for axis, label in enumerate(named):
            sizes[label] = max(sizes.get(label, 1), _dim(shape, axis))
    return (2 if len(operands) > 1 else 1) * math.prod(sizes.values())


def _convolution(which: str, of_depth: bool = False) -> Formula:
    """Two for each weight of the filter and each output position: the same sum forward and for both gradients.

    Of depth, where no sum goes over channels, two for each place of the filter and each number of the result.
    """

    def count(attr: Callable[[str], Any], inputs: Shapes, outputs: Shapes) -> int:
        filters = outputs[0] if which == "filter" else inputs[1]
        result = outputs[0] if which == "forward" else inputs[2]
        if of_depth:
            return 2 * _dim(filters, 0) * _dim(filters, 1) * _size(result)
        channels = -1 if not attr("data_format").s.startswith(b"NC") else 1
        return 2 * _size(filters) * (_size(result) // max(_dim(result, channels), 1))

    return count


def _pooling(attr: Callable[[str], Any], _: Shapes, outputs: Shapes) -> int:
    return int(math.prod(attr("ksize").list.i)) * _size(outputs[0])


def _per_output(factor: int) -> Formula:
    return lambda _attr, _inputs, outputs: factor * _size(outputs[0])


def _per_input(factor: int) -> Formula:
    return lambda _attr, inputs, _outputs: factor * _size(inputs[0])


def _recurrent(factor: int) -> Formula:
    """Each parameter meets each step of each sequence, twice in the gradient; biases count as weights."""

    def count(_: Callable[[str], Any], inputs: Shapes, __: Shapes) -> int:
        steps = _size(inputs[0]) // max(_dim(inputs[0], -1), 1)
        return 2 * factor * steps * _size(inputs[3])

    return count


def _add_n(_: Callable[[str], Any], inputs: Shapes, outputs: Shapes) -> int:
    return (len(inputs) - 1) * _size(outputs[0])


_FORMULAS: dict[str, Formula] = {
    **{name: _per_output(k) for k, names in _PER_OUTPUT.items() for name in names.split()},
    **{name: _per_input(k) for k, names in _PER_INPUT.items() for name in names.split()},
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _matmul),
    **dict.fromkeys(("MaxPool", "AvgPool", "MaxPool3D", "AvgPool3D"), _pooling),
    **{f"Conv{n}D{v}": _convolution("forward") for n, v in (("2", ""), ("3", ""))},
    **{f"Conv{n}BackpropInput{v}": _convolution("input") for n, v in (("2D", ""), ("3D", "V2"))},
    **{f"Conv{n}BackpropFilter{v}": _convolution("filter") for n, v in (("2D", ""), ("3D", "V2"))},
    "DepthwiseConv2dNative": _convolution("forward", of_depth=True),
    "DepthwiseConv2dNativeBackpropInput": _convolution("input", of_depth=True),
    "DepthwiseConv2dNativeBackpropFilter": _convolution("filter", of_depth=True),
    **{f"CudnnRNN{v}": _recurrent(1) for v in ("", "V2", "V3")},
    **{f"CudnnRNNBackprop{v}": _recurrent(2) for v in ("", "V2", "V3")},
    "Einsum": _einsum,
    "AddN": _add_n,
}
