"""Machine: what devices can do, and the links between them. Plain data; `machine_files` reads it from small files."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from graphsplit.errors import ArgumentError
from graphsplit.planning.costs.families import MATRIX
from graphsplit.planning.costs.work import Work

Curve = tuple[tuple[float, float], ...]
"""What was measured: of operations of so much work, and how much of it a second. By work."""


class Sample(NamedTuple):
    """How long one operation took that was measured.

    Attributes:
      work: what one execution does.
      seconds: how long it takes.
    """

    work: Work
    seconds: float


@dataclass(frozen=True)
class Device:
    """What one device can do.

    Attributes:
      name: its model, `A100-SXM4-80GB`.
      kind: `"GPU"` or `"CPU"`.
      matrix_flops_per_s: of products, at most, by dtype: tensor cores where TensorFlow uses them by default.
      vector_flops_per_s: of all else, at most, by dtype.
      bytes_per_s: of its memory, at most.
      memory_bytes: how large that is.
      attainable: which part of these an operation of a family reaches, by family.
      launch_s: from the start of one operation to that of the next, at least: the host's time to launch it.
      overhead_s: what every operation takes besides its work.
      curves: what was measured here: FLOPs (of products) or bytes (of all else) a second, by family; it counts instead
        of a share of the peak.
      samples: operations that were measured one by one, by `sample_key`; they count instead of all else.
    """

    name: str
    kind: str
    matrix_flops_per_s: Mapping[str, float]
    vector_flops_per_s: Mapping[str, float]
    bytes_per_s: float
    memory_bytes: float
    attainable: Mapping[str, float] = field(default_factory=dict)
    launch_s: float = 0.0
    overhead_s: float = 0.0
    curves: Mapping[str, Curve] = field(default_factory=dict)
    samples: Mapping[str, Sample] = field(default_factory=dict, repr=False)

    def roofline_s(self, work: Work) -> float:
        """Return how long work takes at the rates of its family, without what every operation takes besides.

        It is the slower of the arithmetic and of what is read and written. (Williams, Waterman, Patterson 2009:
        Roofline: an insightful visual performance model.)
        """
        is_product = work.family in MATRIX
        curve, amount = self.curves.get(work.family), work.flops if is_product else work.bytes
        if curve and amount:  # (of a product whose arithmetic no formula is for, at least the bytes are known)
            return amount / (rate_at(curve, amount) * self._relative(work))
        share = self.attainable.get(work.family, 1.0)
        peaks = self.matrix_flops_per_s if is_product else self.vector_flops_per_s
        peak = peaks.get(work.dtype) or self._slowest(work)
        # a product that reaches a part of the arithmetic peak is not known to reach less of the memory's
        bytes_share = self.attainable.get("bytes", 1.0)
        return max(work.flops / (peak * share) if work.flops else 0.0, work.bytes / (self.bytes_per_s * bytes_share))

    def _relative(self, work: Work) -> float:
        """Return how fast numbers of a dtype are, as a multiple of 32-bit ones, with which curves are measured."""
        peaks = self.matrix_flops_per_s
        return peaks.get(work.dtype, peaks["float32"]) / peaks["float32"] if work.family in MATRIX else 1.0

    def _slowest(self, work: Work) -> float:
        """Return the rate of numbers that no figure is for: integers are no faster than 32-bit floating point."""
        if work.dtype in ("float64", "complex64", "complex128") and work.flops:
            raise ArgumentError(
                f"The machine's {self.name} has no figure for {work.dtype}, and the function computes with it. Add "
                f"{work.dtype} under [device.vector_flops_per_s] and [device.matrix_flops_per_s] to a file of your own."
            )
        return self.vector_flops_per_s.get("float32") or min(self.vector_flops_per_s.values())


def rate_at(curve: Curve, amount: float) -> float:
    """Return a rate between those that were measured, straight on logarithmic scales; beyond them, the last one.

    >>> round(rate_at(((1e6, 1e9), (1e8, 1e10)), 1e7) / 1e9, 2)
    3.16
    """
    at = bisect.bisect([point for point, _ in curve], amount)
    if at in (0, len(curve)):
        return curve[min(at, len(curve) - 1)][1]
    (low, slow), (high, fast) = curve[at - 1], curve[at]
    part = math.log(amount / low) / math.log(high / low)
    return slow * math.exp(part * math.log(fast / slow))


@dataclass(frozen=True)
class Link:
    """What carries bytes from device to device, or from host to host.

    Attributes:
      name: `NVLink 3 through NVSwitch`.
      bytes_per_s: each way; of each device, or of all together if `shared`.
      latency_s: from the first byte sent to the first received.
      shared: whether all devices of a host share one, as logical devices share a memory.
      copies: whether what is received takes memory: logical CPU devices hand on what they have.
    """

    name: str
    bytes_per_s: float
    latency_s: float
    shared: bool = False
    copies: bool = True


@dataclass(frozen=True)
class Host:
    """What the devices of a host share.

    Attributes:
      threads: that run operations of CPU devices, and launch those of GPUs. Logical CPU devices share them.
      threads_per_device: how many of these one device has at most.
      slowdown: how many times as long an operation takes while 1, 2, ... of the threads work: they share memory, and
        perhaps cores.
      call_s: what a call of a function takes besides its operations.
      device_call_s: what it takes besides for each device after the first.
      argument_s: what it takes besides for each tensor that the graph is given, the handles of variables among them.
      slowdown_of: `slowdown` of operations of a family, where it was measured: what only reads and writes slows others
        down that do, products hardly.
      bytes_per_s: of its memory, by all threads together; None if that is not known.
      flops_per_s: of 32-bit numbers, by all threads together; of 64-bit ones half of it. None if that is not known.
    """

    threads: int = 1
    threads_per_device: int = 1
    slowdown: tuple[float, ...] = (1.0,)
    call_s: float = 0.0
    device_call_s: float = 0.0
    argument_s: float = 0.0
    slowdown_of: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    bytes_per_s: float | None = None
    flops_per_s: float | None = None


@dataclass(frozen=True)
class Machine:
    """Devices of one kind on one or more hosts, and what they share.

    Attributes:
      name: `8xA100-SXM4-80GB`.
      device: what each device can do.
      devices: how many there are on each host.
      hosts: how many.
      link: between devices of a host.
      host_link: between a device and its host; None: it is as `link`.
      network: between hosts; None if that is not described.
      host: what devices of a host share.
      sources: where the figures are from, by table of the file: `device`, `link`, ...
      file: where it was read.
      calibrated: whether its rates were measured and not taken from data sheets.
    """

    name: str
    device: Device
    devices: int
    link: Link
    hosts: int = 1
    network: Link | None = None
    host: Host = Host()  # frozen
    host_link: Link | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    file: str = ""
    calibrated: bool = False

    @property
    def most_devices(self) -> int:
        """How many devices there are on all hosts."""
        return self.devices * self.hosts

    def names(self, count: int) -> tuple[str, ...]:
        """Return the full names of its first devices.

        Raises:
          ArgumentError: if it has fewer.
        """
        if not 1 <= count <= self.most_devices:
            where = f"{self.devices} on each of {self.hosts} hosts" if self.hosts > 1 else f"{self.devices}"
            advice = self._larger(count)
            raise ArgumentError(f"devices={count}: the machine {self.name!r} has {where}. {advice}")
        kind = self.device.kind
        if self.hosts == 1:
            return tuple([f"/device:{kind}:{i}" for i in range(count)])
        places = [divmod(i, self.devices) for i in range(count)]
        return tuple([f"/job:worker/replica:0/task:{host}/device:{kind}:{i}" for host, i in places])

    def _larger(self, count: int) -> str:
        if count < 1:
            return "Choose at least one."
        if self.network is None:
            return "Choose fewer; its file has no [network] by which hosts are joined into a cluster."
        hosts = -(-count // self.devices)
        return f"Choose fewer, or a cluster of {hosts} hosts: {hosts}x{self.devices}x{self.device.name}."

    def cluster(self, hosts: int) -> Machine:
        """Return so many of its hosts, joined by its network.

        Raises:
          ArgumentError: if that is not described.
        """
        if hosts > 1 and self.network is None:
            raise ArgumentError(
                f"{hosts} hosts of {self.name!r}: its file {self.file!r} has no table [network], with bytes_per_s and "
                "latency_s of what joins hosts. Add it to a file of your own."
            )
        plain = f"{self.devices}x{self.device.name}"
        return replace(self, hosts=hosts, name=f"{hosts}x{plain}" if hosts > 1 else plain)

    def covering(self, devices: int) -> Machine:
        """Return this machine, or a cluster of so many of it that there are enough devices."""
        return self if devices <= self.most_devices else self.cluster(-(-devices // self.devices))

    def is_host(self, device: str) -> bool:
        """Return whether a device is a host of others: its memory is none of theirs."""
        return f"device:{self.device.kind}:" not in device

    @property
    def host_device(self) -> Device | None:
        """A host as a device: what all its threads do together, one operation at a time. None if that is not known."""
        host = self.host
        if host.bytes_per_s is None or host.flops_per_s is None:
            return None
        rates = {"float32": host.flops_per_s, "float64": host.flops_per_s / 2}
        as_device = replace(self.device, name="host", kind="CPU", matrix_flops_per_s=rates, vector_flops_per_s=rates)
        return replace(
            as_device, bytes_per_s=host.bytes_per_s, memory_bytes=math.inf, launch_s=0.0, curves={}, samples={}
        )

    def host_of(self, device: str) -> int:
        """Return the number of the host of a device."""
        return int(device.partition("/task:")[2].partition("/")[0] or 0)

    def call_s(self, devices: int, arguments: int = 0) -> float:
        """Return how long a call takes on so many devices, besides its operations. Hosts start at the same time.

        Args:
          devices: how many.
          arguments: how many tensors the graph is given, captured ones among them.
        """
        on_one = min(devices, self.devices)
        return self.host.call_s + (on_one - 1) * self.host.device_call_s + arguments * self.host.argument_s

    def threads(self, devices: int) -> int:
        """Return how many threads of a host run operations of so many of its CPU devices."""
        return min(self.host.threads, devices * self.host.threads_per_device)
