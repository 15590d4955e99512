"""Steps over worker processes: `python -m benchmarks.workers [--workers 2,3] [--widths 128,256,512,1024]`.

A training step of dense layers (momentum, float32), on N worker processes of this machine, beside the same on N logical
devices of one process and under MultiWorkerMirroredStrategy of N processes. All are alive at the same time and take
turns. An operation has one thread everywhere. Copies between processes go over loopback, through the same cores; or,
with `--mbit 1000`, each through a link of its own (see `benchmarks.links`), as between machines.

Prints a table in Markdown: the median of a step, and in brackets the median of its ratio to the first way in the same
round. Ways that compute on the same rows have to agree on the loss of the first step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.links import linked, linked_workers, started
from graphsplit.core.addresses import free_ports

_WAYS = ("local", "workers", "workers, mirrored", "strategy")
_NAMES = {"local": "logical devices of one process", "strategy": "MultiWorkerMirroredStrategy"}
_DEPTH = 4
_WORKERS = "GRAPHSPLIT_BENCHMARK_WORKERS"  # the addresses of those that were started for a process


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2,3")
    parser.add_argument("--widths", default="128,256,512,1024")
    parser.add_argument("--rows", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--ways", default=";".join(_WAYS), help="with semicolons")
    parser.add_argument("--mbit", type=int, help="of a link for each process, see benchmarks.links; without, loopback")
    parser.add_argument("--serve", nargs=4, metavar=("WAY", "N", "WIDTH", "ROWS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        way, *numbers = options.serve
        serve(way, *map(int, numbers))
        return
    ways, counts = options.ways.split(";"), list(map(int, options.workers.split(",")))
    print(f"{options.rows} rows, {_DEPTH} layers, {options.rounds} rounds, {os.cpu_count()} cores\n")
    print("\n".join(head(ways)), flush=True)
    for count in counts:
        for width in map(int, options.widths.split(",")):
            print(row(count, width, compare(ways, count, width, options)), flush=True)


def head(ways: Sequence[str]) -> list[str]:
    """Return the first lines of the table."""
    names = ["processes", "weights", *[_NAMES.get(way, way) for way in ways]]
    return [f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]


def row(count: int, width: int, found: dict[str, list[float]]) -> str:
    """Return a line of the table: the steps of each way, in seconds, round by round."""
    first = next(iter(found.values()))
    cells = [str(count), f"{_DEPTH * width**2 * 4 / 1e6:.1f} MB"]
    for seconds in found.values():
        ratio = statistics.median(a / b for a, b in zip(seconds, first, strict=True))
        cells.append(f"{1e3 * statistics.median(seconds):.1f} ms ({ratio:.2f})")
    return f"| {' | '.join(cells)} |"


def compare(ways: Sequence[str], count: int, width: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Return what the steps of all ways take, in turns, in seconds."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    with contextlib.ExitStack() as stack:
        started = {way: stack.enter_context(processes(way, count, width, options)) for way in ways}
        check({way: step(way, running)[1] for way, running in started.items()})
        for number in range(options.rounds + 2):  # the first two prepare
            for way, running in started.items():
                seconds, _ = step(way, running)
                if number > 1:
                    found[way].append(seconds)
    return found


def check(losses: dict[str, float]) -> None:
    """End the program unless the ways that compute on the same rows agree. (A strategy's replicas have others.)"""
    alike = {way: loss for way, loss in losses.items() if way != "strategy"}
    if alike and max(alike.values()) - min(alike.values()) > 1e-5 * max(map(abs, alike.values())):
        raise SystemExit(f"The ways do not compute the same; the loss of the first step: {alike}.")


@contextlib.contextmanager
def processes(way: str, count: int, width: int, options: argparse.Namespace) -> Iterator[list[Any]]:
    """Start the processes that make a step together, and end them."""
    arguments = ["-m", "benchmarks.workers", "--serve", way, str(count), str(width), str(options.rows)]
    with contextlib.ExitStack() as stack:
        if way == "strategy":
            places = dict(stack.enter_context(linked(count, options.mbit)) if options.mbit else {})
            tasks = [f"{place}:2222" for place in places] or [f"127.0.0.1:{port}" for port in free_ports(count)]
            tasks_of = {"cluster": {"worker": tasks}}
            yield [
                stack.enter_context(
                    started(
                        name, arguments, {"TF_CONFIG": json.dumps({**tasks_of, "task": {"type": "worker", "index": k}})}
                    )
                )
                for k, name in enumerate(list(places.values()) or [None] * count)
            ]
            return
        workers = stack.enter_context(linked_workers(count, options.mbit)) if options.mbit and way != "local" else []
        yield [stack.enter_context(started(None, arguments, {_WORKERS: " ".join(workers)}))]


def step(way: str, running: Sequence[Any]) -> tuple[float, float]:
    """Let processes make a step together, and return what the slowest took, in seconds, and the loss."""
    for process in running:
        process.stdin.write("go\n")
        process.stdin.flush()
    lines = [process.stdout.readline() for process in running]
    if not all(lines):
        raise SystemExit(f"A process of {way!r} ended; --serve {' '.join(running[0].args[-4:])} says why.")
    answers = list(map(json.loads, lines))
    return max(seconds for seconds, _ in answers), answers[0][1]


def serve(way: str, count: int, width: int, rows: int) -> None:
    """Make a step for each line of the input."""
    with contextlib.ExitStack() as stack:
        run = None
        for _ in sys.stdin:
            run = run or prepared(stack, way, count, width, rows)
            begin = time.perf_counter()
            loss = float(run())
            print(json.dumps([time.perf_counter() - begin, loss]), flush=True)


def prepared(stack: contextlib.ExitStack, way: str, count: int, width: int, rows: int) -> Callable[[], Any]:
    """Return a step."""
    import graphsplit as gs

    if way.startswith("workers"):
        gs.connect(os.environ[_WORKERS].split() or stack.enter_context(gs.workers.LocalWorkers(count)))
    elif way == "local":
        gs.use_logical_devices(count, threads_per_device=1)
    import tensorflow as tf

    if way == "strategy":
        return with_strategy(width, rows // count)
    x = tf.random.stateless_normal((rows, width), [1, 2])
    layout = way.partition(", ")[2]
    with tf.device(gs.available_devices()[0] if layout else "CPU:0"):
        variables, train = network(width)
    if layout:
        gs.set_variable_layout(variables, layout)
    parallel = gs.parallelize(train)
    return lambda: parallel(x)


def network(width: int) -> tuple[list[Any], Callable[..., Any]]:
    """Return weights with their momenta, and a training step; `reduce` adds up gradients over processes."""
    import tensorflow as tf

    values = [tf.random.stateless_normal((width, width), [k, 3]) / width**0.5 for k in range(_DEPTH)]
    weights = [tf.Variable(value, name=f"weight_{k}") for k, value in enumerate(values)]
    momenta = [tf.Variable(tf.zeros_like(w), name=f"momentum_{k}") for k, w in enumerate(weights)]

    def train(x: Any, reduce: Callable[[list[Any]], list[Any]] = list) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h**2)
        for weight, momentum, gradient in zip(weights, momenta, reduce(tape.gradient(loss, weights)), strict=True):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(0.01 * momentum)
        return loss

    return [*weights, *momenta], train


def with_strategy(width: int, rows: int) -> Callable[[], Any]:
    """Return a step under MultiWorkerMirroredStrategy, each process with its rows."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        _, train = network(width)
    x = tf.random.stateless_normal((rows, width), [1, 2])

    def replica(x: Any) -> Any:
        context = tf.distribute.get_replica_context()
        return train(x, lambda gradients: context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients))

    @tf.function
    def run() -> Any:
        return strategy.run(replica, args=(x,))

    return lambda: strategy.experimental_local_results(run())[0]


if __name__ == "__main__":
    main()
