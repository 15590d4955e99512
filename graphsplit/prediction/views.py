"""Views of a prediction: a page, a Chrome trace, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from graphsplit.core.devices import short_name
from graphsplit.core.requirements import figure_class
from graphsplit.placement.questions import natural_order
from graphsplit.placement.recorded.recorded_steps import RecordedStep
from graphsplit.placement.views.colors import COLORS
from graphsplit.placement.views.pages import fill_page
from graphsplit.placement.views.timeline_views import trace_place, trace_span
from graphsplit.prediction.predicted_step import PredictedStep

_SENT = "#7f7f7f"
_MEASURED = "#4d4d4d"


def places_of(prediction: PredictedStep) -> list[str]:
    """Return the rows of a timeline: devices, then the ways between them."""
    found = dict.fromkeys([*map(short_name, prediction.devices), *[event.place for event in prediction.events]])
    return sorted(found, key=lambda place: ("->" in place, natural_order(place)))


def _colors(places: Sequence[str]) -> list[str]:
    return [_SENT if "->" in place else COLORS[i % len(COLORS)] for i, place in enumerate(places)]


def chrome_trace(prediction: PredictedStep) -> dict[str, Any]:
    """Return the predicted timeline in the Trace Event Format (chrome://tracing, ui.perfetto.dev)."""
    places = places_of(prediction)
    number = {place: i for i, place in enumerate(places)}
    trace = [trace_place(i, place) for place, i in number.items()]
    for e in prediction.events:
        kind, span = "send" if "->" in e.place else "operation", (e.start_s, e.end_s - e.start_s)
        trace.append(trace_span(e.type, number[e.place], 0, span, kind, op=e.name, bytes=e.bytes))
    trace += [
        {
            "ph": "C",
            "name": "bytes alive",
            "pid": number[short_name(device)],
            "ts": time * 1e6,
            "args": {"bytes": count},
        }
        for device, memory in prediction.memory.items()
        if short_name(device) in number
        for time, count in memory.steps
    ]
    about = {"predicted": True, "rests on": list(prediction.assumptions)}
    return {"traceEvents": trace, "displayTimeUnit": "ms", "otherData": about}


def page(prediction: PredictedStep, measured: RecordedStep | None = None) -> str:
    """Return the predicted timeline as one self-contained page; what was measured, if it was, below each device."""
    places = places_of(prediction)
    number, types = {place: i for i, place in enumerate(places)}, dict[str, int]()
    rows = [[_Row(place, color)] for place, color in zip(places, _colors(places), strict=True)]
    for event in prediction.events:
        kind = types.setdefault(event.type, len(types))
        own = [kind, round(event.start_s, 9), round(event.end_s, 9), event.name, event.bytes]
        rows[number[event.place]][0].events.append(own)
    if measured is not None:
        _put_below(rows, number, measured, types)
    shown = [row for together in rows for row in together]
    memory = [
        {
            "name": short_name(device),
            "most": own.peak_bytes,
            "color": rows[number[short_name(device)]][0].color,
            "steps": own.steps,
        }
        for device, own in prediction.memory.items()
    ]
    data = {
        "seconds": max([float(event[2]) for row in shown for event in row.events], default=0.0),
        "places": [row.name for row in shown],
        "colors": [row.color for row in shown],
        "types": list(types),
        "events": [[k, *event] for k, row in enumerate(shown) for event in row.events],
        "memory": memory,
    }
    what = "Predicted, not measured." if measured is None else "Predicted, and below each device measured."
    note = f"{what} Drag to move, turn the wheel to zoom, double-click for all of it."
    title = f"Prediction of {prediction.title} on {prediction.machine.name}"
    text = str(prediction) if measured is None else f"{prediction.beside(measured)}\n\n{prediction}"
    return fill_page("page_of_times", ("view.js",), title, data, {"note": note, "text": text})


@dataclass(frozen=True)
class _Row:
    """A row of the page: events without their row."""

    name: str
    color: str
    events: list[list[Any]] = field(default_factory=list)


def _put_below(rows: list[list[_Row]], number: dict[str, int], measured: RecordedStep, types: dict[str, int]) -> None:
    """Add rows of what each thread of a device did, below what it was predicted to do."""
    below: dict[tuple[str, int], _Row] = {}
    for event in measured.events:
        place, key = short_name(event.device), (event.device, event.thread)
        if place not in number:
            number[place] = len(rows)
            rows.append([])
        if key not in below:
            is_first = not any(device == event.device for device, _ in below)
            below[key] = _Row(f"{place} measured" if is_first else "", _MEASURED)
            rows[number[place]].append(below[key])
        kind = types.setdefault(event.type, len(types))
        end = round(event.start_s + event.duration_s, 9)
        below[key].events.append([kind, round(event.start_s, 9), end, event.name, 0])


def figure(prediction: PredictedStep) -> Any:
    """Return a matplotlib figure: a row for each device, and for each way between two."""
    figure_of = figure_class("A picture of a prediction")
    from matplotlib.collections import PolyCollection

    places = places_of(prediction)
    drawn = figure_of(figsize=(13, 1.4 + 0.32 * max(len(places), 3)), layout="constrained")
    axes = drawn.add_subplot()
    for row, (place, color) in enumerate(zip(places, _colors(places), strict=True)):
        spans = [(e.start_s * 1e3, e.end_s * 1e3) for e in prediction.events if e.place == place]
        bars = [[(a, row - 0.4), (b, row - 0.4), (b, row + 0.4), (a, row + 0.4)] for a, b in spans]
        axes.add_collection(PolyCollection(bars, facecolors=color, edgecolors="white", linewidths=0.2))
    axes.set_yticks(range(len(places)), places)
    axes.set_xlim(0, max([event.end_s for event in prediction.events], default=1e-3) * 1e3)
    axes.set_ylim(len(places) - 0.5, -0.5)
    axes.set_xlabel("ms, predicted")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{prediction.title} on {prediction.machine.name}: {prediction.step_s * 1e3:.2f} ms", loc="left")
    return drawn
