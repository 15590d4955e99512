"""What was recorded of one step: which operation ran when on which device, and what follows from it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphsplit.core.intervals import covered
from graphsplit.placement.placements import Placement
from graphsplit.placement.profiles import OpEvent
from graphsplit.placement.questions import natural_order
from graphsplit.placement.turn_spans import TurnSpan, find_turns


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
