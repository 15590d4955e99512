"""What was recorded of one step: which operation ran when on which device, and what follows from it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from graphsplit.core.devices import short_name
from graphsplit.core.notebooks import text_html
from graphsplit.core.sizes.intervals import covered
from graphsplit.core.storage import forms
from graphsplit.inspect.placements import Placement
from graphsplit.inspect.questions import natural_order
from graphsplit.inspect.recorded.profiles import OpEvent
from graphsplit.inspect.views.timeline_views import trace_place, trace_span
from graphsplit.planning.amounts import format_bytes


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step as TensorFlow's profiler saw it. `print` it, or `save` it for ui.perfetto.dev.

    Attributes:
      events: every execution of an operation, by start.
      placement: the actual placement of the same graph.
      note: what is missing in the recording, "" if nothing is.
    """

    title: str
    events: tuple[OpEvent, ...]
    placement: Placement
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
    def moved_bytes(self) -> dict[tuple[str, str], int]:
        """The bytes sent from one device to another, by (from, to); in the turns of a loop, once."""
        moved: dict[tuple[str, str], int] = defaultdict(int)
        for transfer in self.placement.transfers:
            moved[transfer.source_device, transfer.target_device] += transfer.bytes
        return dict(moved)

    def _shares(self, events: Sequence[OpEvent]) -> dict[str, float]:
        spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for event in events:
            spans[event.device].append((event.start_s, event.start_s + event.duration_s))
        whole = self.duration_s or 1.0
        return {device: covered(spans[device]) / whole for device in sorted(spans, key=natural_order)}

    def slowest(self, most: int = 10) -> list[OpEvent]:
        """Return the executions that took longest."""
        return sorted(self.events, key=lambda e: -e.duration_s)[:most]

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format (chrome://tracing, ui.perfetto.dev): a process per device."""
        number = {device: i for i, device in enumerate(sorted({e.device for e in self.events}, key=natural_order))}
        trace = [trace_place(i, short_name(device)) for device, i in number.items()]
        for e in self.events:
            kind, span = "copy" if e.copied else "operation", (e.start_s, e.duration_s)
            trace.append(trace_span(e.type, number[e.device], e.thread, span, kind, op=e.name))
        return {"traceEvents": trace, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline as `.json`, which ui.perfetto.dev and chrome://tracing open.

        Raises:
          ArgumentError: for another suffix.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        path = os.fspath(path)
        forms.check_trace_suffix(path, "a timeline")
        forms.write_json(path, self.chrome_trace())

    def __str__(self) -> str:
        lines = [f"Timeline of {self.title}: {len(self.events)} executions in {self.duration_s * 1e3:.2f} ms"]
        copying = self.copying
        for device, share in self.busy.items():
            copies = f", copying {copying[device]:.0%}" if device in copying else ""
            lines.append(f"  {short_name(device)}  busy {share:.0%}{copies}")
        for (a, b), count in sorted(self.moved_bytes.items(), key=lambda item: -item[1])[:8]:
            lines.append(f"  {short_name(a)} -> {short_name(b)}  {format_bytes(count)} moved")
        for event in self.slowest(5):
            lines.append(
                f"  {event.duration_s * 1e3:8.3f} ms  {event.type} on {short_name(event.device)}  {event.name}"
            )
        return "\n".join([line[:100] for line in lines] + ([f"  note: {self.note}"] if self.note else []))

    __repr__ = __str__  # what a prompt, and an assertion that fails, show

    def _repr_html_(self) -> str:
        return text_html(str(self), "the devices, what moved, and the slowest operations")
