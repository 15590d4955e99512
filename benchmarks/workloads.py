"""Workloads: which network at which size, in plain data that parent and worker processes share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

MODES = ("training", "forward")
FIT = "fit"  # a mode of its own: Keras' `fit` on batches, as its users run it
OPTIMIZERS = {
    "sgd": ("SGD", {"learning_rate": 1e-3, "momentum": 0.9}),
    "adam": ("Adam", {"learning_rate": 1e-3}),
}


@dataclass(frozen=True)
class Workload:
    """A network and its data.

    Attributes:
      network: the function of `networks` that makes it.
      batch: rows of a step's batch.
      inputs: how its data look: "points", "vectors", "images", "sequences", "tokens".
      options: arguments of the network.
      optimizer: name of the Keras optimizer.
      small: options that replace others in the small size, which tests and continuous integration run.
      modes: which steps are measured.
      fits: whether `fit` is, too.
    """

    network: str
    batch: int
    inputs: str
    options: dict[str, Any]
    optimizer: str = "sgd"
    small: dict[str, Any] | None = None
    modes: tuple[str, ...] = MODES
    fits: bool = False


_MLP = {"features": 256, "hidden": 512, "depth": 4}
_MLP_SMALL = {"features": 64, "hidden": 128, "depth": 3}
_TOKENS = {"words": 2000, "length": 64, "width": 128, "heads": 4, "blocks": 2}
_TOKENS_SMALL = {"words": 200, "length": 16, "width": 32, "heads": 2, "blocks": 1}

WORKLOADS = {
    "polyfit": Workload("polynomial", 128, "points", {}, "adam", {}, ("training",)),
    "mlp": Workload("perceptron", 256, "vectors", _MLP, small=_MLP_SMALL, fits=True),
    "mlp_bn": Workload("perceptron", 256, "vectors", {**_MLP, "normalized": True}, small=_MLP_SMALL),
    "mini_googlenet": Workload("mini_googlenet", 64, "images", {}, small={"width": 0.25}),
    "mini_googlenet_bn": Workload("mini_googlenet", 64, "images", {"normalized": True}, small={"width": 0.25}),
    "resnet50": Workload("resnet50", 16, "images", {"side": 64}, small={"side": 32}, fits=True),
    "resnet50_without_bn": Workload(
        "resnet50", 16, "images", {"side": 64, "normalized": False}, small={"side": 32}, modes=("training",)
    ),
    "resnet50_adam": Workload(
        "resnet50", 16, "images", {"side": 64}, "adam", {"side": 32}, modes=()
    ),  # for `benchmarks.layouts`
    "large_table": Workload(
        "transformer", 32, "tokens", {**_TOKENS, "words": 200_000, "blocks": 1}, "adam", _TOKENS_SMALL, modes=()
    ),  # likewise
    "lstm": Workload(
        "lstm", 64, "sequences", {"steps": 32, "features": 64, "units": 128}, "adam", {"steps": 8, "units": 32}
    ),
    "transformer": Workload("transformer", 32, "tokens", _TOKENS, "adam", _TOKENS_SMALL, fits=True),
}


def workload(name: str, small: bool, batch: int | None = None) -> Workload:
    """Return a workload in its full or its small size, with another batch if asked."""
    found = WORKLOADS[name]
    options = {**found.options, **(found.small or {})} if small else found.options
    return Workload(found.network, batch or found.batch, found.inputs, options, found.optimizer, {}, found.modes)


def data(found: Workload, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return `rows` rows of inputs and labels, the same ones every time."""
    random, options = np.random.default_rng(0), found.options
    labels = random.integers(0, 10, rows).astype(np.int32)
    if found.inputs == "points":
        x = random.uniform(-10, 10, rows).astype(np.float32)
        return x, (5 * x**2 + 3).astype(np.float32)
    if found.inputs == "tokens":
        return random.integers(0, options["words"], (rows, options["length"])).astype(np.int32), labels
    side = options.get("side", 32)
    shape: tuple[int, ...] = {
        "vectors": (options.get("features", 0),),
        "images": (side, side, 3),
        "sequences": (options.get("steps", 0), options.get("features", 0)),
    }[found.inputs]
    return random.normal(size=(rows, *shape)).astype(np.float32), labels
