"""What a user should know of stages: which of them read variables that live elsewhere."""

from __future__ import annotations

import tensorflow as tf

from graphsplit.core.devices import canonical_name, short_name
from graphsplit.program.stages import Stage
from graphsplit.tracing.trace import Trace


def variables_elsewhere(traced: Trace) -> list[str]:
    """Say which stages read variables that live on devices of others."""
    program = traced.program
    lives = {
        position: canonical_name(handle.device)
        for position, handle in zip(program.captures, traced.captures, strict=True)
        if handle.dtype == tf.resource and handle.device
    }
    found: dict[Stage, set[str]] = {}
    for op in program.ops:
        stage = op.stage
        away = {lives[t.op] for t in op.inputs if t.op in lives} - {stage.home if stage else ""}
        if stage and away:
            found.setdefault(stage, set()).update(away)
    return [
        f"{stage} reads variables that live on {', '.join(map(short_name, sorted(d)))}" for stage, d in found.items()
    ]
