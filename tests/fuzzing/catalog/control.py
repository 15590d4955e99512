"""Loops, branches, gradients inside, functions in functions, variables."""

TABLE = """
tf.while_loop(lambda i, c: i < {int:0:3}, lambda i, c: (i + 1, ({fun:c:same})(c)), (0, {f}))[1]
tf.while_loop(lambda i, c, d: i < {int:1:3}, lambda i, c, d: (i + 1, ({fun:c:same})(c) + d, d * 0.5), (0, {f:*},
    {f:*}))
tf.while_loop(lambda i, c: tf.reduce_sum(c) < 20.0, lambda i, c: (i + 1, c + tf.reduce_sum(tf.abs({f}))), (0, {f}),
    maximum_iterations=4)
tf.cond(tf.reduce_sum({f}) > 0.0, lambda: {f:*}, lambda: {f:*} * 2.0)
tf.cond(tf.size({f:*}) > {int:0:9}, lambda: tf.sin({f:*}), lambda: ({fun:c:same})({f:*}))
tf.cond({b:}, lambda: [tf.sin({f:*}), {f:ab}], lambda: [{f:*}, {f:ab} * 2.0])
tf.case([(tf.reduce_sum({f:*}) > 1.0, lambda: {f:*}), (tf.reduce_sum({f:*}) > -1.0, lambda: -{f:*})],
    lambda: {f:*} * 3.0)
tf.switch_case(tf.cast(tf.reduce_sum({f:*}), tf.int32) % 3, [lambda: {f:*}, lambda: ({fun:c:same})({f:*}),
    lambda: {f:*} * 2.0])
tf.switch_case({index::3}, [lambda: {f:*}, lambda: tf.exp(-{f:*}), lambda: {f:*} * 2.0])
tf.scan(lambda a, c: a * 0.5 + c, {f:ab})
tf.scan(lambda a, c: tf.tanh(a + c), {f:ab}, initializer={f:b})
tf.scan(lambda a, c: (a[0] + c, a[1] * 0.5), {f:ab}, initializer=({f:b}, {f:}))
tf.scan(lambda a, c: tf.tanh(a @ {f:bb} + c), {f:abb}, reverse={flag})
tf.foldl(lambda a, c: a + ({fun:c:same,row})(c), {f:ab})
tf.foldr(lambda a, c: a * 0.5 + c, {f:ab})
tf.map_fn({fun:c:row}, {f:ab}, fn_output_signature=tf.float64)
tf.map_fn({fun:c:row,same}, {f:ab})
tf.map_fn(lambda c: c[0] + tf.reduce_sum(c[1]), ({f:ab}, {f:a}), fn_output_signature=tf.float64)
grad({fun:c}, {f})
grad({fun:c}, {f})
grad({fun:c}, {f}) * {f:~}
grad(lambda d: tf.sin(d) * grad(tf.square, d), {f:*})
tf.recompute_grad({fun:c})({f})
tf.function({fun:c})({f})
tf.custom_gradient(lambda c: (tf.tanh(c), lambda g: g * 2.0))({f})
tf.grad_pass_through(tf.round)({f})
tf.TensorArray(tf.float64, 2, element_shape={f:*}.shape).write(0, {f:*}).write(1, {f:*}).stack()
tf.TensorArray(tf.float64, 0, dynamic_size=True).unstack({f:ab}).gather([0])
tf.TensorArray(tf.float64, 2, infer_shape=False).unstack({f:2ab}).concat()
tf.while_loop(lambda i, a: i < 3, lambda i, a: (i + 1, a.write(i, {f} * tf.cast(i, tf.float64))), (0,
    tf.TensorArray(tf.float64, 3)))[1].stack()
tf.debugging.assert_all_finite({f}, 'no number')
{w}.assign({f:*})
{w}.assign_add(0.1 * {f:*})
{w}.assign_sub(0.1 * {f:*})
{w}.assign_add(0.1 * tf.ones_like({w}) * tf.reduce_mean({f}))
{w}.assign_sub(0.1 * grad(lambda c: tf.reduce_sum(tf.square(c) * tf.reduce_mean({f})), {w} + 0.0))
{w:a}.assign(0.9 * {w:a} + 0.1 * tf.reduce_mean({f:ba}, 0))
{w:a}.scatter_nd_add([[0]], {f:1})
{w:ab}.scatter_nd_update([[0]], {f:1b})
{w:ab}.scatter_add(tf.IndexedSlices({f:cb}, {index:c:a}))
{w:ab}.scatter_update(tf.IndexedSlices({f:1b}, {index:1:a}))
{w:ab}.sparse_read({index:c:a})
{w:ab}.gather_nd({index:c1:a})
"""
