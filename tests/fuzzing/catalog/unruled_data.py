"""Ops of `tf.raw_ops` that have no rule: strings, sets, sparse and ragged data, lists, variables, functions."""

TABLE = """
StringSplit tf.reshape({s:a},[-1]) ' '
StringSplitV2 {s:a} ' '
StringFormat [{s}] template='{pick:%s|x}' placeholder='%s'
tf.raw_ops.StringNGrams(data={s:3}, data_splits=[0, 1, 3], separator=' ', ngram_widths=[2], left_pad='',
    right_pad='', pad_width=0, preserve_short_sequences=True)
UnicodeDecode|UnicodeDecodeWithOffsets {s:a} input_encoding='UTF-8'
UnicodeTranscode {s} input_encoding='UTF-8' output_encoding='UTF-16-BE'
UnicodeScript {n}
UnicodeEncode {n:3}+60 [0,2,3] output_encoding='UTF-8'
ReduceJoin {s} {axis} separator='+'
UnsortedSegmentJoin {s:a} {index:a:3} 3
DecodeRaw tf.strings.substr(tf.strings.join([{s},'padding!']),0,8) out_type=tf.uint8
DecodePaddedRaw {s} 4 out_type=tf.uint8
tf.raw_ops.DecodeCSV(records=tf.as_string({i}), record_defaults=[tf.constant([0])])
tf.raw_ops.DecodeCompressed(bytes={s})
tf.raw_ops.ParseTensor(serialized=tf.io.serialize_tensor({f}), out_type=tf.float64)
SerializeTensor {i}
EditDistance tf.zeros([1,2],tf.int64) [3] [1,2] tf.zeros([1,2],tf.int64) [4] [1,2]
DenseToDenseSetOperation {index:a3:4} {index:a2:4} set_operation='{pick:union|intersection|a-b}'
tf.sets.size(tf.sparse.from_dense({index:a3:4}))
tf.sparse.to_dense(tf.sparse.add(tf.sparse.from_dense({f:ab}), tf.sparse.from_dense({f:ab})))
tf.sparse.to_dense(tf.sparse.concat({pick:0|1}, [tf.sparse.from_dense({f:ab}), tf.sparse.from_dense({f:ab})]))
tf.sparse.to_dense(tf.sparse.reorder(tf.sparse.from_dense({f:ab})))
tf.sparse.to_dense(tf.sparse.reshape(tf.sparse.from_dense({f:ab}), [-1]))
tf.sparse.to_dense(tf.sparse.slice(tf.sparse.from_dense({f:ab}), [0, 0], [1, 2]))
tf.sparse.to_dense(tf.sparse.split(tf.sparse.from_dense({f:a2}), 2, axis=1)[1])
tf.sparse.to_dense(tf.sparse.maximum(tf.sparse.from_dense({f:ab}), tf.sparse.from_dense({f:ab})))
tf.sparse.to_dense(tf.sparse.minimum(tf.sparse.from_dense({f:ab}), tf.sparse.from_dense({f:ab})))
tf.sparse.to_dense(tf.sparse.fill_empty_rows(tf.sparse.from_dense(tf.nn.relu({f:ab})), tf.constant(0.5,
    tf.float64))[0])
tf.sparse.to_dense(tf.sparse.transpose(tf.sparse.from_dense({f:ab})))
tf.sparse.to_dense(tf.sparse.from_dense({f:ab}) * {f:b})
tf.sparse.to_dense(tf.sparse.from_dense({f:ab}) / {p:b})
tf.sparse.add(tf.sparse.from_dense({f:ab}), {f:ab})
tf.sparse.reduce_max(tf.sparse.from_dense({f:ab}), {pick:0|1})
tf.sparse.to_dense(tf.sparse.reduce_sum(tf.sparse.from_dense({f:ab}), 1, output_is_sparse=True))
tf.sparse.to_dense(tf.sparse.reduce_max(tf.sparse.from_dense({f:ab}), 1, output_is_sparse=True))
tf.sparse.bincount({index:a3:4}).values
tf.sparse.to_dense(tf.sparse.cross([{s:a1}, {s:a1}]))
tf.sparse.to_dense(tf.sparse.cross_hashed([{s:a1}, {s:a1}], num_buckets=9))
tf.io.serialize_sparse(tf.sparse.from_dense({i:ab}))
tf.io.serialize_many_sparse(tf.sparse.from_dense({i:ab}))
tf.raw_ops.SparseToDense(sparse_indices=[[0, 1], [2, 0]], output_shape=[3, 2], sparse_values={f:2},
    default_value=tf.constant(0.5, tf.float64))
tf.raw_ops.SparseTensorDenseAdd(a_indices=[[0, 1], [2, 0]], a_values={f:2}, a_shape=[3, 2], b={f:32})
RaggedRange {index:a:3} {index:a:3}+3 tf.ones([{size:a}],tf.int32)
tf.ragged.range({n:a}).to_tensor()
tf.gather(tf.RaggedTensor.from_tensor({f:ab}), {index:c:a}).to_tensor()
tf.ragged.cross([tf.RaggedTensor.from_tensor({s:a2}), tf.RaggedTensor.from_tensor({s:a2})]).to_tensor()
tf.RaggedTensor.from_tensor({f:ab}, lengths={index:a:2}).to_tensor(0.5)
tf.sparse.to_dense(tf.RaggedTensor.from_tensor({f:ab}, lengths={index:a:2}).to_sparse())
tf.math.reduce_mean(tf.RaggedTensor.from_tensor({f:ab}), axis=1)
tf.raw_ops.RaggedBincount(splits=[0, 2, 3], values={n:3}, size=12, weights=tf.constant([], tf.float64))
tf.map_fn(lambda c: c * 2.0, tf.RaggedTensor.from_tensor({f:ab})).to_tensor()
tf.raw_ops.TensorListConcatV2(input_handle=tf.raw_ops.TensorListFromTensor(tensor={f:2ab}, element_shape=-1),
    element_shape=-1, leading_dims=[], element_dtype=tf.float64).tensor
tf.raw_ops.TensorListGather(input_handle=tf.raw_ops.TensorListFromTensor(tensor={f:3ab}, element_shape=-1),
    indices=[2, 0], element_shape=-1, element_dtype=tf.float64)
tf.raw_ops.TensorListStack(input_handle=tf.raw_ops.TensorListScatterV2(tensor={f:2ab}, indices=[1, 0],
    element_shape=-1, num_elements=2), element_shape=-1, element_dtype=tf.float64)
tf.raw_ops.TensorListStack(input_handle=tf.raw_ops.TensorListSplit(tensor={f:4a}, element_shape=-1,
    lengths=tf.constant([2, 2], tf.int64)), element_shape=-1, element_dtype=tf.float64)
tf.raw_ops.TensorListLength(input_handle=tf.raw_ops.TensorListResize(input_handle=tf.raw_ops.TensorListFromTensor(
    tensor={f:2ab}, element_shape=-1), size=3))
tf.raw_ops.TensorListElementShape(input_handle=tf.raw_ops.TensorListFromTensor(tensor={f:2ab},
    element_shape=tf.shape({f:ab})), shape_type=tf.int32)
tf.raw_ops.TensorListLength(input_handle=tf.raw_ops.TensorListConcatLists(input_a=tf.raw_ops.TensorListFromTensor(
    tensor={f:2a}, element_shape=-1), input_b=tf.raw_ops.TensorListFromTensor(tensor={f:2a}, element_shape=-1),
    element_dtype=tf.float64))
tf.raw_ops.TensorMapLookup(input_handle=tf.raw_ops.TensorMapInsert(input_handle=tf.raw_ops.EmptyTensorMap(), key=1,
    value={f}), key=1, value_dtype=tf.float64)
tf.raw_ops.ResourceGather(resource={w:ab}.handle, indices={index:c:a}, dtype=tf.float64)
tf.raw_ops.ResourceGatherNd(resource={w:ab}.handle, indices={index:c1:a}, dtype=tf.float64)
tf.raw_ops.VariableShape(input={w}.handle)
tf.raw_ops.ReadVariableOp(resource={w}.handle, dtype=tf.float64)
[tf.raw_ops.ResourceScatterAdd(resource={w:ab}.handle, indices={index:c:a}, updates={f:cb}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceScatterSub(resource={w:ab}.handle, indices={index:c:a}, updates={f:cb}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceScatterMul(resource={w:ab}.handle, indices={index:1:a}, updates={f:1b}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceScatterDiv(resource={w:ab}.handle, indices={index:1:a}, updates={p:1b}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceScatterMax(resource={w:ab}.handle, indices={index:c:a}, updates={f:cb}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceScatterMin(resource={w:ab}.handle, indices={index:c:a}, updates={f:cb}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceScatterUpdate(resource={w:ab}.handle, indices={index:1:a}, updates={f:1b}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceScatterNdAdd(ref={w:ab}.handle, indices={index:c1:a}, updates={f:cb}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceScatterNdMax(ref={w:ab}.handle, indices={index:c1:a}, updates={f:cb}), {w:ab} + 0.0][1]
[tf.raw_ops.ResourceStridedSliceAssign(ref={w:a}.handle, begin=[0], end=[1], strides=[1], value={f:1}),
    {w:a} + 0.0][1]
[tf.raw_ops.ResourceApplyGradientDescent(var={w:*}.handle, alpha=tf.constant(0.1, tf.float64), delta={f:*}),
    {w:*} + 0.0][1]
[tf.raw_ops.ResourceApplyMomentum(var={w:*}.handle, accum={w:*}.handle, lr=tf.constant(0.1, tf.float64),
    grad={f:*}, momentum=tf.constant(0.9, tf.float64)), {w:*} + 0.0][1]
[tf.raw_ops.ResourceApplyAdagrad(var={w:*}.handle, accum={w:*}.handle, lr=tf.constant(0.1, tf.float64),
    grad={f:*}), tf.constant(0.0)][1]
[tf.raw_ops.ResourceApplyFtrl(var={w:*}.handle, accum={w:*}.handle, linear={w:*}.handle, grad={f:*},
    lr=tf.constant(0.1, tf.float64), l1=tf.constant(0.1, tf.float64), l2=tf.constant(0.1, tf.float64),
    lr_power=tf.constant(-0.5, tf.float64)), tf.constant(0.0)][1]
[tf.raw_ops.ResourceApplyKerasMomentum(var={w:*}.handle, accum={w:*}.handle, lr=tf.constant(0.1, tf.float64),
    grad={f:*}, momentum=tf.constant(0.9, tf.float64)), {w:*} + 0.0][1]
[tf.raw_ops.ResourceSparseApplyMomentum(var={w:ab}.handle, accum={w:ab}.handle, lr=tf.constant(0.1, tf.float64),
    grad={f:cb}, indices={index:c:a}, momentum=tf.constant(0.9, tf.float64)), {w:ab} + 0.0][1]
[tf.debugging.assert_equal(tf.shape({f}), tf.shape({f})), {f} * 2.0][1]
"""
