"""The first example of the make_parallel article: add two vectors, half of them on each device.

python examples/vector_addition.py --size 16
"""

from __future__ import annotations

import argparse

import numpy as np
import tensorflow as tf
from machine import devices

import graphsplit as gs


def model(a: tf.Tensor, b: tf.Tensor) -> tf.Tensor:
    """Return the sum; nothing in here knows of devices."""
    return a + b


def main() -> None:
    """Add on one device and on two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--size", type=int, default=1_000_000)
    options = parser.parse_args()
    names = devices(options.devices)

    generator = np.random.default_rng(0)
    a, b = (tf.constant(generator.uniform(size=options.size).astype("float32")) for _ in range(2))
    c = gs.make_parallel(model, names, a=a, b=b)

    print(gs.parallelize(model, devices=names).plan(a, b))
    print("largest difference:", float(tf.reduce_max(tf.abs(c - model(a, b)))))


if __name__ == "__main__":
    main()
