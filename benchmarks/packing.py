"""Does packing pay? A step that adds vectors to its rows and sums their gradients: sent one by one, and as one.

python -m benchmarks.packing [--devices 8] [--vectors 32] [--rounds 9] [--buckets]

For vectors of several sizes it prints the step packed as a multiple of the step apart, the median over interleaved
rounds, and the same for processor time; with --buckets, for a training step of dense layers with biases and several
sizes of buckets (`bucket_bytes`), as a multiple of the step with the usual size.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import graphsplit as gs
from graphsplit.costs.break_even import BUCKET_BYTES

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
        packed, apart = steps(entries, options.vectors, names)
        wall, processor = compare(packed, apart, options.rounds)
        print(f"  {4 * entries:>6} bytes each: step {wall:.2f}, processor time {processor:.2f}")


def show_buckets(depth: int, devices: int, rounds: int) -> None:
    """Time the steps of all sizes of buckets side by side, and print."""
    import tensorflow as tf

    made, x = {}, tf.random.normal((4 * devices, _WIDTH))
    for size in _BUCKETS:
        step = gs.parallelize(dense_step(depth), devices=devices, bucket_bytes=size)
        made[size] = (lambda step=step: [step(x)]), len(step.plan(x).buckets)
    found: dict[int, list[tuple[float, float]]] = {size: [] for size in made}
    for number in range(rounds + 1):  # the first one prepares
        seconds = {size: _seconds(step, _STEPS // 4) for size, (step, _) in made.items()}
        for size, (wall, processor) in seconds.items() if number else ():
            usual, usual_processor = seconds[BUCKET_BYTES]
            found[size].append((wall / usual, processor / usual_processor))
    print(f"{depth} layers with biases of {4 * _WIDTH} bytes, {devices} devices: as a multiple of {BUCKET_BYTES} bytes")
    for size, ratios in found.items():
        wall, processor = (statistics.median(each) for each in zip(*ratios, strict=True))
        print(f"  {size:>8} bytes, {made[size][1]} buckets: step {wall:.2f}, processor time {processor:.2f}")


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


def steps(entries: int, vectors: int, devices: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Return the step with its packs, and without."""
    import tensorflow as tf

    from graphsplit.api.calls.compilation import trace_and_plan
    from graphsplit.api.options import Options
    from graphsplit.core import structures
    from graphsplit.core.devices import canonical_name
    from graphsplit.planning.communication.collectives import bucketed, find_collectives
    from graphsplit.runtime.executable import make_executable

    devices = [canonical_name(name) for name in devices]
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

    _, call = structures.flatten(((x,), {}))
    leaf = structures.TensorLeaf(x.dtype, tuple(x.shape))
    arguments = structures.Branch(dict, ("x",), (leaf,))
    traced, plan = trace_and_plan(step, call, arguments, Options(), devices, devices[0])
    vectors_moved = [move for move in plan.moves if plan.program.shape(move.tensor) == (entries,)]
    kinds = ("broadcast", "reduce")
    buckets = [[move for move in vectors_moved if move.kind == kind] for kind in kinds]  # whatever their size
    apart = find_collectives(plan.program, plan.mesh, plan.home, plan.moves)
    ways = [tuple(bucketed(apart, own)) for own in (buckets, [])]
    made = [make_executable(traced, replace(plan, collectives=way), "step") for way in ways]
    return (lambda: made[0]([x])), (lambda: made[1]([x]))


def compare(packed: Callable[[], Any], apart: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """Return the medians of the ratios of step time and of processor time."""
    found: list[tuple[float, float]] = []
    for number in range(rounds + 1):  # the first one prepares
        (wall, processor), (other_wall, other_processor) = _seconds(packed), _seconds(apart)
        if number:
            found.append((wall / other_wall, processor / other_processor))
    walls, processors = zip(*found, strict=True)
    return statistics.median(walls), statistics.median(processors)


def _seconds(step: Callable[[], Any], steps: int = _STEPS) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(steps):
        result = step()
    result[0].numpy()
    return time.perf_counter() - wall, time.process_time() - processor


if __name__ == "__main__":
    main()
