"""A placement reduced to some dozens of boxes, for pictures: name scopes per shard or device, and the flows."""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.questions import layer_names, reading_order
from graphsplit.inspect.records import PlacedOp
from graphsplit.inspect.views.lanes import in_order, lanes_of
from graphsplit.planning.amounts import count_text

_UPDATES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")
_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?")
_HIDDEN = frozenset({"Const", "NoOp"})


@dataclass(frozen=True)
class Box:
    """Some operations of one lane that are drawn as one."""

    lane: str
    label: str
    device: str
    ops: int
    flops: int
    rank: int

    @property
    def key(self) -> tuple[str, str]:
        """Return what no two boxes share."""
        return self.lane, self.label


@dataclass(frozen=True)
class LaneFlow:
    """What one box hands to another; `crosses` if it changes devices."""

    source: Box
    target: Box
    bytes: int
    crosses: bool


@dataclass(frozen=True)
class Summary:
    """Boxes by lane, in the order of execution, and the flows between them."""

    lanes: Mapping[str, tuple[Box, ...]]
    flows: tuple[LaneFlow, ...]


def summarize(placement: PlacementGraph, most: int = 70) -> Summary:
    """Return the finest summary with at most `most` boxes (or the coarsest one, if even that has more)."""
    rank = {name: i for i, name in enumerate(reading_order(placement.graph))}
    ops = [op for op in placement.ops.values() if op.ran and op.type not in _HIDDEN]
    paths = page_paths(placement)
    folded = folded_scopes(placement, paths)
    paths = {name: [folded[path[0]]] if path[0] in folded else path for name, path in paths.items()}
    depth = max((len(paths[op.name]) for op in ops), default=1)
    lane_of = lanes_of(ops)
    lanes_by_op = {name: str(lane) for name, lane in lane_of.items()}
    key_of = functools.partial(_box_key, lanes_by_op, paths, alike=False)
    while depth > 1 and len({key_of(op, depth) for op in ops}) > most:
        depth -= 1
    if len({key_of(op, depth) for op in ops}) > most:  # AddN, AddN_1, ... become one box
        key_of = functools.partial(_box_key, lanes_by_op, paths, alike=True)
    members: dict[tuple[str, str], list[PlacedOp]] = defaultdict(list)
    for op in ops:
        members[key_of(op, depth)].append(op)
    boxes = {key: _box(key, group, rank) for key, group in members.items()}
    box_of = {op.name: boxes[key] for key, group in members.items() for op in group}
    lanes: dict[str, list[Box]] = defaultdict(list)
    for box in sorted(boxes.values(), key=lambda b: b.rank):
        lanes[box.lane].append(box)
    return Summary(
        {str(lane): tuple(lanes[str(lane)]) for lane in in_order(lane_of.values())}, _flows(placement, box_of)
    )


def _box(key: tuple[str, str], group: list[PlacedOp], rank: Mapping[str, int]) -> Box:
    flops, first = sum(op.flops or 0 for op in group), min(rank[op.name] for op in group)
    return Box(*key, device=group[0].device, ops=len(group), flops=flops, rank=first)


def _box_key(
    lanes: Mapping[str, str], paths: Mapping[str, list[str]], op: PlacedOp, depth: int, alike: bool
) -> tuple[str, str]:
    label = "/".join(paths[op.name][:depth])
    return lanes[op.name], re.sub(r"_\d+( \(\w+\))?$", r"\1", label) if alike else label


def page_paths(placement: PlacementGraph) -> dict[str, list[str]]:
    """Return the scopes of each operation, and last its own label, as people know them.

    Layers are called as in their model, arguments as in their function, variables by their names; the calls in which a
    SavedModel wraps its functions are none of these.
    """
    plain, paths = layer_names(list(placement.ops.values())), dict[str, list[str]]()
    called = {op.name: op.argument for op in placement.ops.values() if op.argument}
    for op in placement.ops.values():
        *scopes, _ = scope_path(op, plain.get(op.name, ""))
        paths[op.name] = [*[scope for scope in scopes if not _CALL.fullmatch(scope)], _label(op, called)]
    return paths


def _label(op: PlacedOp, called: Mapping[str, str]) -> str:
    if op.variable or op.argument:
        return op.variable or op.argument
    parts = op.own_name.split("/")
    if op.role == "scatter" and parts[-1] in called:
        return f"rows of {called[parts[-1]]}"
    return scope_path(op)[-1]


def folded_scopes(placement: PlacementGraph, paths: Mapping[str, list[str]]) -> dict[str, str]:
    """Return the outermost scopes of arithmetic that updates variables, as optimizers do; and what to call each.

    Nothing in them works on the rows of a shard or on rows gathered at home, so that nobody looks for much there.
    """
    inside: dict[str, list[PlacedOp]] = defaultdict(list)
    for op in placement.ops.values():
        if len(paths[op.name]) > 1:
            inside[paths[op.name][0]].append(op)
    found = {}
    for scope, ops in inside.items():
        updates = sum(op.type.startswith(_UPDATES) for op in ops)
        if updates and all(op.shard is None and not op.home_reason for op in ops):
            found[scope] = f"{scope}: {count_text(updates, 'update')}"
    return found


def scope_path(op: PlacedOp, name: str = "") -> list[str]:
    """Return the name scopes of an operation without its shard; communication stands with what it serves.

    Args:
      op: the operation.
      name: what to call it instead of its name.
    """
    parts = (name or op.name).removeprefix(op.prefix).removeprefix(op.written).split("/")
    if op.written:
        moves = [part for part in re.findall(r"(?<=/)\w+_\d+", f"/{op.written}") if not part.startswith("shard_")]
        return [*parts[:-1], f"{parts[-1]} ({moves[-1]})" if moves else parts[-1]]
    if op.shard is not None and len(parts) > 1:
        return parts[1:]
    if parts[0] == "graphsplit" and len(parts) > 2:
        return [*parts[2:-1], f"{parts[-1]} ({parts[1]})"]
    return parts


def _flows(placement: PlacementGraph, box_of: Mapping[str, Box]) -> tuple[LaneFlow, ...]:
    sizes: dict[tuple[Box, Box], int] = defaultdict(int)
    crossing: set[tuple[Box, Box]] = set()
    seen: set[tuple[str, int, object]] = set()
    for edge in placement.edges:
        a, b = box_of.get(edge.source), box_of.get(edge.target)
        if edge.control or a is None or b is None or a == b:
            continue
        where = b.device if a.device != b.device else b  # a tensor is sent to a device once, whoever reads it there
        if (edge.source, edge.output, where) in seen:
            continue
        seen.add((edge.source, edge.output, where))
        sizes[a, b] += edge.bytes
        if a.device != b.device:
            crossing.add((a, b))
    return tuple(LaneFlow(a, b, size, (a, b) in crossing) for (a, b), size in sizes.items())
