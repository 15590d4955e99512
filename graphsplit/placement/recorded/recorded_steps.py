"""What was recorded of one step: which operation ran when on which device, and what follows from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from graphsplit.core.sizes.intervals import covered
from graphsplit.placement.placements import Placement
from graphsplit.placement.questions import natural_order
from graphsplit.placement.recorded.profiles import OpEvent
from graphsplit.placement.records import PlacedOp


@dataclass(frozen=True, eq=False)
class RecordedStep:
    """One step as TensorFlow's profiler saw it.

    Attributes:
      events: every execution of an operation, by start.
      moved_bytes: bytes sent from one device to another in this step, by (from, to).
      placement: the actual placement of the same graph.
      note: what is missing in the recording, "" if nothing is.
    """

    title: str
    events: tuple[OpEvent, ...] = field(repr=False)
    moved_bytes: Mapping[tuple[str, str], int]
    placement: Placement = field(repr=False)
    note: str = ""

    @property
    def duration_s(self) -> float:
        """The time from the first operation's start to the last one's end, in seconds."""
        return max((e.start_s + e.duration_s for e in self.events), default=0.0)

    @property
    def busy(self) -> dict[str, float]:
        """The share of the step in which at least one operation or copy runs on the device, by device."""
        return self._shares(self.events)

    @property
    def copying(self) -> dict[str, float]:
        """The share of the step in which a GPU copies something to or from somewhere; of devices that do."""
        return self._shares([event for event in self.events if event.copied])

    @property
    def turns(self) -> list[TurnSpan]:
        """When which shard had its turn, on devices that several share: `F0`, `B0` of a stage forward and backward."""
        return find_turns(self.events, self.placement.ops)

    def _shares(self, events: Sequence[OpEvent]) -> dict[str, float]:
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in events:
            spans[event.device].append((event.start_s, event.start_s + event.duration_s))
        whole = self.duration_s or 1.0
        return {device: covered(spans[device]) / whole for device in sorted(spans, key=natural_order)}

    def slowest(self, most: int = 10) -> list[OpEvent]:
        """Return the executions that took longest."""
        return sorted(self.events, key=lambda e: -e.duration_s)[:most]


COLORS = {"F": "#8fb8de", "B": "#f2b880", "": "#c9d1d9"}  # as in the picture of a schedule


class TurnSpan(NamedTuple):
    """A device works on the rows of one shard.

    Attributes:
      kind: in a stage, forward `F` or backward `B`; else "".
      shard: its number.
      stage: its name, "" for none.
      start_s, end_s: of the first and the last of its operations, in seconds.
    """

    device: str
    kind: str
    shard: int
    stage: str
    start_s: float
    end_s: float

    def __str__(self) -> str:
        return f"{self.kind}{self.shard}"


def find_turns(events: Sequence[OpEvent], ops: Mapping[str, PlacedOp]) -> list[TurnSpan]:
    """Return the turns on devices that several shards share, by start; empty where none does.

    Args:
      events: every execution of an operation, by start.
      ops: where each operation runs.
    """
    last: dict[str, TurnSpan] = {}
    found: list[TurnSpan] = []
    for event in events:
        op = ops.get(event.name)
        if op is None or op.shard is None or event.copied or op.role:
            continue
        kind = ("B" if op.backward else "F") if op.stage else ""
        span = TurnSpan(event.device, kind, op.shard, op.stage, event.start_s, event.start_s + event.duration_s)
        before = last.get(event.device)
        if before is not None and before[:4] == span[:4]:
            found.remove(before)
            span = before._replace(end_s=max(before.end_s, span.end_s))
        found.append(span)
        last[event.device] = span
    shared = {device for device in last if len({span.shard for span in found if span.device == device}) > 1}
    return sorted((span for span in found if span.device in shared), key=lambda span: span.start_s)


def draw_turns(axes: Any, turns: Sequence[TurnSpan], rows: Mapping[str, int], whole_s: float) -> None:
    """Draw the turns of each device in its row, with the numbers of shards where there is room."""
    for span in turns:
        start, length = span.start_s * 1e3, (span.end_s - span.start_s) * 1e3
        axes.barh(rows[span.device], length, left=start, height=0.9, color=COLORS[span.kind], edgecolor="white", lw=0.5)
        if span.end_s - span.start_s > 0.012 * whole_s:
            axes.text(start + length / 2, rows[span.device], str(span), ha="center", va="center", fontsize=7)
