"""Two plans of one function, beside each other: what each device computes, sends and holds."""

from __future__ import annotations

from collections import Counter

from graphsplit.core.devices import short_name
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.device_bytes import alive_on, traffic_of_call
from graphsplit.planning.tasks import few_tasks_of
from graphsplit.planning.work_shares import devices_of_shards


def compare(plan: Decisions, other: Decisions) -> str:
    """Return the differences between two plans, a line each; `gs.predict` says the times."""
    lines = []
    for what, answer, another in zip(_QUESTIONS, _answers(plan), _answers(other), strict=True):
        if answer != another:
            lines.append(f"  {what}: {answer}, against {another}")
    return "\n".join([_title(plan, other), *(lines or ["  nothing is different"])])


_QUESTIONS = (
    "devices",
    "parts of the batch",
    "operations on the devices",
    "operations that run once",
    "variables on several devices",
    "stages",
    "schedule",
    "sent between devices",
    "through the busiest device",
    "moves",
    "peak of activations on the fullest device",
)


def _title(plan: Decisions, other: Decisions) -> str:
    return f"A plan for {_count(plan)} against one for {_count(other)}:"


def _count(plan: Decisions) -> str:
    return count_text(len(devices_of_shards(plan)) or 1, "device")


def _answers(plan: Decisions) -> list[str]:
    tasks = few_tasks_of(plan)
    moved, live = (
        traffic_of_call(plan, tasks),
        {device: at_peak.bytes for device, at_peak in alive_on(plan, tasks).items()},
    )
    device, out, into = moved.busiest
    fullest = max(live, key=lambda name: live[name], default="")
    kinds = Counter(move.kind for move in plan.moves)
    return [
        ", ".join(map(short_name, devices_of_shards(plan))) or short_name(plan.default_device),
        str(plan.mesh.shards),
        str(len(plan.sharded_ops)),
        str(len(plan.ops_once)),
        str(len(plan.state.divisions)),
        ", ".join(map(str, plan.program.all_stages())) or "none",
        f"{plan.schedule.kind}" if plan.schedule else "none",
        format_bytes(sum(moved.sent.values()), is_least=bool(moved.unknown)),
        f"{format_bytes(out)} out, {format_bytes(into)} in" if device else "nothing",
        ", ".join(f"{count} x {kind}" for kind, count in sorted(kinds.items())) or "none",
        f"{format_bytes(live[fullest])} on {short_name(fullest)}" if fullest else "nothing",
    ]
