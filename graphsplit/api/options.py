"""The options of `parallelize`, and what can be checked of them before TensorFlow starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphsplit.api.argument_splitting import Split
from graphsplit.api.automatic_plans import Automatic
from graphsplit.core.devices import canonical_name, resolve_devices
from graphsplit.core.errors import ArgumentError
from graphsplit.planning.automatic_stages import Beginnings
from graphsplit.planning.schedules import KINDS

DevicesLike = int | str | Sequence[str] | None


@dataclass(frozen=True)
class Options:
    """The options of `parallelize`, checked as far as they can be without starting TensorFlow.

    Attributes:
      devices_argument: how the user calls `devices`, for messages: `on_device` and models have other names for it.
    """

    devices: DevicesLike = None
    split: Split = 0
    home: str | None = None
    weights: tuple[float, ...] | None = None
    strict: bool | float = False
    random: str = "exact"
    reduce_retracing: bool = False
    micro_batches: int = 1
    schedule: str | None = None
    stages: int | Beginnings | None = None
    jit_compile: bool | str = False
    bucket_bytes: int | None = None
    automatic: Automatic | None = None
    devices_argument: str = "devices"


def checked_options(
    devices: DevicesLike,
    split: Split,
    home: str | None,
    weights: Sequence[float] | None,
    strict: bool | float,
    random: str,
    reduce_retracing: bool,
    micro_batches: int,
    schedule: str | None,
    stages: int | Beginnings | None,
    jit_compile: bool | str,
    bucket_bytes: int | None,
) -> Options:
    """Return the options as given to `parallelize`; see there.

    Raises:
      ArgumentError: for an option that cannot be meant, whatever the function is.
    """
    if random not in ("exact", "independent"):
        raise ArgumentError(f"random={random!r} is not known; choose 'exact' or 'independent'.")
    check_strict(strict)
    check_flag("reduce_retracing", reduce_retracing)
    check_jit_compile(jit_compile)
    check_micro_batches(micro_batches)
    check_schedule(schedule, random)
    check_stages_asked(stages, random)
    check_bucket_bytes(bucket_bytes)
    if isinstance(devices, list):
        devices = tuple(devices)
    stages = int(stages) if isinstance(stages, np.integer) else stages
    shares = _shares(weights)
    options = Options(
        devices,
        split,
        home,
        shares,
        strict,
        random,
        reduce_retracing,
        int(micro_batches),
        schedule,
        stages,
        jit_compile,
        None if bucket_bytes is None else int(bucket_bytes),
    )
    check_devices(options)
    check_weights(options)
    return options


def check_flag(name: str, value: object) -> None:
    """Raise `ArgumentError` unless an option is True or False: `"no"` would count as True."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is True or False, got {value!r}.")


def check_jit_compile(value: object) -> None:
    """Raise `ArgumentError` unless this says what XLA is to compile."""
    if not isinstance(value, bool) and value != "auto":
        raise ArgumentError(f"jit_compile is True, False, or 'auto' for what XLA can compile, got {value!r}.")


def check_micro_batches(count: object) -> None:
    """Raise `ArgumentError` unless each device can have so many shards."""
    if isinstance(count, bool) or not isinstance(count, (int, np.integer)) or count < 1:
        raise ArgumentError(
            f"micro_batches={count!r}: it is the number of parts, at least 1, that each device computes one after the "
            "other; 1 computes the rows of a device at once."
        )


def check_schedule(schedule: object, random: str = "exact") -> None:
    """Raise `ArgumentError` unless there is such a schedule, for shards that draw one device's numbers."""
    if schedule is None:
        return
    if schedule not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise ArgumentError(f"schedule={schedule!r} is not known; choose one of {known}, or None for no pipeline.")
    if random == "independent":
        raise ArgumentError(
            f"schedule={schedule!r} with random='independent': a pipeline has the numbers of one device, whatever its "
            "stages and micro-batches. Drop random."
        )


def check_stages_asked(stages: object, random: str = "exact") -> None:
    """Raise `ArgumentError` unless a function can be cut into so many stages, which draw one device's numbers."""
    if stages is None:
        return
    is_number = isinstance(stages, (int, np.integer)) and not isinstance(stages, bool)
    if not isinstance(stages, Beginnings) and not (is_number and int(stages) >= 1):  # type: ignore[call-overload]
        raise ArgumentError(
            f"stages={stages!r}: it is the number of parts, at least 1, into which the function is cut, each with "
            "devices of its own; None leaves it whole."
        )
    if random == "independent":
        raise ArgumentError(
            f"stages={stages} with random='independent': stages have the numbers of one device, whatever they are and "
            "however many. Drop random."
        )


def check_bucket_bytes(size: object) -> None:
    """Raise `ArgumentError` unless this is a number of bytes, or None."""
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 0:
        raise ArgumentError(
            f"bucket_bytes={size!r}: it is the number of bytes, at least 0, that small gradients travelling as one may "
            "have together; 0 lets each travel alone, None chooses."
        )


def check_strict(strict: object) -> None:
    """Raise `ArgumentError` unless `strict` is True, False or a share."""
    if isinstance(strict, bool) or (_is_share(strict) and float(strict) <= 1):  # type: ignore[arg-type]
        return
    raise ArgumentError(f"strict is True, False, or the share of the work that may run at home, 0.1; got {strict!r}.")


def _shares(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    try:
        return None if weights is None else tuple(weights)
    except TypeError as error:
        raise ArgumentError(f"weights takes a number for each device, [3, 1], got {weights!r}.") from error


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
    if not all(_is_share(weight) for weight in weights) or not sum(weights) > 0:
        raise ArgumentError(f"weights={list(weights)}: weights are finite numbers of at least 0, not all of them 0.")
    if options.stages is not None:
        return  # weights are those of pipelines, which are known with the devices
    count = devices if isinstance(devices, int) else len(devices) if isinstance(devices, tuple) else len(weights)
    if count != len(weights):
        raise ArgumentError(weights_message(weights, count))


def _is_share(weight: object) -> bool:
    """Return whether a weight is a number; numpy's are as good as Python's."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float, np.integer, np.floating)):
        return False
    return math.isfinite(weight) and bool(weight >= 0)


def weights_message(weights: Sequence[float], count: int, what: str = "device") -> str:
    """Say that there are other numbers of weights and devices, or pipelines."""
    plural = "" if count == 1 else "s"
    return f"weights={list(weights)} has {len(weights)} entries for {count} {what}{plural}; give one for each {what}."


def check_leaves_open(options: Options, automatic: Automatic | None) -> None:
    """Raise `ArgumentError` if what is to be chosen automatically is given."""
    if automatic is None:
        return
    given = {"micro_batches": options.micro_batches != 1, "stages": options.stages, "weights": options.weights}
    clashes = [f"{name}={getattr(options, name)!r}" for name, is_given in given.items() if is_given]
    if options.schedule is not None:
        clashes.append(f"schedule={options.schedule!r}")
    if options.home is not None:
        clashes.append(f"home={options.home!r}")
    if clashes:
        raise ArgumentError(
            f"plan='auto' with {', '.join(clashes)}: it chooses how many devices and micro-batches there are, without "
            "stages or unequal shares. Drop one or the other."
        )
