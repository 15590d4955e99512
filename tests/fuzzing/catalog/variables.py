"""What is done to variables, above all to those that lie in parts or in copies: slices, rows, lists, writes."""

TABLE = """
{w:ab}[-{int:1:6}:]
{w:ab}[-{int:1:6}:, 1:]
{w:ab}[:{int:1:6}]
{w:ab}[{int:1:3}:-1]
{w:ab}[::-1]
{w:ab}[::2, ::-1]
{w:ab}[..., :-1]
{w:ab}[:, None]
{w:ab}[0]
{w:ab}[-1:] * {f:ab}
tf.gather({w:ab}, {index:c:a})
tf.gather({w:ab}, {index:c:b}, axis=1)
tf.gather_nd({w:ab}, {index:c1:a})
tf.slice({w:ab}, [0, 0], [-1, 1])
tf.reverse({w:ab}, [0])
tf.roll({w:ab}, 1, 0)
tf.concat([{w:ab}, {w:ab}[:1]], 0)
tf.transpose({w:ab}) * 2.0
tf.matmul({f:ca}, {w:ab})
tf.matmul({w:ab}, {w:bc})
tf.reduce_sum({w:ab}, {int:0:2})
{w:ab} * {f:ab}
{w:ab} + {f:b}
tf.nn.softmax({w:ab})
tf.TensorArray(tf.float64, 2, infer_shape=False).write(0, {w} * 2.0).write(1, {f}).read(0)
tf.TensorArray(tf.float64, 2).write(0, {w:ab} * 2.0).write(1, {w:ab} + 1.0).stack()
tf.tensor_scatter_nd_update({w:ab}, {index:11:a}, {f:1b})
tf.cond({b:}, lambda: {w:ab} * 2.0, lambda: tf.sin({w:ab}))
tf.map_fn(lambda row: tf.reduce_sum(row * {w:b}), {f:ab})
{w}.assign({w} * 0.5)
{w:ab}.assign({w:ab}[::-1])
{w:ab}.assign(0.9 * {w:ab} + 0.1 * tf.matmul({f:ca}, {f:cb}, transpose_a=True))
{w:ab}.assign_sub(0.1 * grad(lambda c: tf.reduce_mean(tf.square(tf.matmul({f:ca}, c))), {w:ab} + 0.0))
{w:ab}.scatter_update(tf.IndexedSlices({f:1b}, {index:1:a}))
{w:ab}.scatter_add(tf.IndexedSlices({f:cb}, {index:c:a}))
{w:ab}[:1].assign({f:1b})
{w:ab}[-1].assign({f:b})
"""
