"""What each device holds, as a table of a plan: variables, arguments, activations, what is moved; and in which layers.

Beside it stands how many operations it runs. Activations and moves are counted when their sum is largest.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence

from graphsplit.core.devices import short_name
from graphsplit.planning.amounts import aligned, count_text, format_bytes
from graphsplit.planning.burdens import operations_on
from graphsplit.planning.costs.buffers import has_lists_of_unknown_size
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.device_bytes import Alive
from graphsplit.planning.holdings import ACTIVATIONS, ARGUMENTS, MOVED, VARIABLES, Holding, holdings
from graphsplit.planning.tasks import Tasks, kept_on
from graphsplit.program.program import TAPES
from graphsplit.program.reading.trip_counts import iterations_of

_MOST_ROWS, _MOST_LAYERS = 8, 3
_JOINED = "tensors moved together"
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
    scopes = _scopes(plan)
    for holding in holdings(plan, tasks, alive):
        kinds.setdefault(holding.device, Counter())[holding.kind] += holding.bytes
        layers.setdefault(holding.device, Counter())[_layer_of(holding, scopes)] += holding.bytes
    columns, operations = (VARIABLES, ARGUMENTS, ACTIVATIONS, MOVED), operations_on(plan, tasks)
    alike: dict[tuple[str, ...], list[str]] = {}
    for device in sorted(kinds, key=lambda device: -kinds[device].total()):
        sizes = kinds[device].total(), *[kinds[device][kind] for kind in columns]
        most = [f"{layer} {format_bytes(size)}" for layer, size in layers[device].most_common(_MOST_LAYERS)]
        alike_devices = tasks.alike.devices.get(device, (device,))
        cells = *map(format_bytes, sizes), f"{operations[device]:,}", ", ".join(most)
        alike.setdefault(cells, []).extend(alike_devices)
    shown = sorted([(devices, cells) for cells, devices in list(alike.items())[:_MOST_ROWS]])
    names = [_named(devices) for devices, _ in shown]
    rows = [(f"  {name}", *cells[:-1]) for name, (_, cells) in zip(names, shown, strict=True)]
    texts = aligned([("peak memory", "total", *columns, _OPERATIONS), *rows])
    lines = [f"  {row}  {last}" for row, last in zip(texts, ["most of it", *[c[-1] for _, c in shown]], strict=True)]
    left_out = sum(map(len, alike.values())) - sum(len(devices) for devices, _ in shown)
    lines += [f"    no more on {count_text(left_out, 'other')}"] if left_out else []
    return [*lines, *_not_counted(plan)] if kinds else []


def _not_counted(plan: Decisions) -> list[str]:
    """Say what loops keep whose size is not known when planning."""
    lines = []
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if (step.once or step.shards) and has_lists_of_unknown_size(op):
            lines.append(f"    plus lists kept by {op.type} {op.name!r}, whose sizes are not known when planning")
        if op.bodies and (step.once or step.shards) and iterations_of(op) is None:
            shards = range(plan.mesh.shards) if step.shards else (None,)
            size = max([sum(kept_on(plan, op, d).values()) for d in shards])
            once = f"{format_bytes(size)} on {short_name(plan.places.once(op)[0])}"
            per_shard = f"at most {format_bytes(size)} on each of {len(shards)} shards"
            kept_text = per_shard if step.shards else once
            lines += [f"    plus {kept_text} for each iteration of {op.type} {op.name!r}"] if size else []
    return lines


def _named(devices: Sequence[str]) -> str:
    """Return the name of a line whose figures hold for each of some devices."""
    first, *other_names = map(short_name, devices)
    if not other_names:
        return first
    return f"each of {first} and {other_names[0] if len(other_names) == 1 else f'{len(other_names)} others'}"


def _layer_of(holding: Holding, scopes: Mapping[Scopes, tuple[str, bool]]) -> str:
    if holding.kind == VARIABLES:
        return holding.name.rpartition("/")[0] or holding.name
    if holding.kind == ARGUMENTS:
        return holding.name
    return _JOINED if holding.op is None else _layer(scopes, holding.op.provenance.origin or holding.op.name)


def _scopes(plan: Decisions) -> dict[Scopes, tuple[str, bool]]:
    """Return the scopes of layers and of what they are in: how they are called, and whether they have variables.

    Keras 3 enters each layer's scope twice, so that TensorFlow gives it a number: `dense_1` is the layer `dense`. The
    variables, which have the layers' own names, tell.
    """
    name_by_scopes: dict[Scopes, tuple[str, bool]] = {}
    for captured in plan.state.captured:
        layers, scopes = captured.name.split("/")[:-1], captured.placeholder.split("/")[:-1]
        for start in range(len(scopes) - len(layers) + 1) if layers else ():
            pairs = zip(layers, scopes[start:], strict=False)
            if all(re.fullmatch(rf"{re.escape(layer)}(_\d+)?", scope) for layer, scope in pairs):
                for k in range(1, len(layers) + 1):
                    entry = name_by_scopes.get(key := tuple(scopes[: start + k]))
                    name_by_scopes[key] = "/".join(layers[:k]), k == len(layers) or (entry is not None and entry[1])
                break
    return name_by_scopes


def _layer(name_by_scopes: Mapping[Scopes, tuple[str, bool]], name: str) -> str:
    """Return the layer of an operation; of one that has no variables what it is called in the model it is in."""
    *scopes, last = [scope for scope in name.split("/") if scope not in TAPES]
    for end in range(len(scopes), 0, -1):
        layer, has_variables = name_by_scopes.get(tuple(scopes[:end]), ("", False))
        if layer:
            inner = scopes[end] if end < len(scopes) else last
            return layer if has_variables else f"{layer}/{re.sub(r'_[0-9]+$', '', inner)}"
    return scopes[0] if scopes else last
