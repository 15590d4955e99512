"""Elementwise ops with numpy broadcasting, and ops that return what they read."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_MEAN, PARTIAL_SUM, Layout
from graphsplit.core.sizes.symbolic_sizes import Shape, are_same, is_one, is_same
from graphsplit.program.program import Op
from graphsplit.rules.factors import ELEMENTS, Declined, Dim, Dims, Factors
from graphsplit.rules.registry import Answer, pass_through, register

UNARY = [
    "Abs",
    "Acos",
    "Acosh",
    "Asin",
    "Asinh",
    "Atan",
    "Atanh",
    "BesselI0e",
    "BesselI1e",
    "Ceil",
    "CheckNumerics",
    "CheckNumericsV2",
    "Cos",
    "Cosh",
    "Digamma",
    "Elu",
    "Erf",
    "Erfc",
    "Erfinv",
    "Exp",
    "Expm1",
    "Floor",
    "Inv",
    "Invert",
    "IsFinite",
    "IsInf",
    "IsNan",
    "LeakyRelu",
    "Lgamma",
    "Log",
    "Log1p",
    "LogicalNot",
    "Ndtri",
    "OnesLike",
    "Reciprocal",
    "Relu",
    "Relu6",
    "Rint",
    "Round",
    "Rsqrt",
    "Selu",
    "Sigmoid",
    "Sign",
    "Sin",
    "Sinh",
    "Softplus",
    "Softsign",
    "Sqrt",
    "Square",
    "Tan",
    "Tanh",
    "ComplexAbs",
    "Angle",
]
UNARY_LINEAR = ["Conj", "Imag", "Neg", "Real", "ZerosLike"]
BINARY = [
    "ApproximateEqual",
    "Atan2",
    "BitwiseAnd",
    "BitwiseOr",
    "BitwiseXor",
    "Complex",
    "EluGrad",
    "Equal",
    "FloorDiv",
    "FloorMod",
    "Greater",
    "GreaterEqual",
    "Igamma",
    "Igammac",
    "InvGrad",
    "LeakyReluGrad",
    "LeftShift",
    "Less",
    "LessEqual",
    "LogicalAnd",
    "LogicalOr",
    "Maximum",
    "Minimum",
    "Mod",
    "NextAfter",
    "NotEqual",
    "Polygamma",
    "Pow",
    "ReciprocalGrad",
    "Relu6Grad",
    "ReluGrad",
    "RightShift",
    "RsqrtGrad",
    "SeluGrad",
    "SigmoidGrad",
    "SoftplusGrad",
    "SoftsignGrad",
    "SqrtGrad",
    "SquaredDifference",
    "TanhGrad",
    "TruncateDiv",
    "TruncateMod",
    "Xdivy",
    "Xlog1py",
    "Xlogy",
    "Zeta",
]
BINARY_LINEAR_IN_FIRST = ["Div", "DivNoNan", "MulNoNan", "RealDiv"]
SUMS = ["Add", "AddV2", "Sub"]
TERNARY = ["Betainc", "ClipByValue", "SelectV2"]


def broadcast_dims(shape: Shape, result: Shape, first_axis: int = 0) -> Dims:
    """Return the factors of an operand that is broadcast to `result`, whose axes are factors 0, 1, 2, ..."""
    skip = len(result) - len(shape)
    return tuple([first_axis + skip + i if is_same(size, result[skip + i]) else None for i, size in enumerate(shape)])


def result_dims(shapes: Sequence[Shape | None], result: Shape) -> tuple[Dim, ...]:
    """Return the factors of the result: none where an operand may have another size, and so be broadcast or not."""
    dims: list[Dim] = list(range(len(result)))
    for shape in shapes:
        for axis, size in enumerate(shape or (), len(result) - len(shape or ())):
            if not is_same(size, result[axis]) and not is_one(size):
                dims[axis] = None
    return tuple(dims)


def elementwise(op: Op) -> Factors | Declined:
    """`ab, ab -> ab`; an axis of size 1 that is broadcast carries no factor."""
    if op.out_dtypes[0] == tf.variant:
        return Factors((ELEMENTS,) * len(op.inputs), (ELEMENTS,))
    result = op.out_shapes[0]
    if result is None or None in op.in_shapes:
        return Declined("the rank of an operand is not known")
    inputs = tuple([broadcast_dims(shape, result) for shape in op.in_shapes if shape is not None])
    return Factors(inputs, (result_dims(op.in_shapes, result),))


def cast_sum(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """Decline a cast of a sum of integers: they may have wrapped around, or be too large to be exact.

    Decline one to a coarser type as well: a sum is rounded once it is whole, not part by part, and rounded parts may
    add up to more than the type can hold. (`float16` and `bfloat16` are coarser than each other.)
    """
    if layouts[0] not in (PARTIAL_SUM, PARTIAL_MEAN):
        return None
    source, target = [tf.as_dtype(op.attr(name).type).real_dtype for name in ("SrcT", "DstT")]
    if not source.is_floating:
        return Declined("its integers are summed before they are cast")
    return Declined("it is summed before it is rounded") if source != target and target.size <= source.size else None


register(*UNARY)(elementwise)
register(*UNARY_LINEAR, linear=(0,))(elementwise)
register(*BINARY, *TERNARY)(elementwise)
register(*BINARY_LINEAR_IN_FIRST, linear=(0,))(elementwise)
register("Mul", linear=(0, 1))(elementwise)
register(*SUMS, "AddN", joint=True)(elementwise)
register("Cast", linear=(0,), layouts=cast_sum)(elementwise)
register("Bitcast")(
    lambda op: elementwise(op) if are_same(op.in_shapes[0], op.out_shapes[0]) else Declined("it changes the shape")
)
register("Identity", "StopGradient", "PreventGradient", "Snapshot", layouts=pass_through)(elementwise)


@register("IdentityN", layouts=pass_through)
def identity_n(op: Op) -> Factors | Declined:
    """Never split on demand: its operands have nothing to do with each other."""
    return Declined("it returns several unrelated tensors")


@register("Select")
def select(op: Op) -> Factors | Declined:
    """`Select` with a vector condition picks rows: `a, ab, ab -> ab`; otherwise it is elementwise."""
    condition, chosen = op.in_shapes[0], op.out_shapes[0]
    if condition is not None and chosen is not None and len(condition) == 1 < len(chosen):
        dims = tuple(range(len(chosen)))
        return Factors(((0,), dims, dims), (dims,))
    return elementwise(op)


@register("EnsureShape", linear=(0,))
def ensure_shape(op: Op) -> Factors | Declined:
    """It returns what it reads. An axis whose size it states is whole: each shard's would be another one."""
    stated = op.attr("shape").shape.dim
    if op.in_shapes[0] is None:
        return Declined("the rank of its operand is not known")
    dims = tuple([i if dim.size < 0 else None for i, dim in enumerate(stated)])
    return Factors((dims,), (dims,))
