"""What compiling shards costs and gains: clusters, nodes, the time until a step can run, and steps.

python -m benchmarks.compiled [--counts 2,8,64] [--model resnet50] [--steps] [--rounds 5]

For each number of devices: how many calls a shard makes, nodes with and without them, and the time from function to
registered graph (trace, plan, emission, registration; XLA compiles later, when a step first runs). With `--steps` also
steps of a smaller network, as multiples of the plain one's: plain compiled, graphsplit, graphsplit compiled. XLA may
lose on CPUs: it does not use oneDNN's convolutions.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import graphsplit as gs
from benchmarks.timing import in_turns, medians, took


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="2,8,64")
    parser.add_argument("--model", choices=["resnet50", "dense"], default="resnet50")
    parser.add_argument("--statistics", action="store_true", help="train BatchNormalization, whose means need all rows")
    parser.add_argument("--steps", action="store_true", help="time steps too, on the first of the numbers of devices")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    counts = [int(count) for count in options.counts.split(",")]
    gs.use_logical_devices(max(counts))
    make = _resnet50 if options.model == "resnet50" else _dense
    for count in counts:
        _preparation(make, count, options.statistics)
    if options.steps:
        _steps(counts[0], options.rounds)


def _preparation(make: Callable[[bool, int], tuple[Any, Any]], count: int, normalizing: bool) -> None:
    seconds, nodes = {}, {}
    calls: Counter[str] = Counter()
    for compiled in (False, True):
        step, batch = make(normalizing, count)
        parallel = gs.parallelize(step, devices=count, jit_compile=compiled)
        start = time.process_time()
        _ = parallel._get(parallel._flatten(batch, {})[1]).executable
        seconds[compiled] = time.process_time() - start
        graph = parallel.graph_def(*batch)
        nodes[compiled] = len(graph.node)
        calls.update(node.name.rsplit("/", 2)[0] for node in graph.node if node.attr["_XlaMustCompile"].b)
    shards = [number for name, number in calls.items() if "/shard_" in name]
    print(
        f"{count:>3} devices: {max(shards)} compiled calls a shard; {nodes[False]} nodes -> {nodes[True]}; ready after "
        f"{seconds[False]:.1f} -> {seconds[True]:.1f} s of processor time"
    )


def _steps(count: int, rounds: int) -> None:
    import tensorflow as tf

    steps: dict[str, Callable[[], Any]] = {}
    for name in ("plain", "plain, compiled", f"{count} devices", f"{count} devices, compiled"):
        step, batch = _dense(False, 64)
        compiled = name.endswith("compiled")
        made: Any = tf.function(step, jit_compile=compiled or None)
        if "devices" in name:
            made = gs.parallelize(step, devices=count, jit_compile=compiled)
        steps[name] = lambda made=made, batch=batch: made(*batch)  # type: ignore[misc]
    for name, run in steps.items():
        if name.endswith("compiled"):
            print(f"  {name}: first step after {took(run).wall:.1f} s, XLA's compilation included")
    found = {name: medians(own).wall for name, own in in_turns(steps, rounds).items()}
    for name, taken in found.items():
        print(f"  {name}: {taken / found['plain']:.2f} x plain's step ({found['plain'] * 1e3:.1f} ms)")


def _resnet50(normalizing: bool, devices: int) -> tuple[Any, Any]:
    import keras
    import tensorflow as tf

    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=10)
    return _training(model, normalizing), (tf.zeros((devices, 64, 64, 3)), tf.zeros((devices, 10)))


def _dense(normalizing: bool, devices: int) -> tuple[Any, Any]:
    import keras
    import tensorflow as tf

    del normalizing  # it has no such layer
    layers = [keras.layers.Dense(256, "gelu") for _ in range(12)]
    return _training(keras.Sequential([keras.Input((256,)), *layers]), False), (
        tf.random.normal((8 * devices, 256)),
        tf.random.normal((8 * devices, 256)),
    )


def _training(model: Any, normalizing: bool) -> Callable[[Any, Any], Any]:
    import keras
    import tensorflow as tf

    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=normalizing) - y) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step


if __name__ == "__main__":
    main()
