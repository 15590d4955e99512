"""Staging: the nodes of an emitted graph that belong to a stage move to the stage's devices. Nothing else changes.

So layouts, rules and planning know nothing of stages, and results are those of the graph without them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import canonical_name, short_name
from graphsplit.core.graphdefs import split_reference
from graphsplit.planning.plan import Plan
from graphsplit.program.stages import Stage
from graphsplit.tracing.trace import Trace

_REDUCES, _GATHERS, _COMMUNICATION = "graphsplit/all_reduce/", "graphsplit/all_gather/", "graphsplit/"


def move_stages(
    plan: Plan,
    nodes: Sequence[Any],
    shard_of: Mapping[str, int],
    prefixes: Sequence[str],
    resource_devices: Mapping[str, str],
) -> None:
    """Set the devices of the nodes that belong to stages, in place.

    Copies on the shards go to the stage's device for that shard, whole operations to its first device, unless they
    touch a variable or table, which stays where it is. What a stage made is reduced on its first device.

    Args:
      plan: what the nodes carry out.
      nodes: all nodes, each after those it reads; their devices are those of the surrounding function.
      shard_of: the shards of those that run on the shards.
      prefixes: how the names of each shard's copies begin.
      resource_devices: where captured variables live, by placeholder name.
    """
    if not plan.program.stages or plan.local:
        return
    resources = {*resource_devices, *(op.name for op in plan.program.ops if tf.resource in op.out_dtypes)}
    moved: dict[str, str] = {}
    for node in nodes:
        shard = shard_of.get(node.name)
        if shard is not None:
            device = plan.stage_device(node.name.removeprefix(prefixes[shard]), shard)
        elif resources.isdisjoint([node.name, *_sources(node)]):
            device = plan.stage_device(node.name, None)
        else:
            device = ""
        if device:
            moved[node.name] = node.device = device
    _move_communication(plan, [n for n in nodes if n.name.startswith(_COMMUNICATION)], nodes, moved)


def variables_elsewhere(traced: Trace) -> list[str]:
    """Say which stages read variables that live on devices of others."""
    program = traced.program
    lives = {
        position: canonical_name(handle.device)
        for position, handle in zip(program.captures, traced.captures, strict=True)
        if handle.dtype == tf.resource and handle.device
    }
    found: dict[Stage, set[str]] = {}
    for op in program.ops if program.stages else ():
        stage = program.stages.of(op.name)
        away = {lives[t.op] for t in op.inputs if t.op in lives} - {stage.home if stage else ""}
        if stage and away:
            found.setdefault(stage, set()).update(away)
    return [
        f"{stage} reads variables that live on {', '.join(map(short_name, sorted(d)))}" for stage, d in found.items()
    ]


def _move_communication(plan: Plan, own: Sequence[Any], nodes: Sequence[Any], moved: dict[str, str]) -> None:
    """Reduce where the stage is, cut where the source is; join and make constants where the only reader is."""
    names = {node.name for node in own}
    readers: dict[str, list[Any]] = {name: [] for name in names}
    for node in nodes:
        for source in names.intersection(_sources(node)):
            readers[source].append(node)
    for node in own:
        if node.name.startswith(_REDUCES):
            device = plan.stage_device(node.name.removeprefix(_REDUCES), None)
        elif node.op == "SplitV":
            device = moved.get(split_reference(node.input[0])[0], "")
        else:
            continue
        if device:
            moved[node.name] = node.device = device
    for node in reversed(own):
        by_reader = {moved.get(reader.name, reader.device) for reader in readers[node.name]}
        if node.op in ("ConcatV2", "Const") and len(by_reader) == 1:
            if node.name.startswith(_GATHERS) and not all(r.name in moved for r in readers[node.name]):
                continue  # returned, or read by the surrounding function: joined at its home
            moved[node.name] = node.device = by_reader.pop()


def _sources(node: Any) -> list[str]:
    return [split_reference(reference)[0] for reference in node.input if reference[0] != "^"]
