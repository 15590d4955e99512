"""The polynomial fit of the make_parallel article as it was written for TensorFlow 1: only the imports are others.

python examples/polynomial_fit_tf1.py --steps 2000
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow.compat.v1 as tf

from graphsplit import make_parallel

tf.disable_eager_execution()


def model(x, y):
    """Return the loss of every point; the variable is the same one on every device."""
    w = tf.get_variable("w", shape=[3, 1])

    f = tf.stack([tf.square(x), x, tf.ones_like(x)], 1)
    yhat = tf.squeeze(tf.matmul(f, w), 1)

    return tf.square(yhat - y)


def generate_data():
    """Return 100 points of the parabola."""
    x_val = np.random.uniform(-10.0, 10.0, size=100)
    y_val = 5 * np.square(x_val) + 3
    return x_val, y_val


def main() -> None:
    """Train in a session; CPU devices are made by the session, GPUs are there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    options = parser.parse_args()
    np.random.seed(0)
    tf.set_random_seed(0)

    x = tf.placeholder(tf.float32)
    y = tf.placeholder(tf.float32)
    loss = make_parallel(model, options.devices, x=x, y=y)
    optimizer = tf.train.AdamOptimizer(0.1)
    train_op = optimizer.minimize(tf.reduce_mean(loss), colocate_gradients_with_ops=True)

    with tf.Session(config=tf.ConfigProto(device_count={"CPU": options.devices}, allow_soft_placement=True)) as sess:
        sess.run(tf.global_variables_initializer())
        for _ in range(options.steps):
            x_val, y_val = generate_data()
            sess.run(train_op, {x: x_val, y: y_val})
        (w,) = sess.run(tf.trainable_variables("w"))
    gradients = [op for op in tf.get_default_graph().get_operations() if op.name.startswith("gradients/tower_")]
    for i in range(options.devices):
        print(f"device {i}: {sum(op.device.endswith(f':{i}') for op in gradients)} gradient operations")
    print("w =", [f"{value:.2f}" for value in w[:, 0]])


if __name__ == "__main__":
    main()
