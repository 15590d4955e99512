"""Whether shards of one device take turns in an emitted graph as its plan says, whatever TensorFlow runs first."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator

from graphsplit.core.errors import CheckError
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.planning.plan import Plan
from graphsplit.planning.schedule.phases import Phase
from graphsplit.planning.schedule.turns import followed


def check_turns(plan: Plan, graph: EmittedGraph) -> None:
    """Raise `CheckError` unless every shard waits until the turn that it follows has ended.

    It has when all its operations of the phase have run, and what they give to sums has been added.

    Args:
      plan: the phases and turns.
      graph: what was emitted for it.
    """
    found = _Waits(graph)
    found.follow()
    for (phase, d), before in followed(plan.turns).items():
        first = plan.mesh.before(before.shard) is None
        ended = list(found.ended(plan.phases[before.phase], before.shard, first=first))
        for name in [found.nodes[i, d] for i in plan.phases[phase].starts]:
            missing = [node for node in ended if not found.waits(name, node)]
            if missing:
                raise CheckError(f"{name!r} does not wait for {missing[0]!r} of the shard before it.")


class _Waits:
    """What has run before each node, in any order that the graph allows.

    Attributes:
      nodes: what operations are on each shard, by position and shard.
    """

    def __init__(self, graph: EmittedGraph):
        self._origins, self._graph = graph.origins, graph.by_name
        self._before = [0] * len(graph.nodes)  # a bit for each node
        self.nodes = {(o.op, o.shard): name for name, o in graph.origins.items() if o.role == "op"}

    def follow(self) -> None:
        """Find out what has run before each node.

        Raises:
          CheckError: if nodes wait for each other.
        """
        for k in self._graph.positions_in_order:
            masks = [self._before[source] | 1 << source for source in self._graph.sources[k]]
            self._before[k] = functools.reduce(operator.or_, masks, 0)

    def waits(self, later: str, first: str) -> bool:
        """Return whether a node has run whenever another one does."""
        return bool(self._before[self._graph.place[later]] >> self._graph.place[first] & 1)

    def ended(self, phase: Phase, d: int, *, first: bool) -> Iterator[str]:
        """Return the nodes that have run when shard `d` has ended a phase.

        Args:
          phase: which.
          d: the shard.
          first: whether it is the first on its device: then nothing is there yet to which its parts would be added.
        """
        for i in phase.ends:
            yield self.nodes[i, d]
        for move in () if first else phase.sums:
            yield from self._added(self.nodes[move.tensor.op, d])

    def _added(self, part: str) -> Iterator[str]:
        for reader in [self._graph.nodes[k] for k in self._graph.readers[self._graph.place[part]]]:
            if self._origins[reader.name].role == "reduce":
                yield from self._added(reader.name) if reader.op == "ConcatV2" else [reader.name]
