"""What micro-batches save: memory and time of a training step on one device, as multiples of the whole batch's.

python -m benchmarks.microbatches [--models transformer,mlp] [--counts 1,2,4,8] [--rounds 3] [--small]

Memory is the most that a process of its own holds during a step, less what it held before it: weights, slots and
arguments are there by then, activations, gradients and temporaries are not. The process gives every large block back
when it is freed, so that what counts is what is alive. Beside it stands the plan's peak of activations. Time is
that of steps in another process, in turns, the median over rounds.
"""

from __future__ import annotations

import argparse
import functools
import gc
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from benchmarks.processes import in_a_process

Name = TypeVar("Name")
# mallopt(3); and TensorFlow's own pool, which it has with oneDNN only, never gives anything back
GIVEN_BACK = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "TF_ENABLE_ONEDNN_OPTS": "0"}


class Size(NamedTuple):
    """Of a network and its batch."""

    layers: int
    width: int
    tokens: int
    rows: int


SIZES = {"transformer": Size(12, 256, 512, 8), "mlp": Size(24, 512, 1, 8192), "normalised": Size(24, 512, 1, 8192)}
SMALL = {"transformer": Size(2, 32, 64, 8), "mlp": Size(4, 64, 1, 256), "normalised": Size(4, 64, 1, 256)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SIZES))
    parser.add_argument("--counts", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--small", action="store_true", help="small networks, to see that everything works")
    options = parser.parse_args()
    counts = [int(count) for count in options.counts.split(",")]
    for model in options.models.split(","):
        show(model, counts, options.rounds, options.small)


def show(model: str, counts: list[int], rounds: int, small: bool) -> None:
    """Measure a model and print a line for each number of micro-batches."""
    seconds = in_a_process(_times, model, counts, rounds, small)
    print(f"{model}, {(SMALL if small else SIZES)[model]}")
    whole = 0
    for count in counts:
        peak, live, loss = in_a_process(_memory, model, count, small, environment=GIVEN_BACK)
        whole, took = whole or peak, seconds[count] / seconds[counts[0]]
        print(
            f"  {count:>3} micro-batches: peak {peak / 1e6:8.1f} MB = {peak / whole:.3f} of the whole batch's, "
            f"{live / 1e6:8.1f} MB predicted; time {took:.3f}; loss {loss:.6f}",
            flush=True,
        )


def _memory(model: str, count: int, small: bool) -> tuple[int, int, float]:
    """Return the most bytes that a step needs, those that its plan tells, and its loss."""
    from graphsplit.planning.device_bytes import live_bytes

    step, arguments = training_step(model, count, small)
    peak, loss = peak_of(step, arguments)
    return peak, max(live_bytes(step.plan(*arguments)).values()), loss


def peak_of(step: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[int, float]:
    """Return the most bytes that a step needs beside what is there before it, and its loss.

    Args:
      step: a training step. The process is one whose freed blocks are `GIVEN_BACK`.
      arguments: of the step.
    """
    step(*arguments)  # makes what stays: kernels, thread pools
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # proc(5): forget the peak
    before = _status("VmRSS")
    loss = float(step(*arguments))
    return _status("VmHWM") - before, loss


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _times(model: str, counts: list[int], rounds: int, small: bool) -> dict[int, float]:
    return times_of({count: training_step(model, count, small) for count in counts}, rounds)


def times_of(steps: Mapping[Name, tuple[Callable[..., Any], tuple[Any, ...]]], rounds: int) -> dict[Name, float]:
    """Return the median seconds of each step with its arguments, timed in turns."""
    from benchmarks.timing import in_turns, medians

    calls = {name: functools.partial(step, *arguments) for name, (step, arguments) in steps.items()}
    return {name: medians(found).wall for name, found in in_turns(calls, rounds).items()}


def training_step(model: str, micro_batches: int, small: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return a parallelized training step on one device of one thread, and its arguments."""
    import keras

    import graphsplit as gs
    from benchmarks.steps import Parts, single_device_step

    [device] = gs.use_logical_devices(1, threads_per_device=1)
    keras.utils.set_random_seed(1)
    size = (SMALL if small else SIZES)[model]
    network, x, y = _NETWORKS[model](size)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(network.trainable_variables)
    step = single_device_step(Parts(network, optimizer, regression=False), "training")
    return gs.parallelize(step, devices=[device], micro_batches=micro_batches), (x, y)


def _transformer(size: Size) -> tuple[Any, Any, Any]:
    import tensorflow as tf

    from benchmarks import networks

    words = 256
    network = networks.transformer(words, size.tokens, size.width, 8, size.layers, words, pooled=False)
    x, y = (tf.random.uniform((size.rows, size.tokens), 0, words, tf.int32, seed) for seed in (1, 2))
    return network, x, y


def _mlp(size: Size, normalised: bool = False) -> tuple[Any, Any, Any]:
    import tensorflow as tf
    from keras import Input, Sequential, layers

    hidden: list[Any] = []
    for _ in range(size.layers):
        hidden += [layers.Dense(size.width, "relu"), *([layers.BatchNormalization()] if normalised else [])]
    network = Sequential([Input((size.width,)), *hidden, layers.Dense(10)])
    return network, tf.random.normal((size.rows, size.width)), tf.random.uniform((size.rows,), 0, 10, tf.int32)


_NETWORKS: dict[str, Callable[[Size], tuple[Any, Any, Any]]] = {
    "transformer": _transformer,
    "mlp": _mlp,
    "normalised": lambda size: _mlp(size, True),
}


if __name__ == "__main__":
    main()
