"""The plan that a function ran last."""

from __future__ import annotations

import graphsplit as gs


def last_plan(function: gs.ParallelFunction) -> gs.inspect.Plan:
    compiled = [found for several in function._traces.planned.values() for found in several]
    return compiled[-1].pair().plan
