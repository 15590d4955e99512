"""Families of operations: those that reach about the same share of what a machine can do."""

from __future__ import annotations

FREE = "free"
"""What takes no time on a device: placeholders, constants, waits."""

PASSED_ON = "passed on"
"""What passes on a buffer: nothing is read or written, it is only scheduled."""

MATRIX = ("matmul", "convolution", "filter gradient", "input gradient", "recurrent")
"""Products, which run on matrix units where a device has some."""

FAMILIES = (*MATRIX, "depthwise", "elementwise", "reduction", "movement", "other")
"""All that take time. `movement` is what only copies: cuts, joins, transpositions. `depthwise` convolutions have no sum
over channels: they do not run on matrix units, and what they take is mostly reading and writing."""

_MEMBERS = {
    FREE: "Const Placeholder NoOp VarHandleOp Sizes ControlTrigger",
    PASSED_ON: "ExpandDims Identity IdentityN PreventGradient Reshape Squeeze StopGradient ReadVariableOp Copies "
    "CheckNumerics EnsureShape Shape ShapeN Size Rank VariableShape Switch Merge Bitcast LoopCond",
    "matmul": "MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum _FusedMatMul",
    "convolution": "Conv2D Conv3D",
    "filter gradient": "Conv2DBackpropFilter Conv3DBackpropFilterV2",
    "input gradient": "Conv2DBackpropInput Conv3DBackpropInputV2",
    "depthwise": "DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter DepthwiseConv2dNativeBackpropInput",
    "recurrent": "CudnnRNN CudnnRNNV2 CudnnRNNV3 CudnnRNNBackprop CudnnRNNBackpropV2 CudnnRNNBackpropV3",
    "elementwise": "Add AddV2 Sub Mul Div RealDiv DivNoNan Maximum Minimum Pow Neg Abs Square Sqrt Rsqrt Reciprocal "
    "Inv Exp Expm1 Log Log1p Sin Cos Tan Tanh Sigmoid Relu Relu6 Elu Selu LeakyRelu Erf Erfc Floor Ceil Round BiasAdd "
    "ReluGrad Relu6Grad Sign SquaredDifference FloorDiv FloorMod Select SelectV2 BiasAddV1 TanhGrad SigmoidGrad "
    "RsqrtGrad SqrtGrad ReciprocalGrad EluGrad SeluGrad Softplus Softsign LeakyReluGrad AddN Cast ZerosLike OnesLike "
    "Greater GreaterEqual Less LessEqual Equal NotEqual LogicalAnd LogicalOr LogicalNot AssignVariableOp "
    "AssignAddVariableOp AssignSubVariableOp ResourceApplyGradientDescent ResourceApplyMomentum ResourceApplyAdam "
    "ResourceApplyKerasMomentum",
    "reduction": "Sum Mean Prod Max Min All Any L2Loss EuclideanNorm BiasAddGrad ArgMax ArgMin Cumsum Softmax "
    "LogSoftmax SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits FusedBatchNorm FusedBatchNormV2 "
    "FusedBatchNormV3 FusedBatchNormGrad FusedBatchNormGradV2 FusedBatchNormGradV3 MaxPool AvgPool MaxPoolGrad "
    "AvgPoolGrad MaxPool3D AvgPool3D SegmentSum UnsortedSegmentSum",
    "movement": "Concat ConcatV2 Split SplitV Transpose Pack Unpack Slice StridedSlice StridedSliceGrad Pad PadV2 "
    "MirrorPad Tile Gather GatherV2 GatherNd ResourceGather ResourceGatherNd Fill BroadcastTo Reverse ReverseV2 OneHot "
    "TensorListStack TensorListFromTensor TensorListGetItem TensorListSetItem TensorListPushBack TensorListPopBack",
}
_FAMILY_OF = {op_type: family for family, names in _MEMBERS.items() for op_type in names.split()}


def family_of(op_type: str) -> str:
    """Return the family of a type of operation.

    >>> family_of("Conv2DBackpropFilter"), family_of("Qr")
    ('filter gradient', 'other')
    """
    return _FAMILY_OF.get(op_type, "other")
