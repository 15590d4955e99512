"""Stages that were cut automatically, in words: where each begins and why, and what it needs from others."""

from __future__ import annotations

from graphsplit.core.devices import short_name
from graphsplit.planning.amounts import size_text
from graphsplit.planning.decisions import Decisions
from graphsplit.program.program import Op, Tensor
from graphsplit.program.stages import Stage


def stages_text(plan: Decisions) -> list[str]:
    """Return lines for the printed plan; none if no stages were asked for."""
    cuts = plan.stage_cuts
    if cuts is None:
        return []
    if not cuts.stages:
        return ["  no stages: nothing runs on the shards"]
    sent = size_text(plan.program, [tensor for stage in cuts.stages for tensor in stage.received])
    slowest = f"the slowest takes {cuts.balance:.2f} times the mean"
    asked = len(cuts.asked.devices)
    fewer = f" instead of {asked}, as too little runs on the shards" if len(cuts.stages) < asked else ""
    count = "1 stage" if len(cuts.stages) == 1 else f"{len(cuts.stages)} stages"
    lines = [f"  cut into {count}{fewer}, {slowest}; {sent} sent between them"]
    for cut in cuts.stages:
        begin = f"from {_place(plan, plan.program.ops[cut.first])}"
        begin += f", named by {cut.asked!r}" if cut.asked else ""
        time = f"{100 * cut.share:.1f} % of the time"
        got = f", receives {size_text(plan.program, cut.received)}" if cut.received else ""
        lines.append(f"    stage {cut.stage}: {begin}; {time}{got}{_reads(plan, cut.stage)}")
    return lines


def _place(plan: Decisions, op: Op) -> str:
    where = plan.program.line_of(op)
    return f"{op.type} {op.name!r}" + (f" ({where})" if where else "")


def _reads(plan: Decisions, stage: Stage) -> str:
    """Say how many bytes of variables a stage reads from other devices."""
    program = plan.program
    found: dict[str, dict[Tensor, None]] = {}
    for op in plan.sharded_ops:
        if op.stage == stage:
            for tensor in op.inputs:
                device = plan.owners.of_ops[tensor.op] or plan.home
                if program.ops[tensor.op].type == "ReadVariableOp" and device not in stage.devices:
                    found.setdefault(device, {})[tensor] = None
    texts = [f"{size_text(program, own)} of variables from {short_name(d)}" for d, own in sorted(found.items())]
    return f", reads {' and '.join(texts)}" if texts else ""
