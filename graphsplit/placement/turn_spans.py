"""When which shard had its turn on a device, in a step that was recorded: the chart of a pipeline, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphsplit.placement.profiles import OpEvent
from graphsplit.placement.records import PlacedOp

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
