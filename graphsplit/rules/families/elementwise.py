"""Elementwise ops with numpy broadcasting, on numbers and strings, and ops that return what they read."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.layouts import PARTIAL_MEAN, PARTIAL_SUM, REPLICATE, Layout
from graphsplit.core.sizes import Shape, are_same, is_one, is_same
from graphsplit.program.program import Op
from graphsplit.rules.factors import ELEMENTS, Declined, Dim, Dims, Factors
from graphsplit.rules.known import ranked
from graphsplit.rules.registry import Answer, Sharded, pass_through, register

_TYPES: dict[tuple[int, ...], str] = {  # by the operands in which they are linear, one at a time
    (): """
        Abs Acos Acosh Asin Asinh Atan Atanh Atan2 Cos Cosh Sin Sinh Tan Tanh Exp Expm1 Log Log1p Pow Sqrt Rsqrt Square
        Inv Reciprocal Sign Ceil Floor Rint Round Xdivy Xlogy Xlog1py SquaredDifference
        Elu LeakyRelu Relu Relu6 Selu Sigmoid Softplus Softsign
        EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad
        SoftsignGrad SqrtGrad TanhGrad
        BesselI0 BesselI0e BesselI1 BesselI1e BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1
        Betainc Dawsn Digamma Erf Erfc Erfinv Expint FresnelCos FresnelSin Igamma IgammaGradA Igammac Lgamma Ndtri
        Polygamma RandomGammaGrad Spence Zeta
        Equal NotEqual ApproximateEqual Greater GreaterEqual Less LessEqual LogicalAnd LogicalNot LogicalOr SelectV2
        Maximum Minimum ClipByValue Bucketize IsFinite IsInf IsNan CheckNumerics CheckNumericsV2 NextAfter OnesLike
        FloorDiv FloorMod Mod TruncateDiv TruncateMod
        BitwiseAnd BitwiseOr BitwiseXor Invert LeftShift PopulationCount RightShift
        Angle Complex ComplexAbs
        FakeQuantWithMinMaxArgs FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsPerChannel
        AsString DecodeBase64 EncodeBase64 RegexFullMatch RegexReplace StaticRegexFullMatch StaticRegexReplace
        StringJoin StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast
        StringToHashBucketStrong StringToNumber StringUpper Substr
    """,
    (0,): "Conj Imag Neg Real ZerosLike Div DivNoNan MulNoNan RealDiv FakeQuantWithMinMaxArgsGradient",
    (0, 1): "Mul",
}


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


def elementwise(op: Op) -> Factors:
    """`ab, ab -> ab`; an axis of size 1 that is broadcast carries no factor."""
    if op.out_dtypes[0] == tf.variant:
        return Factors((ELEMENTS,) * len(op.inputs), (ELEMENTS,))
    *operands, result = ranked(*op.in_shapes, op.out_shapes[0])
    inputs = tuple([broadcast_dims(shape, result) for shape in operands])
    return Factors(inputs, (result_dims(operands, result),))


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


for _linear, _types in _TYPES.items():
    register(*_types.split(), linear=_linear)(elementwise)
register("Add", "AddN", "AddV2", "Sub", joint=True)(elementwise)
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
def select(op: Op) -> Factors:
    """`Select` with a vector condition picks rows: `a, ab, ab -> ab`; otherwise it is elementwise."""
    condition, chosen = op.in_shapes[0], op.out_shapes[0]
    if condition is not None and chosen is not None and len(condition) == 1 < len(chosen):
        dims = tuple(range(len(chosen)))
        return Factors(((0,), dims, dims), (dims,))
    return elementwise(op)


@register("EnsureShape", linear=(0,))
def ensure_shape(op: Op) -> Factors:
    """It returns what it reads. An axis whose size it states is whole: each shard's would be another one."""
    ranked(op.in_shapes[0])
    dims = tuple([i if dim.size < 0 else None for i, dim in enumerate(op.attr("shape").shape.dim)])
    return Factors((dims,), (dims,))


@register("FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient", linear=(0,))
def fake_quantization_gradient(op: Op) -> Factors:
    """`(dy, x, min, max) -> dx, dmin, dmax`: of the range a sum over all entries, or over those of each channel."""
    [shape] = ranked(op.in_shapes[1])
    dims = tuple(range(len(shape)))
    bounds = dims[-1:] if "PerChannel" in op.type else ()
    contracted = {i: "sum" for i in dims if i not in bounds}
    return Factors((dims, dims, bounds, bounds), (dims, bounds, bounds), contracted)


def _passed_on(op: Op, layouts: Sequence[Layout]) -> Answer:
    """Answer for a `Switch`: what it passes on lies as it did, and every device has the predicate."""
    return Sharded((layouts[0], REPLICATE), (layouts[0], layouts[0]))


@register("Switch", layouts=_passed_on)
def switch(op: Op) -> Factors:
    """`ab, -> ab, ab`; one of the results is there."""
    [shape] = ranked(op.in_shapes[0])
    dims = tuple(range(len(shape)))
    return Factors((dims, ()), (dims, dims))


@register("Merge")
def merge(op: Op) -> Factors | Declined:
    """`ab, ab -> ab`; one of the operands is there. Axes whose sizes may differ are whole."""
    shapes = ranked(*op.in_shapes, op.out_shapes[0])
    if len({len(shape) for shape in shapes}) > 1:
        return Declined("its operands may have other numbers of axes")
    axes = enumerate(zip(*shapes, strict=True))
    dims = tuple([None if None in sizes or not all(is_same(s, sizes[-1]) for s in sizes) else i for i, sizes in axes])
    return Factors((dims,) * len(op.inputs), (dims, ())[: len(op.out_shapes)])  # (and which it was)
