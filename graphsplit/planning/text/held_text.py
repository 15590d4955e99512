"""What each device holds, as a table of a plan: variables, arguments, activations, what is moved; and in which layers.

Beside it stands how many operations it runs. Activations and moves are counted when their sum is largest.

Below it is told what a device does more than the others because the variables are there, and what to write.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphsplit.core.devices import copies_take_time, short_name
from graphsplit.planning.amounts import aligned, count_text, format_bytes
from graphsplit.planning.costs.buffers import has_lists_of_unknown_size
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.device_bytes import Alive, alive_on
from graphsplit.planning.state import state_on
from graphsplit.planning.tasks import OPERATION, SEND, Tasks, few_tasks_of, kept_on
from graphsplit.planning.text.headlines import NO_WORK
from graphsplit.program.program import TAPES
from graphsplit.program.reading.trip_counts import turns_of

_MOST_ROWS, _MOST_LAYERS = 8, 3
_JOINED = "tensors moved together"
_VARIABLES, _ARGUMENTS, _ACTIVATIONS, _MOVED = "variables", "arguments", "activations", "moved"
_OPERATIONS = "operations"

Scopes = tuple[str, ...]


def held_text(plan: Decisions, tasks: Tasks, alive: Mapping[str, Alive]) -> list[str]:
    """Return the table as lines.

    Args:
      plan: which.
      tasks: of the plan.
      alive: what is alive on each device when most is.
    """
    kinds: dict[str, Counter[str]] = {}
    layers: dict[str, Counter[str]] = {}
    for device, kind, layer, size in _holdings(plan, tasks, alive):
        kinds.setdefault(device, Counter())[kind] += size
        layers.setdefault(device, Counter())[layer] += size
    columns, operations = (_VARIABLES, _ARGUMENTS, _ACTIVATIONS, _MOVED), operations_on(plan, tasks)
    alike: dict[tuple[str, ...], list[str]] = {}
    for device in sorted(kinds, key=lambda device: -kinds[device].total()):
        sizes = kinds[device].total(), *[kinds[device][kind] for kind in columns]
        most = [f"{layer} {format_bytes(size)}" for layer, size in layers[device].most_common(_MOST_LAYERS)]
        own = tasks.alike.devices.get(device, (device,))
        cells = *map(format_bytes, sizes), f"{operations[device]:,}", ", ".join(most)
        alike.setdefault(cells, []).extend(own)
    shown = sorted([(devices, cells) for cells, devices in list(alike.items())[:_MOST_ROWS]])
    names = [_named(devices) for devices, _ in shown]
    rows = [(f"  {name}", *cells[:-1]) for name, (_, cells) in zip(names, shown, strict=True)]
    texts = aligned([("peak memory", "total", *columns, _OPERATIONS), *rows])
    lines = [f"  {row}  {last}" for row, last in zip(texts, ["most of it", *[c[-1] for _, c in shown]], strict=True)]
    others = sum(map(len, alike.values())) - sum(len(devices) for devices, _ in shown)
    lines += [f"    no more on {count_text(others, 'other')}"] if others else []
    return [*lines, *_not_counted(plan)] if kinds else []


def most_held(plan: Decisions) -> int:
    """Return the bytes of the device that holds most, of all that the table has."""
    tasks = few_tasks_of(plan)
    held = Counter[str]()
    for device, _, _, size in _holdings(plan, tasks, alive_on(plan, tasks)):
        held[device] += size
    return max(held.values(), default=0)


def _not_counted(plan: Decisions) -> list[str]:
    """Say what loops keep whose size is not known when planning."""
    lines = []
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if (step.home or step.shards) and has_lists_of_unknown_size(op):
            lines.append(f"    plus lists kept by {op.type} {op.name!r}, whose sizes are not known when planning")
        if op.bodies and (step.home or step.shards) and turns_of(op) is None:
            shards = range(plan.mesh.shards) if step.shards else (None,)
            size = max([sum(kept_on(plan, op, d).values()) for d in shards])
            once = f"{format_bytes(size)} on {short_name(plan.owners.of_ops[op.index] or plan.home)}"
            each = f"at most {format_bytes(size)} on each of {len(shards)} shards"
            kept = each if step.shards else once
            lines += [f"    plus {kept} for each turn of {op.type} {op.name!r}"] if size else []
    return lines


def _named(devices: Sequence[str]) -> str:
    """Return the name of a line whose figures hold for each of some devices."""
    first, *others = map(short_name, devices)
    if not others:
        return first
    return f"each of {first} and {others[0] if len(others) == 1 else f'{len(others)} others'}"


def _holdings(plan: Decisions, tasks: Tasks, alive: Mapping[str, Alive]) -> list[tuple[str, str, str, int]]:
    """Return all that devices hold: device, kind, layer, bytes."""
    scopes, ops, given = _scopes(plan), plan.program.ops, set(plan.program.inputs)
    names = dict(zip(plan.program.inputs, plan.program.input_names, strict=False))
    state = state_on(plan.program, plan.state, plan.home)
    found = [(d, _VARIABLES, own.name.rpartition("/")[0] or own.name, own.bytes) for d, own in state if own.bytes]
    for task in tasks.tasks:
        if task.kind == OPERATION and task.op in given:
            found.append((task.device, _ARGUMENTS, names.get(task.op, ""), sum(task.bytes)))
    left_out = {plan.mesh.devices[d] for d in tasks.alike.told_by}
    for buffer in [buffer for device, own in alive.items() if device not in left_out for buffer in own.buffers]:
        op = None if buffer.task.op is None else ops[buffer.task.op]
        layer = _JOINED if op is None else _layer(scopes, op.provenance.origin or op.name)
        found.append((buffer.device, _ACTIVATIONS if buffer.task.is_made else _MOVED, layer, buffer.bytes))
    return found


def _scopes(plan: Decisions) -> dict[Scopes, tuple[str, bool]]:
    """Return the scopes of layers and of what they are in: how they are called, and whether they have variables.

    Keras 3 enters each layer's scope twice, so that TensorFlow gives it a number: `dense_1` is the layer `dense`. The
    variables, which have the layers' own names, tell.
    """
    found: dict[Scopes, tuple[str, bool]] = {}
    for own in plan.state.captured:
        layers, scopes = own.name.split("/")[:-1], own.placeholder.split("/")[:-1]
        for start in range(len(scopes) - len(layers) + 1) if layers else ():
            pairs = zip(layers, scopes[start:], strict=False)
            if all(re.fullmatch(rf"{re.escape(layer)}(_\d+)?", scope) for layer, scope in pairs):
                for k in range(1, len(layers) + 1):
                    before = found.get(key := tuple(scopes[: start + k]))
                    found[key] = "/".join(layers[:k]), k == len(layers) or (before is not None and before[1])
                break
    return found


def _layer(known: Mapping[Scopes, tuple[str, bool]], name: str) -> str:
    """Return the layer of an operation; of one that has no variables what it is called in the model it is in."""
    *scopes, last = [scope for scope in name.split("/") if scope not in TAPES]
    for end in range(len(scopes), 0, -1):
        layer, has_variables = known.get(tuple(scopes[:end]), ("", False))
        if layer:
            inner = scopes[end] if end < len(scopes) else last
            return layer if has_variables else f"{layer}/{re.sub(r'_[0-9]+$', '', inner)}"
    return scopes[0] if scopes else last


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
        own, most = self.own, self.others
        over = "" if self.travels else "Over GPUs and workers, "
        return (
            f"the variables are on {short_name(self.device)}, which sends {format_bytes(own.sent)} and receives "
            f"{format_bytes(own.received)} for them in a call, any other device at most {format_bytes(most.sent)} and "
            f"{format_bytes(most.received)}; it runs {own.operations:,} operations, any other at most "
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
    held = Counter[str]()
    for where, captured in state_on(program, plan.state, plan.home):
        held[where] += captured.bytes if captured.name else 0
    device, size = max(held.items(), key=lambda pair: pair[1], default=("", 0))
    if size < LEAST_BYTES or any(_MORE * held[other] > size for other in held if other != device):
        return None
    found = tasks or few_tasks_of(plan)
    sent, received, operations = Counter[str](), Counter[str](), operations_on(plan, found)
    other_bytes = 0  # that pass through the device: rows
    for task in found.tasks:
        if task.kind != SEND or task.reads[0] is None:
            continue
        source, times = found.tasks[task.reads[0].task].device, found.alike.times
        if task.sent_for in _FOR_VARIABLES:
            sent[source] += task.bytes[0] * times(task.device)
            received[task.device] += task.bytes[0] * times(source)
        elif device in (source, task.device):
            other_bytes += task.bytes[0] * times(source) * times(task.device)
    amounts = {own: Amounts(sent[own], received[own], operations[own]) for own in {*sent, *received, *operations}}
    own = amounts.pop(device, Amounts(0, 0, 0))
    others = Amounts(*[max(column) for column in zip(Amounts(0, 0, 0), *amounts.values(), strict=True)])
    is_more = [mine > _MORE * theirs for mine, theirs in zip(own, others, strict=True)]
    if own.sent + own.received < max(LEAST_BYTES, other_bytes) or not any(is_more):
        return None
    return Burden(device, own, others, copies_take_time([*devices, device]))


def operations_on(plan: Decisions, tasks: Tasks) -> Counter[str]:
    """Return how many operations each device runs in a call, including the operations of moves."""
    found = Counter[str]()
    for task in tasks.tasks:
        is_work = task.kind != OPERATION or task.op is None or plan.program.ops[task.op].type not in NO_WORK
        if task.kind != SEND and is_work:
            for device in tasks.alike.devices.get(task.device, (task.device,)):
                found[device] += 1
    return found
