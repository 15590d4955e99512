"""`memory=` and `plan="auto"`: what is asked, and what was chosen. `graphsplit.simulate.search` chooses."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from graphsplit.errors import ArgumentError
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import machine as machine_of

_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B\s*$", re.IGNORECASE)
_UNITS = " KMGT"
_LEAST_BYTES = 1000  # a number below it is one of gigabytes, whose unit was forgotten


@dataclass(frozen=True)
class Automatic:
    """What is chosen automatically, and what that was told.

    Attributes:
      memory: bytes that each device may hold; None: as many as the machine's do.
      machine: by which speed is predicted; None: the one that looks like this.
      whole: whether the number of devices and stages are chosen as well: `plan="auto"`.
      lays_out: whether variables may be laid out; else they stay as they lie.
      on_mesh: whether they may be cut along an axis of a mesh, if none is given.
    """

    memory: float | None = None
    machine: str | os.PathLike[str] | Machine | None = None
    whole: bool = False
    lays_out: bool = True
    on_mesh: bool = True

    @property
    def given(self) -> dict[str, Any]:
        """The option that asks for it, for messages."""
        return {"plan": "auto"} if self.whole else {"memory": self.memory and int(self.memory)}


@dataclass(eq=False)
class Choices:
    """What was chosen for a function.

    Attributes:
      made: a `Choice` of the search, by arguments.
      changes: how often layouts of variables had changed by then; what was chosen before counts no more.
      ran: the last one that ran.
    """

    made: dict[Hashable, Any] = field(default_factory=dict)
    changes: int = 0
    ran: Any = None


def parse_memory(memory: Any) -> float | None:
    """Return how many bytes `memory` says.

    >>> parse_memory("40GB"), parse_memory("2GiB"), parse_memory(1000)
    (40000000000.0, 2147483648.0, 1000.0)
    """
    if memory is None:
        return None
    found = memory
    if match := _BYTES.match(memory) if isinstance(memory, str) else None:
        found = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS.index(match[2].upper() or " ")
    is_number = isinstance(found, (int, float, np.number)) and not isinstance(found, bool)
    if not is_number or not 0 < found < float("inf"):
        raise ArgumentError(
            f"memory={memory!r}: it is what each device may hold, a number of bytes above 0, or a text, '40GB' or "
            "'40GiB'."
        )
    if found is memory and found < _LEAST_BYTES:
        raise ArgumentError(f"memory={memory!r} is a number of bytes. Write memory='{memory}GB'.")
    return float(found)


def checked_automatic(plan: Any, memory: Any, machine: Any) -> Automatic | None:
    """Return what is to be chosen automatically; None if nothing is.

    Raises:
      ArgumentError: for options that cannot be meant.
    """
    if plan not in (None, "auto"):
        raise ArgumentError(f"plan={plan!r}: it is 'auto', for the fastest plan that fits, or None, for what you say.")
    if plan is None and memory is None:
        if machine is not None:
            raise ArgumentError(
                f"machine={machine!r} is that by which plans are compared. Give memory= or plan='auto' as well."
            )
        return None
    if machine is not None:
        machine_of(machine)
    return Automatic(parse_memory(memory), machine, plan is not None)
