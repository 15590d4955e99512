"""Barriers: shards of one device that take turns, phase by phase."""

from __future__ import annotations

import tensorflow as tf

from graphsplit.core.graphdefs import make_node
from graphsplit.core.node_writer import host_of
from graphsplit.emission.draft import Draft
from graphsplit.emission.emitted_graph import Origin
from graphsplit.emission.resharding import Resharding
from graphsplit.emission.row_counts import RowCounts
from graphsplit.planning.plan import Plan

ORDER_ROLE = "order"


class Barriers:
    """One node for each phase and shard that another one follows on its device: it runs when the shard has ended.

    Args:
      plan: the phases.
      draft: takes the nodes.
      counts: how many rows each shard has.
    """

    def __init__(self, plan: Plan, draft: Draft, counts: RowCounts):
        self._plan = plan
        self._draft = draft
        self._counts = counts
        self._phase_of = {i: number for number, phase in enumerate(plan.phases) for i in phase.starts}

    def before(self, position: int, d: int) -> list[str]:
        """Return what shard `d`'s copy of an operation waits for: that the shard before it has ended the phase."""
        before = self._plan.mesh.before(d)
        if before is None or position not in self._phase_of:
            return []
        return [f"^{self._name(self._phase_of[position], before)}"]

    def write(self, moves: Resharding) -> None:
        """Write the nodes, once all is written for which they wait; `moves` knows where sums are added up."""
        ops, mesh = self._plan.program.ops, self._plan.mesh
        for d in range(1, mesh.shards):
            before = mesh.before(d)
            for number, phase in enumerate(self._plan.phases if before is not None else ()):
                assert before is not None
                ended = [self._draft.prefixes[before] + ops[i].name for i in phase.ends]
                added = [moves.added(move, before) for move in phase.sums]
                self._write(number, before, [f"^{name}" for name in dict.fromkeys([*ended, *added]) if name])

    def _write(self, number: int, d: int, controls: list[str]) -> None:
        name, device = self._name(number, d), self._plan.devices[d]
        origin = Origin(None, d, ORDER_ROLE)
        after = self._plan.mesh.shards - 1
        if not self._counts.may_be_absent(after):
            self._draft.add(make_node(name, "NoOp", controls, device), origin)
            return
        # as where an effect ends (see `emitter`): what has no rows is dead, and whoever comes next does not mind
        self._draft.add(make_node(f"{name}/all", "ControlTrigger", controls, device), origin)
        inputs = [self._counts.present(after), f"^{name}/all"]
        self._draft.add(make_node(name, "Identity", inputs, host_of(device), T=tf.bool), origin)

    def _name(self, number: int, d: int) -> str:
        return f"{self._draft.scope}/ended_{number}/shard_{d}"
