"""Views of a recorded step: a page, a Chrome trace, a picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphsplit.core.devices import short_name
from graphsplit.core.requirements import figure_class
from graphsplit.placement.questions import natural_order
from graphsplit.placement.recorded.profiles import OpEvent
from graphsplit.placement.recorded.recorded_steps import COLORS, RecordedStep, TurnSpan, draw_turns
from graphsplit.placement.views.colors import device_colors
from graphsplit.placement.views.pages import fill_page
from graphsplit.planning.amounts import format_bytes

_TURNS = -1  # the row of turns, above those of threads
_LETTER, _INNER = 3.6, 11.5 * 72  # points that a small letter takes, and that the bars of a picture have in all


def chrome_trace(step: RecordedStep) -> dict[str, Any]:
    """Return the timeline in the Trace Event Format (chrome://tracing, ui.perfetto.dev): a process per device."""
    number = {device: i for i, device in enumerate(sorted({e.device for e in step.events}, key=natural_order))}
    trace = [trace_place(i, short_name(device)) for device, i in number.items()]
    for e in step.events:
        kind, span = "copy" if e.copied else "operation", (e.start_s, e.duration_s)
        trace.append(trace_span(e.type, number[e.device], e.thread, span, kind, op=e.name))
    for turn in step.turns:
        span = turn.start_s, turn.end_s - turn.start_s
        about = {"shard": turn.shard, "stage": turn.stage}
        trace.append(trace_span(str(turn), number[turn.device], "turns", span, "turn", **about))
    return {"traceEvents": trace, "displayTimeUnit": "ms"}


def trace_place(number: int, name: str) -> dict[str, Any]:
    """Return the event of a trace that names a place: a device, or a way between two."""
    return {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}


def trace_span(
    name: str, place: int, thread: int | str, span: tuple[float, float], kind: str, **about: object
) -> dict[str, Any]:
    """Return the event of a trace that says what ran when, by its start and duration in seconds."""
    start_s, duration_s = span
    times = {"ts": start_s * 1e6, "dur": duration_s * 1e6}
    return {"ph": "X", "name": name, "pid": place, "tid": thread, **times, "args": about, "cat": kind}


def page(timeline: RecordedStep, text: str) -> str:
    """Return the timeline as one self-contained page; `text` is what it prints."""
    rows, colors, busy = rows_of(timeline), device_colors(timeline.busy), timeline.busy
    types: dict[str, int] = {}
    firsts = {device: min(row for (d, _), row in rows.items() if d == device) for device in busy}
    events = [
        [
            rows[e.device, e.thread],
            types.setdefault(e.type + (" (copy)" if e.copied else ""), len(types)),
            round(e.start_s, 9),
            round(e.start_s + e.duration_s, 9),
            e.name,
            0,
        ]
        for e in timeline.events
    ]
    for turn in timeline.turns:
        kind = types.setdefault(str(turn), len(types))
        events.append([rows[turn.device, _TURNS], kind, round(turn.start_s, 9), round(turn.end_s, 9), turn.stage, 0])
    data = {
        "seconds": timeline.duration_s,
        "places": [
            f"{short_name(device)}  {busy[device]:.0%} busy" if firsts[device] == row else ""
            for (device, _), row in rows.items()
        ],
        "colors": [COLORS["F"] if thread == _TURNS else colors[device] for device, thread in rows],
        "types": list(types),
        "events": events,
        "memory": [],
    }
    note = "Measured. Drag to move, turn the wheel to zoom, double-click for all of it."
    title = f"Timeline of {timeline.title}"
    return fill_page("page_of_times", ("view.js",), title, data, {"note": note, "text": text})


def rows_of(timeline: RecordedStep) -> dict[tuple[str, int], int]:
    """Return the number of the row of each device's threads; turns, where there are some, have one above them."""
    rows: dict[tuple[str, int], int] = {}
    for device in timeline.busy:
        if any(turn.device == device for turn in timeline.turns):
            rows[device, _TURNS] = len(rows)
        for thread in sorted({e.thread for e in timeline.events if e.device == device}):
            rows[device, thread] = len(rows)
    return rows


def figure(timeline: RecordedStep) -> Any:
    """Return a matplotlib figure: a band for each device, a row in it for each thread, a bar for each execution."""
    figure_of = figure_class("A picture of a timeline")
    from matplotlib.collections import PolyCollection

    colors, busy = device_colors(timeline.busy), timeline.busy
    rows, turns = rows_of(timeline), timeline.turns
    drawn = figure_of(figsize=(13, 1.4 + 0.32 * max(len(rows), 3)), layout="constrained")
    axes = drawn.add_subplot()
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
        _label_bars(axes, timeline, device, rows)
        first = min(row for (d, _), row in rows.items() if d == device)
        if first:
            axes.axhline(first - 0.5, color="#d8dee4", lw=0.8)
    draw_turns(axes, turns, {d: row for (d, thread), row in rows.items() if thread == _TURNS}, timeline.duration_s)
    ticks = [[row for (d, _), row in rows.items() if d == device] for device in busy]
    axes.set_yticks(
        [sum(t) / len(t) for t in ticks],
        [f"{short_name(d)}{stages_text(turns, d)}\n{share:.0%} busy" for d, share in busy.items()],
    )
    axes.set_xlim(0, timeline.duration_s * 1e3 or 1.0)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel("ms")
    axes.spines[["top", "right"]].set_visible(False)
    moved = format_bytes(sum(timeline.moved_bytes.values()))
    axes.set_title(f"{timeline.title}: {timeline.duration_s * 1e3:.2f} ms, {moved} moved between devices", loc="left")
    return drawn


def _label_bars(axes: Any, timeline: RecordedStep, device: str, rows: Mapping[tuple[str, int], int]) -> None:
    """Write the types of operations on the bars of a device that are long enough."""
    for event in timeline.events:
        room = _INNER * event.duration_s / (timeline.duration_s or 1.0)
        if event.device == device and room > _LETTER * (len(event.type) + 1):
            middle = (event.start_s + event.duration_s / 2) * 1e3
            looks: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 6.5, "color": "white"}
            axes.text(middle, rows[event.device, event.thread], event.type, clip_on=True, **looks)


def stages_text(turns: Sequence[TurnSpan], device: str) -> str:
    """Say which stages have turns on a device."""
    return "".join(f", stage {s}" for s in dict.fromkeys(t.stage for t in turns if t.device == device) if s)


def _bar(event: OpEvent, row: int) -> list[tuple[float, float]]:
    a, b = event.start_s * 1e3, (event.start_s + event.duration_s) * 1e3
    return [(a, row - 0.4), (b, row - 0.4), (b, row + 0.4), (a, row + 0.4)]
