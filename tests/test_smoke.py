import numpy as np
import tensorflow as tf

from tests.law import assert_law


def test_linear_regression():
    def make():
        w = tf.Variable(np.ones((5, 3)), dtype=tf.float64)

        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w - y) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    data = [(tf.random.normal((n, 5), dtype=tf.float64), tf.random.normal((n, 3), dtype=tf.float64)) for n in (33, 33)]
    assert_law(make, data, sharded=["MatMul"])
