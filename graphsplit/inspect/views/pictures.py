"""A still picture of a placement, for pages that are only read: SVG, for which nothing has to be installed."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence

from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.views.lanes import Lane, device_colors
from graphsplit.inspect.views.summaries import BACKWARD, Box, LaneFlow, Summary, summarize
from graphsplit.inspect.views.tables import format_flops, shorten
from graphsplit.planning.amounts import count_text, format_bytes

_PAGE = 900  # pixels: the width at which pictures are read; columns that do not fit there make them wider
_LEFT, _GAP = 20, 100  # beside the boxes, and between two columns of them
_NARROW, _WIDE = 140, 300  # of boxes
_HEIGHT, _ROW, _TOP = 44, 60, 112  # of a box, from one box to the next, and where the first box is
_INK, _GREY, _SOFT = "#1f2328", "#656d76", "#8b949e"
_LEGEND = "Colour: the device. Coloured line: tensors that are sent, with their bytes. Grey line: on the same device."
_ALIKE = " \u00d7 n: one of n alike is drawn."

PointByLane = Mapping[tuple[Lane, str], tuple[float, float]]
"""The upper left corner of each box."""


def picture(placement: PlacementGraph) -> str:
    """Return the picture: a column for each device or shard, or for those alike, time downwards, and what is sent."""
    summary, colors = summarize(placement), device_colors(placement.devices)
    order = sorted((box for boxes in summary.lanes.values() for box in boxes), key=lambda box: box.rank)
    columns = max(len(summary.lanes), 1)
    wide = min(max((_PAGE - 2 * _LEFT + _GAP) // columns - _GAP, _NARROW), _WIDE)
    places = _places(summary, order, wide)
    width = max(2 * _LEFT + columns * (wide + _GAP) - _GAP, 760)
    height = max([y for _, y in places.values()], default=_TOP) + _ROW
    drawn = [
        f'<rect width="{width}" height="{height:g}" fill="#fff"/>',
        _text((_LEFT, 30), f"Placement of {placement.title}", 18, _INK, bold=True),
        _text((_LEFT, 52), _LEGEND + _ALIKE * any(len(group.lanes) > 1 for group in summary.lanes), 11, _GREY),
    ]
    split = any(group.shown.work for group in summary.lanes)
    for i, group in enumerate(summary.lanes):
        at, color = _LEFT + i * (wide + _GAP), colors.get(group.shown.device, _SOFT)
        title = group.title if split else group.devices
        drawn.append(_text((at, 84), title, 15, color, bold=True, most=wide + _GAP - 10))
        if split:
            drawn.append(_text((at, 100), group.note(placement.rows), 11, _GREY, most=wide + _GAP - 10))
    drawn += _flows(summary, places, colors, wide)
    for box in order:
        drawn += _box(box, *places[box.key], colors.get(box.device, _SOFT), wide)
    size_text = f'width="{width}" height="{height:g}" viewBox="0 0 {width} {height:g}"'
    font = 'font-family="system-ui, Helvetica, Arial, sans-serif"'
    return "\n".join([f'<svg xmlns="http://www.w3.org/2000/svg" {size_text} {font}>', *drawn, "</svg>"])


def _text(
    at: tuple[float, float],
    text: str,
    size: float,
    color: str,
    bold: bool = False,
    end: bool = False,
    most: float = 1e9,
) -> str:
    """Return a text, smaller or shorter if it is wider than `most`; if bold, on white, which covers lines behind it.

    (A rectangle is white in whatever format a picture is converted to; `paint-order` is not known to all.)
    """
    letter = 0.6 if bold else 0.55  # of the size: how wide a letter is, about
    size = max(min(size, most / max(len(text), 1) / letter), 10)
    looks = (
        f'font-size="{size:g}" font-weight="{"bold" if bold else "normal"}" text-anchor="{"end" if end else "start"}"'
    )
    text = shorten(text, int(most / size / letter))
    wide = len(text) * size * letter
    left, top = at[0] - wide * end, at[1] - size
    white = f'<rect x="{left:g}" y="{top:g}" width="{wide:g}" height="{1.3 * size:g}" fill="#fff"/>' * bold
    return f'{white}<text x="{at[0]:g}" y="{at[1]:g}" {looks} fill="{color}">{html.escape(text)}</text>'


def _places(summary: Summary, order: Sequence[Box], wide: int) -> PointByLane:
    """Return where boxes are: below the box before it in its lane and the boxes that feed it."""
    x_by_lane = {group.shown: _LEFT + i * (wide + _GAP) for i, group in enumerate(summary.lanes)}
    feeds: dict[tuple[Lane, str], list[Box]] = {}
    for flow in summary.flows:
        if flow.source.lane != flow.target.lane:
            feeds.setdefault(flow.target.key, []).append(flow.source)
    next_y = dict.fromkeys(x_by_lane, float(_TOP))
    places: dict[tuple[Lane, str], tuple[float, float]] = {}
    for box in order:
        below = [places[source.key][1] + _ROW / 2 for source in feeds.get(box.key, ()) if source.key in places]
        y = max([next_y[box.lane], *below])
        places[box.key] = (x_by_lane[box.lane], y)
        next_y[box.lane] = y + _ROW
    return places


def _box(box: Box, x: float, y: float, color: str, wide: int) -> list[str]:
    label = box.label.removeprefix(f"{BACKWARD}/")
    facts = [count_text(box.ops, "op"), format_flops(box.flops) * bool(box.flops), "backward" * (label != box.label)]
    what = ", ".join(filter(None, facts))
    shape = f'<rect x="{x:g}" y="{y:g}" width="{wide}" height="{_HEIGHT}" rx="6"'
    return [
        f'{shape} fill="#fff"/>{shape} fill="{color}" fill-opacity="0.15" stroke="{color}" stroke-width="1.5"/>',
        _text((x + 10, y + 18), label, 12.5, _INK, most=wide - 20),
        _text((x + 10, y + 35), what, 11, _GREY, most=wide - 20),
    ]


def _flows(summary: Summary, places: PointByLane, colors: Mapping[str, str], wide: int) -> list[str]:
    """Return the lines from lane to lane, the thickest first, and labels over them."""
    lines, labels, taken = list[str](), list[str](), list[tuple[float, float]]()
    columns = [[places[box.key][1] for box in boxes] for boxes in summary.lanes.values()]
    for flow in sorted(summary.flows, key=lambda flow: -flow.bytes):
        (x1, y1), (x2, y2) = places[flow.source.key], places[flow.target.key]
        if x1 == x2:
            continue
        way = 1 if x2 > x1 else -1
        start = (x1 + (wide if way > 0 else 0), y1 + _HEIGHT / 2)
        end = (x2 + (0 if way > 0 else wide), y2 + _HEIGHT / 2)
        color = colors.get(flow.source.device, _SOFT) if flow.crosses else "#b6bdc5"
        thick = 1 + (min(3.0, math.log10(1 + flow.bytes / 1000)) if flow.crosses else 0)
        route = _route(start, end, columns, wide)
        lines.append(f'<path d="{route}" fill="none" stroke="{color}" stroke-width="{thick:.2g}" opacity="0.6"/>')
        lines.append(f'<path d="M{end[0]:g},{end[1]:g} l{-8 * way},-4 v8 z" fill="{color}" opacity="0.8"/>')
        labels += _label(flow, (end[0] - 10 * way, end[1] - 8), color, taken, way) if flow.crosses else []
    return lines + labels


def _route(start: tuple[float, float], end: tuple[float, float], columns: Sequence[Sequence[float]], wide: int) -> str:
    """Return a curve: a lane on the way is passed between its boxes.

    Args:
      start, end: where it begins and ends.
      columns: the upper edges of each lane's boxes, from above.
      wide: the width of boxes.
    """
    way = 1 if end[0] > start[0] else -1
    first, last = (int((x - 1) // (wide + _GAP)) for x in (start[0], end[0]))
    (x, y), curve = start, f"M{start[0]:g},{start[1]:g}"
    for k in [*range(first + way, last, way), None]:
        enter, middle, leave = end[0], end[1], end[0]
        if k is not None:
            left = _LEFT + k * (wide + _GAP)
            edges = left - 10, left + wide + 10
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
    heights = [max(min(y, top - room), low + room) for low, top in zip(bottoms, [*tops, math.inf], strict=True)]
    return min(heights, key=lambda height: abs(height - y))


def _label(
    flow: LaneFlow, at: tuple[float, float], color: str, taken: list[tuple[float, float]], way: int
) -> list[str]:
    """Return the bytes beside the arrowhead, above or below it; nothing where there is no room."""
    for shift in (0, 24, -16):
        place = (at[0], at[1] + shift)
        if not any(abs(place[0] - x) < 84 and abs(place[1] - y) < 14 for x, y in taken):
            taken.append(place)
            text = format_bytes(flow.bytes) + (f" \u00d7 {flow.times}" if flow.times > 1 else "")
            return [_text(place, text, 11, color, bold=True, end=way > 0)]
    return []
