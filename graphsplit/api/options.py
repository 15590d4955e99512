"""The options of `parallelize`, and what can be checked of them before TensorFlow starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphsplit.api.argument_splitting import Split
from graphsplit.core.devices import canonical_name, resolve_devices
from graphsplit.core.errors import ArgumentError

DevicesLike = int | str | Sequence[str] | None


@dataclass(frozen=True)
class Options:
    """The options of `parallelize`, checked as far as they can be without starting TensorFlow."""

    devices: DevicesLike = None
    split: Split = 0
    home: str | None = None
    weights: tuple[float, ...] | None = None
    strict: bool = False
    random: str = "exact"
    reduce_retracing: bool = False


def check_devices(options: Options) -> None:
    """Check what can be checked before TensorFlow starts: numbers and spellings, not existence."""
    devices, home = options.devices, options.home
    if isinstance(devices, (str, tuple)):
        names = [devices] if isinstance(devices, str) else list(devices)
        canonical = [canonical_name(name) for name in names]
        if not canonical or len(set(canonical)) != len(canonical):
            resolve_devices(names)
    elif devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
        resolve_devices(devices)
    if home is not None:
        canonical_name(home, "home")


def check_weights(options: Options) -> None:
    """Check shares of the batch against each other, and against the devices if those are listed."""
    weights, devices = options.weights, options.devices
    if weights is None:
        return
    if not all(isinstance(w, (int, float)) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise ArgumentError(f"weights={list(weights)}: weights are numbers of at least 0, and not all of them 0.")
    count = devices if isinstance(devices, int) else len(devices) if isinstance(devices, tuple) else len(weights)
    if count != len(weights):
        raise ArgumentError(weights_message(weights, count))


def weights_message(weights: Sequence[float], count: int) -> str:
    """Say that there are other numbers of weights and devices."""
    return f"weights={list(weights)} has {len(weights)} entries for {count} devices; give one for each device."
