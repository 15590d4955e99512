"""A step in the Trace Event Format, which ui.perfetto.dev and chrome://tracing open: recorded, or predicted."""

from __future__ import annotations

from typing import Any


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
