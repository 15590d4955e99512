"""Does packing pay? A step that adds vectors to its rows and sums their gradients: sent one by one, and as one.

python -m benchmarks.packing [--devices 8] [--vectors 32] [--rounds 9] [--buckets]

For vectors of several sizes it prints the step packed as a multiple of the step apart, the median over interleaved
rounds, and the same for processor time; with --buckets, for a training step of dense layers with biases and several
sizes of buckets (`tuning={"bucket_bytes": ...}`), as a multiple of the step with the usual size.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import graphsplit as gs
from benchmarks.timing import in_turns, ratios
from graphsplit.planning.costs.work import BUCKET_BYTES

_ENTRIES = (16, 256, 1024, 4096, 16384)
_ROWS_EACH, _STEPS = 2, 20
_WIDTH, _BUCKETS = 256, (0, 8_192, BUCKET_BYTES, 1 << 20)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--vectors", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--buckets", action="store_true", help="sizes of buckets")
    options = parser.parse_args()
    names = gs.use_logical_devices(options.devices, threads_per_device=1)
    if options.buckets:
        show_buckets(options.vectors, options.devices, options.rounds)
        return
    print(f"{options.vectors} vectors, {options.devices} devices: packed as a multiple of apart")
    for entries in _ENTRIES:
        found = in_turns(steps(entries, options.vectors, names), options.rounds, _STEPS)
        wall, processor = ratios(found["packed"], found["apart"])
        print(f"  {4 * entries:>6} bytes each: step {wall:.2f}, processor time {processor:.2f}")


def show_buckets(depth: int, devices: int, rounds: int) -> None:
    """Time the steps of all sizes of buckets side by side, and print."""
    import tensorflow as tf

    made, x = {}, tf.random.normal((4 * devices, _WIDTH))
    for size in _BUCKETS:
        made[size] = gs.parallelize(dense_step(depth), devices=devices, tuning={"bucket_bytes": size})
    found = in_turns({size: functools.partial(step, x) for size, step in made.items()}, rounds, _STEPS // 4)
    print(f"{depth} layers with biases of {4 * _WIDTH} bytes, {devices} devices: as a multiple of {BUCKET_BYTES} bytes")
    for size, step in made.items():
        (wall, processor), count = ratios(found[size], found[BUCKET_BYTES]), len(step.plan(x).buckets)
        print(f"  {size:>8} bytes, {count} buckets: step {wall:.2f}, processor time {processor:.2f}")


def dense_step(depth: int) -> Callable[[Any], Any]:
    """Return a training step of dense layers with biases."""
    import tensorflow as tf

    weights = [tf.Variable(tf.random.normal((_WIDTH, _WIDTH), stddev=_WIDTH**-0.5)) for _ in range(depth)]
    biases = [tf.Variable(tf.zeros(_WIDTH)) for _ in range(depth)]

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            for weight, bias in zip(weights, biases, strict=True):
                x = tf.tanh(tf.nn.bias_add(x @ weight, bias))
            loss = tf.reduce_sum(x)
        both = [*weights, *biases]
        for variable, gradient in zip(both, tape.gradient(loss, both), strict=True):
            variable.assign_sub(1e-3 * gradient)
        return loss

    return step


def steps(entries: int, vectors: int, devices: Sequence[str]) -> dict[str, Callable[[], Any]]:
    """Return the step with all vectors packed, whatever their size, and with none."""
    import tensorflow as tf

    from graphsplit.planning.communication import bucketing

    added = [tf.Variable(tf.zeros(entries)) for _ in range(vectors)]
    x = tf.random.normal((_ROWS_EACH * len(devices), entries))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            for vector in added:
                x = tf.tanh(x + vector)
            loss = tf.reduce_sum(x)
        for vector, gradient in zip(added, tape.gradient(loss, added), strict=True):
            vector.assign_sub(1e-3 * gradient)
        return loss

    made = {}
    for name, most in {"packed": 1 << 30, "apart": 0}.items():
        with mock.patch.object(bucketing, "SMALL_BYTES", most):
            parallel = gs.parallelize(step, devices=devices, tuning={"bucket_bytes": most})
            parallel(x)  # (the plan is made here)
        made[name] = functools.partial(parallel, x)
    return made


if __name__ == "__main__":
    main()
