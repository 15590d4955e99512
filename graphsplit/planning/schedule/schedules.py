"""Schedules: in which order the devices of a pipeline run the micro-batches of their stages. Plain Python.

A micro-batch runs forward through all stages and back: `F`, `B`; where the gradients of weights are apart from those
that earlier stages wait for, these come third, `W`. A device runs one slot at a time. Every kind is one rule of what a
device runs next of what is ready:

* `gpipe`: all forward, then all backward (Huang et al. 2019).
* `1f1b`: backward as soon as it is ready; forward while no more micro-batches are alive than stages follow (PipeDream-
  flush, Narayanan et al. 2021). Idle as long as GPipe, `(S - 1) / M`, and stage `s` keeps at most `S - s` alive.
* `interleaved`: several stages a device, `V`; idle `(S - 1) / (M V)` with `S` devices (the same authors).
* `zero-bubble`: 1F1B in which gradients of weights fill what would be idle (ZB-H1, Qi et al. 2024).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphsplit.core.requirements import needed
from graphsplit.core.storage import forms
from graphsplit.errors import CheckError

KINDS = ("gpipe", "1f1b", "interleaved", "zero-bubble")
_MOST_COLUMNS = 40
_COLORS = {"F": "#8fb8de", "B": "#f2b880", "W": "#a8d5a2"}


class Slot(NamedTuple):
    """What a device runs at a time: a stage of a micro-batch, forward `F`, backward `B`, or its weights' part `W`.

    Where all micro-batches wait for each other inside of stages it is what lies between two such waits: the one after
    `waits` of them.
    """

    stage: int
    kind: str
    shard: int
    waits: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.shard}"


@dataclass(frozen=True)
class Schedule:
    """An order for each device, and when each slot runs if all take equally long.

    Attributes:
      kind: one of `KINDS`.
      stages, shards: how many stages, and micro-batches.
      chunks: how many stages each device has: stage `s` is on device `s` modulo the number of devices.
      starts: when each slot begins, in slots.
    """

    kind: str
    stages: int
    shards: int
    chunks: int
    starts: Mapping[Slot, int] = field(repr=False)

    @property
    def devices(self) -> int:
        """The number of devices."""
        return self.stages // self.chunks

    def order(self, device: int) -> list[Slot]:
        """Return what a device runs, in order."""
        slots = [slot for slot in self.starts if slot.stage % self.devices == device]
        return sorted(slots, key=lambda slot: self.starts[slot])

    @property
    def slots(self) -> int:
        """How many slots it takes from the first to the last."""
        return max(self.starts.values()) + 1

    @property
    def idle_share(self) -> float:
        """The time that a device is idle, as a part of the time that it works."""
        work = len(self.starts) / self.devices
        return self.slots / work - 1

    @property
    def waits(self) -> int:
        """How often all micro-batches wait for each other."""
        return len({slot.waits for slot in self.starts}) - 1

    @property
    def idle_text(self) -> str:
        """How many slots are idle, on each device where that is the same number on all: `2 of 10 slots idle, 20 %`."""
        idle, slots = self.devices * self.slots - len(self.starts), self.devices * self.slots
        if len({len(self.order(device)) for device in range(self.devices)}) == 1:
            idle, slots = idle // self.devices, self.slots
        return f"{idle} of {slots} slots idle, {100 * idle / slots:.3g} %"

    def alive(self, stage: int) -> int:
        """Return of how many micro-batches a stage keeps what it computed forward, at most."""
        last = "W" if self.kind == "zero-bubble" else "B"
        begun = [min(self._times(stage, "F", k)) for k in range(self.shards)]
        ended = [max(self._times(stage, last, k)) for k in range(self.shards)]
        return max(sum(f <= time for f in begun) - sum(b < time for b in ended) for time in begun)

    def _times(self, stage: int, kind: str, shard: int) -> list[int]:
        return [start for slot, start in self.starts.items() if slot[:3] == (stage, kind, shard)]

    def check(self) -> None:
        """Raise `CheckError` unless each slot comes after those that it needs, and devices run one at a time."""
        for slot, start in self.starts.items():
            if any(other.waits < slot.waits and end >= start for other, end in self.starts.items()):
                raise CheckError(f"{slot} of stage {slot.stage} begins before all micro-batches have waited.")
            for source in _needs(slot, self.stages) if not self.waits else ():
                if not self.starts[source] < start:
                    raise CheckError(f"{slot} of stage {slot.stage} begins before {source}, which it needs, ends.")
        for device in range(self.devices):
            times = [self.starts[slot] for slot in self.order(device)]
            if len(set(times)) < len(times):
                raise CheckError(f"Device {device} of the pipeline runs two slots at a time.")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the chart as a picture, `.png` or `.svg`.

        Raises:
          ArgumentError: for another suffix.
          UnsupportedError: if matplotlib is not installed.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        path = os.fspath(path)
        forms.check_suffix(path, "a schedule", (".png", ".svg"))
        forms.write_figure(path, _draw(self))

    def __str__(self) -> str:
        width = max(len(str(slot)) for slot in self.starts) + (1 if self.chunks < 2 else 3)
        waits = f"; all micro-batches wait for each other {self.waits} times" if self.waits else ""
        lines = [f"{self.kind}: {self.stages} stages, {self.shards} micro-batches, {self.idle_text}{waits}"]
        for device in range(self.devices):
            cells = [".".ljust(width)] * self.slots
            for slot in self.order(device):
                cells[self.starts[slot]] = (f"{slot}" + (f"/{slot.stage}" if self.chunks > 1 else "")).ljust(width)
            ellipsis = " ..." if self.slots > _MOST_COLUMNS else ""
            lines.append(f"  device {device}: {''.join(cells[:_MOST_COLUMNS]).rstrip()}{ellipsis}")
        return "\n".join(lines)


def make_schedule(kind: str, stages: int, shards: int, chunks: int = 1) -> Schedule:
    """Return the order in which pipelines of equal stages run.

    Args:
      kind: one of `KINDS`.
      stages: how many.
      shards: the number of micro-batches.
      chunks: how many stages each device has, for `interleaved`.

    >>> print(make_schedule("1f1b", 3, 4))
    1f1b: 3 stages, 4 micro-batches, 4 of 12 slots idle, 33.3 %
      device 0: F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3
      device 1: .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .
      device 2: .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .
    """
    devices = [_PipelineDevice(kind, d, stages, shards, chunks) for d in range(stages // chunks)]
    starts: dict[Slot, int] = {}
    time, total = 0, stages * shards * (3 if kind == "zero-bubble" else 2)
    while len(starts) < total:
        chosen = [slot for device in devices if (slot := device.next(starts, time)) is not None]
        if not chosen and (not starts or max(starts.values()) < time - 1):
            raise CheckError(f"No {kind} schedule of {shards} micro-batches through {stages} stages was found.")
        starts.update(dict.fromkeys(chosen, time))
        time += 1
    return Schedule(kind, stages, shards, chunks, starts)


def _needs(slot: Slot, stages: int) -> Iterator[Slot]:
    """Return the slots that must have ended before another one."""
    stage, kind, shard, _ = slot
    if kind == "F" and stage:
        yield Slot(stage - 1, "F", shard)
    if kind == "B":
        yield Slot(stage, "F", shard) if stage == stages - 1 else Slot(stage + 1, "B", shard)
    if kind == "W":
        yield Slot(stage, "B", shard)


class _PipelineDevice:
    """What a device has still to run, and the rule of what comes next."""

    def __init__(self, kind: str, number: int, stages: int, shards: int, chunks: int):
        count = stages // chunks
        groups = [range(first, min(first + count, shards)) for first in range(0, shards, count)]
        own_stages = [number + v * count for v in range(chunks)]
        forward = [Slot(stage, "F", k) for group in groups for stage in own_stages for k in group]
        backward = [Slot(stage, "B", k) for group in groups for stage in reversed(own_stages) for k in group]
        self._waiting = {"F": forward, "B": backward, "W": []}
        if kind == "zero-bubble":
            self._waiting["W"] = [Slot(stage, "W", k) for stage, _, k, _ in backward]
        self._begun = {"F": 0, "B": 0, "W": 0}
        self._kind, self._stages = kind, stages
        self._is_uneven = chunks > 1 and shards % count != 0  # then the order of the paper may wait for itself
        ahead = (count - number - 1) * (2 if chunks > 1 else 1) + (chunks - 1) * count
        self._ahead = len(forward) if kind == "gpipe" else min(ahead + 1, len(forward))

    def next(self, starts: Mapping[Slot, int], time: int) -> Slot | None:
        """Take what runs now; None if nothing may."""
        for kind in self._rule():
            if self._waiting[kind] and self._is_ready(self._waiting[kind][0], starts, time):
                self._begun[kind] += 1
                return self._waiting[kind].pop(0)
        return None

    def _rule(self) -> str:
        """Return the kinds of slots that may run next, the better ones first."""
        begun = self._begun
        if begun["F"] - begun["B"] < self._ahead and self._waiting["F"]:
            may_begin = self._kind != "zero-bubble" or begun["F"] - begun["W"] < self._stages
            return ("FBW" if self._is_uneven else "FW") if may_begin else "W"
        return "BW"

    def _is_ready(self, slot: Slot, starts: Mapping[Slot, int], time: int) -> bool:
        return all(starts.get(source, time) < time for source in _needs(slot, self._stages))


def _draw(schedule: Schedule) -> Any:
    """Return the chart as a matplotlib figure: a row for each device, a box for each slot."""
    figure = needed("matplotlib.figure", "plots", "Saving a schedule").Figure(
        figsize=(1 + 0.35 * schedule.slots, 0.8 + 0.45 * schedule.devices), layout="constrained"
    )
    axes = figure.subplots()
    for slot, start in schedule.starts.items():
        device, chunk = slot.stage % schedule.devices, slot.stage // schedule.devices
        shade = 1 - 0.5 * chunk / schedule.chunks
        axes.barh(device, 1, left=start, height=0.9, color=_COLORS[slot.kind], alpha=shade, edgecolor="white")
        axes.text(start + 0.5, device, str(slot), ha="center", va="center", fontsize=7)
    axes.set_yticks(range(schedule.devices), [f"device {device}" for device in range(schedule.devices)])
    axes.invert_yaxis()
    axes.set_xlim(0, schedule.slots)
    axes.set_xlabel("slots")
    axes.set_title(f"{schedule.kind}: {schedule.stages} stages, {schedule.shards} micro-batches", fontsize=9)
    return figure
