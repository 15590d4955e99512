"""A placement as one self-contained page: no network, nothing to install, thousands of operations.

What moves between devices is told by the kinds of moves that plans have.
"""

from __future__ import annotations

import html
import importlib.resources
import json
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from graphsplit.core.devices import short_name
from graphsplit.inspect.findings import find_warnings
from graphsplit.inspect.graph import PlacementGraph, natural_order, reading_order
from graphsplit.inspect.records import DeviceTotals, PlacedOp, Transfer
from graphsplit.inspect.views.lanes import Alike, Lane, alike_lanes, device_colors, in_order, lanes_of
from graphsplit.inspect.views.summaries import folded_scopes, page_paths
from graphsplit.planning.amounts import count_text, format_bytes

_SCRIPTS = ("model.js", "view.js", "arrows.js", "panel.js")  # in the order in which they run


def page_html(placement: PlacementGraph) -> str:
    """Return the page."""
    files = importlib.resources.files("graphsplit.inspect.views") / "page"
    parts = {
        "title": html.escape(f"Placement of {placement.title}"),
        "style": (files / "page.css").read_text("utf-8"),
        "script": "\n".join((files / name).read_text("utf-8") for name in _SCRIPTS),
        "data": _script_data(page_data(placement)),
    }
    page = (files / "page.html").read_text("utf-8")
    return re.sub(r"{{(\w+)}}", lambda name: parts[name[1]], page)  # (in one go: a title may have such words, too)


def _script_data(data: Mapping[str, Any]) -> str:
    """Return data as JSON that stands in a script element, which a `</script>` or a `<!--` in a name would change."""
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


_LARGEST = 25  # tensors that the page names one by one


def page_data(placement: PlacementGraph) -> dict[str, Any]:
    """Return what the page shows, operations in the order of execution."""
    order = reading_order(placement.graph)
    number = {name: i for i, name in enumerate(order)}
    device_names = {op.requested for op in placement.ops.values()} | set(placement.devices)
    devices = sorted(device_names - {""}, key=natural_order)
    colors = device_colors(devices)
    index = {device: i for i, device in enumerate(devices)} | {"": -1}
    lane_of = lanes_of(placement.ops.values())
    place = {lane: i for i, lane in enumerate(in_order(lane_of.values()))}
    paths = page_paths(placement)
    return {
        "title": placement.title,
        "actual": placement.actual,
        "sharded": any(op.shard is not None for op in placement.ops.values()),
        "rows": list(placement.rows),
        "devices": [_device(placement, device, colors[device]) for device in devices],
        "lanes": _lanes(placement, lane_of, index),
        "usual": _USUAL,
        "ops": [_op(placement.ops[name], index, place[lane_of[name]], paths[name]) for name in order],
        "folded": folded_scopes(placement, paths),
        "edges": [x for e in placement.edges for x in (number[e.source], number[e.target], int(e.control))],
        **_transfers(placement, index, number),
        "largest": _largest(placement, number, paths),
        "mostFlops": max((op.flops or 0 for op in placement.ops.values()), default=0),
        "warnings": list(find_warnings(placement)),
    }


def _lanes(placement: PlacementGraph, lane_of: Mapping[str, Lane], index: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return the lanes in their order; those that another one stands for name it as `like`, others themselves."""
    lanes = in_order(lane_of.values())
    group_of = {lane: group for group in alike_lanes(placement, lane_of) for lane in group.lanes}
    return [
        {
            "work": lane.work,
            "device": index[lane.device],
            "shards": list(lane.shards),
            "like": lanes.index(group_of[lane].shown),
            "alike": len(group_of[lane].lanes),
            "together": group_of[lane].title,
            "note": Alike(lane, (lane,)).note(placement.rows),
            "notes": group_of[lane].note(placement.rows),
        }
        for lane in lanes
    ]


_SHOWN = (
    *("name", "type", "shard", "stage", "output_bytes", "flops", "variable", "source", "reason"),
    *("unsharded_reason", "ran", "backward"),
)
_USUAL = {name: getattr(PlacedOp, name, "") for name in _SHOWN}
"""Of the fields of operations, those that the page shows, and what they usually are."""


def _op(op: PlacedOp, index: Mapping[str, int], lane: int, path: Sequence[str]) -> dict[str, Any]:
    """Return one operation; of its fields those that are not as usual."""
    shapes = " ".join(shape_text(shape, dtype) for shape, dtype in zip(op.shapes, op.dtypes, strict=True))
    return {
        **{name: value for name, usual in _USUAL.items() if (value := getattr(op, name)) != usual},
        **{name: index[getattr(op, name)] for name in ("device", "requested", "actual")},
        "outputs": shapes,
        "lane": lane,
        "scopes": "/".join(path[:-1]),
        "label": path[-1],
    }


def _transfers(placement: PlacementGraph, index: Mapping[str, int], number: Mapping[str, int]) -> dict[str, Any]:
    """Return transfers, each with the number of its kind, and the kinds, both largest first."""
    moves = moves_of(placement)
    kind_of = {transfer: kind for kind, moved in enumerate(moves) for transfer in moved.transfers}
    return {
        "transfers": [
            [
                number[t.source],
                index[t.source_device],
                index[t.target_device],
                t.bytes,
                [number[r] for r in t.readers],
                kind_of[t],
                way_text(t.source_device, t.target_device).replace("->", "→"),
            ]
            for t in placement.transfers
        ],
        "moves": [
            {
                "kind": moved.kind,
                "text": f"{moved.kind}: {count_text(len(moved.transfers), 'tensor')}, {format_bytes(moved.bytes)}",
                "note": ways_text(moved.ways).replace("->", "→"),
            }
            for moved in moves
        ],
    }


def _largest(placement: PlacementGraph, number: Mapping[str, int], paths: Mapping[str, list[str]]) -> list[Any]:
    """Return the largest tensors that are sent, the same to or from several devices once, with how users call them."""
    together = dict[tuple[str, int, int], list[Transfer]]()
    for transfer in placement.transfers:
        variable_names = [placement.ops[name].variable for name in placement.graph.predecessors(transfer.source)]
        path = next(filter(None, variable_names), "/".join(paths[transfer.source]))
        if placement.ops[transfer.source].role:
            path = re.sub(r"_\d+ \(", " (", path)  # what is packed on each device has its number
        together.setdefault((path, transfer.output, transfer.bytes), []).append(transfer)
    return [
        {
            "op": number[transfers[0].source],
            "bytes": size,
            "way": ways_text([(t.source_device, t.target_device) for t in transfers]).replace("->", "→"),
            "name": path,
        }
        for (path, _, size), transfers in list(together.items())[:_LARGEST]
    ]


def _device(placement: PlacementGraph, device: str, color: str) -> dict[str, Any]:
    totals = placement.devices.get(device, DeviceTotals(device))
    return {
        "name": short_name(device),
        "color": color,
        "ops": totals.ops,
        "flops": totals.flops,
        "parameters": totals.parameter_bytes,
        "sent": totals.sent_bytes,
    }


def shape_text(shape: tuple[int | None, ...] | None, dtype: str) -> str:
    """Return a tensor as people write it.

    >>> shape_text((None, 784), "float32")
    'float32[?,784]'
    """
    return dtype + ("[...]" if shape is None else f"[{','.join('?' if d is None else str(d) for d in shape)}]")


class MovedTensors(NamedTuple):
    """All transfers of one kind.

    Attributes:
      kind: as plans call it, `reduce`; `values` where no plan tells.
      transfers: the largest first.
    """

    kind: str
    transfers: tuple[Transfer, ...]

    @property
    def bytes(self) -> int:
        """How much all of them are."""
        return sum(transfer.bytes for transfer in self.transfers)

    @property
    def ways(self) -> list[tuple[str, str]]:
        """From where to where each goes."""
        return [(transfer.source_device, transfer.target_device) for transfer in self.transfers]


def moves_of(placement: PlacementGraph) -> list[MovedTensors]:
    """Return what moves, the kind of most bytes first."""
    members: dict[str, list[Transfer]] = defaultdict(list)
    for transfer in placement.transfers:
        members[_kind(placement.ops, transfer)].append(transfer)
    kinds = [MovedTensors(kind, tuple(transfers)) for kind, transfers in members.items()]
    return sorted(kinds, key=lambda moved: (-moved.bytes, moved.kind))


def _kind(ops: Mapping[str, PlacedOp], transfer: Transfer) -> str:
    source, reader = ops[transfer.source], ops[transfer.readers[0]]
    is_broadcast = source.shard is None and reader.shard is not None
    return source.role or reader.role or ("broadcast" if is_broadcast else "values")


def way_text(source: str, target: str) -> str:
    """Return from where to where, the common part once.

    >>> way_text("/device:CPU:0", "/device:CPU:1"), way_text("/device:CPU:0", "/device:GPU:0")
    ('CPU:0 -> 1', 'CPU:0 -> GPU:0')
    """
    (place, _, _), (other, _, number) = source.rpartition(":"), target.rpartition(":")
    alike = place == other and number.isdigit()
    return f"{short_name(source) or 'any'} -> {number if alike else short_name(target) or 'any'}"


def ways_text(ways: Sequence[tuple[str, str]]) -> str:
    """Return from where to where the same goes several times.

    >>> ways_text([("/device:CPU:0", "/device:CPU:1"), ("/device:CPU:0", "/device:CPU:2")])
    'CPU:0 -> 2 devices'
    """
    sources, targets = {source for source, _ in ways}, {target for _, target in ways}
    if len(sources) == len(targets) == 1:
        return way_text(*ways[0])
    ends = [short_name(next(iter(end))) if len(end) == 1 else f"{len(end)} devices" for end in (sources, targets)]
    return " -> ".join(ends)
