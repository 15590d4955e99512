"""Assumptions: on what a prediction rests, in sentences that are printed with it."""

from __future__ import annotations

from graphsplit.costs.machine import Link, Machine
from graphsplit.costs.seconds import Costs


def assumptions_of(machine: Machine, costs: Costs) -> tuple[str, ...]:
    """Return one sentence for each thing that a prediction takes for granted."""
    device = machine.device
    return (
        _standing(machine),
        _rates(machine, costs),
        f"{device.name}: {amount(device.bytes_per_s)}B/s of memory, {amount(device.memory_bytes)}B; an operation "
        f"takes at least {_microseconds(device.launch_s)} and {_microseconds(device.overhead_s)} besides its work",
        _link("between devices", machine.link)
        + (f"; {_link('between hosts', machine.network)}" if machine.network and machine.hosts > 1 else ""),
        f"a call takes {_microseconds(machine.host.call_s)} besides{_each(machine)}; " + _threads(machine),
    )


def _standing(machine: Machine) -> str:
    if machine.calibrated:
        return f"figures measured on this kind of machine ({machine.file}); this step itself was not run"
    return f"figures from data sheets and assumptions ({machine.file}): predicted, not validated"


def _rates(machine: Machine, costs: Costs) -> str:
    device = machine.device
    if device.samples:
        return f"{len(costs.sampled)} kinds of operations as measured, {len(costs.estimated)} by what others took"
    if device.curves:
        return f"rates measured for {', '.join(device.curves)}"
    shares = ", ".join(f"{family} {share:.0%}" for family, share in device.attainable.items())
    return f"a roofline; shares of the peak that are reached: {shares or 'all of it'}"


def _link(where: str, link: Link) -> str:
    rate = "no copies" if link.bytes_per_s == float("inf") else f"{amount(link.bytes_per_s)}B/s each way"
    return f"{where} {link.name}: {rate}, {_microseconds(link.latency_s)}" + (", shared by all" if link.shared else "")


def _threads(machine: Machine) -> str:
    if machine.device.kind != "CPU":
        return "kernels of a GPU run one after the other, copies beside them"
    slowest = machine.host.slowdown[-1]
    more = f", {slowest:.2f} times as slow when all of them work" if slowest != 1 else ""
    wakes = f"; one without work starts after {_microseconds(machine.host.wake_s)}" if machine.host.wake_s else ""
    return f"devices share {machine.host.threads} threads{more}{wakes}"


def _each(machine: Machine) -> str:
    host = machine.host
    each = [(host.device_call_s, "more device"), (host.argument_s, "tensor that the graph is given")]
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
