"""How equal the stages are into which networks are cut, and what they send each other.

python -m benchmarks.stages [--networks transformer,resnet50,unet] [--stages 2,4,8] [--small]

Printed is, for the plan of a training step with 8 micro-batches under 1F1B, the time of the slowest stage as a multiple
of the mean, by the plan's own costs, and the bytes that are sent between stages, forward and backward, also as a share
of all that is computed. Nothing runs.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import graphsplit as gs


def main() -> None:
    """Plan and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", default="transformer,resnet50,unet")
    parser.add_argument("--stages", default="2,4,8")
    parser.add_argument("--small", action="store_true", help="small networks, to see that everything works")
    options = parser.parse_args()
    counts = [int(count) for count in options.stages.split(",")]
    gs.use_logical_devices(max(counts))
    for name in options.networks.split(","):
        model, x = _NETWORKS[name](options.small)
        for count in counts:
            show(name, model, x, count)


def show(name: str, model: Any, x: Any, count: int) -> None:
    """Plan a training step in so many stages and print a line."""
    import tensorflow as tf

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        for v, gradient in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
            v.assign_sub(0.1 * gradient)
        return loss

    begin = time.perf_counter()
    plan = gs.parallelize(step, devices=count, stages=count, micro_batches=8, schedule="1f1b").plan(x)
    took, cuts, program = time.perf_counter() - begin, plan.stage_starts, plan.program
    assert cuts is not None
    sent = sum(program.bytes(tensor) for stage in cuts.stages for tensor in stage.received)
    made = sum(sum(op.out_bytes) for op in plan.sharded_ops)
    print(
        f"{name:<12} {count} stages: slowest {cuts.balance:.3f} of the mean; {sent / 1e6:.1f} MB sent, "
        f"{100 * sent / made:.2f} % of what is computed; traced and planned in {took:.1f} s",
        flush=True,
    )


def _transformer(small: bool) -> tuple[Any, Any]:
    """Return 12 layers of width 256 and a batch of 8 x 512 tokens."""
    import keras
    import tensorflow as tf

    depth, width, tokens = (2, 16, 8) if small else (12, 256, 512)
    layers = keras.layers
    given = h = keras.Input((tokens, width))
    for _ in range(depth):
        normal = layers.LayerNormalization()(h)
        h = h + layers.MultiHeadAttention(4, width // 4)(normal, normal)
        h = h + layers.Dense(width)(layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(h)))
    out = layers.Dense(10)(layers.GlobalAveragePooling1D()(h))
    return keras.Model(given, out), tf.ones((8, tokens, width))


def _unet(small: bool) -> tuple[Any, Any]:
    """Return four levels with skips, BatchNormalization behind each convolution, and 16 images of 64 x 64."""
    import keras
    import tensorflow as tf

    size, width, depth = (16, 4, 2) if small else (64, 16, 4)
    layers = keras.layers

    def block(h: Any, filters: int) -> Any:
        for _ in range(2):
            h = layers.Conv2D(filters, 3, padding="same", use_bias=False)(h)
            h = layers.ReLU()(layers.BatchNormalization()(h))
        return h

    given = h = keras.Input((size, size, 3))
    skips = []
    for level in range(depth):
        h = block(h, width * 2**level)
        skips.append(h)
        h = layers.MaxPool2D()(h)
    h = block(h, width * 2**depth)
    for level in reversed(range(depth)):
        h = layers.Conv2DTranspose(width * 2**level, 2, 2)(h)
        h = block(layers.Concatenate()([h, skips[level]]), width * 2**level)
    return keras.Model(given, layers.Conv2D(1, 1)(h)), tf.ones((16, size, size, 3))


def _resnet50(small: bool) -> tuple[Any, Any]:
    """Return ResNet50 and 16 images of 64 x 64."""
    import keras
    import tensorflow as tf

    shape = (32, 32, 3) if small else (64, 64, 3)
    return keras.applications.ResNet50(weights=None, input_shape=shape, classes=10), tf.ones((16, *shape))


_NETWORKS: dict[str, Callable[[bool], tuple[Any, Any]]] = {
    "transformer": _transformer,
    "resnet50": _resnet50,
    "unet": _unet,
}

if __name__ == "__main__":
    main()
