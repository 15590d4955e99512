"""`Prediction`: what a step takes on a machine, in seconds and bytes, and on what that rests."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from graphsplit.core.devices import short_name
from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.notebooks import text_html
from graphsplit.core.storage import forms
from graphsplit.errors import ArgumentError
from graphsplit.inspect.questions import natural_order
from graphsplit.inspect.views.timeline_views import trace_place, trace_span
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.planning.costs.machine import Link, Machine
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.plan import Plan
from graphsplit.planning.state import state_bytes
from graphsplit.simulate.prediction.buffers import Memory, live_memory, with_state
from graphsplit.simulate.prediction.compiled_work import ASSUMED as COMPILED
from graphsplit.simulate.prediction.predicted_step import PredictedStep, percent
from graphsplit.simulate.prediction.replay import replay
from graphsplit.simulate.prediction.task_writing import machine_tasks

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
            f"  limited by {self.limit}",
        ]
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
        left = len(self.memory) - len(shown)
        lines += [f"  ... and {count_text(left, 'more device')}"] if left else []
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
    found = dict.fromkeys([*map(short_name, prediction.devices), *[event.place for event in prediction.events]])
    places = sorted(found, key=lambda place: ("->" in place, natural_order(place)))
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
    state = state_bytes(plan.program, plan.state, plan.home)
    on_host = _on_hosts(machine, state)
    tasks = machine_tasks(plan, machine, costs)
    schedule = replay(tasks.tasks, tasks.resources)
    memory = with_state(live_memory(tasks.buffers, schedule), state, tasks.arguments)
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
    more = f", {slowest:.2f} times as slow when all are busy" if slowest != 1 else ""
    return f"devices share {machine.host.threads} threads{more}"


def _each(machine: Machine) -> str:
    host = machine.host
    each = [(host.device_call_s, "more device"), (host.argument_s, "tensor that is passed in")]
    return "".join([f", {_microseconds(seconds)} for each {what}" for seconds, what in each if seconds])


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
