"""Still pictures of a placement: through Graphviz where it is installed, else through matplotlib."""

from __future__ import annotations

import math
import shutil
import subprocess
from typing import Any

from graphsplit.core.errors import StorageError, UnsupportedError
from graphsplit.core.requirements import how_to_install
from graphsplit.core.storage import forms
from graphsplit.placement.graph import PlacementGraph
from graphsplit.placement.summaries import Box, LaneFlow, Summary, summarize
from graphsplit.placement.views.colors import device_colors
from graphsplit.placement.views.tables import format_flops, shorten
from graphsplit.planning.amounts import count_text, format_bytes

_WIDTH, _HEIGHT, _ROW = 3.0, 0.62, 0.9  # of a box, and from one box to the next, in inches
_COLUMN = 4.4
_MOST_LETTERS = 32  # of a lane's title, at full size
_LEGEND = "Colour: the device. Coloured line: tensors that are sent, with their bytes. Grey line: on the same device."


def save_dot(placement: PlacementGraph, path: str) -> None:
    """Write the summary in Graphviz's language; `dot -Tsvg` draws it."""
    forms.write(path, dot_text(placement).encode())


def save_picture(placement: PlacementGraph, path: str) -> None:
    """Write the summary as `.svg` or `.png`.

    Raises:
      UnsupportedError: if neither Graphviz nor matplotlib is installed.
      StorageError: if Graphviz or writing fails.
    """
    kind = forms.suffix_of(path)[1:]
    program = shutil.which("dot")
    if program:
        drawn = subprocess.run([program, f"-T{kind}"], input=dot_text(placement).encode(), capture_output=True)
        if drawn.returncode:
            said = drawn.stderr.decode(errors="replace").strip()
            raise StorageError(f"Graphviz ({program}) could not draw {path!r}, and nothing was written: {said}")
        forms.write(path, drawn.stdout)
        return
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(
            f"Saving {path!r} needs Graphviz's program `dot` or matplotlib: {how_to_install('matplotlib', 'plots')}."
        ) from error
    title = f"Placement of {placement.title}"
    forms.write_figure(path, draw(summarize(placement), device_colors(placement.devices), title, Figure))


def dot_text(placement: PlacementGraph) -> str:
    """Return the summary in Graphviz's language: a cluster for each shard or device, coloured by device."""
    summary, colors = summarize(placement), device_colors(placement.devices)
    number: dict[tuple[str, str], int] = {}
    lines = [
        "digraph placement {",
        f"  label={_quote(placement.title)}; labelloc=t; rankdir=TB; nodesep=0.25;",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica", fontsize=10];',
        '  edge [fontname="Helvetica", fontsize=9, color="#8b949e"];',
    ]
    for i, (lane, boxes) in enumerate(summary.lanes.items()):
        color = colors.get(boxes[0].device, "#8b949e")
        lines.append(f'  subgraph cluster_{i} {{ label={_quote(lane)}; color="{color}"; penwidth=2;')
        for box in boxes:
            number[box.key] = len(number)
            text = _quote(f"{shorten(box.label, 40)}\n{_subtitle(box)}")
            lines.append(f'    n{number[box.key]} [label={text}, color="{color}", fillcolor="{color}22"];')
        lines.append("  }")
    for flow in summary.flows:
        style = f' [label="{format_bytes(flow.bytes)}", color="{colors[flow.source.device]}", penwidth=2]'
        lines.append(f"  n{number[flow.source.key]} -> n{number[flow.target.key]}{style if flow.crosses else ''};")
    return "\n".join([*lines, "}", ""])


def draw(summary: Summary, colors: dict[str, str], title: str, figure_type: Any) -> Any:
    """Return a matplotlib figure: a column for each shard or device, time downwards, transfers with their bytes."""
    order = sorted((box for boxes in summary.lanes.values() for box in boxes), key=lambda box: box.rank)
    places = _places(summary, order)
    height = max((-y for _, y in places.values()), default=0) + 2.2
    width = len(summary.lanes) * _COLUMN - (_COLUMN - _WIDTH) + 0.6
    figure = figure_type(figsize=(width, height), layout=None)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(-height + 1.2, 1.2)
    axes.axis("off")
    axes.text(0.3, 0.95, title, fontsize=13, weight="bold", va="center")
    axes.text(0.3, 0.74, _LEGEND, fontsize=7.5, color="#656d76", va="center")
    for i, (lane, boxes) in enumerate(summary.lanes.items()):
        color = colors.get(boxes[0].device, "#8b949e")
        size = min(11.0, 11 * _MOST_LETTERS / len(lane))
        axes.text(0.3 + i * _COLUMN, 0.5, lane, fontsize=size, weight="bold", color=color, va="center")
    _draw_flows(axes, summary, places, colors)
    for box in order:
        _draw_box(axes, box, *places[box.key], colors.get(box.device, "#8b949e"))
    return figure


def _places(summary: Summary, order: list[Box]) -> dict[tuple[str, str], tuple[float, float]]:
    """Return the upper left corner of each box: below the box before it in its lane and the boxes that feed it."""
    column = {lane: i for i, lane in enumerate(summary.lanes)}
    feeds: dict[tuple[str, str], list[Box]] = {}
    for flow in summary.flows:
        if flow.source.lane != flow.target.lane:
            feeds.setdefault(flow.target.key, []).append(flow.source)
    next_y = dict.fromkeys(summary.lanes, 0.0)
    places: dict[tuple[str, str], tuple[float, float]] = {}
    for box in order:
        above = [places[source.key][1] - _ROW / 2 for source in feeds.get(box.key, ()) if source.key in places]
        y = min([next_y[box.lane], *above])
        places[box.key] = (0.3 + column[box.lane] * _COLUMN, y)
        next_y[box.lane] = y - _ROW
    return places


def _draw_box(axes: Any, box: Box, x: float, y: float, color: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    style = "round,pad=0,rounding_size=0.08"
    axes.add_patch(FancyBboxPatch((x, y - _HEIGHT), _WIDTH, _HEIGHT, style, fc="white", ec="none", zorder=2))
    axes.add_patch(
        FancyBboxPatch((x, y - _HEIGHT), _WIDTH, _HEIGHT, style, fc=color + "26", ec=color, lw=1.2, zorder=3)
    )
    axes.text(x + 0.12, y - 0.2, shorten(box.label, 38), fontsize=8.5, va="center", zorder=4)
    axes.text(x + 0.12, y - 0.44, _subtitle(box), fontsize=7.5, color="#656d76", va="center", zorder=4)


def _draw_flows(axes: Any, summary: Summary, places: Any, colors: dict[str, str]) -> None:
    from matplotlib.patches import FancyArrowPatch
    from matplotlib.path import Path

    taken: list[tuple[float, float]] = []
    tops = {lane: [places[box.key] for box in boxes] for lane, boxes in summary.lanes.items()}
    columns = [sorted([y for _, y in corners], reverse=True) for corners in tops.values()]
    for flow in sorted(summary.flows, key=lambda f: -f.bytes):
        (x1, y1), (x2, y2) = places[flow.source.key], places[flow.target.key]
        if flow.source.lane == flow.target.lane:
            continue
        right = x2 > x1
        start = (x1 + (_WIDTH if right else 0), y1 - _HEIGHT / 2)
        end = (x2 + (0 if right else _WIDTH), y2 - _HEIGHT / 2)
        color = colors.get(flow.source.device, "#8b949e") if flow.crosses else "#b6bdc5"
        width = 0.8 + (min(3.0, math.log10(1 + flow.bytes / 1000)) if flow.crosses else 0)
        route = Path(*_route(start, end, columns))
        axes.add_patch(
            FancyArrowPatch(path=route, arrowstyle="-|>", mutation_scale=9, lw=width, color=color, alpha=0.6)
        )
        if flow.crosses:
            _label(axes, flow, (end[0] + (-0.1 if right else 0.1), end[1] + 0.1), color, taken, right)


def _route(
    start: tuple[float, float], end: tuple[float, float], columns: list[list[float]]
) -> tuple[list[tuple[float, float]], list[int]]:
    """Return the points of a curve, and matplotlib's codes for them: a lane on the way is passed between its boxes.

    Args:
      start, end: where it begins and ends.
      columns: the upper edges of each lane's boxes, from above.
    """
    right = end[0] > start[0]
    first, last = int((start[0] - 0.1) // _COLUMN), int((end[0] - 0.1) // _COLUMN)
    points, codes = [start], [1]
    for k in [*range(first + (1 if right else -1), last, 1 if right else -1), None]:
        enter = leave = end
        if k is not None:
            left = 0.2 + k * _COLUMN, 0.4 + k * _COLUMN + _WIDTH
            middle = start[1] + (end[1] - start[1]) * (sum(left) / 2 - start[0]) / (end[0] - start[0])
            y = _gap_near(columns[k], middle)
            enter, leave = [(x, y) for x in (left if right else left[::-1])]
        (x, y), bend = points[-1], (enter[0] - points[-1][0]) / 2
        points += [(x + bend, y), (enter[0] - bend, enter[1]), enter, leave]
        codes += [4, 4, 4, 2]
    return points[:-1], codes[:-1]


def _gap_near(tops: list[float], y: float) -> float:
    """Return the height between two boxes of a lane, or beside all of them, that is nearest to `y`."""
    room = (_ROW - _HEIGHT) / 2
    lows = [math.inf, *[top - _HEIGHT for top in tops]]
    near = [min(max(y, top + room), low - room) for low, top in zip(lows, [*tops, -math.inf], strict=True)]
    return min(near, key=lambda found: abs(found - y))


def _label(
    axes: Any, flow: LaneFlow, at: tuple[float, float], color: str, taken: list[tuple[float, float]], right: bool
) -> None:
    """Write the bytes beside the arrowhead, above or below it, or not at all where there is no room."""
    for shift in (0.0, -0.24, 0.16):
        place = (at[0], at[1] + shift)
        if any(abs(place[0] - x) < 0.6 and abs(place[1] - y) < 0.15 for x, y in taken):
            continue
        taken.append(place)
        axes.text(
            *place,
            format_bytes(flow.bytes),
            fontsize=7.5,
            color=color,
            weight="bold",
            ha="right" if right else "left",
            zorder=5,
            bbox={"fc": "white", "ec": "none", "pad": 0.6, "alpha": 0.85},
        )
        return


def _subtitle(box: Box) -> str:
    ops = count_text(box.ops, "operation")
    return f"{ops}, {format_flops(box.flops)}" if box.flops else ops


def _quote(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
