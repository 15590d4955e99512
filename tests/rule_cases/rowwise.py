"""Cases of ops on the last axes: softmax, losses, top-k, transforms, linear algebra."""

import numpy as np

from tests.rule_cases.table import COMPLEX, SPD, UNIT, UNIT32, Arg, case, distinct, ints

for _type in ["Softmax", "LogSoftmax"]:
    case(_type, "b5")
    case(_type, "2b3")
for _type in ["FFT", "IFFT"]:
    case(_type, COMPLEX("b4"))
for _type in ["FFT2D", "IFFT2D", "FFT3D", "IFFT3D"]:
    case(_type, COMPLEX("b243"))
case("FFT2D", COMPLEX("2b43"))
case("FFT3D", COMPLEX("b2143"))
for _type in ["RFFT", "RFFT2D"]:
    case(_type, "b44", [4] if _type == "RFFT" else [4, 2], Tcomplex="complex128")
for _type in ["IRFFT", "IRFFT2D"]:
    case(_type, COMPLEX("b43"), [4] if _type == "IRFFT" else [4, 4], Treal="float64")

case("SparseSoftmaxCrossEntropyWithLogits", "b5", ints(5)("b"))
case("SparseSoftmaxCrossEntropyWithLogits", "b5", ints(5)("B"))
case("SoftmaxCrossEntropyWithLogits", "b5", UNIT("b5"))
case("SoftmaxCrossEntropyWithLogits", "b5", UNIT("15"))
case("SoftmaxCrossEntropyWithLogits", "15", UNIT("b5"))
case("TopKV2", distinct("b5"), 2)
case("TopKV2", distinct("2b5"), 3)
case("InTopK", UNIT32("b5"), ints(5)("b"), k=2)
case("InTopKV2", UNIT32("b5"), ints(5)("b"), 2)
case("Cross", "b3", "b3")
case("Cross", "4b3", "4b3")
case("Cross", "+43", "43")
case("Cross", "43", "+43")

for _type in [
    "MatrixInverse",
    "Cholesky",
    "MatrixDeterminant",
    "LogMatrixDeterminant",
    "SelfAdjointEigV2",
    "Qr",
    "Svd",
]:
    case(_type, SPD("b33"))
    case(_type, SPD("2b33"))
# What is not computed is not initialised either.
case("SelfAdjointEigV2", SPD("b33"), compute_v=False)
case("Svd", SPD("b33"), compute_uv=False)
case("Qr", "b43", full_matrices=True)
case("MatrixInverse", SPD("b33"), adjoint=True)
case("CholeskyGrad", SPD("b33"), "b33")
case("CholeskyGrad", SPD("33"), "+33")
case("MatrixSolve", SPD("b33"), "b32")
case("MatrixSolve", SPD("33"), "+32", adjoint=True)
case("MatrixTriangularSolve", SPD("b33"), "b32")
case("MatrixTriangularSolve", SPD("33"), "b32", lower=False)
case("MatrixTriangularSolve", SPD("b33"), "32", adjoint=True)
case("MatrixTriangularSolve", SPD("b133"), "1232")
case("MatrixTriangularSolve", SPD("33"), "+32")
# The columns on the right are problems of their own: inducing points against rows of a batch.
case("MatrixSolve", SPD("33"), "3b")
case("MatrixTriangularSolve", SPD("33"), "3b")
case("MatrixTriangularSolve", SPD("233"), "13b", adjoint=True)
case("MatrixTriangularSolve", SPD("b33"), "3b", lower=False)

case("MatrixBandPart", "b34", 1, 0)
case("MatrixBandPart", "2b34", 0, -1)
case("MatrixBandPart", "+34", 1, 0)
case("MatrixDiag", "b3")
case("MatrixDiagPart", "b34")
case("MatrixSetDiag", "b34", "b3")
for _version in ["V2", "V3"]:
    case(f"MatrixDiag{_version}", "b3", 0, -1, -1, 0.0)
    case(f"MatrixDiag{_version}", "b23", [0, 1], 4, 3, 7.0)
    case(f"MatrixDiag{_version}", "4b3", -1, -1, -1, 1.0)
    case(f"MatrixDiagPart{_version}", "b34", 0, 0.0)
    case(f"MatrixDiagPart{_version}", "b34", [-1, 1], 5.0)
    case(f"MatrixDiagPart{_version}", "2b34", [0, 1], 5.0)
    case(f"MatrixSetDiag{_version}", "b34", "b3", 0)
    case(f"MatrixSetDiag{_version}", "b34", "b33", [-1, 1])

for _type in ["LowerBound", "UpperBound"]:
    case(_type, Arg("b5", lambda rng, shape: np.sort(rng.standard_normal(shape), -1)), "b3")
