"""Sharded variables and shards that take turns: put together once for all turns, or again whenever they are read.

What is dropped and put together again is so for all shards at a time (`variables/gathering`), so all turns meet there,
and what they have computed so far is held. Kept through all turns it is put together once, but then all of it is alive,
and so are the sums of its gradients. Few rows and large weights want the one, many rows and small weights the other.
"""

from __future__ import annotations

from dataclasses import replace

from graphsplit.core.layouts import Cut, Nested
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.memory import live_bytes
from graphsplit.planning.plan import Plan

_SAID = "sharded variables are gathered"


def may_drop(plan: Plan) -> bool:
    """Return whether anything is kept that could be dropped, and what is alive is known when planning."""
    divisions = plan.state.divisions.values()
    in_stages = plan.asked.stages is not None or plan.asked.schedule
    is_there = any(isinstance(division, (Cut, Nested)) and division.reshard for division in divisions)
    return not plan.start.drops and is_there and not in_stages and not plan.program.symbols


def with_less_alive(kept: Plan, again: Plan) -> Plan:
    """Return the plan of the two that has fewer bytes alive on its fullest device; it says what the other one has."""
    most_kept, most_again = _most_alive(kept), _most_alive(again)
    if most_again < most_kept:
        said = "again for each use, for which all micro-batches wait"
        return _with_note(again, said, most_again, most_kept)
    if most_kept < most_again:
        return _with_note(kept, "once, and kept for all micro-batches", most_kept, most_again)
    return kept


def _most_alive(plan: Plan) -> int:
    return max(live_bytes(plan).values(), default=0)


def _with_note(plan: Plan, said: str, most: int, otherwise: int) -> Plan:
    note = f"{_SAID} {said}: {format_bytes(most)} alive at most, {format_bytes(otherwise)} the other way"
    others = [
        other for other in plan.notes if not other.startswith(_SAID)
    ]  # (a function's, on the plan of its gradient)
    return replace(plan, notes=(*others, note))
