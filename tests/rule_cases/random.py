"""Cases of random ops. Numbers for a whole batch are read row by row, and so are drawn in pieces."""

import numpy as np
import tensorflow as tf

from tests.rule_cases.table import add, call

_KEY = [np.array([0x9E3779B97F4A7C15], np.uint64), np.array([0, 0xD1B54A32D192ED03], np.uint64)]


def _noisy(op_type, dtype, bounds, rows, x):
    key, counter = map(tf.constant, _KEY)
    names = {"dtype": dtype} if not bounds else {"minval": bounds[0], "maxval": bounds[1]}
    if op_type == "StatelessRandomUniformFullIntV2":
        names = {"dtype": dtype}
    numbers = getattr(tf.raw_ops, op_type)(shape=[rows, 9], key=key, counter=counter, alg=1, **names)
    return x + call("Cast", numbers, x.dtype)


def _bounds(dtype):
    return tf.constant(-9, dtype), tf.constant(99, dtype)


for _type, _dtypes in {
    "StatelessRandomNormalV2": (tf.float32, tf.float64),
    "StatelessRandomUniformV2": (tf.float32, tf.float64),
    "StatelessTruncatedNormalV2": (tf.float32, tf.float64),
    "StatelessRandomUniformFullIntV2": (tf.int32, tf.uint64),
    "StatelessRandomUniformIntV2": (tf.int32, tf.int64),
}.items():
    for _dtype in _dtypes:

        def _case(rows, x, op_type=_type, dtype=_dtype):
            bounds = _bounds(dtype) if op_type == "StatelessRandomUniformIntV2" else ()
            return _noisy(op_type, dtype, bounds, rows, x)

        add(_type, _case, ["b9"], answered=False)
