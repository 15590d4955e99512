"""How close a pipeline comes to its ceiling: two equal stages on two devices of one core each, against one device.

python -m benchmarks.pipelines [--schedules gpipe,1f1b,zero-bubble] [--counts 2,4,8] [--rounds 5] [--cut]

With `--cut` the stages are not given by `on_device` but cut automatically.

The ceiling of `S` stages and `M` micro-batches is `(M + S - 1) / M` of an `S`-th of one device's step. Printed is the
step as a multiple of one device's, and of the ceiling: medians over interleaved rounds, all in one process. It needs
two idle cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import graphsplit as gs

_STAGES, _LAYERS, _WIDTH = 2, 6, 512


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="gpipe,1f1b,zero-bubble")
    parser.add_argument("--counts", default="2,4,8")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cut", action="store_true", help="stages that are cut automatically")
    options = parser.parse_args()
    names = gs.use_logical_devices(_STAGES, threads_per_device=1)
    steps: dict[tuple[str, int], Callable[[], Any]] = {("one device", 1): step(names, options.rows, None, 1)}
    for kind in options.schedules.split(","):
        for count in map(int, options.counts.split(",")):
            steps[kind, count] = step(names, options.rows, kind, count, options.cut)
    seconds = _times(steps, options.rounds)
    whole = seconds["one device", 1]
    print(f"{_STAGES} stages of {_LAYERS} layers of width {_WIDTH}, {options.rows} rows: {whole * 1e3:.0f} ms on one")
    for (kind, count), took in list(seconds.items())[1:]:
        part, ceiling = took / whole, (count + _STAGES - 1) / count / _STAGES
        print(f"  {kind:<12} {count:>3} micro-batches: {part:.3f} of it, {part / ceiling:.2f} x the ceiling")


def step(names: Any, rows: int, schedule: str | None, count: int, cut: bool = False) -> Callable[[], Any]:
    """Return a training step of the pipeline, whose stages are given or cut; on one device if there is no schedule."""
    import tensorflow as tf

    weights = [[tf.Variable(tf.random.normal((_WIDTH, _WIDTH)) / _WIDTH**0.5) for _ in range(_LAYERS)] for _ in names]

    def stage(own: list[Any]) -> Callable[[Any], Any]:
        def run(h: Any) -> Any:
            for w in own:
                h = tf.tanh(h @ w)
            return h

        return run

    parts: list[Any] = [stage(own) for own in weights]
    if schedule is not None and not cut:
        parts = [gs.on_device(part, name) for part, name in zip(parts, names, strict=True)]
    variables = [w for own in weights for w in own]
    x = tf.random.normal((rows, _WIDTH))

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for part in parts:
                h = part(h)
            loss = tf.reduce_mean(h**2)
        for w, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            w.assign_sub(1e-3 * gradient)
        return loss

    if schedule is not None and cut:
        made = gs.parallelize(train, devices=names, stages=_STAGES, micro_batches=count, schedule=schedule)
    else:
        made = gs.parallelize(train, devices=names[:1], micro_batches=count, schedule=schedule)
    return lambda: made(x)


def _times(steps: dict[tuple[str, int], Callable[[], Any]], rounds: int) -> dict[tuple[str, int], float]:
    found: dict[tuple[str, int], list[float]] = {key: [] for key in steps}
    for number in range(rounds + 1):  # the first one prepares
        for key, run in steps.items():
            start = time.perf_counter()
            run().numpy()
            if number:
                found[key].append(time.perf_counter() - start)
    return {key: statistics.median(seconds) for key, seconds in found.items()}


if __name__ == "__main__":
    main()
