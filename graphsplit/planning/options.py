"""What users ask of a plan, beside the devices: handed on whole to all that is planned for a function."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.planning.recomputation import Recompute
from graphsplit.planning.schedule.automatic_stages import Beginnings
from graphsplit.planning.schedule.schedules import KINDS


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Those options of `parallelize` that a plan follows; see there for each.

    Attributes:
      stages: into how many parts the program is cut, or where they begin. (Who plans knows their devices.)
      variables: `"auto"`, or None for variables as they lie. (Who plans has laid them out.)

    Raises:
      ArgumentError: for a value that cannot be meant, whatever the function is.
    """

    weights: Sequence[float] | None = None
    strict: bool | float = False
    random: str = "exact"
    micro_batches: int = 1
    schedule: str | None = None
    stages: int | Beginnings | None = None
    jit_compile: bool = False
    bucket_bytes: int | None = None
    recompute: Recompute = None
    variables: str | None = None

    def __post_init__(self) -> None:
        if self.random not in ("exact", "independent"):
            raise ArgumentError(f"random={self.random!r} is not known; choose 'exact' or 'independent'.")
        if self.variables not in (None, "auto"):
            raise ArgumentError(
                f"variables={self.variables!r}: it is 'auto', or None for variables as they lie. For another layout "
                "call gs.set_variable_layout(model, 'sharded', devices=4)."
            )
        _check_strict(self.strict)
        check_jit_compile(self.jit_compile)
        if not _is_count(self.micro_batches, 1):
            raise ArgumentError(
                f"micro_batches={self.micro_batches!r}: it is the number of parts, at least 1, that each device "
                "computes one after the other; 1 computes the rows of a device at once."
            )
        _check_schedule(self.schedule, self.random)
        if isinstance(self.stages, (list, tuple)) and all(isinstance(name, str) for name in self.stages or [0]):
            object.__setattr__(self, "stages", Beginnings(tuple(dict.fromkeys(self.stages))))
        _check_stages(self.stages, self.random)
        if self.bucket_bytes is not None and not _is_count(self.bucket_bytes, 0):
            raise ArgumentError(
                f"bucket_bytes={self.bucket_bytes!r}: it is the number of bytes, at least 0, that small gradients "
                "travelling as one may have together; 0 lets each travel alone, None chooses."
            )
        object.__setattr__(self, "recompute", _recompute(self.recompute))
        if self.recompute is not None and self.jit_compile:
            raise UnsupportedError(
                f"recompute={self.recompute!r} with jit_compile=True: XLA merges equal computations, so nothing "
                "would be recomputed. Use one or the other."
            )
        for name in ("micro_batches", "stages", "bucket_bytes"):
            if isinstance(value := getattr(self, name), np.integer):
                object.__setattr__(self, name, int(value))
        object.__setattr__(self, "weights", _shares(self.weights))


def _recompute(asked: object) -> Recompute:
    """Return what is to be recomputed, checked."""
    if asked is None or asked == "blocks":
        return asked  # type: ignore[return-value]
    if isinstance(asked, (list, tuple)) and asked and all(isinstance(pattern, str) for pattern in asked):
        return tuple(asked)
    if _is_share(asked) and 0 < float(asked) <= 1:  # type: ignore[arg-type]
        return float(asked)  # type: ignore[arg-type]
    raise ArgumentError(
        f"recompute={asked!r}: it is 'blocks', patterns of the names of layers, ['block_*'], or the share of the bytes "
        "kept for the backward pass that is to be dropped, 0.5; None keeps all."
    )


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def _check_schedule(schedule: str | None, random: str) -> None:
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


def _check_stages(stages: object, random: str) -> None:
    """Raise `ArgumentError` unless a function can be cut into so many stages, which draw one device's numbers."""
    if stages is None:
        return
    if not isinstance(stages, Beginnings) and not _is_count(stages, 1):
        raise ArgumentError(
            f"stages={stages!r}: it is the number of parts, at least 1, into which the function is cut, each with "
            "devices of its own; or patterns of names of the layers at which new ones begin, ['block4_*', 'block9_*']; "
            "None leaves it whole."
        )
    if random == "independent":
        raise ArgumentError(
            f"stages={stages} with random='independent': stages have the numbers of one device, whatever they are and "
            "however many. Drop random."
        )


def check_jit_compile(jit_compile: object) -> None:
    """Raise `ArgumentError` unless XLA is asked to compile, or not."""
    if not isinstance(jit_compile, bool):
        raise ArgumentError(f"jit_compile is True or False, got {jit_compile!r}. Write True, or leave it out.")


def _check_strict(strict: object) -> None:
    """Raise `ArgumentError` unless `strict` is True, False or a share."""
    if isinstance(strict, bool) or (_is_share(strict) and float(strict) <= 1):  # type: ignore[arg-type]
        return
    allowed = "True, False, or the share of the work that may run on one device, 0.1"
    raise ArgumentError(f"strict is {allowed}; got {strict!r}.")


def _shares(weights: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return shares of the batch, checked; they are compared with the devices where these are known."""
    if weights is None:
        return None
    try:
        found = tuple(weights)
    except TypeError as error:
        raise ArgumentError(f"weights takes a number for each device, [3, 1], got {weights!r}.") from error
    if not all(map(_is_share, found)) or not sum(found) > 0:
        raise ArgumentError(f"weights={list(found)}: weights are finite numbers of at least 0, not all of them 0.")
    return found


def _is_share(weight: object) -> bool:
    """Return whether a weight is a number; numpy's are as good as Python's."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float, np.integer, np.floating)):
        return False
    return math.isfinite(weight) and bool(weight >= 0)
