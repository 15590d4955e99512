"""Ops that work on the last axes and leave the leading ones apart: softmax, losses, top-k, linear algebra.

Each is what numpy calls a generalized ufunc: every operand and result has some *core* axes at its end,
`(n,n),(n,k)->(n,k)`, which must be whole; the axes before them only number independent problems. So a table of core
ranks is the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphsplit.core.sizes.symbolic_sizes import Shape, is_one
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dims, Factors
from graphsplit.rules.families.elementwise import broadcast_dims, result_dims
from graphsplit.rules.registry import register

_COLUMNS = 64  # a factor that is no leading axis: more than any tensor has

Ranks = tuple[int | None, ...]  # one for each operand or result; None if it is whole, sizes and options


def by_core_ranks(operands: Ranks, results: Ranks) -> Callable[[Op], Factors | Declined]:
    """Return the rule of ops with these core ranks; leading axes are aligned at their right end and broadcast."""

    def rule(op: Op) -> Factors | Declined:
        if any(shape is None for shape in (*op.in_shapes, *op.out_shapes)):
            return Declined("the rank of an operand is not known")
        shapes = (*op.in_shapes, *op.out_shapes)
        ranks = (*operands[: len(op.in_shapes)], *results)
        leads = [_lead(shape, rank) for shape, rank in zip(shapes, ranks, strict=True)]
        known = [lead for lead in leads if lead is not None]
        whole = _broadcast(known)
        free = result_dims(known, whole)  # an axis is nobody's factor where an operand's size is unknown
        dims: list[Dims] = []
        for lead, rank in zip(leads, ranks, strict=True):
            own = broadcast_dims(lead, whole) if lead is not None else ()
            axes = tuple([dim if isinstance(dim, int) and free[dim] == dim else None for dim in own or ()])
            dims.append(None if lead is None or rank is None else (*axes, *(None,) * rank))
        return Factors(tuple(dims[: len(op.in_shapes)]), tuple(dims[len(op.in_shapes) :]))

    return rule


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return what the shapes broadcast to."""
    rank = max(map(len, shapes), default=0)
    columns = zip(*[(1,) * (rank - len(shape)) + shape for shape in shapes], strict=True)
    return tuple([next((size for size in column if not is_one(size)), 1) for column in columns])


def _lead(shape: Shape | None, rank: int | None) -> Shape | None:
    """Return the sizes before the core axes; None for what lacks them: options, results that nobody asked for."""
    return None if shape is None or rank is None or len(shape) < rank else shape[: len(shape) - rank]


VECTORS = by_core_ranks((1, None), (1,))
MATRICES = by_core_ranks((2, None, None), (2,))

register("Softmax", "LogSoftmax", "FFT", "IFFT", "RFFT", "IRFFT")(VECTORS)
register("AdjustSaturation", "AdjustHue", "HSVToRGB", "RGBToHSV")(VECTORS)
register("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D", "MatrixInverse", "Cholesky")(MATRICES)
register("MatrixBandPart", linear=(0,))(MATRICES)
register("FFT3D", "IFFT3D", "AdjustContrastv2")(by_core_ranks((3, None), (3,)))
register("CholeskyGrad", linear=(1,))(by_core_ranks((2, 2), (2,)))
register("Cross", linear=(0, 1))(by_core_ranks((1, 1), (1,)))
register("MatrixDeterminant")(by_core_ranks((2,), (0,)))
register("LogMatrixDeterminant")(by_core_ranks((2,), (0, 0)))
register("SelfAdjointEigV2")(by_core_ranks((2,), (1, 2)))
register("Qr")(by_core_ranks((2,), (2, 2)))
register("Svd")(by_core_ranks((2,), (1, 2, 2)))
register("LowerBound", "UpperBound")(by_core_ranks((1, 1), (1,)))
register("TopKV2")(by_core_ranks((1, None), (1, 1)))
register("InTopK", "InTopKV2")(by_core_ranks((1, 0, None), (0,)))
register("SparseSoftmaxCrossEntropyWithLogits")(by_core_ranks((1, 0), (0, 1)))
register("SoftmaxCrossEntropyWithLogits")(by_core_ranks((1, 1), (0, 1)))


@register("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3")
def matrix_diagonal(op: Op) -> Factors | Declined:
    """Vectors, or bands of several diagonals, to matrices."""
    vector, matrix = op.in_shapes[0], op.out_shapes[0]
    if vector is None or matrix is None:
        return Declined("the rank of an operand is not known")
    core = len(vector) - (len(matrix) - 2)
    return by_core_ranks((core, *(None,) * 4), (2,))(op)


@register("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3")
def matrix_diagonal_part(op: Op) -> Factors | Declined:
    """Matrices to vectors, or bands of several diagonals."""
    matrix, vector = op.in_shapes[0], op.out_shapes[0]
    if vector is None or matrix is None:
        return Declined("the rank of an operand is not known")
    core = len(vector) - (len(matrix) - 2)
    return by_core_ranks((2, None, None), (core,))(op)


@register("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def matrix_set_diagonal(op: Op) -> Factors | Declined:
    """Matrices and the vectors, or bands of several diagonals, that replace theirs."""
    matrix, vector = op.in_shapes[:2]
    if vector is None or matrix is None:
        return Declined("the rank of an operand is not known")
    core = len(vector) - (len(matrix) - 2)
    return by_core_ranks((2, core, None), (2,))(op)


@register("MatrixSolve", "MatrixTriangularSolve", linear=(1,))
def solve(op: Op) -> Factors | Declined:
    """`...nn, ...nk -> ...nk`: each of the `k` columns on the right is a problem of its own."""
    factors = by_core_ranks((2, 2), (2,))(op)
    if isinstance(factors, Declined):
        return factors
    matrix, right = factors.inputs
    [result] = factors.outputs
    return replace(factors, inputs=(matrix, _with_columns(right)), outputs=(_with_columns(result),))


def _with_columns(dims: Dims) -> Dims:
    return None if dims is None else (*dims[:-1], _COLUMNS)
