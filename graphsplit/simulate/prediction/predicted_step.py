"""What a step takes on a machine, as it is predicted: questions that can be asked of it."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

from graphsplit.core.devices import short_name
from graphsplit.core.sizes.intervals import covered
from graphsplit.planning.costs.families import FREE, family_of
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.plan import Plan
from graphsplit.simulate.prediction.buffers import Memory
from graphsplit.simulate.prediction.replay import Task, TaskTimes
from graphsplit.simulate.prediction.task_writing import MachineTasks


@dataclass(frozen=True)
class TimeShare:
    """How a device spends a step: parts of its time.

    Attributes:
      computing: in operations.
      sending: in which something is sent to it or from it, and nothing computed.
      waiting: the rest.
    """

    computing: float
    sending: float
    waiting: float


@dataclass(frozen=True)
class Event:
    """Something that is predicted to run.

    Attributes:
      place: the device; of something sent, `GPU:0 -> GPU:1`.
      name, type: of the operation, or of what is sent.
      start_s, end_s: in seconds.
      bytes: that are sent.
    """

    place: str
    name: str
    type: str
    start_s: float
    end_s: float
    bytes: int = 0


@dataclass(frozen=True, eq=False)
class PredictedStep:
    """What a step takes on a machine. Nothing has run: all figures are predictions.

    Attributes:
      title: of the function.
      machine: on which.
      plan: what would run where.
      memory: what each device holds, by device.
      layout: of the variables, `sharded`; "" for as they lie.
      unknown: sentences on what is known only when it runs: then the step takes at least `step_s`.
      assumptions: on what it rests.
      notes: what a user might not expect.
    """

    title: str
    machine: Machine
    plan: Plan = field(repr=False)
    memory: Mapping[str, Memory] = field(repr=False)
    layout: str = ""
    unknown: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = field(default=(), repr=False)
    notes: tuple[str, ...] = ()
    _tasks: MachineTasks = field(repr=False, kw_only=True)
    _schedule: TaskTimes = field(repr=False, kw_only=True)

    @property
    def used(self) -> int:
        """How many devices of the machine are used."""
        return len({*self.plan.devices, *[device for column in self.plan.mesh.columns for device in column]})

    @property
    def step_s(self) -> float:
        """Seconds from a call to its results; the least, where something is `unknown`."""
        return self._call_s + self._schedule.seconds

    @property
    def _call_s(self) -> float:
        return self.machine.call_s(self.used, self._tasks.given)

    @functools.cached_property
    def memory_bytes(self) -> dict[str, int]:
        """The most bytes that each device holds at a time: variables, arguments, and what is alive."""
        return {short_name(device): memory.peak_bytes for device, memory in self.memory.items()}

    @functools.cached_property
    def of_devices(self) -> dict[str, Memory]:
        """What each device holds, without hosts, whose memory is their own."""
        return {device: memory for device, memory in self.memory.items() if not self.machine.is_host(device)}

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that are used, full names."""
        return tuple(self.memory)

    @functools.cached_property
    def events(self) -> tuple[Event, ...]:
        """All that is predicted to run, by start; what takes no time is left out."""
        starts, ends = self._schedule.starts, self._schedule.ends
        found = []
        for i, task in enumerate(self._tasks.tasks):
            if task.kind == "wait" or (task.kind == "compute" and ends[i] <= starts[i]):
                continue
            place = short_name(task.device) + (f" -> {short_name(task.target)}" if task.target else "")
            found.append(Event(place, task.name, task.type, starts[i], ends[i] + task.delay_s, task.bytes))
        return tuple(sorted(found, key=lambda event: (event.start_s, event.place)))

    @functools.cached_property
    def shares(self) -> dict[str, TimeShare]:
        """How each device spends the step."""
        computing: dict[str, list[tuple[float, float]]] = {device: [] for device in self.memory}
        sending: dict[str, list[tuple[float, float]]] = {device: [] for device in self.memory}
        starts, ends = self._schedule.starts, self._schedule.ends
        for i, task in enumerate(self._tasks.tasks):
            span = (starts[i], ends[i])
            if task.kind == "compute":
                computing.setdefault(task.device, []).append(span)
            elif task.kind == "send":
                for device in (task.device, task.target):
                    sending.setdefault(device, []).append(span)
        whole = self._schedule.seconds or 1.0
        found = {}
        for device in self.memory:
            busy = covered(computing[device]) / whole
            either = covered([*computing[device], *sending[device]]) / whole
            found[device] = TimeShare(busy, either - busy, 1.0 - either)
        return found

    @property
    def operations(self) -> int:
        """How many operations take time on a device, those that only pass on a buffer among them."""
        own = [task.type for task in self._tasks.tasks if task.kind != "send" and task.type != "signal"]
        return sum(family_of(op_type) != FREE for op_type in own)

    @property
    def sent_bytes(self) -> int:
        """The bytes that are sent between devices."""
        return self._tasks.sent_bytes

    @functools.cached_property
    def limit(self) -> str:
        """What limits the step: of what its critical path consists, most of all."""
        parts: dict[str, float] = {}
        path, starts = self._schedule.critical_path(), self._schedule.starts
        ends = [*[starts[i] for i in path[1:]], self._schedule.seconds]
        for i, end in zip(path, ends, strict=True):  # each counts until the next one starts
            for key in _what(self._tasks.tasks[i]):
                parts[key] = parts.get(key, 0.0) + end - starts[i]
        parts["the call itself"] = self._call_s
        key = max(parts, key=lambda key: parts[key])
        return f"{key}: {percent(parts[key] / (self.step_s or 1.0))} of the step"

    def over(self, limit: float | None = None) -> dict[str, int]:
        """Return the devices that would hold more bytes than they have, or than `limit`, and how many."""
        most = self.machine.device.memory_bytes if limit is None else limit
        held = {short_name(device): own.peak_bytes for device, own in self.of_devices.items()}
        return {device: count for device, count in held.items() if count > most}


def _what(task: Task) -> list[str]:
    """Return what a task of the critical path counts as: something sent burdens the device at either end."""
    source, target = short_name(task.device), short_name(task.target)
    if task.kind == "compute":
        return [f"computing on {source}"]
    return [f"sending from {source}", f"sending to {target}"] if target else []


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{100 * share:.0f} %"
