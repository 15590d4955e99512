"""Barriers: shards of one device that take turns, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.protos.graphdefs import make_node
from graphsplit.core.protos.node_writer import host_of
from graphsplit.emission.communication.resharding import Resharding
from graphsplit.emission.draft import Draft
from graphsplit.emission.emitted_graph import Origin
from graphsplit.emission.shards.row_counts import RowCounts
from graphsplit.planning.plan import Plan
from graphsplit.planning.schedule.turns import followed

ORDER_ROLE = "order"


def ended_nodes(name: str, controls: Sequence[str], present: str, device: str) -> list[Any]:
    """Return nodes that run when all that they wait for has ended or, for want of rows, is dead; `name` is the last.

    TensorFlow takes a `ControlTrigger`, which does not mind the dead, for a constant: it folds constants that wait for
    one, and lets them wait for what that waits for instead, so they are dead as well, and a loop among whose arguments
    they are never ends. So others wait for a `Merge` of a truth value that is there in any case. (What stands between
    has to be something that TensorFlow's graph optimizer does not reduce to control edges, as it does an `Identity`.)

    Args:
      present: of any shard.
    """
    trigger = make_node(f"{name}/all", "ControlTrigger", controls, device)
    return [trigger, make_node(name, "Merge", [present, f"^{name}/all"], host_of(device), N=1, T=tf.bool)]


class Barriers:
    """One node for each turn that another one follows: it runs when the shard has ended the phase.

    Args:
      plan: the phases and turns.
      draft: takes the nodes.
      counts: how many rows each shard has.
    """

    def __init__(self, plan: Plan, draft: Draft, counts: RowCounts):
        self._plan = plan
        self._draft = draft
        self._counts = counts
        self._phase_of = {i: number for number, phase in enumerate(plan.phases) for i in phase.starts}
        self._followed = followed(plan.turns)

    def before(self, position: int, d: int) -> list[str]:
        """Return what shard `d`'s copy of an operation waits for: the turn that its own one follows."""
        phase = self._phase_of.get(position, -1)
        if (phase, d) not in self._followed:
            return []
        turn = self._followed[phase, d]
        return [f"^{self._name(turn.phase, turn.shard)}"]

    def write(self, moves: Resharding) -> None:
        """Write the nodes, once all is written for which they wait; `moves` knows where sums are added up."""
        ops = self._plan.program.ops
        for turn in self._followed.values():
            phase, d = self._plan.phases[turn.phase], turn.shard
            ended = [self._draft.prefixes[d] + ops[i].name for i in phase.ends]
            added = [moves.added(move, d) for move in phase.sums]
            places = Counter(self._plan.shard_device(ops[i], d) for i in phase.ops)  # a stage's, where it is one
            controls = [f"^{name}" for name in dict.fromkeys([*ended, *added]) if name]
            self._write(turn.phase, d, controls, places.most_common(1)[0][0])

    def _write(self, number: int, d: int, controls: list[str], device: str) -> None:
        name, origin = self._name(number, d), Origin(None, d, ORDER_ROLE)
        after = self._plan.mesh.shards - 1
        if not self._counts.may_be_absent(after):
            self._draft.add(make_node(name, "NoOp", controls, device), origin)
            return
        for node in ended_nodes(name, controls, self._counts.present(after), device):
            self._draft.add(node, origin)

    def _name(self, number: int, d: int) -> str:
        return f"{self._draft.scope}/ended_{number}/shard_{d}"
