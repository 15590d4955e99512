"""Cases of elementwise ops and ops that return what they read."""

import tensorflow as tf

from tests.rule_cases.table import (
    ABOVE_ONE,
    BOOL,
    COMPLEX,
    F32,
    POSITIVE,
    UNIT,
    WITH_NANS,
    Arg,
    add,
    call,
    case,
    ints,
)

_DOMAINS = {
    "Acos": UNIT,
    "Acosh": ABOVE_ONE,
    "Angle": COMPLEX,
    "Asin": UNIT,
    "Atanh": UNIT,
    "ComplexAbs": COMPLEX,
    "Conj": COMPLEX,
    "Digamma": POSITIVE,
    "Erfinv": UNIT,
    "Imag": COMPLEX,
    "Invert": ints(100),
    "IsFinite": WITH_NANS,
    "IsInf": WITH_NANS,
    "IsNan": WITH_NANS,
    "Lgamma": POSITIVE,
    "Log": POSITIVE,
    "Log1p": POSITIVE,
    "LogicalNot": BOOL,
    "Ndtri": UNIT,
    "Real": COMPLEX,
    "Rsqrt": POSITIVE,
    "Sqrt": POSITIVE,
}
_ATTRIBUTES = {
    "Angle": {"Tout": tf.float64},
    "ComplexAbs": {"Tout": tf.float64},
    "Imag": {"Tout": tf.float64},
    "Real": {"Tout": tf.float64},
}
UNARY = """
    Abs Acos Acosh Angle Asin Asinh Atan Atanh BesselI0e BesselI1e Ceil ComplexAbs Conj Cos Cosh Digamma Elu Erf
    Erfc Erfinv Exp Expm1 Floor Imag Inv Invert IsFinite IsInf IsNan LeakyRelu Lgamma Log Log1p LogicalNot Ndtri Neg
    OnesLike Real Reciprocal Relu Relu6 Rint Round Rsqrt Selu Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Square
    Tan Tanh ZerosLike Identity PreventGradient Snapshot StopGradient
""".split()  # noqa: SIM905
for _type in UNARY:
    case(_type, _DOMAINS.get(_type, Arg)("b3"), **_ATTRIBUTES.get(_type, {}))

for _type in ["Neg", "ZerosLike", "Identity", "PreventGradient", "Snapshot", "StopGradient"]:
    case(_type, "+34")
for _type in ["Conj", "Imag", "Real"]:
    case(_type, COMPLEX("+34"), **_ATTRIBUTES.get(_type, {}))
case("Neg", "4b3")
case("LeakyRelu", "3b", alpha=0.3)
case("Square", ints(9)("b3"))

case("Cast", "b3", DstT=tf.float32)
case("Cast", ints(300)("b3"), DstT=tf.uint8)
case("Cast", BOOL("b3"), DstT=tf.float64)
case("Cast", "+3", DstT=tf.complex128)
# Bytes wrap around: their sum must be complete before it is cast.
add("Cast", lambda rows, x: call("Cast", call("Cast", x, DstT=tf.float64) * 2, DstT=tf.float32), [ints(250)("b3")])
case("Bitcast", "b3", type=tf.int64)

for _type in ["CheckNumerics", "CheckNumericsV2"]:  # they run even if nobody reads their result
    case(_type, "b3", message="", expect={"answered": False})

_INTS = ints(9, 1)
_BINARY_DOMAINS = {
    **dict.fromkeys(["BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "Mod", "RightShift", "TruncateMod"], _INTS),
    **dict.fromkeys(["LogicalAnd", "LogicalOr"], BOOL),
    **dict.fromkeys(["Igamma", "Igammac", "Pow", "RsqrtGrad", "SqrtGrad", "Xlog1py", "Xlogy"], POSITIVE),
    **dict.fromkeys(["Equal", "NotEqual", "TruncateDiv"], ints(4, 1)),
    "Zeta": ABOVE_ONE,
}
BROADCASTING = """
    Add AddV2 Atan2 BitwiseAnd BitwiseOr BitwiseXor Complex Div DivNoNan Equal FloorDiv FloorMod Greater
    GreaterEqual Igamma Igammac LeftShift Less LessEqual LogicalAnd LogicalOr Maximum Minimum Mod Mul MulNoNan
    NextAfter NotEqual Pow RealDiv RightShift SquaredDifference Sub TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta
""".split()  # noqa: SIM905
for _type in BROADCASTING:
    _of = _BINARY_DOMAINS.get(_type, Arg)
    _attributes = {"Tout": tf.complex128} if _type == "Complex" else {}
    case(_type, _of("b3"), _of("b3"), **_attributes)
    case(_type, _of("b3"), _of("3"), **_attributes)
    case(_type, _of("31"), _of("b13"), **_attributes)
case("Polygamma", ints(4, 1, float)("b3"), POSITIVE("b3"))
case("Polygamma", ints(4, 1, float)("3"), POSITIVE("b3"))
case("ApproximateEqual", "b3", "b3", tolerance=0.5)

SAME_SHAPE = """
    EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad
    SoftsignGrad SqrtGrad TanhGrad
""".split()  # noqa: SIM905
for _type in SAME_SHAPE:
    _of = _BINARY_DOMAINS.get(_type, Arg)
    case(_type, _of("b3"), _of("b3"))
    case(_type, _of("b3"), _of("B3"))
case("ReluGrad", F32("4b"), F32("4b"))

for _type in ["Add", "AddV2", "Sub"]:
    case(_type, "+34", "+34")
    case(_type, "+34", "+4")
for _type in ["Div", "DivNoNan", "Mul", "MulNoNan", "RealDiv"]:
    case(_type, "+34", "4")
case("Mul", "14", "+34")
case("AddN", ["b3", "b3", "b3"])
case("AddN", ["b3", "B3"])
case("AddN", ["+34", "+34"])

case("Betainc", POSITIVE("b3"), POSITIVE("b3"), UNIT("b3"))
case("Betainc", POSITIVE(""), POSITIVE(""), UNIT("b3"))
case("ClipByValue", "b3", -0.5, 0.5)
case("SelectV2", BOOL("b3"), "b3", "b3")
case("SelectV2", BOOL("b1"), "b3", "")
case("SelectV2", BOOL("3"), "b3", "b3")
case("SelectV2", BOOL("B1"), "3", "b3")
case("Select", BOOL("b3"), "b3", "b3")
case("Select", BOOL("b"), "b3", "b3")
case("Select", BOOL("b"), "b", "b")
case("Select", BOOL(""), "b3", "b3")
case("Select", BOOL("B"), "b3", "B3")


def checked_identities(*tensors):
    """Make an `IdentityN` that waits for something: others are read through, and do not run."""
    with tf.control_dependencies([call("Assert", tf.constant(True), [tf.constant("is true")])]):
        return call("IdentityN", tensors)


add("IdentityN", lambda rows, x, y, z: checked_identities(x, y, z), ["b3", "4b", "3"], answered=False)
add("IdentityN", lambda rows, x, y: checked_identities(x, y), ["+3", "b3"], partial=(0,))
