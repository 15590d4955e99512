"""`Prediction`: what a step takes on a machine, in seconds and bytes, and on what that rests.

A `PredictedStep` can be asked what each device does when, and what it waits for.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphsplit.core.devices import short_name
from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.intervals import covered
from graphsplit.core.notebooks import text_html
from graphsplit.core.sizes import apportion
from graphsplit.core.storage import forms
from graphsplit.errors import ArgumentError
from graphsplit.inspect.graph import natural_order
from graphsplit.inspect.views.timeline_views import trace_place, trace_span
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.planning.chains import SIGNAL
from graphsplit.planning.costs.families import FREE, family_of
from graphsplit.planning.costs.machine import Link, Machine
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.plan import Plan
from graphsplit.planning.state import state_bytes
from graphsplit.simulate.prediction.buffers import Memory, live_memory, most_memory, with_state
from graphsplit.simulate.prediction.compiled_work import ASSUMED as COMPILED
from graphsplit.simulate.prediction.replay import Task, TaskTimes, replay
from graphsplit.simulate.prediction.task_writing import MachineTasks, machine_tasks


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
        return self.machine.call_s(self.used, self._tasks.arguments_given)

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
        events = []
        for i, task in enumerate(self._tasks.tasks):
            if task.kind == "wait" or (task.kind == "compute" and ends[i] <= starts[i]):
                continue
            place = short_name(task.device) + (f" -> {short_name(task.target)}" if task.target else "")
            events.append(Event(place, task.name, task.type, starts[i], ends[i] + task.delay_s, task.bytes))
        return tuple(sorted(events, key=lambda event: (event.start_s, event.place)))

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
        share_by_device = {}
        for device in self.memory:
            busy = covered(computing[device]) / whole
            either = covered([*computing[device], *sending[device]]) / whole
            share_by_device[device] = TimeShare(busy, either - busy, 1.0 - either)
        return share_by_device

    @property
    def operations(self) -> int:
        """How many operations take time on a device, those that only pass on a buffer among them."""
        types = [task.type for task in self._tasks.tasks if task.kind != "send" and task.type != SIGNAL]
        return sum(family_of(op_type) != FREE for op_type in types)

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
        parts[_CALL] = self._call_s
        key = max(parts, key=lambda key: parts[key])
        return f"{key}: {percent(parts[key] / (self.step_s or 1.0))} of the step"

    @property
    def exchanges(self) -> int:
        """How often on its critical path a device waits for what another one sends."""
        return len(self._exchanged)

    @property
    def latency_s(self) -> float:
        """Seconds of its critical path that are latency of links: what exchanges take however few bytes are sent."""
        return sum([task.latency_s for task in self._exchanged])

    @functools.cached_property
    def _exchanged(self) -> list[Task]:
        """What is sent on the critical path, and waited for. (What only keeps a link from the next one is not.)"""
        tasks, path = self._tasks.tasks, self._schedule.critical_path()
        pairs = zip(path, [*path[1:], None], strict=True)
        return [tasks[i] for i, after in pairs if tasks[i].target and (after is None or i in tasks[after].after)]

    @functools.cached_property
    def chain(self) -> dict[str, float]:
        """Seconds of the longest chain of what follows one after the other, by what takes them; their sum is `step_s`.

        What an operation computes is apart from what its device takes to start it; of what is sent the bytes are apart
        from the latency of the link. A chain waits for a device, or a link, that does something else.
        """
        seconds = dict.fromkeys((_COMPUTING, _LAUNCHING, _BYTES, _LATENCY, _WAITING), 0.0)
        path, times = self._schedule.critical_path(), self._schedule
        for i, after in zip(path, [*[times.starts[i] for i in path[1:]], times.seconds], strict=True):
            task, begin, end = self._tasks.tasks[i], times.starts[i], min(times.ends[i], after)
            host = self.machine.host_device if self.machine.is_host(task.device) else None
            device = host or self.machine.device
            is_sent, run = task.kind == "send", end - begin
            started = 0.0 if is_sent else min(run, device.overhead_s if run > device.launch_s else device.launch_s)
            delay = min(task.delay_s, after - end)
            seconds[_BYTES if is_sent else _COMPUTING] += run - started
            seconds[_LAUNCHING] += started
            seconds[_LATENCY] += delay
            seconds[_WAITING] += after - end - delay
        return {**seconds, _CALL: self._call_s}

    def over(self, limit: float | None = None) -> dict[str, int]:
        """Return the devices that would hold more bytes than they have, or than `limit`, and how many."""
        most = self.machine.device.memory_bytes if limit is None else limit
        peak_by_device = {short_name(device): memory.peak_bytes for device, memory in self.of_devices.items()}
        return {device: count for device, count in peak_by_device.items() if count > most}


def _what(task: Task) -> list[str]:
    """Return what a task of the critical path counts as: something sent burdens the device at either end."""
    source, target = short_name(task.device), short_name(task.target)
    if task.kind == "compute":
        return [f"computing on {source}"]
    return [f"sending from {source}", f"sending to {target}"] if target else []


_COMPUTING, _LAUNCHING, _BYTES = "computing", "launching operations", "sending bytes"
_LATENCY, _WAITING, _CALL = "latency of links", "waiting for what a device or link does besides", "the call itself"


def _chain_text(seconds: Mapping[str, float]) -> str:
    """Return what takes the time of a chain, the most first, in percent that add up to 100."""
    if not sum(seconds.values()):
        return "nothing"
    shares = zip(seconds, apportion(100, [*seconds.values()]), strict=True)
    return ", ".join([f"{what} {share} %" for what, share in sorted(shares, key=lambda pair: -pair[1]) if share])


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{100 * share:.0f} %"


_SHOWN = 8  # devices, and as many hosts


class Prediction(PredictedStep):
    """How long a step takes on a machine, and its memory. `print` it, `save` it, ask it."""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the predicted timeline as `.json`, which ui.perfetto.dev and chrome://tracing open.

        Raises:
          ArgumentError: for another suffix.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        path = os.fspath(path)
        forms.check_trace_suffix(path, "a prediction")
        forms.write_json(path, _chrome_trace(self))

    def __str__(self) -> str:
        lines = [
            f"Prediction of {self.title} on {self.used} of {self.machine.name}"
            + (f", variables {self.layout}" if self.layout else "")
            + f": {self._seconds()} a step"
            + ("; does not fit" if self.over() else ""),
            f"  a step takes {self._seconds()}; {format_bytes(self.sent_bytes)} are sent between devices",
            f"  limited by {_chain_text(self.chain)}; most by {self.limit}",
        ]
        if self.latency_s:
            waits = count_text(self.exchanges, "exchange")
            latency = f"{_seconds(self.latency_s)}, {percent(self.latency_s / self.step_s)} of the step"
            lines.append(f"  latency of links: {latency}, in {waits} on its critical path")
        hosts = [device for device in self.memory if device not in self.of_devices]
        shown = [*list(self.of_devices)[:_SHOWN], *hosts[:_SHOWN]]
        for device in shown:
            share, memory = self.shares[device], self.memory[device]
            lines.append(
                f"  {short_name(device)}  computing {percent(share.computing)}, sending {percent(share.sending)}, "
                f"waiting {percent(share.waiting)}; {format_bytes(memory.peak_bytes)}: "
                f"{format_bytes(memory.state_bytes)} variables, {format_bytes(memory.argument_bytes)} arguments, "
                f"{format_bytes(memory.live_bytes)} activations at the peak"
            )
        left_out = len(self.memory) - len(shown)
        lines += [f"  ... and {count_text(left_out, 'more device')}"] if left_out else []
        over = self.over()
        if over:
            names = ", ".join(f"{device} {format_bytes(count)}" for device, count in list(over.items())[:4])
            has = format_bytes(int(self.machine.device.memory_bytes))
            lines.append(f"  does not fit: {names}, and each has {has}")
        lines += [f"  note: {note}" for note in self.notes]
        for text in self.unknown[:4]:
            hint = "; unknown_size=... says how large" if text.startswith("the size") else ""
            lines.append(f"  known only when it runs: {text}{hint}")
        return "\n".join([*lines, "It assumes:", *[f"  {text}" for text in self.assumptions]])

    __repr__ = __str__  # what a prompt, and an assertion that fails, show

    def _repr_html_(self) -> str:
        return text_html(str(self), "each device, and the assumptions")

    def _seconds(self) -> str:
        return f"{'at least ' if self.unknown else ''}{_seconds(self.step_s)}"


def _chrome_trace(prediction: PredictedStep) -> dict[str, Any]:
    """Return the predicted timeline: devices, then the ways between them, and the bytes that each device holds."""
    unordered = dict.fromkeys([*map(short_name, prediction.devices), *[event.place for event in prediction.events]])
    places = sorted(unordered, key=lambda place: ("->" in place, natural_order(place)))
    number = {place: i for i, place in enumerate(places)}
    trace = [trace_place(i, place) for place, i in number.items()]
    for e in prediction.events:
        kind, span = "send" if "->" in e.place else "operation", (e.start_s, e.end_s - e.start_s)
        trace.append(trace_span(e.type, number[e.place], 0, span, kind, op=e.name, bytes=e.bytes))
    for device, memory in prediction.memory.items():
        alive = {"ph": "C", "name": "bytes alive", "pid": number[short_name(device)]}
        trace += [{**alive, "ts": time * 1e6, "args": {"bytes": count}} for time, count in memory.steps]
    about = {"predicted": True, "rests on": list(prediction.assumptions)}
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": about}


@collection_paused()
def predict_plan(
    plan: Plan,
    machine: Machine,
    *,
    title: str,
    layout: str = "",
    unknown_size: int | None = None,
) -> Prediction:
    """Return what a plan takes on a machine, by replaying its tasks.

    Args:
      plan: its devices are some of the machine's; the sizes of its arguments are known.
      machine: what runs it.
      title: what to call it.
      layout: what to call the variables' layout.
      unknown_size: what sizes count as that follow from data.

    Raises:
      ArgumentError: for variables in the memory of a host of which the machine's file does not say how fast it is.
    """
    costs = Costs(machine.device, unknown_size)
    state = state_bytes(plan.program, plan.state, plan.default_device)
    on_host = _on_hosts(machine, state)
    tasks = machine_tasks(plan, machine, costs)
    schedule = replay(tasks.tasks, tasks.resources)
    others = [live_memory(other.buffers, replay(other.tasks, other.resources)) for other in tasks.on_other_sides]
    memory = with_state(most_memory([live_memory(tasks.buffers, schedule), *others]), state, tasks.arguments)
    compiled = (COMPILED,) if plan.jit_compile else ()
    ordered = {device: memory.get(device, Memory()) for device in dict.fromkeys([*plan.devices, *sorted(memory)])}
    return Prediction(
        title,
        machine,
        plan,
        ordered,
        layout,
        tasks.unknown,
        (*assumptions_of(machine, costs), *on_host, *compiled),
        _tasks=tasks,
        _schedule=schedule,
    )


def _on_hosts(machine: Machine, state: Mapping[str, int]) -> tuple[str, ...]:
    """Return what a prediction takes for granted of hosts in whose memory variables are; nothing if none are."""
    if not any(map(machine.is_host, state)):
        return ()
    host, link = machine.host_device, machine.host_link
    if host is None:
        raise ArgumentError(
            f"Variables are in the host's memory, and the machine {machine.name!r} does not say how fast its host "
            f"computes. Add bytes_per_s, of its memory, and flops_per_s under [host] to its file {machine.file!r}, or "
            "measure both: graphsplit calibrate -o here.toml."
        )
    rates = f"{amount(host.bytes_per_s)}B/s of memory and {amount(host.matrix_flops_per_s['float32'])}FLOP/s"
    return (
        f"the host: {rates}, one operation at a time, with a device's shares of the peak; the size of its "
        "memory is not known",
        _link("between the host and a device", link)
        if link is not None
        else "between the host and a device as between devices: the file has no [host_link]",
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.2f} ms"


def assumptions_of(machine: Machine, costs: Costs) -> tuple[str, ...]:
    """Return one sentence for each thing that a prediction takes for granted."""
    device = machine.device
    return (
        _standing(machine),
        _rates(machine, costs),
        f"{device.name}: {amount(device.bytes_per_s)}B/s of memory, {amount(device.memory_bytes)}B; an operation "
        f"takes at least {_microseconds(device.launch_s)} and {_microseconds(device.overhead_s)} in addition to its "
        "work",
        _link("between devices", machine.link)
        + (f"; {_link('between hosts', machine.network)}" if machine.network and machine.hosts > 1 else ""),
        f"each call also costs {_microseconds(machine.host.call_s)}{_each(machine)}; " + _threads(machine),
    )


def _standing(machine: Machine) -> str:
    if machine.calibrated:
        return f"figures measured on this kind of machine ({machine.file}); this step itself was not run"
    return f"figures from data sheets and assumptions ({machine.file}): predicted, not validated"


def _rates(machine: Machine, costs: Costs) -> str:
    device = machine.device
    if device.samples:
        return f"{len(costs.sampled)} kinds of operations as measured, {len(costs.estimated)} estimated from others"
    if device.curves:
        return f"rates measured for {', '.join(device.curves)}"
    shares = ", ".join(f"{family} {share:.0%}" for family, share in device.attainable.items())
    return f"a roofline; achieved shares of the peak: {shares or 'all of it'}"


def _link(where: str, link: Link) -> str:
    rate = "no copies" if link.bytes_per_s == float("inf") else f"{amount(link.bytes_per_s)}B/s each way"
    return f"{where} {link.name}: {rate}, {_microseconds(link.latency_s)}" + (", shared by all" if link.shared else "")


def _threads(machine: Machine) -> str:
    if machine.device.kind != "CPU":
        return "kernels of a GPU run one at a time, copies overlap with them"
    slowest = machine.host.slowdown[-1]
    slowdown_text = f", {slowest:.2f} times as slow when all are busy" if slowest != 1 else ""
    return f"devices share {machine.host.threads} threads{slowdown_text}"


def _each(machine: Machine) -> str:
    host = machine.host
    costs = [(host.device_call_s, "more device"), (host.argument_s, "tensor that is passed in")]
    return "".join([f", {_microseconds(seconds)} for each {what}" for seconds, what in costs if seconds])


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"


def amount(value: float) -> str:
    """Return a number with the prefix of its unit.

    >>> amount(2.039e12)
    '2.04 T'
    """
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "


def checked_unknown_size(size: object) -> int | None:
    """Return what `unknown_size` says.

    Raises:
      ArgumentError: unless it is a number of at least 0, or None.

    >>> checked_unknown_size(128)
    128
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0):
        return size
    raise ArgumentError(f"unknown_size must be the number to assume for sizes that depend on data, 128, got {size!r}.")
