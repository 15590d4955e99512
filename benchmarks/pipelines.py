"""How close a pipeline comes to its ceiling: two equal stages on two devices of one core each, against one device.

python -m benchmarks.pipelines [--schedules gpipe,1f1b] [--counts 2,4,8] [--rounds 5] [--cut]

With `--cut` the stages are not given by `on_device` but cut automatically.

The ceiling of `S` stages and `M` micro-batches is `(M + S - 1) / M` of an `S`-th of one device's step. Printed is the
step as a multiple of one device's, and of the ceiling: medians over interleaved rounds, all in one process. It needs
two idle cores: on a virtual machine whose host takes them away meanwhile, pipelines suffer most, so rounds in which it
did are run again (at most as often once more) and counted.

A logical device is no core: TensorFlow runs the operations of all of them on one pool of threads, so two products that
do not wait for each other use both cores on "one device" too (a step that trains these layers' matrices kept 1.5 cores
busy there, and nothing could be twice as fast). So only the biases are trained: forward and backward are then chains of
products of one size, and one device is one core (a zero-bubble schedule has nothing to put off here). The cores that
each step kept busy are printed to show it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import graphsplit as gs
from benchmarks.environment import stolen_seconds
from benchmarks.timing import Took, in_turns, medians

_STAGES, _LAYERS, _WIDTH = 2, 6, 512
_STOLEN = 0.02


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", default="gpipe,1f1b")
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
    alone = seconds["one device", 1]
    print(f"{_STAGES} stages of {_LAYERS} layers of width {_WIDTH}, {options.rows} rows")
    print(f"  one device: {alone.wall * 1e3:.0f} ms ({alone.processor / alone.wall:.2f} cores busy)")
    for (kind, count), took in list(seconds.items())[1:]:
        part, ceiling = took.wall / alone.wall, (count + _STAGES - 1) / count / _STAGES
        print(
            f"  {kind:<12} {count:>3} micro-batches: {part:.3f} of it, {part / ceiling:.2f} x the ceiling "
            f"({took.processor / took.wall:.2f} cores busy)"
        )


def step(names: Any, rows: int, schedule: str | None, count: int, cut: bool = False) -> Callable[[], Any]:
    """Return a training step of the pipeline, whose stages are given or cut; on one device if there is no schedule."""
    import tensorflow as tf

    def layer() -> tuple[Any, Any]:
        return tf.Variable(tf.random.normal((_WIDTH, _WIDTH)) / _WIDTH**0.5), tf.Variable(tf.zeros(_WIDTH))

    layers = [[layer() for _ in range(_LAYERS)] for _ in names]

    def stage(own: list[Any]) -> Callable[[Any], Any]:
        def run(h: Any) -> Any:
            for w, b in own:
                h = tf.tanh(h @ w + b)
            return h

        return run

    parts: list[Any] = [stage(own) for own in layers]
    if schedule is not None and not cut:
        parts = [gs.on_device(part, name) for part, name in zip(parts, names, strict=True)]
    biases = [b for own in layers for _, b in own]
    x = tf.random.normal((rows, _WIDTH))

    def train(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for part in parts:
                h = part(h)
            loss = tf.reduce_mean(h**2)
        for b, gradient in zip(biases, tape.gradient(loss, biases), strict=True):
            b.assign_sub(1e-3 * gradient)
        return loss

    if schedule is not None and cut:
        made = gs.parallelize(train, devices=names, stages=_STAGES, micro_batches=count, schedule=schedule)
    else:
        made = gs.parallelize(train, devices=names[:1], micro_batches=count, schedule=schedule)
    return lambda: made(x)


def _times(steps: dict[tuple[str, int], Callable[[], Any]], rounds: int) -> dict[tuple[str, int], Took]:
    """Return what each step takes, medians over the undisturbed rounds."""
    in_turns(steps, 0)  # prepares
    calm: list[dict[tuple[str, int], list[Took]]] = []
    disturbed: list[dict[tuple[str, int], list[Took]]] = []
    while len(calm) < rounds and len(calm) + len(disturbed) < 2 * rounds:
        stolen, start = stolen_seconds(), time.perf_counter()
        times = in_turns(steps, 1, prepare=0)
        share = (stolen_seconds() - stolen) / (time.perf_counter() - start)
        (calm if share < _STOLEN else disturbed).append(times)
    if disturbed:
        print(f"{len(disturbed)} rounds left out: the host took more than {_STOLEN:.0%} of a core meanwhile")
    used = calm or disturbed
    return {key: medians([own for times in used for own in times[key]]) for key in steps}


if __name__ == "__main__":
    main()
