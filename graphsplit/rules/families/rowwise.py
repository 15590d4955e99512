"""Ops that work on the last axes and leave the leading ones apart: softmax, losses, linear algebra, stored examples.

Each is what numpy calls a generalized ufunc: every operand and result has some *core* axes at its end,
`(n,n),(n,k)->(n,k)`, which must be whole; the axes before them only number independent problems. So a table of core
ranks is the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from graphsplit.core.sizes import Shape, are_same, is_one
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Dims, Factors
from graphsplit.rules.families.elementwise import broadcast_dims, result_dims
from graphsplit.rules.known import ranked
from graphsplit.rules.registry import register

_COLUMNS = 64  # a factor that is no leading axis: more than any tensor has

Ranks = tuple[int | None, ...]
"""For each operand or result how many axes are core; less than 0 for all but so many; None where it is whole, as sizes
and options are."""


def by_core_ranks(operands: Ranks, results: Ranks) -> Callable[[Op], Factors]:
    """Return the rule of ops with these core ranks; leading axes are aligned at their right end and broadcast."""

    def rule(op: Op) -> Factors:
        count = len(op.in_shapes)
        ranks = (*operands[:count], *results[: len(op.out_shapes)])
        pairs = list(zip((*op.in_shapes, *op.out_shapes), ranks, strict=True))
        ranked(*[shape for shape, rank in pairs if rank is not None])
        leads = [_lead(shape, rank) for shape, rank in pairs]
        known_leads = [lead for lead in leads if lead is not None]
        whole = _broadcast(known_leads)
        free = result_dims(known_leads, whole)  # an axis is nobody's factor where an operand's size is unknown
        dims: list[Dims] = []
        for lead, (shape, _) in zip(leads, pairs, strict=True):
            lead_dims = broadcast_dims(lead, whole) if lead is not None else ()
            axes = tuple([dim if isinstance(dim, int) and free[dim] == dim else None for dim in lead_dims or ()])
            dims.append(None if lead is None else (*axes, *(None,) * (len(shape or ()) - len(lead))))
        return Factors(tuple(dims[:count]), tuple(dims[count:]))

    return rule


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    """Return what the shapes broadcast to."""
    rank = max(map(len, shapes), default=0)
    columns = zip(*[(1,) * (rank - len(shape)) + shape for shape in shapes], strict=True)
    return tuple([next((size for size in column if not is_one(size)), 1) for column in columns])


def _lead(shape: Shape | None, rank: int | None) -> Shape | None:
    """Return the sizes before the core axes; None for what lacks them: options, results that nobody asked for."""
    if shape is None or rank is None or len(shape) < abs(rank):
        return None
    return shape[: len(shape) - rank if rank >= 0 else -rank]


_VECTORS = by_core_ranks((1, None), (1,))
_MATRICES = by_core_ranks((2, None, None), (2,))

register("Softmax", "LogSoftmax", "FFT", "IFFT", "RFFT", "IRFFT")(_VECTORS)
register("AdjustSaturation", "AdjustHue", "HSVToRGB", "RGBToHSV")(_VECTORS)
register("FFT2D", "IFFT2D", "RFFT2D", "IRFFT2D", "MatrixInverse", "Cholesky")(_MATRICES)
register("MatrixLogarithm", "MatrixSquareRoot")(_MATRICES)
register("MatrixBandPart", linear=(0,))(_MATRICES)
register("FFT3D", "IFFT3D", "RFFT3D", "IRFFT3D", "AdjustContrastv2")(by_core_ranks((3, None), (3,)))
register("CholeskyGrad", "BandedTriangularSolve", "TridiagonalSolve", linear=(1,))(by_core_ranks((2, 2), (2,)))
register("Cross", linear=(0, 1))(by_core_ranks((1, 1), (1,)))
register("MatrixDeterminant")(by_core_ranks((2,), (0,)))
register("LogMatrixDeterminant")(by_core_ranks((2,), (0, 0)))
register("Eig", "SelfAdjointEigV2")(by_core_ranks((2,), (1, 2)))
register("Lu")(by_core_ranks((2,), (2, 1)))
register("Qr")(by_core_ranks((2,), (2, 2)))
register("Svd")(by_core_ranks((2,), (1, 2, 2)))
register("MatrixSolveLs", linear=(1,))(by_core_ranks((2, 2, None), (2,)))
register("TridiagonalMatMul", linear=(3,))(by_core_ranks((2, 2, 2, 2), (2,)))
register("LowerBound", "UpperBound")(by_core_ranks((1, 1), (1,)))
register("IsotonicRegression")(by_core_ranks((1,), (1, 1)))
register("NthElement")(by_core_ranks((1, None), (0,)))
register("TopKV2")(by_core_ranks((1, None), (1, 1)))
register("InTopK", "InTopKV2")(by_core_ranks((1, 0, None), (0,)))
register("SparseSoftmaxCrossEntropyWithLogits")(by_core_ranks((1, 0), (0, 1)))
register("SoftmaxCrossEntropyWithLogits")(by_core_ranks((1, 1), (0, 1)))


@register("MatrixDiag", "MatrixDiagV2", "MatrixDiagV3")
def matrix_diagonal(op: Op) -> Factors:
    """Vectors, or bands of several diagonals, to matrices."""
    band = _band(vector=op.in_shapes[0], matrix=op.out_shapes[0])
    return by_core_ranks((band, None, None, None, None), (2,))(op)


@register("MatrixDiagPart", "MatrixDiagPartV2", "MatrixDiagPartV3")
def matrix_diagonal_part(op: Op) -> Factors:
    """Matrices to vectors, or bands of several diagonals."""
    return by_core_ranks((2, None, None), (_band(vector=op.out_shapes[0], matrix=op.in_shapes[0]),))(op)


@register("MatrixSetDiag", "MatrixSetDiagV2", "MatrixSetDiagV3")
def matrix_set_diagonal(op: Op) -> Factors:
    """Matrices and the vectors, or bands of several diagonals, that replace theirs."""
    return by_core_ranks((2, _band(vector=op.in_shapes[1], matrix=op.in_shapes[0]), None), (2,))(op)


def _band(vector: Shape | None, matrix: Shape | None) -> int:
    """Return the core rank of vectors, or of bands of several diagonals, that belong to matrices."""
    vectors, matrices = ranked(vector, matrix)
    return len(vectors) - (len(matrices) - 2)


@register("MatrixSolve", "MatrixTriangularSolve", linear=(1,))
def solve(op: Op) -> Factors:
    """`...nn, ...nk -> ...nk`: each of the `k` columns on the right is a problem of its own."""
    factors = by_core_ranks((2, 2), (2,))(op)
    matrix, right = factors.inputs
    [result] = factors.outputs
    return replace(factors, inputs=(matrix, _with_columns(right)), outputs=(_with_columns(result),))


@register("ParseExample", "ParseExampleV2")
def parse_example(op: Op) -> Factors | Declined:
    """Each serialized example gives one row of every dense feature; features of other kinds mix the rows."""
    shapes = [shape.dim for shape in op.attr("dense_shapes").list.shape]
    if len(op.out_shapes) != len(shapes):
        return Declined("sparse and ragged features of several examples are one list")
    if any(dim.size < 0 for dims in shapes for dim in dims):
        return Declined("features of different lengths are padded to the longest of all rows")
    if op.in_shapes[0] is None or len(op.in_shapes[0]) != 1 or op.in_shapes[1] is None:
        return Declined("it is not known to take a vector of examples")
    names = None if are_same(op.in_shapes[1], (0,)) else 0
    return by_core_ranks((0, names, *(None,) * (len(op.inputs) - 2)), (-1,) * len(shapes))(op)


def _with_columns(dims: Dims) -> Dims:
    return None if dims is None else (*dims[:-1], _COLUMNS)
