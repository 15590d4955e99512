"""What micro-batches save: memory and time of a training step on one device, as multiples of the whole batch's.

python -m benchmarks.microbatches [--models transformer,mlp] [--counts 1,2,4,8] [--rounds 3] [--small]

Memory is the most that a process of its own holds during a step, less what it held before it: weights, slots and
arguments are there by then, activations, gradients and temporaries are not. The process gives every large block back
when it is freed, so that what counts is what is alive. Beside it stands what the plan says is alive at most. Time is
that of steps in another process, in turns, the median over rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
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
    parser.add_argument("--measure", choices=("memory", "time"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    counts = [int(count) for count in options.counts.split(",")]
    if options.measure:
        if options.measure == "memory":
            print(json.dumps(_memory(options.models, counts[0], options.small)))
        else:
            print(json.dumps(_times(options.models, counts, options.rounds, options.small)))
        return
    for model in options.models.split(","):
        show(model, counts, options.rounds, options.small)


def show(model: str, counts: list[int], rounds: int, small: bool) -> None:
    """Measure a model and print a line for each number of micro-batches."""
    seconds = _ask("time", model, counts, rounds, small, {})
    print(f"{model}, {(SMALL if small else SIZES)[model]}")
    whole = 0
    for count in counts:
        memory = _ask("memory", model, [count], rounds, small, GIVEN_BACK)
        peak, live, loss = (memory[key] for key in ("peak_bytes", "live_bytes", "loss"))
        whole, took = whole or peak, seconds[str(count)] / seconds[str(counts[0])]
        print(
            f"  {count:>3} micro-batches: peak {peak / 1e6:8.1f} MB = {peak / whole:.3f} of the whole batch's, "
            f"{live / 1e6:8.1f} MB predicted; time {took:.3f}; loss {loss:.6f}",
            flush=True,
        )


def _ask(
    measure: str, model: str, counts: list[int], rounds: int, small: bool, environment: dict[str, str]
) -> dict[str, Any]:
    options = ["--measure", measure, "--models", model, "--counts", ",".join(map(str, counts))]
    found: dict[str, Any] = asked(
        "benchmarks.microbatches", [*options, "--rounds", str(rounds), *(["--small"] if small else [])], environment
    )
    return found


def asked(module: str, options: Sequence[str], environment: Mapping[str, str]) -> Any:
    """Return what a benchmark prints last, as JSON, in a process of its own without GPUs.

    Args:
      module, options: of the process.
      environment: variables for it, beside those of this one.
    """
    command = [sys.executable, "-m", module, *options]
    own = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **environment}
    done = subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def _memory(model: str, count: int, small: bool) -> dict[str, Any]:
    """Return the most bytes that a step needs, those that its plan tells, and its loss."""
    step, arguments = training_step(model, count, small)
    plan = step.plan(*arguments)
    from graphsplit.planning.memory import live_bytes

    peak, loss = peak_of(step, arguments)
    return {"peak_bytes": peak, "live_bytes": max(live_bytes(plan).values()), "loss": loss}


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


def _times(model: str, counts: list[int], rounds: int, small: bool) -> dict[str, float]:
    """Return the median seconds of a step for each number of micro-batches, measured in turns."""
    return times_of({str(count): training_step(model, count, small) for count in counts}, rounds)


def times_of(steps: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]], rounds: int) -> dict[str, float]:
    """Return the median seconds of each step, measured in turns.

    Args:
      steps: and the arguments of each.
      rounds: how often each is measured.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):  # the first one prepares
        for name, (step, arguments) in steps.items():
            start = time.perf_counter()
            float(step(*arguments))
            if number:
                found[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def training_step(model: str, micro_batches: int, small: bool) -> tuple[Any, tuple[Any, ...]]:
    """Return a parallelized training step on one device of one thread, and its arguments."""
    import keras
    import tensorflow as tf

    import graphsplit as gs

    [device] = gs.use_logical_devices(1, threads_per_device=1)
    keras.utils.set_random_seed(1)
    size = (SMALL if small else SIZES)[model]
    network, x, y = _NETWORKS[model](size)
    optimizer = keras.optimizers.Adam(1e-3)
    optimizer.build(network.trainable_variables)
    cross_entropy = tf.nn.sparse_softmax_cross_entropy_with_logits

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(cross_entropy(y, network(x, training=True)))
        optimizer.apply(tape.gradient(loss, network.trainable_variables))
        return loss

    return gs.parallelize(step, devices=[device], micro_batches=micro_batches), (x, y)


def _transformer(size: Size) -> tuple[Any, Any, Any]:
    import tensorflow as tf
    from keras import Input, Model, layers

    words, heads = 256, 8
    ids = Input((size.tokens,), dtype="int32")
    x = layers.Embedding(words, size.width)(ids)
    for _ in range(size.layers):
        h = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, size.width // heads)(h, h)
        h = layers.Dense(4 * size.width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(size.width)(h)
    network = Model(ids, layers.Dense(words)(layers.LayerNormalization()(x)))
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
