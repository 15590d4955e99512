"""Node times: how long each node of an emitted graph takes on its device; what is alike is asked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.costs.families import FREE, PASSED_ON, family_of
from graphsplit.costs.seconds import Costs, sample_key, told_attributes
from graphsplit.costs.work import Work, bytes_of, is_known, work_of
from graphsplit.emission.emitted_graph import Origin
from graphsplit.emission.shards.sizes import Sizes, alike
from graphsplit.planning.plan import Plan
from graphsplit.prediction.bodies import BodyTime, bytes_in_lists, seconds_of_bodies
from graphsplit.prediction.buffers import SAME_BUFFER
from graphsplit.prediction.compiled_work import Pricing, RunGraph, work_of_call
from graphsplit.program.program import Op
from graphsplit.program.reading.trip_counts import turns_of


class NodeTime(NamedTuple):
    """What a node takes.

    Attributes:
      family: of its work.
      seconds: from its start to its end.
      held_bytes: that it needs meanwhile, besides what it makes: inside of a compiled call.
    """

    family: str
    seconds: float
    held_bytes: int = 0


class NodeTimes:
    """How long nodes take.

    Args:
      plan: what was emitted.
      run: what is run of that.
      sizes: of what the nodes make.
      costs: of single operations.
      note: takes a sentence on what is known only when it runs.
      seconds_of_turn: how long a turn of a loop takes that is split over the devices.
    """

    def __init__(
        self,
        plan: Plan,
        run: RunGraph,
        sizes: Sizes,
        costs: Costs,
        note: Callable[[str], None],
        seconds_of_turn: Callable[[Plan], float],
    ):
        self._plan = plan
        self._run = run
        self._sizes = sizes
        self._costs = costs
        self._note = note
        self._seconds_of_turn = seconds_of_turn
        self._alike = alike(plan)
        self._known: dict[object, NodeTime] = {}
        self._pricing = Pricing(self._work, self._own_s, self._bytes, SAME_BUFFER.__contains__)

    def of(self, node: Any) -> NodeTime:
        """Return what a node takes."""
        key = self._key(node)
        if key not in self._known:
            key = self._key_of_unknown(node, key)
        if key not in self._known:
            self._known[key] = self._of_call(node) if node.name in self._run.calls else self._of_operation(node)
        return self._known[key]

    def _key(self, node: Any) -> object:
        """Return what tells a node from those that take another time."""
        if node.name in self._run.calls:
            return (node.attr["f"].func.name, *[shape for shape, _ in self._sizes.inputs_of(node)])
        if family_of(node.op) in (FREE, PASSED_ON):
            return node.op
        origin = self._run.origins[node.name]
        if origin.op is not None and self._plan.program.ops[origin.op].bodies:
            return self._key_of_copy(origin)
        inputs = self._sizes.inputs_of(node)
        return node.op, told_attributes(node), len(inputs), *inputs, *self._sizes[node.name]

    def _key_of_unknown(self, node: Any, key: object) -> object:
        """Return the key of a node, another one if sizes are not known: each such operation is told of by name."""
        origin = self._run.origins[node.name]
        if origin.op is None or origin.role != "op" or node.name in self._run.calls:
            return key
        is_all_known = all(map(is_known, (*self._sizes.inputs_of(node), *self._sizes[node.name])))
        return key if is_all_known else self._key_of_copy(origin)

    def _key_of_copy(self, origin: Origin) -> object:
        return origin.op, origin.role, None if origin.shard is None else self._alike[origin.shard]

    def _of_operation(self, node: Any) -> NodeTime:
        time = self._of_bodies(node)
        if time is not None:
            self._note(time.unknown)
            return NodeTime("other", time.seconds)
        work = self._work(node)
        if work.family in (FREE, PASSED_ON):
            return NodeTime(work.family, self._costs.seconds(work))
        return NodeTime(work.family, self._costs.started(self._own_s(node, work)))

    def _of_call(self, node: Any) -> NodeTime:
        found = work_of_call(self._run.calls[node.name], self._pricing)
        return NodeTime("compiled", self._costs.started(found.seconds), found.held_bytes)

    def _work(self, node: Any) -> Work:
        reads, makes = self._sizes.inputs_of(node), self._sizes[node.name]
        work = work_of(node.op, _attributes(node), reads, makes, self._costs.unknown_size)
        if work.is_least:
            self._note(f"the sizes of {node.op} {node.name!r} are known only when it runs")
        return work

    def _own_s(self, node: Any | None, work: Work | None) -> float:
        """Return how long the device works for a node, or for work that belongs to none."""
        if node is None:
            assert work is not None
            return self._costs.own_s(work)
        time = self._of_bodies(node)
        if time is not None:
            self._note(time.unknown)
            return time.seconds
        key = sample_key(node, self._sizes.inputs_of(node), self._sizes[node.name])
        return self._costs.own_s(work or self._work(node), key)

    def _bytes(self, reference: str) -> int:
        return bytes_of(self._sizes.of(reference), self._costs.unknown_size)

    def _of_bodies(self, node: Any) -> BodyTime | None:
        """Return how long the functions take that a node runs; None if it runs none."""
        origin = self._run.origins[node.name]
        if origin.op is None or origin.role != "op" or not self._plan.program.ops[origin.op].bodies:
            return None
        op, step = self._plan.program.ops[origin.op], self._plan.steps[origin.op]
        if origin.shard is None and step.bodies:
            return self._of_turns(op, step.bodies)
        plans = step.shards.bodies if origin.shard is not None and step.shards else {}
        return seconds_of_bodies(op, plans, self._plan.rows, origin.shard if plans else None, self._costs)

    def bytes_in_lists(self, node: Any) -> Mapping[int, int]:
        """Return the bytes of the lists of tensors that a loop returns, by output; nothing for other nodes."""
        origin = self._run.origins[node.name]
        if origin.op is None or origin.role != "op" or not self._plan.program.ops[origin.op].bodies:
            return {}
        op, step = self._plan.program.ops[origin.op], self._plan.steps[origin.op]
        plans = step.shards.bodies if origin.shard is not None and step.shards else {}
        shard = origin.shard if plans else None
        return bytes_in_lists(op, plans, self._plan.rows, shard, self._costs.unknown_size)

    def _of_turns(self, op: Op, bodies: Mapping[str, Any]) -> BodyTime:
        """Return how long a loop takes whose turns are split over the devices."""
        seconds = sum([self._seconds_of_turn(plan) for plan in bodies.values()])
        turns = turns_of(op)
        if turns is None:
            return BodyTime(seconds, f"how often {op.type} {op.name!r} turns is known only when it runs")
        return BodyTime(turns.number * seconds)


_NO_ATTRIBUTE = tf.compat.v1.AttrValue()


def _attributes(node: Any) -> Any:
    return lambda name: node.attr.get(name, _NO_ATTRIBUTE)
