"""What recomputing saves and costs: memory and time of a training step on one device, as multiples of the plain step's.

python -m benchmarks.recomputation [--models transformer,resnet50] [--rounds 5] [--small]

Beside `recompute="blocks"` stands `tf.recompute_grad` written by hand around each block of the transformer. Memory is
measured as `benchmarks.microbatches` does; time is that of steps in another process, in turns, the median over rounds.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.microbatches import GIVEN_BACK, peak_of, times_of
from benchmarks.processes import in_a_process

WAYS = {"transformer": ("plain", "by hand", "blocks", "0.5"), "resnet50": ("plain", "blocks", "0.5")}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(WAYS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--small", action="store_true", help="small networks, to see that everything works")
    options = parser.parse_args()
    for model in options.models.split(","):
        show(model, options.rounds, options.small)


def show(model: str, rounds: int, small: bool) -> None:
    """Measure a model and print a line for each way of recomputing."""
    seconds = in_a_process(_times, model, rounds, small)
    print(model)
    plain = 0
    for way in WAYS[model]:
        peak, loss = in_a_process(_memory, model, way, small, environment=GIVEN_BACK)
        plain, took = plain or peak, seconds[way] / seconds["plain"]
        print(
            f"  {way:>8}: peak {peak / 1e6:8.1f} MB = {peak / plain:.3f}; time {took:.3f}; loss {loss:.6f}", flush=True
        )


def _times(model: str, rounds: int, small: bool) -> dict[str, float]:
    return times_of({way: training_step(model, way, small) for way in WAYS[model]}, rounds)


def _memory(model: str, way: str, small: bool) -> tuple[int, float]:
    return peak_of(*training_step(model, way, small))


def training_step(model: str, way: str, small: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return a training step on one device of one thread that recomputes in this way, and its arguments."""
    import keras
    import tensorflow as tf

    import graphsplit as gs

    [device] = gs.use_logical_devices(1, threads_per_device=1)
    keras.utils.set_random_seed(1)
    network, x, y, variables = {"transformer": _transformer, "resnet50": _resnet50}[model](way == "by hand", small)
    optimizer = keras.optimizers.SGD(1e-3)
    optimizer.build(variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, network(x)))
        optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    recompute = {"blocks": "blocks", "0.5": 0.5}.get(way)
    return gs.parallelize(step, devices=[device], recompute=recompute), (x, y)


def _transformer(by_hand: bool, small: bool) -> Any:
    import tensorflow as tf
    from keras import layers

    count, width, tokens, rows, words, heads = (2, 32, 64, 4, 64, 4) if small else (12, 256, 256, 8, 256, 8)
    inner = tf.zeros((1, tokens, width))

    def block() -> tuple[Any, list[Any]]:
        norm, other = layers.LayerNormalization(), layers.LayerNormalization()
        attention = layers.MultiHeadAttention(heads, width // heads)
        up, down = layers.Dense(4 * width, "gelu"), layers.Dense(width)

        def call(x: Any) -> Any:
            h = norm(x)
            x = x + attention(h, h)
            return x + down(up(other(x)))

        call(inner)
        own = [v for layer in (norm, attention, other, up, down) for v in layer.trainable_variables]
        return call, own

    embedding, head = layers.Embedding(words, width), layers.Dense(words)
    blocks = [block() for _ in range(count)]
    head(embedding(tf.zeros((1, tokens), tf.int32)))
    variables = [v for own in (embedding.variables, *[own for _, own in blocks], head.variables) for v in own]

    def network(x: Any) -> Any:
        x = embedding(x)
        for call, _ in blocks:
            x = tf.recompute_grad(call)(x) if by_hand else call(x)
        return head(x)

    x, y = (tf.random.uniform((rows, tokens), 0, words, tf.int32, seed) for seed in (1, 2))
    return network, x, y, variables


def _resnet50(_: bool, small: bool) -> Any:
    import keras
    import tensorflow as tf

    side, rows = (32, 2) if small else (128, 8)
    network = keras.applications.ResNet50(
        weights=None, input_shape=(side, side, 3), classes=10, classifier_activation=None
    )
    x, y = tf.random.normal((rows, side, side, 3)), tf.random.uniform((rows,), 0, 10, tf.int32)
    return lambda x: network(x, training=True), x, y, network.trainable_variables


if __name__ == "__main__":
    main()
