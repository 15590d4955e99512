"""Lanes: what stands side by side in pictures of a placement. A device, or the shards and the stage that it runs.

And the colours of devices, the same in all pictures and pages.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.core.devices import short_name
from graphsplit.inspect.graph import PlacementGraph, natural_order
from graphsplit.inspect.records import PlacedOp
from graphsplit.planning.amounts import count_text


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
            parts.append(f"shards {_span(self.shards)} in turns")
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


def _span(numbers: Sequence[int]) -> str:
    """Return sorted numbers for people: `0 to 3`, or `0, 2, 5`."""
    follow = list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]} to {numbers[-1]}" if follow else ", ".join(map(str, numbers))


@dataclass(frozen=True)
class Alike:
    """Lanes whose shards do the same work; any other lane alone.

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
        stage = f"stage {self.shown.stage}, " if self.shown.stage else ""
        return f"{stage}shards {_span(shards)}"

    @property
    def devices(self) -> str:
        """Where they are, `CPU:0 to 7`."""
        names = sorted({lane.device for lane in self.lanes}, key=natural_order)
        places, numbers = {n.rpartition(":")[0] for n in names}, [n.rpartition(":")[2] for n in names]
        if len(names) > 1 and len(places) == 1 and all(map(str.isdigit, numbers)):
            span = _span([int(number) for number in numbers])
            if "," not in span:
                return f"{short_name(names[0]).removesuffix(numbers[0])}{span}"
        return ", ".join(map(short_name, names)) or "any device"

    @property
    def title(self) -> str:
        """What a picture of one of them says: which there are, and how many."""
        several = f" \u00d7 {len(self.lanes)}" if len(self.lanes) > 1 else ""
        return f"{self}{several}" or "runs once"

    def note(self, rows: Sequence[int]) -> str:
        """Return where they are, and how many rows of the batch they have, if that is known: `GPU:0 to 7, 2 rows each`.

        Args:
          rows: of each shard.
        """
        counts = sorted({sum(rows[shard] for shard in lane.shards if shard < len(rows)) for lane in self.lanes})
        if not counts[-1]:
            return self.devices
        several = f"{counts[0]} to {counts[-1]} rows" if len(counts) > 1 else count_text(counts[0], "row")
        return f"{self.devices}, {several}{' each' if len(self.lanes) > 1 else ''}"


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
    default_device, first = default_device_of(ops), dict[str, Lane]()
    for lane in in_order(lanes.values()):
        first.setdefault(lane.device, lane)
    return {
        op.name: first[op.device]
        if op.shard is None and op.device in first.keys() - {default_device}
        else _lane(op, lanes)
        for op in ops
    }


def in_order(lanes: Iterable[Lane]) -> list[Lane]:
    """Return the lanes that there are, each once, as they stand side by side."""
    return sorted(set(lanes), key=lambda lane: lane.order)


def default_device_of(ops: Iterable[PlacedOp]) -> str:
    """Return the device on which most operations run that run once; "" if none does."""
    counts = Counter(op.device for op in ops if op.shard is None)
    return min(counts, key=lambda device: (-counts[device], natural_order(device)), default="")


def _lane(op: PlacedOp, lanes: Mapping[tuple[str, str], Lane]) -> Lane:
    if op.shard is None:
        return Lane(op.device)
    beside: Sequence[Lane] = [lane for lane in lanes.values() if lane.device == op.device and op.shard in lane.shards]
    stage_lane = lanes.get((op.device, op.stage))
    return (
        stage_lane
        if stage_lane in beside and stage_lane is not None
        else beside[0]
        if beside
        else Lane(op.device, (op.shard,))
    )


def _serves(op: PlacedOp) -> bool:
    """Return whether an operation is no work on rows, but a constant, a wait or something sent."""
    return op.type in ("Const", "NoOp") or bool(op.role)


def alike_lanes(placement: PlacementGraph, lane_of: Mapping[str, Lane]) -> list[Alike]:
    """Return the lanes in their order, those together whose shards do the same.

    Args:
      placement: what is looked at.
      lane_of: the lane of each operation.
    """
    work: dict[Lane, set[tuple[object, ...]]] = defaultdict(set)
    for op in placement.ops.values():
        lane = lane_of[op.name]
        if op.shard is not None and not op.role and lane.shards:
            turn = lane.shards.index(op.shard)
            work[lane].add((turn, tuple(op.own_name.split("/")[1:]), op.type, op.ran))
    together: dict[object, list[Lane]] = defaultdict(list)
    for lane in in_order(lane_of.values()):
        together[(lane.stage, frozenset(work[lane])) if lane in work else lane].append(lane)
    default_device = default_device_of(placement.ops.values())
    of_default = {
        lane.shards for lane in work if lane.device == default_device
    }  # (one pipeline is shown, in all of its stages)
    return [
        Alike(max(lanes, key=lambda lane: lane.shards not in of_default), tuple(lanes)) for lanes in together.values()
    ]


# Okabe and Ito's palette, made for colour-blind readers (jfly.uni-koeln.de/color), then Tableau's for more devices.
COLORS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a200", "#7f7f7f"),
    *("#1f77b4", "#9467bd", "#8c564b", "#17becf", "#2ca02c", "#bcbd22", "#e377c2", "#d62728"),
)


def device_colors(devices: Iterable[str]) -> dict[str, str]:
    """Return a colour for each device."""
    ordered = sorted(devices, key=natural_order)
    return {device: COLORS[i % len(COLORS)] for i, device in enumerate(ordered)}
