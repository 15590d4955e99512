"""What each device holds at its peak: variables, arguments, activations, what is moved."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from graphsplit.planning.decisions import Decisions
from graphsplit.planning.device_bytes import Alive, alive_on
from graphsplit.planning.state import state_on
from graphsplit.planning.tasks import OPERATION, Tasks, few_tasks_of
from graphsplit.program.program import Op

VARIABLES, ARGUMENTS, ACTIVATIONS, MOVED = "variables", "arguments", "activations", "moved"


class Holding(NamedTuple):
    """Bytes that a device holds.

    Attributes:
      device: full name.
      kind: `VARIABLES`, `ARGUMENTS`, `ACTIVATIONS` or `MOVED`.
      bytes: how many.
      name: of the variable or the argument; "" for others.
      op: what made an activation, or what is moved; None for several that are moved together, and for others.
    """

    device: str
    kind: str
    bytes: int
    name: str = ""
    op: Op | None = None


def holdings(plan: Decisions, tasks: Tasks, alive: Mapping[str, Alive]) -> Iterator[Holding]:
    """Return what devices hold.

    Args:
      plan: which.
      tasks: of the plan.
      alive: what is alive on each device when most is.
    """
    ops, arguments = plan.program.ops, set(plan.program.inputs)
    names = dict(zip(plan.program.inputs, plan.program.input_names, strict=False))
    for device, captured in state_on(plan.program, plan.state, plan.default_device):
        if captured.bytes:
            yield Holding(device, VARIABLES, captured.bytes, captured.name)
    for task in tasks.tasks:
        if task.kind == OPERATION and task.op in arguments:
            yield Holding(task.device, ARGUMENTS, sum(task.bytes), names.get(task.op, ""))
    left_out = {plan.mesh.devices[d] for d in tasks.alike.told_by}
    for buffer in [buffer for device, live in alive.items() if device not in left_out for buffer in live.buffers]:
        op = None if buffer.task.op is None else ops[buffer.task.op]
        yield Holding(buffer.device, ACTIVATIONS if buffer.task.is_made else MOVED, buffer.bytes, op=op)


def most_held(plan: Decisions) -> int:
    """Return the bytes of the device that holds most."""
    tasks = few_tasks_of(plan)
    bytes_by_device = Counter[str]()
    for holding in holdings(plan, tasks, alive_on(plan, tasks)):
        bytes_by_device[holding.device] += holding.bytes
    return max(bytes_by_device.values(), default=0)
