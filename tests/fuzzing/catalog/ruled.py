"""Ops of `tf.raw_ops` that have a rule."""

_ELEMENTWISE = """
Abs|Asinh|Atan|BesselI0e|BesselI1e|Ceil|Cos|Cosh|Elu|Erf|Erfc|Exp|Expm1|Floor|Neg|OnesLike|Relu|Relu6|Rint {f}
Round|Selu|Sigmoid|Sign|Sin|Sinh|Softplus|Softsign|Square|Tan|Tanh|ZerosLike|Identity|PreventGradient {f}
Snapshot|StopGradient|IsFinite|IsInf|IsNan {f}
Digamma|Inv|Lgamma|Log|Log1p|Reciprocal|Rsqrt|Sqrt {p}
Acos|Asin|Atanh|Erfinv|Ndtri {q}
Acosh {m}
Conj|Square|Neg|Sin|Exp|Identity|ZerosLike|Tanh {c}
Imag|Real|ComplexAbs|Angle {c} Tout=tf.float64
Abs|Square|Neg|Sign|Identity|OnesLike|ZerosLike|Invert {i}
LogicalNot {b}
LeakyRelu {f} alpha={pick:0.2|0.3}
CheckNumerics|CheckNumericsV2 {f} message='no_number'
Cast {f} DstT={pick:tf.float32|tf.int32|tf.complex128|tf.bool}
Cast {i} DstT=tf.float64
Cast {b} DstT=tf.float64
Cast {F} DstT=tf.float64
Cast {u} DstT=tf.float64
Bitcast {f} type={pick:tf.int64|tf.int32|tf.uint8}
Bitcast {i} type={pick:tf.float32|tf.uint8}
Add|AddV2|Sub|Mul|Maximum|Minimum|SquaredDifference|Atan2|NextAfter {f} {f:~}
Equal|NotEqual|Greater|GreaterEqual|Less|LessEqual {f} {f:~}
Add|AddV2|Sub|Mul|Equal|NotEqual|SquaredDifference|RealDiv {c} {c:~}
AddV2|Sub|Mul|Maximum|Equal|Less|BitwiseAnd|BitwiseOr|BitwiseXor|SquaredDifference {i} {i:~}
Div|RealDiv|DivNoNan|FloorDiv|Xdivy|Mod|FloorMod|TruncateMod {f} {p:~}
MulNoNan {f} {f:~}
Div|FloorDiv|FloorMod|Mod|TruncateDiv|TruncateMod|LeftShift|RightShift {n} {n:~}
Pow|Xlogy|Xlog1py|Igamma|Igammac {p} {p:~}
Zeta {m} {m:~}
Polygamma tf.round({p}) {p:~}
Betainc {p} {p:~} {q:~}
Complex {f} {f:~} Tout=tf.complex128
LogicalAnd|LogicalOr {b} {b:~}
ApproximateEqual {f:*} {f:*} tolerance=0.5
EluGrad|InvGrad|LeakyReluGrad|ReciprocalGrad|Relu6Grad|ReluGrad|SeluGrad|SigmoidGrad|SoftplusGrad {f:*} {f:*}
SoftsignGrad|TanhGrad {f:*} {f:*}
RsqrtGrad|SqrtGrad {p:*} {f:*}
AddN [{f:*},{f:*},{f:*}]
IdentityN [{f},{f}]
ClipByValue {f} -0.5 0.75
SelectV2 {b} {f:~} {f:~}
Select {b:*} {f:*} {f:*}
Select {b:a} {f:ab} {f:ab}
"""
_CONTRACTIONS = """
MatMul {f:ab} {f:bc}
MatMul {f:ba} {f:bc} transpose_a=True
MatMul {f:ab} {f:cb} transpose_b=True
MatMul {f:ba} {f:cb} transpose_a=True transpose_b=True
MatMul {c:ab} {c:bc}
BatchMatMul|BatchMatMulV2 {f:*ab} {f:*bc}
BatchMatMulV2 {f:*ab} {f:cb} adj_y=True
BatchMatMul|BatchMatMulV2 {c:*ba} {c:*bc} adj_x=True
BatchMatMulV3 {f:*ab} {f:*bc} Tout=tf.float64
Einsum [{f:ab},{f:bc}] equation='{pick:ab,bc->ac|ab,bc->ca|ab,bc->b|...ab,...bc->...ac}'
Einsum [{f:*ab},{f:cb}] equation='...ab,cb->...{pick:ac|c|ca}'
Einsum [{f:ab},{f:acd}] equation='ab,acd->{pick:bcd|dcb|abcd|bd|}'
Einsum [{f:aa}] equation='aa->{pick:a|}'
Einsum [{f:abc}] equation='abc->{pick:cab|ca|b|}'
Conv2D|DepthwiseConv2dNative {f:n452} {f:2323} strides=[1,{pick:1,1|2,2},1] padding='{pick:SAME|VALID}'
Conv2D {f:n542} {f:2223} strides=[1,1,1,1] padding='SAME' dilations=[1,{int:1:2},2,1]
Conv {f:n452} {f:2323} strides=[1,1,{int:1:2},1] padding='{pick:SAME|VALID}'
Conv3D {f:n3442} {f:22222} strides=[1,1,{pick:1,1|2,2},1] padding='{pick:SAME|VALID}'
Conv2DBackpropInput [{size:n},4,5,2] {f:2323} {f:n453} strides=[1,1,1,1] padding='SAME'
Conv2DBackpropFilter {f:n452} [2,3,2,3] {f:n453} strides=[1,1,1,1] padding='SAME'
DepthwiseConv2dNativeBackpropFilter {f:n452} [2,3,2,2] {f:n454} strides=[1,1,1,1] padding='SAME'
tf.raw_ops.Conv2DBackpropInput(input_sizes=tf.shape({f:n452}), filter={f:2323}, out_backprop={f:n453}, strides=[1,
    1, 1, 1], padding='SAME')
tf.raw_ops.DepthwiseConv2dNativeBackpropInput(input_sizes=tf.shape({f:n452}), filter={f:2322},
    out_backprop={f:n454}, strides=[1, 1, 1, 1], padding='SAME')
tf.raw_ops.Conv3DBackpropInputV2(input_sizes=tf.shape({f:n3442}), filter={f:22222}, out_backprop={f:n3442},
    strides=[1, 1, 1, 1, 1], padding='SAME')
Conv3DBackpropFilterV2 {f:n3442} [2,2,2,2,2] {f:n3442} strides=[1,1,1,1,1] padding='SAME'
Dilation2D {f:n452} {f:222} strides=[1,1,{int:1:2},1] rates=[1,1,1,1] padding='{pick:SAME|VALID}'
Dilation2DBackpropInput|Dilation2DBackpropFilter {f:n452} {f:222} {f:n452} strides=[1,1,1,1] rates=[1,1,1,1]
    padding='SAME'
BiasAdd {f:*ab} {f:b}
BiasAdd {f:ab34} {f:b} data_format='NCHW'
BiasAddGrad {f:*ab}
BiasAddGrad {f:ab34} data_format='NCHW'
"""
_IMAGES = """
AvgPool {f:n452} ksize=[1,2,2,1] strides=[1,{pick:1,1|2,2},1] padding='{pick:SAME|VALID}'
MaxPool {f:n452} ksize=[1,2,2,1] strides=[1,2,2,1] padding='{pick:SAME|VALID}'
MaxPool {f:n452} ksize=[1,2,2,1] strides=[1,1,1,1] padding='VALID'
tf.raw_ops.MaxPool3D(input={F:n4442} * 100.0, ksize=[1, 2, 2, 2, 1], strides=[1, 2, 2, {int:1:2}, 1],
    padding='{pick:SAME|VALID}')
AvgPool3D {F:n4442} ksize=[1,2,2,2,1] strides=[1,2,2,{int:1:2},1] padding='{pick:SAME|VALID}'
AvgPoolGrad [{size:n},4,5,2] {f:n452} ksize=[1,2,2,1] strides=[1,1,1,1] padding='SAME'
tf.raw_ops.AvgPoolGrad(orig_input_shape=tf.shape({f:n452}), grad={f:n452}, ksize=[1, 2, 2, 1], strides=[1, 1, 1,
    1], padding='SAME')
tf.raw_ops.AvgPool3DGrad(orig_input_shape=tf.shape({F:n4442}), grad={F:n4442}, ksize=[1, 2, 2, 2, 1], strides=[1,
    1, 1, 1, 1], padding='SAME')
MaxPoolGrad {f:n452} {f:n232} {f:n232} ksize=[1,2,2,1] strides=[1,2,2,1] padding='SAME'
MaxPoolGradGrad {f:n452} {f:n232} {f:n452} ksize=[1,2,2,1] strides=[1,2,2,1] padding='SAME'
MaxPool3DGrad|MaxPool3DGradGrad {F:n3332} {F:n3332} {F:n3332} ksize=[1,2,2,2,1] strides=[1,1,1,1,1] padding='SAME'
MaxPoolWithArgmax {f:n443} ksize=[1,2,2,1] strides=[1,2,2,1] padding='VALID' include_batch_in_index={flag}
tf.raw_ops.MaxPoolGradWithArgmax(input={F:n443}, grad={F:n223}, argmax=tf.raw_ops.MaxPoolWithArgmax(input={F:n443},
    ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding='VALID').argmax, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1],
    padding='VALID')
LRN {F:n344} depth_radius={int:1:2}
LRNGrad {F:n344} {F:n344} {F:n344} depth_radius=1
DepthToSpace {f:n238} block_size=2
SpaceToDepth {f:n462} block_size=2
ExtractImagePatches {f:n452} ksizes=[1,2,2,1] strides=[1,{int:1:2},2,1] rates=[1,1,1,1] padding='VALID'
ExtractVolumePatches {f:n4452} ksizes=[1,2,2,2,1] strides=[1,2,2,2,1] padding='VALID'
SpaceToBatchND {f:n452} [2,2] [[0,0],[1,0]]
BatchToSpaceND {f:4223} [2,2] [[0,{int:0:1}],[0,0]]
tf.raw_ops.BatchToSpaceND(input=tf.raw_ops.SpaceToBatchND(input={f:n442}, block_shape=[2, 2], paddings=[[0, 0], [2,
    0]]) * 2.0, block_shape=[2, 2], crops=[[0, 0], [1, 1]])
AdjustHue|AdjustSaturation {Q:*ab3} 0.3
AdjustContrastv2 {Q:*abc} 0.3
HSVToRGB|RGBToHSV {q:*3}
ResizeArea|ResizeBicubic|ResizeBilinear|ResizeNearestNeighbor {F:n452} [{int:1:6},7]
ResizeBicubic|ResizeBilinear|ResizeNearestNeighbor {F:n452} [3,7] half_pixel_centers=True
ResizeBicubicGrad|ResizeBilinearGrad {F:n372} {F:n452}
ResizeNearestNeighborGrad {F:n372} [4,5]
tf.raw_ops.FusedBatchNorm(x={F:nhwc}, scale={F:c}, offset={F:c}, mean=[], variance=[])[:3]
tf.raw_ops.FusedBatchNormV2(x={F:nhwc}, scale={F:c}, offset={F:c}, mean={Q:c}, variance={Q:c}, is_training={flag},
    exponential_avg_factor=0.5)[:1]
tf.raw_ops.FusedBatchNormV3(x={F:nhwc}, scale={F:c}, offset={F:c}, mean={Q:c}, variance={Q:c}, is_training=True,
    exponential_avg_factor={pick:0.25|1.0})[:3]
tf.raw_ops.FusedBatchNormV3(x={F:nhwc}, scale={F:c}, offset={F:c}, mean={Q:c}, variance={Q:c},
    is_training=False)[:1]
tf.raw_ops.FusedBatchNormGrad(y_backprop={F:nhwc}, x={F:nhwc}, scale={F:c}, reserve_space_1={F:c},
    reserve_space_2={Q:c}, is_training={flag})[:3]
tf.raw_ops.FusedBatchNormGradV2(y_backprop={F:nhwc}, x={F:nhwc}, scale={F:c}, reserve_space_1={F:c},
    reserve_space_2={Q:c}, is_training={flag})[:3]
tf.raw_ops.FusedBatchNormGradV3(y_backprop={F:nhwc}, x={F:nhwc}, scale={F:c}, reserve_space_1={F:c},
    reserve_space_2={Q:c}, reserve_space_3={F:c}, is_training={flag})[:3]
"""
_MOVERS = """
Transpose {f} {perm}
Transpose {i} {perm}
ConjugateTranspose {c} {perm}
ExpandDims {f} {axis:new}
Squeeze {f} axis=[]
tf.raw_ops.Squeeze(input=tf.raw_ops.ExpandDims(input={f}, axis={axis:new}), axis=[])
Squeeze {f:a1b} axis=[{pick:1|-2}]
Squeeze {f:1a1} axis={pick:[0]|[2,0]|[-1]|[]}
Reshape {f} {newshape}
Reshape {i} {newshape}
Pack [{f:*},{f:*}] axis={axis:new}
Pack [{i:*},{i:*},{i:*}] axis={axis:new}
Unpack {f:abc} num={size:b} axis={pick:1|-2}
Unpack {f:2ab} num=2 axis=0
Unpack {f:a3} num=3 axis={pick:1|-1}
ConcatV2 [{f:*},{f:*}] {axis}
ConcatV2 [{f:ab},{f:cb},{f:ab}] {pick:0|-2}
ConcatV2 [{f:ab},{f:ac}] {pick:1|-1}
Split {axis} {f:4a} num_split={pick:1|2|4}
Split {pick:0|-2} {f:4a} num_split={pick:1|2|4}
Split {pick:1|-1} {f:a2b} num_split={pick:1|2}
SplitV {f:a4} [{pick:4,0|1,3|0,-1|2,2}] {pick:1|-1} num_split=2
SplitV {f:4a} [{pick:4,0|1,3|0,-1|2,2}] {pick:0|-2} num_split=2
Slice {f:ab} [0,0] [-1,{int:0:1}]
Slice {f:a4b} [0,{int:0:2},0] [-1,{pick:2|1|0|-1},-1]
StridedSlice {f:ab} [0,{int:-3:2}] [{int:-3:3},{int:-3:3}] [{pick:1|-1|2},{pick:1|-1}] begin_mask={int:0:3}
    end_mask={int:0:3}
StridedSlice {f:abc} [0,1] [0,2] [1,1] begin_mask=1 end_mask=1 shrink_axis_mask={pick:0|2}
StridedSlice {f:abc} [0,0] [0,1] [1,1] ellipsis_mask=1 new_axis_mask={pick:0|2}
StridedSliceGrad [{size:a},{size:b:2}] [0,1] [0,{size:b:1}] [1,1] {f:ab} begin_mask=1 end_mask=1
tf.raw_ops.StridedSliceGrad(shape=tf.shape({f:ab}) + [0, 2], begin=[0, 1], end=[0, -1], strides=[1, 1], dy={f:ab},
    begin_mask=1, end_mask=1)
tf.raw_ops.StridedSliceGrad(shape=tf.shape({f:abc}), begin=[0, 0], end=[0, 1], strides=[1, 1], dy={f:ac},
    begin_mask=1, end_mask=1, shrink_axis_mask=2)
ReverseV2 {f} {axes}
ReverseSequence {f:ab} {index:a:b} seq_dim=1 batch_dim=0
ReverseSequence {f:abc} {index:b:a} seq_dim=0 batch_dim=1
Cumsum|Cumprod|CumulativeLogsumexp {f} {axis} exclusive={flag} reverse={flag}
tf.raw_ops.Roll(input={f}, shift={int:-3:3}, axis={axis})
tf.roll({f}, {shifts})
Pad {f} {pads}
PadV2 {f} {pads} tf.constant(7.0,tf.float64)
MirrorPad {f} {pads:1} mode='{pick:REFLECT|SYMMETRIC}'
MirrorPadGrad {f:a6} [[0,0],[1,2]] mode='{pick:REFLECT|SYMMETRIC}'
Tile {f} {multiples}
BroadcastTo {f} {newdims}
Fill {shape} tf.constant(2.0,tf.float64)
tf.raw_ops.Fill(dims=tf.shape({f}), value=tf.reduce_sum({f}))
GatherV2 {f:ab} {index:c:a} 0
GatherV2 {f:abc} {index:de:b} {pick:1|-2}
GatherV2 {f:ab} {index:a:b} {pick:1|-1} batch_dims=1
GatherV2 {f:abc} {index:ad:b} 1 batch_dims={pick:1|-1}
GatherV2 {f:abc} {index:abd:c} 2 batch_dims={pick:0|1|2}
GatherNd {f:ab} {index:c1:a}
GatherNd {f:abb} {index:cd2:1}
OneHot {index:*:3} 3 tf.constant(2.0,tf.float64) tf.constant(-1.0,tf.float64) axis={pick:-1|0}
TensorScatterAdd|TensorScatterSub|TensorScatterMax|TensorScatterMin {f:ab} {index:c1:a} {f:cb}
TensorScatterUpdate {f:ab} {index:11:a} {f:1b}
TensorScatterUpdate|TensorScatterAdd|TensorScatterSub|TensorScatterMax|TensorScatterMin {f:ab}
    tf.stack([tf.range({size:a}),tf.cast({index:a:b},tf.int32)],1) {f:a}
GatherNd {f:ab} tf.stack([tf.range({size:a}),tf.cast({index:a:b},tf.int32)],1)
SparseTensorDenseMatMul [[0,1],[2,0]] {f:2} [3,2] {f:2a}
SparseTensorDenseMatMul tf.cast({index:a2:4},tf.int64) {f:a} [4,4] {f:4b} adjoint_a={flag}
ScatterNd {index:a1:4} {f:ab} [4,{size:b}]
ScatterNd {index:ac2:2} {f:acb} [2,2,{size:b}]
UnsortedSegmentSum|UnsortedSegmentProd {f:ab} {index:a:3} 3
UnsortedSegmentMax|UnsortedSegmentMin {f:ab} {index:a:2} 2
UnsortedSegmentSum {f:abc} {index:ab:4} 5
"""
_REDUCTIONS = """
Sum|Mean|Max|Min|Prod|EuclideanNorm {f} {axes} keep_dims={flag}
Sum|Mean {c} {axes} keep_dims={flag}
Sum|Max|Prod|Mean {i} {axes}
Sum|Max {f} {axis}
All|Any {b} {axes} keep_dims={flag}
ArgMax|ArgMin {f} {axis} output_type={pick:tf.int32|tf.int64}
L2Loss {f}
Softmax|LogSoftmax {f:*ab}
SparseSoftmaxCrossEntropyWithLogits {f:ab} {index:a:b}
SoftmaxCrossEntropyWithLogits {f:ab} {q:ab}
SoftmaxCrossEntropyWithLogits {f:ab} {q:1b}
TopKV2 {f:*3} {int:0:3}
TopKV2 {f:*ab} 1 sorted={flag}
InTopK {F:ab} {index:a:b} k=2
InTopKV2 {F:ab} {index:a:b} 1
LowerBound|UpperBound tf.sort({f:a4}) {f:ab}
"""
_LINEAR_ALGEBRA = """
FFT|IFFT {c:*a}
FFT2D|IFFT2D {c:*ab}
FFT3D|IFFT3D {c:*abc}
RFFT {f:*a} [{int:1:5}] Tcomplex=tf.complex128
RFFT2D {f:*ab} [{int:1:4},{int:1:5}] Tcomplex=tf.complex128
IRFFT {c:*3} [{int:2:5}] Treal=tf.float64
IRFFT2D {c:*a3} [3,4] Treal=tf.float64
Cross {f:*3} {f:*3}
MatrixInverse|Cholesky|MatrixDeterminant|LogMatrixDeterminant {spd:*aa}
MatrixInverse {spd:*33} adjoint=True
tf.raw_ops.SelfAdjointEigV2(input={spd:*33})[0]
tf.raw_ops.SelfAdjointEigV2(input={spd:*22}, compute_v=False)[0]
tf.raw_ops.Svd(input={f:*43})[0]
tf.raw_ops.Svd(input={f:*ab}, compute_uv=False)[0]
tf.raw_ops.Qr(input={f:*43}, full_matrices={flag})
CholeskyGrad tf.linalg.cholesky({spd:*33}) {f:*33}
MatrixSolve {spd:*aa} {f:*ab} adjoint={flag}
MatrixTriangularSolve tf.linalg.cholesky({spd:*aa}) {f:*ab} adjoint={flag}
MatrixTriangularSolve tf.linalg.cholesky({spd:aa}) {f:*ab}
MatrixBandPart {f:*ab} {int:-1:1} {int:-1:1}
MatrixDiag {f:*a}
MatrixDiagPart {f:*34}
MatrixSetDiag {f:*44} {f:*4}
MatrixDiagV2|MatrixDiagV3 {f:*3} {int:-1:1} -1 -1 tf.constant(0.5,tf.float64)
MatrixDiagV2|MatrixDiagV3 {f:*23} [0,1] 4 3 tf.constant(7.0,tf.float64)
MatrixDiagPartV2|MatrixDiagPartV3 {f:*34} [{int:-1:0},{int:0:1}] tf.constant(5.0,tf.float64)
MatrixSetDiagV2|MatrixSetDiagV3 {f:*34} {f:*33} [-1,1]
"""
_STRINGS = r"""
EncodeBase64|StringLength|StringLower|StringStrip|StringUpper {s}
AsString {i}
AsString {b}
tf.raw_ops.DecodeBase64(input=tf.io.encode_base64({s}))
RegexFullMatch {s} tf.constant('a.*')
RegexReplace {s} tf.constant('[aC]') tf.constant('o') replace_global={flag}
StaticRegexFullMatch {s} pattern='a.*'
StaticRegexReplace {s} pattern='[aC]' rewrite='o' replace_global={flag}
StringJoin [{s:*},{s:*}] separator='+'
StringToHashBucket {s} num_buckets=7
StringToHashBucketFast {s} num_buckets=7
StringToHashBucketStrong {s} num_buckets=7 key=[1,2]
tf.raw_ops.StringToNumber(string_tensor=tf.as_string({i}), out_type=tf.float64)
Substr {s} 0 {int:0:1}
Substr {s:*} {index:*:1} {index:*:2} unit='UTF8_CHAR'
ParseExampleV2 tf.fill(tf.shape({f:a}),b'\n\x0f\n\r\n\x01a\x12\x08\x12\x06\n\x04\x00\x00\x80?')
    tf.constant([],tf.string)
    tf.constant([],tf.string) tf.constant(['a']) tf.constant([],tf.string) [tf.zeros([1])] num_sparse=0 sparse_types=[]
    ragged_value_types=[] ragged_split_types=[] dense_shapes=[[1]]
ParseExample tf.fill(tf.shape({f:a}),b'\n\x0f\n\r\n\x01a\x12\x08\x12\x06\n\x04\x00\x00\x80?')
    tf.constant([],tf.string) [] [tf.constant('a')] [tf.zeros([1])] dense_shapes=[[1]] sparse_types=[]
"""
_LISTS = """
tf.raw_ops.TensorListStack(input_handle=tf.raw_ops.TensorListFromTensor(tensor={f:ab}, element_shape=[{size:b}]),
    element_shape=[{size:b}], element_dtype=tf.float64)
tf.raw_ops.TensorListGetItem(input_handle=tf.raw_ops.TensorListFromTensor(tensor={f:3ab},
    element_shape=tf.shape({f:ab})), index={int:0:2}, element_shape=tf.shape({f:ab}), element_dtype=tf.float64)
tf.raw_ops.TensorListStack(input_handle=tf.raw_ops.TensorListSetItem(input_handle=tf.raw_ops.TensorListReserve(
    element_shape=tf.shape({f:*}), num_elements=2, element_dtype=tf.float64), index=1, item={f:*}),
    element_shape=-1, element_dtype=tf.float64)
tf.raw_ops.TensorListPopBack(input_handle=tf.raw_ops.TensorListPushBack(input_handle=tf.raw_ops.EmptyTensorList(
    element_shape=-1, max_num_elements=-1, element_dtype=tf.float64), tensor={f}), element_shape=-1,
    element_dtype=tf.float64)[1]
tf.raw_ops.TensorListLength(input_handle=tf.raw_ops.TensorListFromTensor(tensor={f:abc}, element_shape=-1))
"""
_RANDOM = """
StatelessRandomNormalV2|StatelessRandomUniformV2|StatelessTruncatedNormalV2 {shape} [1] [2,3] 1 dtype=tf.float64
StatelessRandomUniformFullIntV2 {shape} [1] [2,3] 1 dtype=tf.int32
StatelessRandomUniformIntV2 {shape} [1] [2,3] 1 -3 7
tf.random.stateless_{pick:normal|uniform|truncated_normal}([{size:a}, 3], [{int:0:9}, 2], dtype=tf.float64) * {f:a3}
"""
TABLE = "".join(
    (_ELEMENTWISE, _CONTRACTIONS, _IMAGES, _MOVERS, _REDUCTIONS, _LINEAR_ALGEBRA, _STRINGS, _LISTS, _RANDOM)
)
