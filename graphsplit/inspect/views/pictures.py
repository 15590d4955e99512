"""A still picture of a placement, for pages that are only read: SVG, for which nothing has to be installed."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.views.colors import device_colors
from graphsplit.inspect.views.summaries import Box, LaneFlow, Summary, summarize
from graphsplit.inspect.views.tables import format_flops, shorten
from graphsplit.planning.amounts import count_text, format_bytes

_WIDTH, _HEIGHT, _ROW = 300, 62, 90  # of a box, and from one box to the next, in pixels
_COLUMN, _LEFT, _TOP = 440, 30, 100  # from one column to the next, and where the first box is
_MOST_LETTERS = 32  # of a lane's title, at full size
_GREY, _SOFT = "#656d76", "#8b949e"
_LEGEND = "Colour: the device. Coloured line: tensors that are sent, with their bytes. Grey line: on the same device."

Places = Mapping[tuple[str, str], tuple[float, float]]
"""The upper left corner of each box."""


def picture(placement: PlacementGraph) -> str:
    """Return the picture: a column for each shard or device, time downwards, transfers with their bytes."""
    summary, colors = summarize(placement), device_colors(placement.devices)
    order = sorted((box for boxes in summary.lanes.values() for box in boxes), key=lambda box: box.rank)
    places = _places(summary, order)
    width = _LEFT + max(len(summary.lanes) * _COLUMN, 700)
    height = max([y for _, y in places.values()], default=_TOP) + _ROW
    drawn = [
        f'<rect width="{width}" height="{height:g}" fill="#fff"/>',
        _text(_LEFT, 30, f"Placement of {placement.title}", 18, weight="bold"),
        _text(_LEFT, 52, _LEGEND, 11, _GREY),
    ]
    for i, (lane, boxes) in enumerate(summary.lanes.items()):
        size, color = min(15.0, 15 * _MOST_LETTERS / len(lane)), colors.get(boxes[0].device, _SOFT)
        drawn.append(_text(_LEFT + i * _COLUMN, 84, lane, size, color, weight="bold"))
    drawn += _flows(summary, places, colors)
    for box in order:
        drawn += _box(box, *places[box.key], colors.get(box.device, _SOFT))
    size_text = f'width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}"'
    font = 'font-family="system-ui, Helvetica, Arial, sans-serif"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size_text} {font}>', *drawn, "</svg>"])


def _text(
    x: float, y: float, text: str, size: float, color: str = "#1f2328", *, weight: str = "normal", anchor: str = "start"
) -> str:
    looks = f'font-size="{size:g}" font-weight="{weight}" text-anchor="{anchor}" fill="{color}"'
    return f'<text x="{x:g}" y="{y:g}" {looks}>{html.escape(text)}</text>'


def _places(summary: Summary, order: Sequence[Box]) -> Places:
    """Return where boxes are: below the box before it in its lane and the boxes that feed it."""
    column = {lane: i for i, lane in enumerate(summary.lanes)}
    feeds: dict[tuple[str, str], list[Box]] = {}
    for flow in summary.flows:
        if flow.source.lane != flow.target.lane:
            feeds.setdefault(flow.target.key, []).append(flow.source)
    next_y = dict.fromkeys(summary.lanes, float(_TOP))
    places: dict[tuple[str, str], tuple[float, float]] = {}
    for box in order:
        below = [places[source.key][1] + _ROW / 2 for source in feeds.get(box.key, ()) if source.key in places]
        y = max([next_y[box.lane], *below])
        places[box.key] = (_LEFT + column[box.lane] * _COLUMN, y)
        next_y[box.lane] = y + _ROW
    return places


def _box(box: Box, x: float, y: float, color: str) -> list[str]:
    ops = count_text(box.ops, "operation")
    what = f"{ops}, {format_flops(box.flops)}" if box.flops else ops
    shape = f'<rect x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="8"'
    return [
        f'{shape} fill="#fff"/>{shape} fill="{color}" fill-opacity="0.15" stroke="{color}" stroke-width="1.5"/>',
        _text(x + 12, y + 25, shorten(box.label, 38), 12.5),
        _text(x + 12, y + 47, what, 11, _GREY),
    ]


def _flows(summary: Summary, places: Places, colors: Mapping[str, str]) -> list[str]:
    """Return the lines from lane to lane, the thickest first, and labels over them."""
    lines, labels, taken = list[str](), list[str](), list[tuple[float, float]]()
    columns = [[places[box.key][1] for box in boxes] for boxes in summary.lanes.values()]
    for flow in sorted(summary.flows, key=lambda flow: -flow.bytes):
        (x1, y1), (x2, y2) = places[flow.source.key], places[flow.target.key]
        if x1 == x2:
            continue
        way = 1 if x2 > x1 else -1
        start = (x1 + (_WIDTH if way > 0 else 0), y1 + _HEIGHT / 2)
        end = (x2 + (0 if way > 0 else _WIDTH), y2 + _HEIGHT / 2)
        color = colors.get(flow.source.device, _SOFT) if flow.crosses else "#b6bdc5"
        thick = 1 + (min(3.0, math.log10(1 + flow.bytes / 1000)) if flow.crosses else 0)
        route = _route(start, end, columns)
        lines.append(f'<path d="{route}" fill="none" stroke="{color}" stroke-width="{thick:.2g}" opacity="0.6"/>')
        lines.append(f'<path d="M{end[0]:g},{end[1]:g} l{-8 * way},-4 v8 z" fill="{color}" opacity="0.8"/>')
        labels += _label(flow, (end[0] - 10 * way, end[1] - 8), color, taken, way) if flow.crosses else []
    return lines + labels


def _route(start: tuple[float, float], end: tuple[float, float], columns: Sequence[Sequence[float]]) -> str:
    """Return a curve: a lane on the way is passed between its boxes.

    Args:
      start, end: where it begins and ends.
      columns: the upper edges of each lane's boxes, from above.
    """
    way = 1 if end[0] > start[0] else -1
    first, last = (int((x - 1) // _COLUMN) for x in (start[0], end[0]))
    (x, y), curve = start, f"M{start[0]:g},{start[1]:g}"
    for k in [*range(first + way, last, way), None]:
        enter, middle, leave = end[0], end[1], end[0]
        if k is not None:
            edges = _LEFT + k * _COLUMN - 10, _LEFT + k * _COLUMN + _WIDTH + 10
            enter, leave = edges[::way]
            straight = start[1] + (end[1] - start[1]) * (sum(edges) / 2 - start[0]) / (end[0] - start[0])
            middle = _gap_near(columns[k], straight)
        bend = (enter - x) / 2
        curve += f" C{x + bend:g},{y:g} {enter - bend:g},{middle:g} {enter:g},{middle:g} H{leave:g}"
        x, y = leave, middle
    return curve


def _gap_near(tops: Sequence[float], y: float) -> float:
    """Return the height between two boxes of a lane, or beside all of them, that is nearest to `y`."""
    room = (_ROW - _HEIGHT) / 2
    bottoms = [-math.inf, *[top + _HEIGHT for top in tops]]
    near = [max(min(y, top - room), low + room) for low, top in zip(bottoms, [*tops, math.inf], strict=True)]
    return min(near, key=lambda found: abs(found - y))


def _label(
    flow: LaneFlow, at: tuple[float, float], color: str, taken: list[tuple[float, float]], way: int
) -> list[str]:
    """Return the bytes beside the arrowhead, above or below it; nothing where there is no room."""
    for shift in (0, 24, -16):
        place = (at[0], at[1] + shift)
        if not any(abs(place[0] - x) < 60 and abs(place[1] - y) < 14 for x, y in taken):
            taken.append(place)
            return [
                _text(*place, format_bytes(flow.bytes), 11, color, weight="bold", anchor="end" if way > 0 else "start")
            ]
    return []
