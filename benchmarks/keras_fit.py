"""`fit` as a Keras user compares it: the plain model and the wrapped one, with and without XLA, in turns.

python -m benchmarks.keras_fit [--kind gpu --memory-mb 12000] [--devices 2] [--network transformer] [--seconds 8]

Where a GPU is, Keras compiles a plain model with XLA by default. Printed are the first batch, which has tracing and
compiling in it, and the milliseconds of a batch after it, as multiples of those of the plain model by default.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import graphsplit as gs
from benchmarks.gpus import make_devices
from benchmarks.workloads import Workload

_TOKENS = {"words": 8192, "length": 256, "width": 512, "heads": 8, "blocks": 8}
NETWORKS = {
    "mlp": Workload("perceptron", 1024, "vectors", {"features": 1024, "hidden": 4096, "depth": 4}, "adam"),
    "transformer": Workload("transformer", 32, "tokens", _TOKENS, "adam"),
    "resnet50": Workload("resnet50", 64, "images", {"side": 224}),
}
SMALL = {
    "mlp": Workload("perceptron", 8, "vectors", {"features": 8, "hidden": 16, "depth": 2}, "adam"),
    "transformer": Workload("transformer", 4, "tokens", {**_TOKENS, "words": 64, "width": 16, "blocks": 1}, "adam"),
    "resnet50": Workload("resnet50", 4, "images", {"side": 32}),
}
WAYS = {  # how it is compiled, and whether it is wrapped
    "plain, by default": ("auto", False),
    "plain, no XLA": (False, False),
    "wrapped, by default": ("auto", True),
    "wrapped, no XLA": (False, True),
    "wrapped, XLA": (True, True),
}
_TURN_S, _FEWEST = 0.5, 3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--memory-mb", type=int, help="of each logical GPU")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--network", choices=NETWORKS, default="transformer")
    parser.add_argument("--ways", default=";".join(WAYS), help="their names, with ; between them; the first is 1")
    parser.add_argument("--seconds", type=float, default=8, help="for which batches are timed")
    parser.add_argument("--small", action="store_true", help="the small network, to see that everything works")
    options = parser.parse_args()
    devices = make_devices(options.devices, options.kind, options.memory_mb)
    found = (SMALL if options.small else NETWORKS)[options.network]
    ways = options.ways.split(";")
    fits = {way: fit_of(found, devices, *WAYS[way]) for way in ways}
    for way, fit in fits.items():
        seconds, loss = fit(1)
        print(f"{options.network}, {way}: first batch {seconds:.2f} s, loss {loss:.5f}", flush=True)
    fastest = min(fit(2)[0] / 2 for fit in fits.values())
    count = 2 if options.small else max(4, round(_TURN_S / fastest))
    batches: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + options.seconds
    while len(batches[ways[0]]) < _FEWEST or time.perf_counter() < end:
        for way, fit in fits.items():
            batches[way].append(fit(count)[0] / count)
    for way, own in batches.items():
        ratio = statistics.median(a / b for a, b in zip(own, batches[ways[0]], strict=True))
        print(
            f"{options.network}, {way}: {1e3 * statistics.median(own):.2f} ms a batch, {ratio:.2f} x {ways[0]}; ",
            end="",
        )
        print(f"{len(own)} turns of {count}", flush=True)


def fit_of(found: Workload, devices: list[str], compiled: Any, wrapped: bool) -> Callable[[int], tuple[float, float]]:
    """Return a function that fits some batches, and returns the seconds it took and the loss."""
    import keras
    import tensorflow as tf

    from benchmarks.steps import make_parts
    from benchmarks.workloads import data

    with tf.device(devices[0]):
        parts = make_parts(found)
        model = gs.multi_gpu_model(parts.model, gpus=devices) if wrapped else parts.model
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(parts.optimizer, loss, jit_compile=compiled)
    batches = tf.data.Dataset.from_tensors(data(found, found.batch)).repeat().prefetch(2)

    def fit(count: int) -> tuple[float, float]:
        begun = time.perf_counter()
        with tf.device(devices[0]):
            history = model.fit(batches, epochs=1, steps_per_epoch=count, verbose=0)
        return time.perf_counter() - begun, history.history["loss"][0]

    return fit


if __name__ == "__main__":
    main()
