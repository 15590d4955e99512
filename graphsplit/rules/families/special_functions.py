"""Functions of mathematical physics, buckets and other functions of single entries; decompositions of matrices."""

from __future__ import annotations

from graphsplit.rules.families.elementwise import elementwise
from graphsplit.rules.families.rowwise import by_core_ranks
from graphsplit.rules.registry import register

ENTRY_BY_ENTRY = [
    "BesselI0",
    "BesselI1",
    "BesselJ0",
    "BesselJ1",
    "BesselK0",
    "BesselK0e",
    "BesselK1",
    "BesselK1e",
    "BesselY0",
    "BesselY1",
    "Bucketize",
    "Dawsn",
    "Expint",
    "FresnelCos",
    "FresnelSin",
    "IgammaGradA",
    "PopulationCount",
    "RandomGammaGrad",
    "Spence",
]
register(*ENTRY_BY_ENTRY)(elementwise)

register("BandedTriangularSolve", linear=(1,))(by_core_ranks((2, 2), (2,)))
register("Eig")(by_core_ranks((2,), (1, 2)))
register("IsotonicRegression")(by_core_ranks((1,), (1, 1)))
register("Lu")(by_core_ranks((2,), (2, 1)))
register("MatrixLogarithm", "MatrixSquareRoot")(by_core_ranks((2,), (2,)))
register("MatrixSolveLs", linear=(1,))(by_core_ranks((2, 2, None), (2,)))
register("NthElement")(by_core_ranks((1, None), (0,)))
register("TridiagonalMatMul", linear=(3,))(by_core_ranks((2, 2, 2, 2), (2,)))
register("TridiagonalSolve", linear=(1,))(by_core_ranks((2, 2), (2,)))
register("IRFFT3D", "RFFT3D")(by_core_ranks((3, None), (3,)))
