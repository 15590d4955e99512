"""Ops that work on the last axis or axes and leave the leading ones apart: softmax, losses, top-k, linear algebra."""

from __future__ import annotations

from graphsplit.programs import Op
from graphsplit.rules.registry import Declined, Dims, Factors, register


def leading(shape: tuple[int | None, ...], whole: int) -> Dims:
    """Return dims whose last `whole` axes must be whole."""
    return tuple([i if i < len(shape) - whole else None for i in range(len(shape))])


@register("Softmax", "LogSoftmax", "FFT", "IFFT", "MatrixDiag", "MatrixDiagV2")
def last_axis(op: Op) -> Factors | Declined:
    """The last axis is whole."""
    return _leading_axes(op, whole=1)


@register("FFT2D", "IFFT2D", "MatrixBandPart", "MatrixInverse", "MatrixSolve", "MatrixTriangularSolve")
@register("Cholesky", "CholeskyGrad", "MatrixDeterminant", "LogMatrixDeterminant", "MatrixDiagPart", "SelfAdjointEigV2")
@register("Qr", "Svd", "MatrixSetDiag")
def matrices(op: Op) -> Factors | Declined:
    """Leading axes number independent matrices."""
    return _leading_axes(op, whole=2)


def _leading_axes(op: Op, whole: int) -> Factors | Declined:
    """Number the leading axes of the first operand; operands and results that share them share their factors."""
    shape = op.in_shapes[0]
    if shape is None or any(s is None for s in (*op.in_shapes, *op.out_shapes)):
        return Declined("the rank of an operand is not known")
    lead = len(shape) - whole

    def dims(other: tuple[int | None, ...] | None) -> Dims:
        if other is None or len(other) < lead or other[:lead] != shape[:lead]:
            return None
        return tuple([i if i < lead else None for i in range(len(other))])

    return Factors(tuple([dims(s) for s in op.in_shapes]), tuple([dims(s) for s in op.out_shapes]))


@register("SparseSoftmaxCrossEntropyWithLogits")
def sparse_cross_entropy(op: Op) -> Factors | Declined:
    """`(bc, b) -> b, bc`: a loss per row and its gradient."""
    return Factors(((0, None), (0,)), ((0,), (0, None)))


@register("SoftmaxCrossEntropyWithLogits")
def cross_entropy(op: Op) -> Factors | Declined:
    """`(bc, bc) -> b, bc`; one row of labels may serve all rows."""
    rows = op.out_shapes[1][0] if op.out_shapes[1] else None
    inputs = tuple([(0 if s and s[0] == rows else None, None) for s in op.in_shapes])
    return Factors(inputs, ((0,), (0, None)))


@register("TopK", "TopKV2")
def top_k(op: Op) -> Factors | Declined:
    """Values and indices of the largest entries of each row."""
    shape = op.in_shapes[0]
    if shape is None:
        return Declined("the rank of its operand is not known")
    dims = leading(shape, 1)
    return Factors((dims, None)[: len(op.inputs)], (dims, dims))


@register("InTopK", "InTopKV2")
def in_top_k(op: Op) -> Factors | Declined:
    """`(bc, b, k) -> b`."""
    return Factors(((0, None), (0,), None)[: len(op.inputs)], ((0,),))
