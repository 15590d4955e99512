"""Sharded variables and shards that take turns: put together once for all turns, or again whenever they are read.

What is dropped and put together again is so for all shards at a time (`variables/gathering`), so all turns meet there,
and what they have computed so far is held. Kept through all turns it is put together once, but then all of it is alive,
and so are the sums of its gradients. Few rows and large weights want the one, many rows and small weights the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from graphsplit.core.layouts import Cut, Nested
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.memory import live_bytes
from graphsplit.planning.plan import Plan

_SAID = "sharded variables are gathered"


def plan_of_less_alive(make_plan: Callable[[bool], Plan], takes_turns: bool) -> Plan:
    """Return the plan of the two that has fewer bytes alive on its fullest device; it says what the other one has.

    Args:
      make_plan: returns the plan in which what is put together is dropped and put together again, given True; and that
        in which it is kept, given False.
      takes_turns: whether devices have several shards; else nothing has to wait for turns.
    """
    if not takes_turns:
        return make_plan(True)
    kept = make_plan(False)
    may_drop = any(
        isinstance(division, (Cut, Nested)) and division.reshard for division in kept.state.divisions.values()
    )
    in_stages = kept.asked.stages is not None or kept.asked.schedule
    if not may_drop or in_stages or kept.program.symbols:  # (what is alive is not known before sizes are)
        return kept
    again = make_plan(True)
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
