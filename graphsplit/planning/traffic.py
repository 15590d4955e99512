"""Traffic: the bytes that leave and reach each device when a plan runs once. They follow from its moves."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graphsplit.core.hosts import host_name
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.propagation.owners import computing_devices
from graphsplit.planning.tasks import COPY, OPERATION, SEND, PlannedTask, Tasks, few_tasks_of

STAGES = "between stages"


@dataclass(frozen=True)
class Traffic:
    """Bytes by device, full names.

    Attributes:
      sent: what leaves it for other devices.
      received: what reaches it from other devices.
      between_hosts: how much of all that passes from host to host.
      by_kind: all that is sent, by the kind of move, and of what is sent between columns by the axis: see `along`.
      unknown: the kinds of which something is sent whose size follows from data. It counts as no bytes.
      giving: devices of which only arguments come, within their host.
    """

    sent: dict[str, int] = field(default_factory=dict)
    received: dict[str, int] = field(default_factory=dict)
    between_hosts: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    unknown: frozenset[str] = frozenset()
    giving: frozenset[str] = frozenset()

    @property
    def within_hosts(self) -> int:
        """The bytes that devices send to others of their host."""
        return sum(self.sent.values()) - self.between_hosts

    @property
    def through(self) -> dict[str, tuple[int, int]]:
        """What each device sends and receives, without their host's memory, to which each has a link."""
        devices = [device for device in dict.fromkeys([*self.sent, *self.received]) if device not in self.giving]
        return {device: (self.sent.get(device, 0), self.received.get(device, 0)) for device in devices}

    @property
    def busiest(self) -> tuple[str, int, int]:
        """The device through which most bytes go, the bytes that it sends, and those that it receives."""
        through = self.through
        device = max(through, key=lambda device: sum(through[device]), default="")
        return (device, *through.get(device, (0, 0)))


def traffic(plan: Decisions, tasks: Tasks | None = None) -> Traffic:
    """Return the bytes that one call moves between devices.

    A tensor that several operations of a device read is sent there once, as TensorFlow's runtime does. Sizes that are
    not known count as planned. What loops at home move in each turn is not in it.

    Args:
      plan: which.
      tasks: of the plan; None: they are made.
    """
    sent: dict[str, int] = {}
    received: dict[str, int] = {}
    between_hosts, by_kind, unknown = 0, {COPY: 0}, set[str]()
    found = tasks or few_tasks_of(plan)
    for task in found.tasks:
        size = task.bytes[0] if task.kind == SEND else 0
        if task.kind != SEND or task.reads[0] is None:
            continue
        source = found.tasks[task.reads[0].task].device
        kind = _kind(plan, source, task)
        if not size and _follows_from_data(plan, task):
            unknown.add(kind)
        if size:
            senders, receivers = found.alike.times(source), found.alike.times(task.device)
            by_kind[kind] = by_kind.get(kind, 0) + size * senders * receivers
            sent[source] = sent.get(source, 0) + size * receivers
            received[task.device] = received.get(task.device, 0) + size * senders
            between_hosts += size * senders * receivers if host_name(source) != host_name(task.device) else 0
    hosts = set(map(host_name, plan.devices))
    giving = frozenset([device for device in giving_devices(plan) if host_name(device) in hosts])
    return Traffic(_of_each(sent, found), _of_each(received, found), between_hosts, by_kind, frozenset(unknown), giving)


def giving_devices(plan: Decisions) -> frozenset[str]:
    """Return the devices of which only arguments come: the host's memory, to which each device has a link."""
    given, of_ops = set(plan.program.inputs), plan.owners.of_ops
    live = [i for i, step in enumerate(plan.steps) if step.home and i not in given]
    running = {device for i in live for device in plan.owners.devices(i)}
    lying = {of_ops[i] for i in given}
    return frozenset(lying - running - computing_devices(plan.program, plan.mesh, plan.home))


def _follows_from_data(plan: Decisions, task: PlannedTask) -> bool:
    """Return whether something is sent of an operation that makes tensors whose shapes follow from data."""
    shapes = () if task.op is None else plan.program.ops[task.op].out_shapes
    return any(shape is None or None in shape for shape in shapes)


def _of_each(amounts: Mapping[str, int], tasks: Tasks) -> dict[str, int]:
    """Return amounts by device, those also of devices for which others stand."""
    devices = tasks.alike.devices
    return dict(sorted((own, size) for device, size in amounts.items() for own in devices.get(device, (device,))))


def along(*axes: str) -> str:
    """Return what sends along an axis, or several at once, are called: no kind of move is, whatever axes are called."""
    return f"along {' and '.join(map(repr, axes))}"


def _kind(plan: Decisions, source: str, task: PlannedTask) -> str:
    """Return the kind of move for which something is sent from a device, or between which places of a shard."""
    if task.sent_for != OPERATION:
        return task.sent_for
    return along(*plan.mesh.axes_between(source, task.device)) if plan.mesh.columns else STAGES
