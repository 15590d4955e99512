"""Ops of `tf.raw_ops` that have no rule: numbers and images."""

TABLE = """
BesselI0|BesselI1|BesselJ0|BesselJ1 {f}
BesselK0|BesselK1|BesselK0e|BesselK1e|BesselY0|BesselY1|Dawsn|Expint|FresnelCos|FresnelSin {p}
Spence {m}
IgammaGradA|RandomGammaGrad {p:*} {p:*}
PopulationCount {i}
ToBool {f:}
Bucketize {f} boundaries=[-0.5,0.25,1.0]
HistogramFixedWidth {f} tf.constant([-1.0,1.0],tf.float64) 4
Bincount {n:*} 5 tf.constant([],tf.float64)
DenseBincount {index:ab:5} 5 {f:ab} binary_output={flag}
tf.raw_ops.DenseCountSparseOutput(values={index:a3:5}, weights={f:a3}, binary_output=False).output_values
InvertPermutation tf.argsort({i:a})
NthElement {f:*a} 0 reverse={flag}
ApproxTopK {F:*5} k=2
Where {b}
Where {f}
Unique|UniqueWithCounts {index:a:3}
UniqueV2|UniqueWithCountsV2 {index:ab:3} [{pick:0|1}]
ListDiff {i:a} {i:b}
Gather {f:ab} {index:c:a}
DynamicPartition {f:ab} {index:a:3} num_partitions=3
DynamicStitch|ParallelDynamicStitch [[0,2],[1]] [{f:2a},{f:1a}]
ScatterNdNonAliasingAdd {f:ab} {index:c1:a} {f:cb}
TensorStridedSliceUpdate {f:4b} [1] [3] [1] {f:2b}
SegmentSum|SegmentMean|SegmentMax|SegmentMin|SegmentProd {f:ab} tf.sort({index:a:3})
SparseSegmentSum|SparseSegmentMean|SparseSegmentSqrtN {f:ab} {index:c:a} tf.sort({index:c:3})
SparseSegmentSumWithNumSegments|SparseSegmentMeanWithNumSegments {f:ab} {index:c:a} tf.sort({index:c:3}) 4
SparseSegmentSqrtNWithNumSegments {f:ab} {index:c:a} tf.sort({index:c:3}) 4
SparseSegmentSumGrad|SparseSegmentMeanGrad {f:3b} tf.pad({index:c:4},[[0,1]]) tf.sort(tf.pad({index:c:3},[[0,1]])) 4
SparseSegmentSqrtNGrad {f:3b} tf.pad({index:c:4},[[0,1]]) tf.sort(tf.pad({index:c:3},[[0,1]])) 4
Diag {f:a}
Diag {f:ab}
DiagPart {f:aa}
tf.raw_ops.Range(start=0, limit=tf.shape({f:ab})[0], delta=1)
LinSpace {f:} {f:} 4
Rank|Size|Shape {f}
ShapeN [{f},{f}]
BroadcastArgs {shape} [1]
BroadcastGradientArgs [3,1] [1,4]
ConcatOffset 1 [[2,3],[2,5]]
EnsureShape {f} shape={dims}
GuaranteeConst|DeepCopy {f}
DataFormatDimMap {index:*:4}
DataFormatVecPermute {i:4}
UnravelIndex {index:a:6} [2,3]
Empty [0,2] dtype=tf.float64 init=True
ParallelConcat [{f:1a},{f:1a}] shape=[2,{size:a}]
BatchToSpace {f:422c} [[0,{int:0:1}],[0,0]] block_size=2
SpaceToBatch {f:n44c} [[0,0],[0,0]] block_size=2
InplaceAdd|InplaceSub|InplaceUpdate {f:ab}+0.0 [0] {f:1b}
MaxPoolV2 {f:n452} [1,2,2,1] [1,1,2,1] padding='SAME'
MaxPoolGradV2 {f:n452} {f:n232} {f:n232} [1,2,2,1] [1,2,2,1] padding='SAME'
MaxPoolGradGradV2 {f:n452} {f:n232} {f:n452} [1,2,2,1] [1,2,2,1] padding='SAME'
FractionalAvgPool|FractionalMaxPool {f:n662} pooling_ratio=[1.0,1.4,1.5,1.0] deterministic=True seed=1 seed2=2
CropAndResize {f:n45c} {Q:a4} {index:a:n} [2,3]
tf.raw_ops.CropAndResizeGradImage(grads={F:a23c}, boxes={Q:a4}, box_ind={index:a:2}, image_size=[2, 4, 5,
    {size:c}], T=tf.float32)
DrawBoundingBoxes {F:n453} {Q:na4}
DrawBoundingBoxesV2 {F:n453} {Q:na4} {Q:a4}
ExtractGlimpse|ExtractGlimpseV2 {F:n45c} [2,3] {F:n2} uniform_noise=False noise='zero'
ScaleAndTranslate {f:n45c} [3,6] [0.5,1.5] [0.0,1.0]
ScaleAndTranslateGrad {F:n36c} {F:n45c} [0.5,1.5] [0.0,1.0]
CropAndResizeGradBoxes {F:a23c} {F:n45c} {Q:a4} {index:a:n}
ImageProjectiveTransformV2 {F:n45c} {F:18} [3,4] interpolation='BILINEAR'
ImageProjectiveTransformV3 {F:n45c} {F:n8} [3,4] 0.5 interpolation='NEAREST'
NonMaxSuppression {Q:a4} {Q:a} 2
NonMaxSuppressionV2 {Q:a4} {Q:a} 2 0.5
NonMaxSuppressionV3 {Q:a4} {Q:a} 2 0.5 0.1
NonMaxSuppressionV4 {Q:a4} {Q:a} 2 0.5 0.1
NonMaxSuppressionV5 {Q:a4} {Q:a} 2 0.5 0.1 0.2
NonMaxSuppressionWithOverlaps {Q:aa} {Q:a} 2 0.5 0.1
CombinedNonMaxSuppression {Q:na14} {Q:nac} 2 3 0.5 0.1
EncodePng {u:453}
DecodePng tf.io.encode_png({u:453})
DecodeJpeg tf.io.encode_jpeg({u:443})
EncodeJpeg {u:443}
DecodeImage tf.io.encode_png({u:453})
StatelessSampleDistortedBoundingBox [4,5,3] {Q:114} 0.1 [1,2]
AudioSpectrogram {F:91} window_size=4 stride=2
DecodeWav tf.audio.encode_wav(tf.tanh({F:91}),8000)
Lu {spd:*aa}
Eig {spd:*33} compute_v=False Tout=tf.complex128
MatrixLogarithm|MatrixSquareRoot tf.cast({spd:*33},tf.complex128)
MatrixSolveLs {f:*42} {f:*4a} tf.constant(0.1,tf.float64) fast={flag}
BandedTriangularSolve tf.abs({f:*23})+1.0 {f:*3a}
TridiagonalMatMul {f:*13} {f:*13} {f:*13} {f:*3a}
TridiagonalSolve tf.abs({f:*33})+1.0 {f:*3a}
SparseMatMul {F:ab} {F:bc} a_is_sparse=True
RFFT3D {f:*abc} [2,2,2] Tcomplex=tf.complex128
IRFFT3D {c:*ab3} [2,2,4] Treal=tf.float64
QuantizeAndDequantizeV2 {f} tf.constant(-1.0,tf.float64) tf.constant(1.0,tf.float64) range_given={flag}
QuantizeAndDequantizeV3 {f} tf.constant(-1.0,tf.float64) tf.constant(1.0,tf.float64) 8
QuantizeAndDequantizeV4 {f} tf.constant(-1.0,tf.float64) tf.constant(1.0,tf.float64) range_given=True
FakeQuantWithMinMaxArgs {F}
FakeQuantWithMinMaxArgsGradient {F:*} {F:*}
FakeQuantWithMinMaxVars {F} -1.0 {pick:1.0|2.0}
FakeQuantWithMinMaxVarsGradient {F:*} {F:*} -1.0 1.0
FakeQuantWithMinMaxVarsPerChannel {F:*3} [-1.0,-2.0,-0.5] [1.0,2.0,0.5]
FakeQuantWithMinMaxVarsPerChannelGradient {F:*3} {F:*3} [-1.0,-2.0,-0.5] [1.0,2.0,0.5]
Fingerprint {i:ab} method='farmhash64'
Mfcc tf.abs({F:1a9}) 8000
tf.raw_ops.TensorMapSize(input_handle=tf.raw_ops.EmptyTensorMap())
Reverse {f:ab} [True,False]
tf.raw_ops.SetSize(set_indices=[[0, 0], [1, 0]], set_values=[{int:0:3}, 4], set_shape=[2, 1])
tf.raw_ops.StringNGrams(data={s:a}, data_splits=[0, {size:a}], separator=' ', ngram_widths=[2], left_pad='',
    right_pad='', pad_width=0, preserve_short_sequences=False).ngrams
tf.raw_ops.TensorMapHasKey(input_handle=tf.raw_ops.EmptyTensorMap(), key={int:0:3})
IsotonicRegression {f:ab} output_dtype=tf.float64
tf.raw_ops.Dequantize(input=tf.raw_ops.QuantizeV2(input={F}, min_range=-2.0, max_range=2.0, T=tf.quint8).output,
    min_range=-2.0, max_range=2.0)
tf.raw_ops.UniformDequantize(input=tf.raw_ops.UniformQuantize(input={F}, scales=0.1, zero_points=0, Tout=tf.qint8,
    quantization_min_val=-128, quantization_max_val=127), scales=0.1, zero_points=0, Tout=tf.float32,
    quantization_min_val=-128, quantization_max_val=127)
tf.raw_ops.LSTMBlockCell(x={F:ab}, cs_prev={F:a2}, h_prev={F:a2}, w=tf.ones([{size:b} + 2, 8]), wci=[0.0, 0.0],
    wcf=[0.0, 0.0], wco=[0.0, 0.0], b=tf.zeros([8]))
tf.raw_ops.GRUBlockCell(x={F:ab}, h_prev={F:a2}, w_ru=tf.ones([{size:b} + 2, 4]), w_c=tf.ones([{size:b} + 2, 2]),
    b_ru=tf.zeros([4]), b_c=tf.zeros([2]))
CTCGreedyDecoder {f:4ab} tf.fill([{size:a}],4)
CTCBeamSearchDecoder {F:4a3} tf.fill([{size:a}],4) beam_width=2 top_paths=1
tf.raw_ops.CTCLoss(inputs={f:5a4}, labels_indices=[[0, 0]], labels_values=[1], sequence_length=tf.fill([{size:a}],
    5))
StatelessRandomNormal|StatelessRandomUniform|StatelessTruncatedNormal {shape} [1,2]
StatelessRandomUniformInt {shape} [1,2] 0 9
StatelessRandomUniformFullInt {shape} [1,2] dtype=tf.int32
StatelessMultinomial {f:ab} 3 [1,2]
StatelessRandomBinomial {shape} [1,2] 5.0 0.5 dtype=tf.float64
StatelessRandomGammaV2 [2,{size:a}] [1,2] {p:a}
StatelessRandomPoisson [2,{size:a}] [1,2] {p:a} dtype=tf.float64
StatelessParameterizedTruncatedNormal [3,{size:a}] [1,2] {f:a} {p:a} tf.constant(-1.0,tf.float64)
    tf.constant(1.0,tf.float64)
StatelessShuffle {f} [1] [2,3] 1
StatelessRandomGetKeyCounter|StatelessRandomGetKeyCounterAlg [{int:0:5},2]
RandomStandardNormal|RandomUniform|TruncatedNormal {shape} seed=3 seed2=4 dtype=tf.float64
RandomUniformInt {shape} 0 9 seed=3 seed2=4
RandomShuffle {f} seed=3 seed2=4
Multinomial {f:ab} 3 seed=3 seed2=4
RandomGamma [2] {p:a} seed=3 seed2=4
RandomPoissonV2 [2] {p:a} seed=3 seed2=4
RandomIndexShuffle {index:a:3} [1,2,3] 5
UniformCandidateSampler {l:a2} num_true=2 num_sampled=3 unique=True range_max=9 seed=3 seed2=4
"""
