"""Routes: which links a tensor takes from one device to another, and how long each is busy with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphsplit.planning.costs.machine import Machine
from graphsplit.simulate.prediction.replay import Resource

_LINKS = ("link from", "link to", "host link from", "host link to")  # of each device


@dataclass(frozen=True)
class LinkRoute:
    """A way from one device to another.

    Attributes:
      uses: the links' directions, for all of which it waits.
      bytes_per_s: of the slowest of them.
      latency_s: from the last byte sent to the reader's start.
      busy_s: how long they are busy besides.
      copies: whether what arrives takes memory there.
    """

    uses: tuple[str, ...]
    bytes_per_s: float
    latency_s: float
    busy_s: float
    copies: bool


class Routes:
    """The links between devices of a machine.

    Args:
      machine: what there is.
      devices: those that are used.
    """

    def __init__(self, machine: Machine, devices: Sequence[str]):
        self._machine = machine
        self._devices = tuple(devices)
        self._computes_on: dict[str, str] = {}
        self._routes: dict[tuple[str, str], LinkRoute] = {}
        self._number = {device: i for i, device in enumerate(devices)}

    def resources(self) -> dict[str, Resource]:
        """Return what tasks can use: streams of devices, directions of links, threads and memory of hosts."""
        machine, hosts = self._machine, {self._machine.host_of(device) for device in self._devices}
        found: dict[str, Resource] = {}
        for host in sorted(hosts):
            own = sum(machine.host_of(device) == host for device in self._devices)
            threads = machine.threads(own) if machine.device.kind == "CPU" else machine.host.threads
            found[f"threads of host {host}"] = Resource(threads, newest_first=True)
            found[f"memory of host {host}"] = Resource()
            for link in (machine.link, machine.host_link):
                if link is not None and link.shared:
                    found[f"{link.name} of host {host}"] = Resource()
            found.update({f"network {way} host {host}": Resource() for way in ("from", "to")})
        for device in self._devices:
            found[f"stream of {device}"] = Resource()
            found.update({f"{link} {device}": Resource() for link in _LINKS})
        return found

    def computes_on(self, device: str) -> str:
        """Return what an operation occupies: the stream of a GPU, or a thread, as logical CPU devices do.

        The host of GPUs runs operations on large tensors by all its threads, which its memory keeps waiting: two at a
        time take as long as one after the other.
        """
        if device not in self._computes_on:
            machine = self._machine
            cpus = f"{'memory' if machine.is_host(device) else 'threads'} of host {machine.host_of(device)}"
            is_cpu = machine.device.kind == "CPU" or machine.is_host(device)
            self._computes_on[device] = cpus if is_cpu else f"stream of {device}"
        return self._computes_on[device]

    def between(self, source: str, target: str) -> LinkRoute:
        """Return the way of a tensor from one device to another."""
        if (source, target) not in self._routes:
            self._routes[source, target] = self._between(source, target)
        return self._routes[source, target]

    def _between(self, source: str, target: str) -> LinkRoute:
        machine = self._machine
        here, there = machine.host_of(source), machine.host_of(target)
        if here != there:
            network = machine.network
            assert network is not None  # a machine without one has one host
            uses = (f"network from host {here}", f"network to host {there}")
            return LinkRoute(uses, network.bytes_per_s, network.latency_s, 0.0, True)
        link = machine.link
        if machine.device.kind == "CPU":  # a send and a receive, which threads run
            return LinkRoute((f"threads of host {here}",), link.bytes_per_s, 0.0, link.latency_s, link.copies)
        name = "link"
        if machine.host_link is not None and (machine.is_host(source) or machine.is_host(target)):
            name, link = "host link", machine.host_link
        if link.shared:
            return LinkRoute((f"{link.name} of host {here}",), link.bytes_per_s, link.latency_s, 0.0, link.copies)
        ways = [(source, "from"), (target, "to")]
        used = tuple([f"{name} {way} {device}" for device, way in ways if device in self._number])
        return LinkRoute(used, link.bytes_per_s, link.latency_s, 0.0, link.copies)

    def rank(self, source: str, target: str) -> int:
        """Return when a device's turn is that is sent something at the same time as others: round the circle.

        If all send to all, no two then send to the same one at the same time.
        """
        count = len(self._devices)
        return (self._number.get(target, 0) - self._number.get(source, 0)) % max(count, 1)
