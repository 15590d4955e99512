"""Lanes: what stands side by side in pictures of a placement. A device, or the shards and the stage that it runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.core.devices import short_name
from graphsplit.placement.questions import natural_order
from graphsplit.placement.records import PlacedOp


@dataclass(frozen=True)
class Lane:
    """Operations of one device that belong together.

    Attributes:
      device: where they run, "" if nobody knows.
      shards: the shards whose rows they work on; several if these take turns there. Empty for what runs once.
      stage: the stage of a pipeline, "" for none.
    """

    device: str
    shards: tuple[int, ...] = ()
    stage: str = ""

    @property
    def work(self) -> str:
        """What of the batch runs there, `stage 1, shards 0 to 3 in turns`; "" for what runs once."""
        parts = [f"stage {self.stage}"] if self.stage else []
        if len(self.shards) > 1:
            follow = self.shards == tuple(range(self.shards[0], self.shards[-1] + 1))
            several = f"{self.shards[0]} to {self.shards[-1]}" if follow else ", ".join(map(str, self.shards))
            parts.append(f"shards {several} in turns")
        elif self.shards:
            parts.append(f"shard {self.shards[0]}")
        return ", ".join(parts)

    def __str__(self) -> str:
        place = short_name(self.device) or "any device"
        return f"{self.work} on {place}" if self.work else place

    @property
    def order(self) -> tuple[object, ...]:
        """What lanes are sorted by: what runs once first, then pipeline by pipeline, device by device."""
        return bool(self.work), self.shards[:1], natural_order(self.device), natural_order(f":{self.stage}")


def lanes_of(ops: Iterable[PlacedOp]) -> dict[str, Lane]:
    """Return the lane of each operation, by name.

    Shards that work on the same device, and in the same stage, share a lane. What serves their work stands with it, and
    so does what runs once on another device than most of that: it has no lane of its own beside the work of a device.
    """
    ops = list(ops)
    working: dict[tuple[str, str], set[int]] = {}
    for op in ops:
        if op.shard is not None and not _serves(op):
            working.setdefault((op.device, op.stage), set()).add(op.shard)
    lanes = {key: Lane(key[0], tuple(sorted(shards)), key[1]) for key, shards in working.items()}
    home, first = home_device(ops), dict[str, Lane]()
    for lane in sorted(lanes.values(), key=lambda lane: lane.order):
        first.setdefault(lane.device, lane)
    return {
        op.name: first[op.device] if op.shard is None and op.device in first.keys() - {home} else _lane(op, lanes)
        for op in ops
    }


def home_device(ops: Iterable[PlacedOp]) -> str:
    """Return the device on which most operations run that run once; "" if none does."""
    counts = Counter(op.device for op in ops if op.shard is None)
    return min(counts, key=lambda device: (-counts[device], natural_order(device)), default="")


def _lane(op: PlacedOp, lanes: Mapping[tuple[str, str], Lane]) -> Lane:
    if op.shard is None:
        return Lane(op.device)
    beside: Sequence[Lane] = [lane for lane in lanes.values() if lane.device == op.device and op.shard in lane.shards]
    own = lanes.get((op.device, op.stage))
    return own if own in beside and own is not None else beside[0] if beside else Lane(op.device, (op.shard,))


def _serves(op: PlacedOp) -> bool:
    """Return whether an operation is no work on rows, but a constant, a wait or something sent."""
    return op.type in ("Const", "NoOp") or bool(op.role)
