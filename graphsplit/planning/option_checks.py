"""What each option may be, for itself: checks, and texts that become numbers."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence

import numpy as np

from graphsplit.errors import ArgumentError
from graphsplit.planning.amounts import count_text
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import machine as machine_of
from graphsplit.planning.recomputation import Recompute
from graphsplit.planning.schedule.automatic_stages import Beginnings
from graphsplit.planning.schedule.schedules import KINDS

_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B\s*$", re.IGNORECASE)
_UNITS = " KMGT"
_LEAST_BYTES = 1000  # a number below it is one of gigabytes, whose unit was forgotten


def check_flag(name: str, value: object) -> None:
    """Raise `ArgumentError` unless an option is True or False: `"no"` would count as True."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}.")


def check_micro_batches(count: object) -> None:
    """Raise `ArgumentError` unless it is a number of micro-batches."""
    if not is_count(count, 1):
        raise ArgumentError(
            f"micro_batches must be a whole number of at least 1, got {count!r}. Each device splits its rows into so "
            "many parts and computes one after the other; 1 computes all rows at once."
        )


def check_schedule(schedule: str | None) -> None:
    """Raise `ArgumentError` unless there is such a schedule."""
    if schedule is not None and schedule not in KINDS:
        known = ", ".join(map(repr, KINDS))
        raise ArgumentError(f"Unknown schedule {schedule!r}. Schedules: {known}, or None for no pipeline.")


def check_stages(stages: object) -> None:
    """Raise `ArgumentError` unless a function can be cut into so many stages."""
    if stages is not None and not isinstance(stages, Beginnings) and not is_count(stages, 1):
        raise ArgumentError(
            f"stages must be the number of pipeline stages, at least 1; or patterns of names of the layers at which "
            f"new stages begin, ['block4_*', 'block9_*']; or None for no stages. Got {stages!r}."
        )


def check_strict(strict: object) -> None:
    """Raise `ArgumentError` unless `strict` is True or False."""
    if not isinstance(strict, bool):
        raise ArgumentError(
            f"strict must be True or False, got {strict!r}. To require a share of the work, write: "
            "assert step.plan(x).sharded_fraction > 0.9."
        )


def recompute_asked(asked: object) -> Recompute:
    """Return what is to be recomputed, checked."""
    if asked is None or asked == "blocks":
        return asked  # type: ignore[return-value]
    if isinstance(asked, (list, tuple)) and asked and all(isinstance(pattern, str) for pattern in asked):
        return tuple(asked)
    if _is_share(asked) and 0 < float(asked) <= 1:  # type: ignore[arg-type]
        return float(asked)  # type: ignore[arg-type]
    raise ArgumentError(
        f"recompute must be 'blocks'; patterns of names of layers, ['block_*']; the share of the activations to "
        f"recompute, 0.5; or None, which stores all. Got {asked!r}."
    )


def shares_asked(shares: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return shares of the batch, checked; they are compared with the devices where these are known."""
    if shares is None:
        return None
    try:
        found = tuple(shares)
    except TypeError as error:
        raise ArgumentError(f"shares must be a number for each device, [3, 1], got {shares!r}.") from error
    if not all(map(_is_share, found)) or not sum(found) > 0:
        raise ArgumentError(f"shares must be finite numbers of at least 0, not all of them 0, got {list(found)}.")
    return found


def shares_message(shares: Sequence[float], count: int, what: str = "device") -> str:
    """Say that there are other numbers of shares and devices, or pipelines."""
    several = count_text(count, what)
    return f"shares={list(shares)} has {len(shares)} entries for {several}; give one for each {what}."


def parse_memory(memory: object) -> float | None:
    """Return how many bytes `memory` says.

    >>> parse_memory("40GB"), parse_memory("2GiB"), parse_memory(1000)
    (40000000000.0, 2147483648.0, 1000.0)
    """
    if memory is None:
        return None
    found = memory
    if match := _BYTES.match(memory) if isinstance(memory, str) else None:
        found = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS.index(match[2].upper() or " ")
    if isinstance(found, bool) or not isinstance(found, (int, float, np.number)) or not 0 < found < float("inf"):
        raise ArgumentError(
            f"memory must be the bytes that each device may hold, a number above 0, '40GB' or '40GiB', got {memory!r}."
        )
    if found is memory and found < _LEAST_BYTES:
        raise ArgumentError(f"memory={memory!r} is a number of bytes. Write memory='{memory}GB'.")
    return float(found)


def plan_asked(plan: str | os.PathLike[str] | Machine | None) -> str | Machine | None:
    """Return "auto", the machine for which the fastest plan is searched, or None."""
    return plan if plan is None or plan == "auto" else machine_of(plan, "plan")


def is_count(value: object, least: int) -> bool:
    """Return whether it is a whole number of at least so much; numpy's are as good as Python's."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def _is_share(weight: object) -> bool:
    """Return whether a weight is a number; numpy's are as good as Python's."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float, np.integer, np.floating)):
        return False
    return math.isfinite(weight) and bool(weight >= 0)
