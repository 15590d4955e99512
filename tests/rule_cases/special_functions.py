"""Cases of special functions and further decompositions of matrices."""

import numpy as np
import tensorflow as tf

from tests.rule_cases.table import POSITIVE, SPD, Arg, add, call, case, ints

for _type in ["BesselI0", "BesselI1", "BesselJ0", "BesselJ1", "Dawsn", "FresnelCos", "FresnelSin"]:
    case(_type, "b3")
for _type in ["BesselK0", "BesselK0e", "BesselK1", "BesselK1e", "BesselY0", "BesselY1", "Expint", "Spence"]:
    case(_type, POSITIVE("b3"))
case("Bucketize", "b3", boundaries=[-1.0, 0.0, 0.5])
case("PopulationCount", ints(999)("4b"))
case("IgammaGradA", POSITIVE("b3"), POSITIVE("3"))
case("RandomGammaGrad", POSITIVE("b3"), POSITIVE("b3"))

case("BandedTriangularSolve", POSITIVE("b23"), "b32")
case("BandedTriangularSolve", POSITIVE("23"), "+32")
case("Lu", SPD("b33"))
case("MatrixLogarithm", Arg("b33", lambda rng, shape: np.eye(3) * rng.uniform(1, 2, shape) + 0j))
case("MatrixSquareRoot", SPD("b33"))
case("MatrixSolveLs", "b43", "b42", 0.1)
case("MatrixSolveLs", "43", "+42", 0.1)
case("TridiagonalMatMul", "b13", "b13", "b13", "b32")
case("TridiagonalMatMul", "13", "13", "13", "+32")
case("TridiagonalSolve", POSITIVE("b33"), "b32", partial_pivoting=True)
case("TridiagonalSolve", POSITIVE("33"), "+32")
case("NthElement", "4b5", 2)
case("IsotonicRegression", "b5", output_dtype=tf.float64)
case("RFFT3D", "b244", [2, 4, 4], Tcomplex=tf.complex128)
add(
    "IRFFT3D",
    lambda rows, x, y: call("IRFFT3D", call("Complex", x, y, Tout=tf.complex128), [2, 4, 4], Treal=tf.float64),
    ["b243", "b243"],
)
add("Eig", lambda rows, x: call("Eig", x, Tout=tf.complex128), [SPD("b33")])
