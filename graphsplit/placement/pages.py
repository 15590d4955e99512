"""A placement as one self-contained page: no network, nothing to install, thousands of operations."""

from __future__ import annotations

import html
import importlib.resources
import json
from typing import Any

from graphsplit.core.devices import short_name
from graphsplit.placement.findings import find_warnings
from graphsplit.placement.graph import PlacementGraph
from graphsplit.placement.lanes import lanes_of
from graphsplit.placement.questions import natural_order, reading_order
from graphsplit.placement.records import PlacedOp

# Okabe and Ito's palette, made for colour-blind readers (jfly.uni-koeln.de/color), then Tableau's for more devices.
COLORS = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a200", "#7f7f7f"),
    *("#1f77b4", "#9467bd", "#8c564b", "#17becf", "#2ca02c", "#bcbd22", "#e377c2", "#d62728"),
)


def device_colors(devices: Any) -> dict[str, str]:
    """Return a colour for each device."""
    ordered = sorted(devices, key=natural_order)
    return {device: COLORS[i % len(COLORS)] for i, device in enumerate(ordered)}


def page_html(placement: PlacementGraph) -> str:
    """Return the page."""
    folder = importlib.resources.files("graphsplit.placement") / "page"
    parts = {
        "title": html.escape(f"Placement of {placement.title}"),
        "style": (folder / "page.css").read_text("utf-8"),
        "script": "\n".join((folder / name).read_text("utf-8") for name in ("model.js", "view.js", "panel.js")),
        "data": json.dumps(page_data(placement), separators=(",", ":")).replace("</", "<\\/"),
    }
    page = (folder / "page.html").read_text("utf-8")
    for name, text in parts.items():
        page = page.replace("{{" + name + "}}", text)
    return page


def notebook_html(placement: PlacementGraph, height: int = 640) -> str:
    """Return the page in a frame, as a notebook shows it."""
    page = html.escape(page_html(placement), quote=True)
    return f'<iframe srcdoc="{page}" style="width:100%;height:{height}px;border:1px solid #d8dee4"></iframe>'


def page_data(placement: PlacementGraph) -> dict[str, Any]:
    """Return what the page shows, as plain lists: names and reasons once, operations in the order of execution."""
    order = reading_order(placement.graph)
    number = {name: i for i, name in enumerate(order)}
    known = {op.requested for op in placement.ops.values()} | set(placement.devices)
    devices = sorted(known - {""}, key=natural_order)
    colors = device_colors(devices)
    index = {device: i for i, device in enumerate(devices)} | {"": -1}
    types, sources, reasons, stages = _Table(), _Table(), _Table(), _Table()
    lane_of = lanes_of(placement.ops.values())
    lanes = sorted(set(lane_of.values()), key=lambda lane: lane.order)
    place = {lane: i for i, lane in enumerate(lanes)}
    return {
        "title": placement.title,
        "actual": placement.actual,
        "sharded": any(op.shard is not None for op in placement.ops.values()),
        "rows": list(placement.rows),
        "devices": [_device(placement, device, colors[device]) for device in devices],
        "lanes": [{"work": lane.work, "device": index[lane.device], "shards": list(lane.shards)} for lane in lanes],
        "ops": [
            [*_op(op, index, types, sources, reasons), place[lane_of[op.name]], stages[op.stage]]
            for op in (placement.ops[name] for name in order)
        ],
        "variables": {number[op.name]: op.variable for op in placement.ops.values() if op.variable},
        "types": types.values,
        "sources": sources.values,
        "reasons": reasons.values,
        "stages": stages.values,
        "edges": [x for e in placement.edges for x in (number[e.source], number[e.target], int(e.control))],
        "transfers": [
            [number[t.source], index[t.source_device], index[t.target_device], t.bytes, [number[r] for r in t.readers]]
            for t in placement.transfers
        ],
        "mostFlops": max((op.flops or 0 for op in placement.ops.values()), default=0),
        "warnings": list(find_warnings(placement)),
    }


class _Table:
    """Different strings, each once; -> its number."""

    def __init__(self) -> None:
        self.values: list[str] = []
        self._numbers: dict[str, int] = {}

    def __getitem__(self, text: str) -> int:
        if text not in self._numbers:
            self._numbers[text] = len(self.values)
            self.values.append(text)
        return self._numbers[text]


def _device(placement: PlacementGraph, device: str, color: str) -> dict[str, Any]:
    totals = placement.devices.get(device)
    return {
        "name": short_name(device),
        "color": color,
        "ops": totals.ops if totals else 0,
        "flops": totals.flops if totals else 0,
        "parameters": totals.parameter_bytes if totals else 0,
        "sent": totals.sent_bytes if totals else 0,
    }


def _op(op: PlacedOp, index: dict[str, int], types: _Table, sources: _Table, reasons: _Table) -> list[Any]:
    """Return one operation in the order that `OP` in model.js names, but for its lane and stage."""
    return [
        op.name,
        types[op.type],
        index[op.device],
        index[op.requested],
        index[op.actual],
        -1 if op.shard is None else op.shard,
        " ".join(shape_text(shape, dtype) for shape, dtype in zip(op.shapes, op.dtypes, strict=True)),
        op.output_bytes,
        -1 if op.flops is None else op.flops,
        sources[op.source],
        reasons[op.reason],
        int(op.ran),
        int(op.backward),
        reasons[op.home_reason],
    ]


def shape_text(shape: tuple[int | None, ...] | None, dtype: str) -> str:
    """Return a tensor as people write it.

    >>> shape_text((None, 784), "float32")
    'float32[?,784]'
    """
    return dtype + ("[...]" if shape is None else f"[{','.join('?' if d is None else str(d) for d in shape)}]")
