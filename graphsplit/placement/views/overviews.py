"""What a large placement is at first sight: shards that are alike, labels that people know, what is left closed."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from graphsplit.core.devices import short_name
from graphsplit.placement.graph import PlacementGraph
from graphsplit.placement.questions import natural_order
from graphsplit.placement.views.lanes import Lane, home_device


@dataclass(frozen=True)
class Alike:
    """Lanes whose shards do the same work.

    Attributes:
      shown: the one that stands for all.
      lanes: all of them, in their order.
    """

    shown: Lane
    lanes: tuple[Lane, ...]

    def __str__(self) -> str:
        if len(self.lanes) == 1:
            return self.shown.work
        shards = sorted(shard for lane in self.lanes for shard in lane.shards)
        several = f"{shards[0]} to {shards[-1]}" if shards == list(range(shards[0], shards[-1] + 1)) else _list(shards)
        stage = f"stage {self.shown.stage}, " if self.shown.stage else ""
        return f"{stage}shards {several}"

    @property
    def devices(self) -> str:
        """Where they are, `CPU:0 to 7`."""
        names = sorted({lane.device for lane in self.lanes}, key=natural_order)
        places, numbers = {n.rpartition(":")[0] for n in names}, [n.rpartition(":")[2] for n in names]
        if len(names) > 1 and len(places) == 1 and all(number.isdigit() for number in numbers):
            follow = [int(n) for n in numbers] == list(range(int(numbers[0]), int(numbers[0]) + len(names)))
            return f"{short_name(names[0])} to {numbers[-1]}" if follow else _list(map(short_name, names))
        return _list(map(short_name, names)) or "any device"


def alike_lanes(placement: PlacementGraph, lane_of: Mapping[str, Lane], critical: set[str]) -> list[Alike]:
    """Return the lanes with work on shards, those together whose shards do the same, in their order.

    Args:
      placement: what is looked at.
      lane_of: the lane of each operation.
      critical: the operations of the critical path: it is shown where it is, if one of several does.
    """
    work: dict[Lane, set[tuple[object, ...]]] = defaultdict(set)
    on_path = Counter(lane_of[name] for name in critical if name in placement.ops)
    for op in placement.ops.values():
        lane = lane_of[op.name]
        if op.shard is not None and not op.role and lane.shards:
            turn = lane.shards.index(op.shard)
            work[lane].add((turn, tuple(op.own_name.split("/")[1:]), op.type, op.ran))
    together: dict[object, list[Lane]] = defaultdict(list)
    for lane in sorted(work, key=lambda lane: lane.order):
        together[lane.stage, frozenset(work[lane])].append(lane)
    home = home_device(placement.ops.values())
    return [
        Alike(max(lanes, key=lambda lane: (on_path[lane], lane.device != home, -lanes.index(lane))), tuple(lanes))
        for lanes in together.values()
    ]


def _list(items: object) -> str:
    return ", ".join(map(str, items))  # type: ignore[call-overload]
