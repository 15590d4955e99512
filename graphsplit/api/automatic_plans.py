"""`plan="auto"`: the fastest plan that fits, by prediction: number of devices, layout of variables, micro-batches."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from graphsplit.core.errors import ArgumentError, UnsupportedError
from graphsplit.costs.machine import Machine
from graphsplit.costs.machine_files import known_machines
from graphsplit.costs.machine_files import machine as machine_of
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.plan import Plan
from graphsplit.prediction.predictions import Prediction, predict_plan
from graphsplit.prediction.state_bytes import state_bytes
from graphsplit.tracing.trace import Trace

LAYOUTS = ("home", "mirrored", "sharded")
_MICRO_BATCHES = (2, 4, 8, 16)
_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMGT]?)B\s*$")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_SHOWN = 8


@dataclass(frozen=True)
class Automatic:
    """What `plan="auto"` was told besides.

    Attributes:
      memory: bytes that each device has; None: as many as the machine's do.
      machine: by which speed is predicted; None: the one that looks like this.
    """

    memory: float | None = None
    machine: str | os.PathLike[str] | Machine | None = None


@dataclass(frozen=True)
class Candidate:
    """A plan that may be chosen."""

    devices: int
    layout: str
    micro_batches: int = 1

    def __str__(self) -> str:
        plural = "s" if self.devices != 1 else ""
        micro = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.devices} device{plural}, variables {self.layout}{micro}"


@dataclass(frozen=True)
class Choice:
    """What was compared, and what won.

    Attributes:
      chosen: the winner.
      compared: predicted seconds and the most bytes of a device, by candidate, in the order of the search.
      limit: bytes that each device may hold.
      machine: by which it was predicted.
    """

    chosen: Candidate
    compared: dict[Candidate, tuple[float, int]] = field(repr=False)
    limit: float
    machine: Machine = field(repr=False)

    def explain(self) -> str:
        """Return why it was chosen: the fastest of those that fit, and by how much, or the only one."""
        seconds, peak = self.compared[self.chosen]
        fitting = [c for c, (_, count) in self.compared.items() if count <= self.limit and c != self.chosen]
        what = f"{self.chosen}: {seconds * 1e3:.2f} ms and {format_bytes(peak)} a device predicted"
        if not fitting:
            return f"{what}; the only one of {len(self.compared)} that fits into {format_bytes(int(self.limit))}"
        second = min(fitting, key=lambda c: self.compared[c][0])
        slower = self.compared[second][0] / seconds - 1 if seconds else 0.0
        return f"{what}, the fastest of {len(self.compared)}; {second} takes {slower:.0%} more"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the plan: what was chosen and why, what else was compared, and on what that rests."""
        others = sorted((c for c in self.compared if c != self.chosen), key=lambda c: self.compared[c][0])
        lines = [f"chosen automatically: {self.explain()}"]
        for candidate in others[:_SHOWN]:
            seconds, peak = self.compared[candidate]
            fits = "" if peak <= self.limit else f", does not fit into {format_bytes(int(self.limit))}"
            lines.append(f"compared with {candidate}: {seconds * 1e3:.2f} ms, {format_bytes(peak)} a device{fits}")
        measured = "measured" if self.machine.calibrated else "from data sheets and assumptions, not validated"
        return (*lines, f"predicted for {self.machine.name}, figures {measured}")


MakePlan = Callable[[Sequence[str], str, int], Plan]


def choose(
    title: str,
    trace: Trace,
    devices: int,
    machine: Machine,
    memory: float | None,
    make_plan: MakePlan,
    layouts: Sequence[str] = LAYOUTS,
    fewest: int = 1,
) -> Choice:
    """Return the fastest plan that fits.

    First are compared numbers of devices and layouts of variables. Where none fits, more and more micro-batches, which
    need less memory.

    Args:
      title: of the function.
      trace: of the function.
      devices: how many there are.
      machine: by which speed is predicted.
      memory: bytes that each device may hold; None: all it has.
      make_plan: device names, layout and micro-batches -> plan.
      layouts: those of variables that are compared; the first for one device.
      fewest: the smallest number of devices: those on which variables lie.

    Raises:
      ArgumentError: if nothing fits: with what would.
    """
    limit = machine.device.memory_bytes if memory is None else memory
    compared: dict[Candidate, tuple[float, int]] = {}

    def look_at(candidate: Candidate) -> Prediction:
        plan = make_plan(machine.covering(candidate.devices).names(candidate.devices), *_how(candidate))
        found = predict_plan(
            plan,
            machine.covering(candidate.devices),
            title=title,
            state=state_bytes(trace, plan.program, plan.state, plan.home),
            layout=candidate.layout,
        )
        compared[candidate] = found.step_s, max(found.memory_bytes.values(), default=0)
        return found

    in_parts = [_in_parts(devices, layouts, count) for count in _MICRO_BATCHES]
    for group in (_plain(range(fewest, devices + 1), layouts), *in_parts):
        for candidate in group:
            look_at(candidate)
        fitting = [candidate for candidate, (_, peak) in compared.items() if peak <= limit]
        if fitting:
            return Choice(min(fitting, key=lambda c: compared[c][0]), compared, limit, machine)
    _check_tensors(look_at(Candidate(devices, layouts[-1 if devices > 1 else 0])), limit)
    least = min(compared, key=lambda candidate: compared[candidate][1])
    count = len(compared)
    would = _what_would(look_at, compared, devices, machine, limit, replace(least, layout=layouts[-1]))
    raise ArgumentError(
        f"{title} does not fit: of {count} plans for up to {devices} device{'s' if devices != 1 else ''} the "
        f"smallest is that for {least}, with {format_bytes(compared[least][1])} on a device, and each may hold "
        f"{format_bytes(int(limit))}. {would}"
    )


def _how(candidate: Candidate) -> tuple[str, int]:
    return candidate.layout, candidate.micro_batches


def _plain(devices: range, layouts: Sequence[str]) -> Iterator[Candidate]:
    """Return plans for all devices, and for powers of two of them."""
    counts = [count for count in devices if count in (1, devices[-1]) or count.bit_count() == 1]
    for count in reversed(counts):
        for layout in layouts if count > 1 else layouts[:1]:
            yield Candidate(count, layout)


def _in_parts(devices: int, layouts: Sequence[str], micro_batches: int) -> Iterator[Candidate]:
    for layout in layouts if devices > 1 else layouts[:1]:
        yield Candidate(devices, layout, micro_batches)


def _check_tensors(prediction: Prediction, limit: float) -> None:
    """Raise `ArgumentError` if a device could not even hold the largest tensor."""
    found = [(count, name) for memory in prediction.memory.values() for name, count in memory.largest]
    if found and max(found)[0] > limit:
        count, name = max(found)
        raise ArgumentError(
            f"memory: each device may hold {format_bytes(int(limit))}, and the largest tensor has "
            f"{format_bytes(count)} on a device ({name!r}, with variables {prediction.layout}). Allow more."
        )


def _what_would(
    look_at: Callable[[Candidate], Prediction],
    compared: dict[Candidate, tuple[float, int]],
    devices: int,
    machine: Machine,
    limit: float,
    least: Candidate,
) -> str:
    """Say what would fit: the smallest number of devices, twice as many at a time."""
    count = devices
    while count < 8 * devices and (machine.network is not None or 2 * count <= machine.most_devices):
        count *= 2
        candidate = replace(least, devices=count)
        look_at(candidate)
        if compared[candidate][1] <= limit:
            return f"{count} devices would do: {candidate}, {format_bytes(compared[candidate][1])} on each."
    return "Not even that for more devices fits. Allow more, or choose a smaller batch."


def machine_like(automatic: Automatic, devices: Sequence[str]) -> Machine:
    """Return the machine by which speed is predicted: the one named, or that which looks like this one.

    Raises:
      UnsupportedError: for GPUs that no machine file describes.
      ArgumentError: for a machine of another kind than the devices.
    """
    kind = devices[0].rpartition("device:")[2].partition(":")[0]
    if automatic.machine is not None:
        found = machine_of(automatic.machine)
    elif kind == "CPU":
        known = known_machines()["cpu"]
        found = replace(known, host=replace(known.host, threads=os.cpu_count() or 1))
    else:
        found = _gpu_machine()
    if found.device.kind != kind:
        raise ArgumentError(
            f"machine={found.name!r} has {found.device.kind} devices, and the function is to run on {devices[0]!r}. "
            "Name a machine of that kind, or other devices."
        )
    return replace(found, devices=max(found.devices, len(devices)))


def _gpu_machine() -> Machine:
    details = tf.config.experimental.get_device_details(tf.config.list_physical_devices("GPU")[0])
    model = str(details.get("device_name", "GPU"))
    for found in known_machines().values():
        if found.device.name.split("-")[0] in re.split(r"[\s-]", model):
            return found
    raise UnsupportedError(
        f"plan='auto' predicts speed, and no machine file describes {model!r}. Write one by `graphsplit calibrate -o "
        "here.toml`, and name it: machine='here.toml'."
    )


def parse_memory(memory: Any) -> float | None:
    """Return how many bytes `memory` says.

    >>> parse_memory("40GB"), parse_memory(1000)
    (40000000000.0, 1000.0)
    """
    if memory is None:
        return None
    match = _BYTES.match(memory) if isinstance(memory, str) else None
    if match:
        return float(match[1]) * _UNITS[match[2]]
    if isinstance(memory, bool) or not isinstance(memory, (int, float)) or not 0 < memory < float("inf"):
        raise ArgumentError(f"memory={memory!r}: it is a number of bytes, or a text like '40GB', for each device.")
    return float(memory)


def checked_automatic(plan: Any, memory: Any, machine: Any) -> Automatic | None:
    """Return the options of an automatic plan; None if none is asked for.

    Raises:
      ArgumentError: for options that cannot be meant.
    """
    if plan not in (None, "auto"):
        raise ArgumentError(f"plan={plan!r}: it is 'auto', for the fastest plan that fits, or None, for what you say.")
    if plan is None:
        for name, value in (("memory", memory), ("machine", machine)):
            if value is not None:
                raise ArgumentError(
                    f"{name}={value!r} is for plan='auto', by which plans are compared. Give that as well."
                )
        return None
    if machine is not None:
        machine_of(machine)
    return Automatic(parse_memory(memory), machine)
