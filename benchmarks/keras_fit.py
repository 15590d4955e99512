"""Keras' `fit` as its users compare it: the plain model, and the ways to run it on several devices.

`python -m benchmarks --modes fit` measures each contestant in a process of its own. This command compares compiling:

python -m benchmarks.keras_fit [--kind gpu --memory-mb 12000] [--devices 2] [--network transformer] [--seconds 8]

Where a GPU is, Keras compiles a plain model with XLA by default. Printed are the first batch, which has tracing and
compiling in it, and the milliseconds of a batch after it, as multiples of those of the plain model by default.

Nothing here imports TensorFlow before a contestant does: one of them is Keras on JAX.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from benchmarks import networks
from benchmarks.workloads import OPTIMIZERS, Workload, data

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
WAYS: dict[str, tuple[str, Any]] = {  # who fits, and how it is compiled
    "plain, by default": ("plain", "auto"),
    "plain, no XLA": ("plain", False),
    "wrapped, by default": ("graphsplit", "auto"),
    "wrapped, no XLA": ("graphsplit", False),
    "wrapped, XLA": ("graphsplit", True),
}
_TURN_S, _FEWEST = 0.5, 3


@dataclass(frozen=True)
class Fit:
    """A compiled model that can be fitted.

    Attributes:
      model: it.
      batches: what it is fitted to, without an end.
      within: makes the context of each call of `fit`.
    """

    model: Any
    batches: Any
    within: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext

    def first_call(self) -> tuple[dict[str, float], Any]:
        """Fit to the first batch, for which everything is traced and compiled; return the seconds and the loss."""
        seconds, loss = self.fitted(1)
        return {"total": seconds}, np.asarray(loss)

    def seconds(self, batches: int) -> float:
        """Return how long it takes to fit to so many batches more."""
        return self.fitted(batches)[0]

    def fitted(self, batches: int) -> tuple[float, float]:
        """Fit to so many batches; return the seconds that it took and the loss."""
        begun = time.perf_counter()
        with self.within():
            history = self.model.fit(self.batches, epochs=1, steps_per_epoch=batches, verbose=0, shuffle=False)
        return time.perf_counter() - begun, history.history["loss"][0]

    def describe(self) -> dict[str, Any]:
        """Return nothing: what `fit` runs is no graph that contestants have in common."""
        return {}


def make(name: str, found: Workload, _: str, devices: list[str], compiled: Any = "auto") -> Fit:
    """Return a contestant of `fit`; its devices exist already."""
    return _MAKERS[name](found, devices, compiled)


def _compiled(found: Workload, compiled: Any, wrapped: Callable[[Any], Any] = lambda model: model) -> Any:
    """Return the network with the same weights in every process but JAX's, which draws others, compiled alike."""
    keras.utils.set_random_seed(0)
    model = wrapped(getattr(networks, found.network)(**found.options))
    name, options = OPTIMIZERS[found.optimizer]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(getattr(keras.optimizers, name)(**options), loss, jit_compile=compiled)
    return model


def _dataset(found: Workload) -> Any:
    import tensorflow as tf

    rows = tf.data.Dataset.from_tensor_slices(data(found, found.batch)).repeat()
    return rows.batch(found.batch, drop_remainder=True).prefetch(2)


def _on(device: str) -> Callable[[], AbstractContextManager[Any]]:
    import tensorflow as tf

    return lambda: tf.device(device)


def _plain(found: Workload, devices: list[str], compiled: Any) -> Fit:
    within = _on(devices[0])
    with within():
        return Fit(_compiled(found, compiled), _dataset(found), within)


def _graphsplit(found: Workload, devices: list[str], compiled: Any) -> Fit:
    import graphsplit as gs

    within = _on(devices[0])
    with within():
        model = _compiled(found, compiled, lambda model: gs.multi_gpu_model(model, gpus=devices))
    return Fit(model, _dataset(found), within)


def _mirrored(found: Workload, devices: list[str], compiled: Any) -> Fit:
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(devices).scope():
        return Fit(_compiled(found, compiled), _dataset(found))


def _towers(found: Workload, devices: list[str], compiled: Any) -> Fit:
    """A `train_step` that somebody wrote: the rows of each device under `tf.device`, gradients averaged."""
    import tensorflow as tf

    class Towers(keras.Model):
        def __init__(self, network: Any):
            super().__init__()
            self.network = network

        def call(self, x: Any, training: bool = False) -> Any:
            return self.network(x, training=training)

        def train_step(self, batch: Any) -> dict[str, Any]:
            losses, towers = [], []
            for device, x, y in zip(devices, *[tf.split(part, len(devices)) for part in batch], strict=True):
                with tf.device(device):
                    with tf.GradientTape() as tape:
                        loss = self.compute_loss(x, y, self(x, training=True))
                    towers.append(tape.gradient(loss, self.trainable_variables))
                losses.append(loss)
            gradients = [tf.add_n(own) / len(devices) for own in zip(*towers, strict=True)]
            self.optimizer.apply(gradients, self.trainable_variables)
            tracked = next(metric for metric in self.metrics if metric.name == "loss")
            tracked.update_state(tf.add_n(losses) / len(devices))
            return {"loss": tracked.result()}

    return Fit(_compiled(found, compiled, Towers), _dataset(found))


def _jax(found: Workload, devices: list[str], compiled: Any) -> Fit:
    """Keras on JAX, which cuts each batch along its rows and lets XLA sum the gradients."""
    assert keras.backend.backend() == "jax"
    assert len(keras.distribution.list_devices("cpu")) == len(devices)
    keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
    return Fit(_compiled(found, compiled), _again_and_again(data(found, found.batch)))


def _again_and_again(batch: Any) -> Iterator[Any]:
    while True:
        yield batch


_MAKERS = {"plain": _plain, "towers": _towers, "mirrored": _mirrored, "graphsplit": _graphsplit, "jax": _jax}


def main() -> None:
    """Measure and print."""
    from benchmarks.gpus import make_devices

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
    fits = {way: make(WAYS[way][0], found, "fit", devices, WAYS[way][1]) for way in ways}
    for way, fit in fits.items():
        seconds, loss = fit.fitted(1)
        print(f"{options.network}, {way}: first batch {seconds:.2f} s, loss {loss:.5f}", flush=True)
    fastest = min(fit.seconds(2) / 2 for fit in fits.values())
    count = 2 if options.small else max(4, round(_TURN_S / fastest))
    batches: dict[str, list[float]] = {way: [] for way in ways}
    end = time.perf_counter() + options.seconds
    while len(batches[ways[0]]) < _FEWEST or time.perf_counter() < end:
        for way, fit in fits.items():
            batches[way].append(fit.seconds(count) / count)
    for way, own in batches.items():
        ratio = statistics.median(a / b for a, b in zip(own, batches[ways[0]], strict=True))
        print(
            f"{options.network}, {way}: {1e3 * statistics.median(own):.2f} ms a batch, {ratio:.2f} x {ways[0]}; ",
            end="",
        )
        print(f"{len(own)} turns of {count}", flush=True)


if __name__ == "__main__":
    main()
