"""A plan between two passes, in words: operation by operation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphsplit.planning.steps import Step

if TYPE_CHECKING:
    from graphsplit.planning.plan import Plan


def steps_text(plan: Plan) -> str:
    """Return where each operation of a plan runs and in which layouts, and what moves, as far as it is decided."""
    first, *lines = str(plan.program).splitlines()
    devices = [", ".join(plan.owners.devices(i)) for i in range(len(plan.steps))]
    where = list(map(_where, plan.steps, devices)) or ["not decided"] * len(lines)
    moves = [f"  {move.kind} of %{move.tensor.op}: {move.source} -> {move.target}" for move in plan.moves]
    return "\n".join([first, *[f"{line}: {own}" for line, own in zip(lines, where, strict=True)], *moves])


def _where(step: Step, devices: str) -> str:
    once, given = f"once, on {devices}", step.shards
    if given is None:
        return once if step.home else "not run by itself"
    own = f"shards: ({', '.join(map(str, given.wants))}) -> {', '.join(map(str, given.gives))}"
    return f"{own}; {once}" if step.home else own
