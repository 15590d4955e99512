"""Where variables live, over processes: steps whose copies between devices go through a network, here loopback.

python -m benchmarks.layouts_over_workers [--workers 4] [--width 1024] [--depth 4] [--rows 32] [--optimizer sgd]
    [--mbit 1000]

The devices are the CPUs of so many worker processes, each with one thread for an operation; the weights (by default
16 MB) and the optimizer's slots live there by each layout, and the steps of all are interleaved. A step at home sends
`(N - 1) P` bytes through one process. Workers that share cores share the N optimizers of "mirrored", too, and over
loopback nothing is limited but those cores, so that what counts is how many bytes travel in all. With `--mbit` each
worker has a link of that many megabits a second (see `benchmarks.links`), as machines have, and the busiest one counts.
"In columns" every second weight is cut by its columns and the others by their rows: activations travel, and no weights.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.links import linked_workers
from benchmarks.timing import in_turns, medians, ratios

_WAYS: dict[str, dict[str, Any]] = {
    "home": {"layout": "home"},
    "mirrored": {"layout": "mirrored"},
    "sharded": {"layout": "sharded"},
    "sharded, not again": {"layout": "sharded", "reshard_after_forward": False},
    "auto": {},
    "in columns": {"layout": {"*weight_*[02468]": (None, "model"), "*weight_*[13579]": ("model", None)}},
}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in {"workers": 4, "width": 1024, "depth": 4, "rows": 32, "rounds": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--mbit", type=int, help="of the link of each worker; without it, loopback")
    options = parser.parse_args()
    import graphsplit as gs

    started = (
        linked_workers(options.workers, options.mbit) if options.mbit else gs.workers.LocalWorkers(options.workers)
    )
    with started as workers:
        devices = gs.connect(workers).devices
        network = Network(options.width, options.depth, options.rows, options.optimizer)
        show(devices, network, options.rounds, options.mbit)


@dataclass(frozen=True)
class Network:
    """Dense layers of a width, rows of a batch for them, and the optimizer of their weights."""

    width: int
    depth: int
    rows: int
    optimizer: str


def show(devices: Sequence[str], network: Network, rounds: int, mbit: int | None = None) -> None:
    """Time the steps of all layouts side by side, and print; with links, also how long the plan's bytes take on one."""
    import tensorflow as tf

    import graphsplit as gs
    from graphsplit.planning.device_bytes import traffic

    x = tf.random.stateless_normal((network.rows, network.width), [1, 2])
    steps = {}
    for name, how in _WAYS.items():
        variables, step = training(network, devices[0])
        mesh = {"mesh": {"model": len(devices)}} if isinstance(how.get("layout"), dict) else {}
        if how:
            gs.set_variable_layout(variables, devices=devices, **how, **mesh)
        parallel = gs.parallelize(step, devices=devices, variables=None if how else "auto", **mesh)
        begin = time.perf_counter()
        loss = float(parallel(x))
        print(f"{name:<18} first call {time.perf_counter() - begin:.1f} s, loss {loss:.6f}", flush=True)
        steps[name] = parallel
    found = in_turns({name: functools.partial(step, x) for name, step in steps.items()}, rounds, prepare=2)
    size = network.depth * network.width**2 * 4 / 1e6
    print(f"{len(devices)} workers, {size:.0f} MB of weights, {network.optimizer}: a step, and as a multiple of home's")
    for name, own in found.items():
        ratio = ratios(own, found["home"]).wall
        size = max(traffic(steps[name].plan(x)).busiest[1:])
        on_link = f"; {8e-3 * size / mbit:.0f} ms of them for the busiest link, by the plan" if mbit else ""
        print(
            f"  {name:<18} {1e3 * medians(own).wall:.0f} ms, {ratio:.2f}, {size / 1e6:.2f} MB{on_link}",
            flush=True,
        )


def training(network: Network, device: str) -> tuple[list[Any], Callable[[Any], Any]]:
    """Return weights on a device, with the optimizer's slots, and a training step."""
    import tensorflow as tf

    depth, width, slots = network.depth, network.width, {"sgd": "", "adam": "mv"}[network.optimizer]
    with tf.device(device):
        values = [tf.random.stateless_normal((width, width), [k, 3]) / width**0.5 for k in range(depth)]
        weights = [tf.Variable(value, name=f"weight_{k}") for k, value in enumerate(values)]
        held = [[tf.Variable(tf.zeros_like(w), name=f"{s}/weight_{k}") for s in slots] for k, w in enumerate(weights)]

    def update(weight: Any, own: Sequence[Any], gradient: Any) -> None:
        if own:
            own[0].assign_add(0.1 * (gradient - own[0]))
            own[1].assign_add(1e-3 * (gradient**2 - own[1]))
            gradient = own[0] / (tf.sqrt(own[1]) + 1e-7)
        weight.assign_sub(1e-3 * gradient)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            h = x
            for weight in weights:
                h = tf.tanh(h @ weight)
            loss = tf.reduce_mean(h**2)
        for weight, own, gradient in zip(weights, held, tape.gradient(loss, weights), strict=True):
            update(weight, own, gradient)
        return loss

    return [*weights, *[slot for own in held for slot in own]], step


if __name__ == "__main__":
    main()
