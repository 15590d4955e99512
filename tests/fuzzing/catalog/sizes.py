"""Sizes that are computed of open ones: as lengths, and in values."""

TABLE = """
{f:ab}[:{length}]
{f:ab}[{length}:]
{f:ab}[:, :{length}]
tf.pad({f:ab}, [[0, {length} % 5], [0, {length} % 3]])
tf.tile({f:ab}, [{length} % 3, 1])
tf.repeat({f:ab}, {length} % 3, axis={int:0:1})
tf.zeros([{length} % 9, 2], tf.float64)
tf.cast(tf.range({length} % 20), tf.float64)
tf.where({length} > {int:0:6}, {f:*}, {f:*})
{f:*} * tf.cast({length}, tf.float64)
{f:*} * tf.cast(tf.size({f}), tf.float64)
tf.cond({length} > {length}, lambda: {f:ab}, lambda: {f:ab}[:{length}])
tf.one_hot(tf.range({length} % 9), {length} % 7, dtype=tf.float64)
tf.math.unsorted_segment_sum({f:ab}, {index:a:3}, {length} % 5 + 3)
tf.reshape({f:ab}[:{length}], [-1])
{f:ab}[::{int:2:4}]
{f:ab} + {f:ab}
tf.concat([{f:ab}, {f:cb}], 0)
{f:ab} @ {f:bc}
"""
