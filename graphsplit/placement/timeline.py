"""What one executed step looked like: which operation ran when on which device. Measured, not modelled."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphsplit.core import forms
from graphsplit.core.devices import short_name
from graphsplit.core.extras import figure_class
from graphsplit.core.intervals import covered
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.placement.actual import match, require_runnable
from graphsplit.placement.builders import source_of
from graphsplit.placement.colors import device_colors
from graphsplit.placement.flattening import flatten
from graphsplit.placement.placements import Placement
from graphsplit.placement.profiles import OpEvent, SendEvent, lacks_streams, read_events, record
from graphsplit.placement.questions import natural_order
from graphsplit.placement.reading import bytes_of, read_ops
from graphsplit.placement.sources import Source, StateKeeper
from graphsplit.placement.turn_spans import TurnSpan, draw_turns, find_turns
from graphsplit.planning.amounts import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping


_TURNS = -1  # the row of turns, above those of threads
_NO_STREAMS = (
    "no stream of a GPU was recorded, so the times on GPUs are those of launches on the host. The profiler needs CUPTI "
    "and the right to use it: https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


@dataclass(frozen=True, eq=False)
class Timeline:
    """One step as TensorFlow's profiler saw it. `print` it, or `save` it as `.json`, `.png` or `.svg`.

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

    def chrome_trace(self) -> dict[str, Any]:
        """Return the timeline in the Trace Event Format (chrome://tracing, ui.perfetto.dev): a process per device."""
        number = {device: i for i, device in enumerate(sorted({e.device for e in self.events}, key=natural_order))}
        trace: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": i, "args": {"name": short_name(device)}}
            for device, i in number.items()
        ]
        trace += [
            {
                "ph": "X",
                "name": event.type,
                "pid": number[event.device],
                "tid": event.thread,
                "ts": event.start_s * 1e6,
                "dur": event.duration_s * 1e6,
                "args": {"op": event.name},
                "cat": "copy" if event.copied else "operation",
            }
            for event in self.events
        ]
        trace += [
            {
                "ph": "X",
                "name": str(turn),
                "pid": number[turn.device],
                "tid": "turns",
                "ts": turn.start_s * 1e6,
                "dur": (turn.end_s - turn.start_s) * 1e6,
                "args": {"shard": turn.shard, "stage": turn.stage},
                "cat": "turn",
            }
            for turn in self.turns
        ]
        return {"traceEvents": trace, "displayTimeUnit": "ms"}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the timeline: `.json` as a Chrome trace, `.png` or `.svg` as a picture.

        Raises:
          ArgumentError: for another suffix.
          UnsupportedError: for a picture, if matplotlib is not installed.
          StorageError: if writing fails, or `path` holds what graphsplit has not written; that is left as it was.
        """
        path = os.fspath(path)
        forms.check_timeline_suffix(path)
        if forms.suffix_of(path) == ".json":
            forms.write_json(path, self.chrome_trace())
        else:
            forms.write_figure(path, _draw(self))

    def __str__(self) -> str:
        lines = [f"Timeline of {self.title}: {len(self.events)} executions in {self.duration_s * 1e3:.2f} ms"]
        copying = self.copying
        for device, share in self.busy.items():
            copies = f", copying {copying[device]:.0%}" if device in copying else ""
            lines.append(f"  {short_name(device)}  busy {share:.0%}{copies}{_turns_text(self.turns, device)}")
        for (a, b), count in sorted(self.moved_bytes.items(), key=lambda item: -item[1])[:8]:
            lines.append(f"  {short_name(a)} -> {short_name(b)}  {format_bytes(count)} moved")
        for event in self.slowest(5):
            lines.append(
                f"  {event.duration_s * 1e3:8.3f} ms  {event.type} on {short_name(event.device)}  {event.name}"
            )
        return "\n".join([line[:100] for line in lines] + ([f"  note: {self.note}"] if self.note else []))


def _turns_text(turns: Sequence[TurnSpan], device: str) -> str:
    """Say which stages and shards have turns on a device."""
    own = [turn for turn in turns if turn.device == device]
    return f"{_stages(own, device)}, {len({turn.shard for turn in own})} shards in turns" if own else ""


def timeline_of(fn: Any, *args: Any, **kwargs: Any) -> Timeline:
    """Run a function under TensorFlow's profiler and return what ran when on which device.

    The function runs three times: to learn where each operation runs, to warm up, and to be recorded. Variables are
    given back the values that they had. The recorded step is slower than others: a training step of 1,000 operations
    on 4 logical devices of a 2-core CPU took 46 ms instead of 39; stopping and reading back took another 30 ms.

    Args:
      fn: a function made by `parallelize`, or anything that `placement_of` takes but directories.
      *args, **kwargs: its arguments, tensors.

    Raises:
      ArgumentError: if arguments are specifications and not tensors.

    >>> import tensorflow as tf
    >>> from graphsplit.placement import timeline_of
    >>> timeline_of(tf.function(lambda x: tf.linalg.matmul(x, x)), tf.ones([64, 64])).slowest(1)[0].device
    '/device:CPU:0'
    """
    source, arguments, title = source_of(fn, args, kwargs)
    return timeline_of_source(source, arguments, title)


def timeline_of_source(source: Source, arguments: Sequence[Any], title: str) -> Timeline:
    """Return the timeline of a graph run on flat arguments."""
    require_runnable(source, arguments)
    assert source.make_run is not None
    run = source.make_run()
    with StateKeeper(source.state):
        with partition_graphs() as graphs:
            run(arguments)
        run(arguments)
        space = record(lambda: [tensor.numpy() for tensor in run(arguments) if hasattr(tensor, "numpy")])
    events, sends = read_events(space, graphs)
    flat = flatten(source.graph)
    ops, edges = read_ops(source, flat)
    ops, added = match(ops, flat, source, graphs)
    placement = Placement(ops, edges, actual=True, rows=source.rows, graph_def=source.graph, added=added, title=title)
    note = _NO_STREAMS if lacks_streams(space, graphs) else ""
    return Timeline(title, tuple(events), _moved(sends, placement), placement, note)


def _moved(sends: Sequence[SendEvent], placement: Placement) -> dict[tuple[str, str], int]:
    """Return the bytes that the recorded sends carried: each tensor as often as it was sent."""
    moved: dict[tuple[str, str], int] = defaultdict(int)
    for send in sends:
        op = placement.ops.get(send.source)  # none for the signals that carry control dependencies
        if op is not None:
            size = bytes_of(op.shapes[send.output], op.dtypes[send.output])
            moved[send.source_device, send.target_device] += size
    return {route: count for route, count in moved.items() if count}


def _draw(timeline: Timeline) -> Any:
    """Return a matplotlib figure: a band for each device, a row in it for each thread, a bar for each execution."""
    figure_of = figure_class("A picture of a timeline")
    from matplotlib.collections import PolyCollection

    colors, busy = device_colors(timeline.busy), timeline.busy
    rows: dict[tuple[str, int], int] = {}
    turns = timeline.turns
    for device in busy:
        if any(turn.device == device for turn in turns):
            rows[device, _TURNS] = len(rows)
        for thread in sorted({e.thread for e in timeline.events if e.device == device}):
            rows[device, thread] = len(rows)
    figure = figure_of(figsize=(13, 1.4 + 0.32 * max(len(rows), 3)), layout="constrained")
    axes = figure.add_subplot()
    for device in busy:
        for copied, hatch in ((False, None), (True, "////")):
            events = [e for e in timeline.events if e.device == device and e.copied == copied]
            bars = [_bar(e, rows[e.device, e.thread]) for e in events]
            looks: dict[str, Any] = {
                "facecolors": colors[device],
                "edgecolors": "white",
                "linewidths": 0.2,
                "hatch": hatch,
            }
            axes.add_collection(PolyCollection(bars, **looks))
        first = min(row for (d, _), row in rows.items() if d == device)
        if first:
            axes.axhline(first - 0.5, color="#d8dee4", lw=0.8)
    draw_turns(axes, turns, {d: row for (d, thread), row in rows.items() if thread == _TURNS}, timeline.duration_s)
    ticks = [[row for (d, _), row in rows.items() if d == device] for device in busy]
    axes.set_yticks(
        [sum(t) / len(t) for t in ticks],
        [f"{short_name(d)}{_stages(turns, d)}\n{share:.0%} busy" for d, share in busy.items()],
    )
    axes.set_xlim(0, timeline.duration_s * 1e3 or 1.0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    moved = format_bytes(sum(timeline.moved_bytes.values()))
    axes.set_title(f"{timeline.title}: {timeline.duration_s * 1e3:.2f} ms, {moved} moved between devices", loc="left")
    return figure


def _stages(turns: Sequence[TurnSpan], device: str) -> str:
    return "".join(f", stage {s}" for s in dict.fromkeys(t.stage for t in turns if t.device == device) if s)


def _bar(event: OpEvent, row: int) -> list[tuple[float, float]]:
    a, b = event.start_s * 1e3, (event.start_s + event.duration_s) * 1e3
    return [(a, row - 0.4), (b, row - 0.4), (b, row + 0.4), (a, row + 0.4)]
