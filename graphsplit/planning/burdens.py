"""The device that has the variables, where it does much more than the others because of that."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from graphsplit.core.devices import copies_take_time, short_name
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.state import state_on
from graphsplit.planning.tasks import OPERATION, SEND, Tasks, few_tasks_of

NO_WORK = frozenset({"Const", "Placeholder"})  # types of operations that nobody waits for
LEAST_BYTES = 64_000  # of weights: to divide fewer takes longer than to send them
_FOR_VARIABLES = ("broadcast", "reduce")  # values of variables to all devices, and gradients from all
_MORE = 2  # times what any other device does


class Amounts(NamedTuple):
    """What a device does in a call: bytes that it sends and receives for variables, and operations that it runs."""

    sent: int
    received: int
    operations: int


class Burden(NamedTuple):
    """The device that has the variables and does much more than the others.

    Attributes:
      device: full name.
      own: what it does.
      others: the most of each that any other device does.
      travels: whether that takes time.
    """

    device: str
    own: Amounts
    others: Amounts
    travels: bool

    def __str__(self) -> str:
        this, most = self.own, self.others
        over = "" if self.travels else "Over GPUs and workers, "
        return (
            f"the variables are on {short_name(self.device)}, which sends {format_bytes(this.sent)} and receives "
            f"{format_bytes(this.received)} for them in a call, any other device at most {format_bytes(most.sent)} and "
            f"{format_bytes(most.received)}; it runs {this.operations:,} operations, any other at most "
            f'{most.operations:,}. {over}variables="auto" stores them on all devices'
        )


def burden_of_variables(plan: Decisions, tasks: Tasks | None = None) -> Burden | None:
    """Return what one device does because the variables are there, if that is more than twice what others do.

    None where `variables="auto"` has no say: in stages, along another axis of a mesh, and where it was asked.
    """
    program, devices = plan.program, set(plan.mesh.devices)
    has_own = plan.asked.has_layouts or plan.mesh.columns or program.all_stages()
    if len(devices) < 2 or program.symbols or has_own:
        return None
    bytes_held = Counter[str]()
    for where, captured in state_on(program, plan.state, plan.default_device):
        bytes_held[where] += captured.bytes if captured.name else 0
    device, size = max(bytes_held.items(), key=lambda pair: pair[1], default=("", 0))
    if size < LEAST_BYTES or any(_MORE * bytes_held[other] > size for other in bytes_held if other != device):
        return None
    plan_tasks = tasks or few_tasks_of(plan)
    sent, received, operations = Counter[str](), Counter[str](), operations_on(plan, plan_tasks)
    other_bytes = 0  # that pass through the device: rows
    for task in plan_tasks.tasks:
        if task.kind != SEND or task.reads[0] is None:
            continue
        source, times = plan_tasks.tasks[task.reads[0].task].device, plan_tasks.alike.times
        if task.sent_for in _FOR_VARIABLES:
            sent[source] += task.bytes[0] * times(task.device)
            received[task.device] += task.bytes[0] * times(source)
        elif device in (source, task.device):
            other_bytes += task.bytes[0] * times(source) * times(task.device)
    amounts = {name: Amounts(sent[name], received[name], operations[name]) for name in {*sent, *received, *operations}}
    of_device = amounts.pop(device, Amounts(0, 0, 0))
    of_others = Amounts(*[max(column) for column in zip(Amounts(0, 0, 0), *amounts.values(), strict=True)])
    is_more = [amount > _MORE * other_amount for amount, other_amount in zip(of_device, of_others, strict=True)]
    if of_device.sent + of_device.received < max(LEAST_BYTES, other_bytes) or not any(is_more):
        return None
    return Burden(device, of_device, of_others, copies_take_time([*devices, device]))


def operations_on(plan: Decisions, tasks: Tasks) -> Counter[str]:
    """Return how many operations each device runs in a call, including the operations of moves."""
    count_by_device = Counter[str]()
    for task in tasks.tasks:
        is_work = task.kind != OPERATION or task.op is None or plan.program.ops[task.op].type not in NO_WORK
        if task.kind != SEND and is_work:
            for device in tasks.alike.devices.get(task.device, (task.device,)):
                count_by_device[device] += 1
    return count_by_device
