"""Tensor parallelism: a small transformer whose layers are split over two devices, and its batch over two more.

A mesh arranges the devices in rows and columns. The rows of a batch are shared out over the axis "batch"; attention
heads, the hidden units of feed-forward layers and the words of the vocabulary over the axis "model". The losses are
those of one device.

python examples/large_layers.py --steps 20 --batch 2 --model 2
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from machine import devices

import graphsplit as gs

layers = keras.layers

LAYOUT = {
    **{
        f"*/{name}/kernel": (None, "model") for name in ("query", "key", "value")
    },  # [width, heads, size]: some heads each
    **{f"*/{name}/bias": ("model",) for name in ("query", "key", "value")},
    "*/attention_output/kernel": ("model",),  # [heads, size, width]: the sums over heads are added up
    "up_*/kernel": (None, "model"),
    "up_*/bias": ("model",),
    "down_*/kernel": ("model",),
    "words/embeddings": ("model",),  # some words each
    "head/kernel": (None, "model"),  # cross entropy is computed where the logits are
    "head/bias": ("model",),
    "*": "home",
}


def main() -> None:
    """Train on counting, by one device and by a mesh, and print both losses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--words", type=int, default=101, help="need not be a multiple of the devices")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rows", type=int, default=9, help="of a batch")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=2, help="devices along this axis")
    parser.add_argument("--model", type=int, default=2, help="devices along this axis")
    options = parser.parse_args()
    names = devices(options.batch * options.model)

    starts = np.random.default_rng(0).integers(0, options.words, (options.rows * options.steps, 1))
    sequences = (starts + np.arange(options.tokens + 1)) % options.words  # each word follows from the one before
    x, y = sequences[:, :-1], sequences[:, 1:]

    losses = {}
    for name in ("one device", "mesh"):
        keras.utils.set_random_seed(1)
        model = network(options)
        if name == "mesh":
            mesh = {"batch": options.batch, "model": options.model}
            model = gs.multi_gpu_model(model, gpus=names, mesh=mesh, variables=LAYOUT)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-2), loss)
        history = model.fit(x, y, batch_size=options.rows, epochs=3, shuffle=False, verbose=0)
        losses[name] = history.history["loss"]
        print(f"{name}: losses {', '.join(f'{loss:.6f}' for loss in losses[name])}")
    print(f"largest difference: {np.max(np.abs(np.subtract(*losses.values()))):.1e}")
    print(model.plan(x[: options.rows], y[: options.rows]))


def network(options: argparse.Namespace) -> keras.Model:
    """Return a causal transformer."""
    ids = keras.Input((options.tokens,), dtype="int32")
    h = layers.Embedding(options.words, options.width, name="words")(ids)
    for k in range(options.blocks):
        attention = layers.MultiHeadAttention(options.heads, options.width // options.heads, name=f"attention_{k}")
        normal = layers.LayerNormalization(name=f"before_attention_{k}")(h)
        h = h + attention(normal, normal, use_causal_mask=True)
        up = layers.Dense(4 * options.width, "gelu", name=f"up_{k}")(
            layers.LayerNormalization(name=f"before_up_{k}")(h)
        )
        h = h + layers.Dense(options.width, name=f"down_{k}")(up)
    return keras.Model(ids, layers.Dense(options.words, name="head")(h))


if __name__ == "__main__":
    main()
