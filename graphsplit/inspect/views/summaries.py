"""A placement reduced to some dozens of boxes, for pictures: name scopes per shard or device, and the flows."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graphsplit.inspect.graph import PlacementGraph, layer_names, reading_order
from graphsplit.inspect.records import NO_DATA, PlacedOp
from graphsplit.inspect.views.lanes import Alike, Lane, alike_lanes, lanes_of
from graphsplit.planning.amounts import count_text

_UPDATES = ("Assign", "ResourceApply", "ResourceSparseApply", "ResourceScatter")
_CALL = re.compile(r"(Stateful)?PartitionedCall(_\d+)?")
_HIDDEN = frozenset({"Const", "NoOp"})
_SMALL = 0.01  # of all work: what is less stays one box
BACKWARD = "gradient_tape"  # TensorFlow's scope: in it, scopes of the forward pass are those of its gradients


@dataclass(frozen=True)
class Box:
    """Some operations of one lane that are drawn as one."""

    lane: Lane
    label: str
    device: str
    ops: int
    flops: int
    rank: int

    @property
    def key(self) -> tuple[Lane, str]:
        """Return what no two boxes share."""
        return self.lane, self.label


@dataclass(frozen=True)
class LaneFlow:
    """What one box hands to another, so many `times` if lanes are alike; `crosses` if it changes devices."""

    source: Box
    target: Box
    bytes: int
    crosses: bool
    times: int


@dataclass(frozen=True)
class Summary:
    """Boxes of each lane, or of one of those that are alike, in the order of execution, and the flows between them."""

    lanes: Mapping[Alike, tuple[Box, ...]]
    flows: tuple[LaneFlow, ...]


def summarize(placement: PlacementGraph, most: int = 24) -> Summary:
    """Return the finest summary with at most `most` boxes in a lane (or the coarsest one, if even that has more)."""
    rank = {name: i for i, name in enumerate(reading_order(placement.graph))}
    lane_of = lanes_of(placement.ops.values())
    groups = alike_lanes(placement, lane_of)
    shown = {group.shown for group in groups}
    ops = [op for op in placement.ops.values() if op.ran and op.type not in _HIDDEN and lane_of[op.name] in shown]
    paths = page_paths(placement)
    folded = folded_scopes(placement, paths)
    paths = {name: [folded[path[0]]] if path[0] in folded else path for name, path in paths.items()}
    labels = _labels(ops, paths, lane_of, most)
    members: dict[tuple[Lane, str], list[PlacedOp]] = defaultdict(list)
    for op in ops:
        members[lane_of[op.name], labels[op.name]].append(op)
    boxes = {key: _box(key, group, rank) for key, group in members.items()}
    box_of = {op.name: boxes[key] for key, group in members.items() for op in group}
    in_lane: dict[Lane, list[Box]] = defaultdict(list)
    for box in sorted(boxes.values(), key=lambda b: b.rank):
        in_lane[box.lane].append(box)
    drawn = {group: tuple(in_lane[group.shown]) for group in groups if in_lane[group.shown]}
    return Summary(drawn, _flows(placement, box_of, {group.shown: group for group in groups}))


def _labels(
    ops: Sequence[PlacedOp], paths: Mapping[str, list[str]], lane_of: Mapping[str, Lane], most: int
) -> dict[str, str]:
    """Return what each operation is drawn as: its scopes, as finely as no lane has more than `most` of them.

    What is little of all work stays whole. A layer is as fine in the backward pass as in the forward pass.
    """
    backward = {op.name for op in ops if paths[op.name][0] == BACKWARD and len(paths[op.name]) > 1}
    levels = {op.name: _levels(paths[op.name][op.name in backward :]) for op in ops}
    labels = {name: names[0] for name, names in levels.items()}
    least = sum(1 + (op.flops or 0) for op in ops) * _SMALL
    for depth in range(1, max(map(len, levels.values()), default=1)):
        work: Counter[str] = Counter()
        for op in ops:
            work[labels[op.name]] += 1 + (op.flops or 0)
        finer = {
            name: names[depth] if depth < len(names) and work[labels[name]] >= least else labels[name]
            for name, names in levels.items()
        }
        boxes = {(lane_of[name], name in backward, label) for name, label in finer.items()}
        if max(Counter(lane for lane, _, _ in boxes).values()) > most:
            break
        labels = finer
    count = Counter(label for names in levels.values() for label in names)
    for name, names in levels.items():  # of scopes that hold the same, the outermost
        label = next(label for label in names if count[label] == count[labels[name]])
        labels[name] = f"{BACKWARD}/{label}" if name in backward else label
    return labels


def _levels(path: Sequence[str]) -> list[str]:
    """Return ever finer labels of an operation: its scopes, and blocks of layers by their names.

    >>> _levels(["net", "conv2_block1_bn", "Add_1"])[:-1]
    ['net', 'net/conv2', 'net/conv2_block1', 'net/conv2_block1_bn', 'net/conv2_block1_bn/Add']
    """
    labels = []
    for i, part in enumerate(path):
        begins = {part, *(part[: number.end()] for number in re.finditer(r"\d(?=_)", part))}
        if i == len(path) - 1:
            begins.add(re.sub(r"(_\d+)?( \(\w+\))?$", "", part))
        labels += ["/".join([*path[:i], begin]) for begin in sorted(begins, key=len)]
    return labels


def _box(key: tuple[Lane, str], group: list[PlacedOp], rank: Mapping[str, int]) -> Box:
    """Return the box of some operations: where their work on rows begins, or, without any, where they have updated.

    (What an optimizer counts and how it slows down follows from nothing, and stands before all else.)
    """
    on_rows = [rank[op.name] for op in group if op.shard is not None]
    updates = [rank[op.name] for op in group if op.type.startswith(_UPDATES)]
    first = min(on_rows) if on_rows else max(updates) if updates else min(rank[op.name] for op in group)
    return Box(*key, device=key[0].device, ops=len(group), flops=sum(op.flops or 0 for op in group), rank=first)


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

    Nothing in them works on the rows of a shard or on rows gathered on one device, so that nobody looks for much there.
    """
    inside: dict[str, list[PlacedOp]] = defaultdict(list)
    for op in placement.ops.values():
        if len(paths[op.name]) > 1:
            inside[paths[op.name][0]].append(op)
    label_by_scope = {}
    for scope, ops in inside.items():
        updates = sum(op.type.startswith(_UPDATES) for op in ops)
        if updates and all(op.shard is None and not op.unsharded_reason for op in ops):
            label_by_scope[scope] = f"{scope}: {count_text(updates, 'update')}"
    return label_by_scope


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


def _flows(
    placement: PlacementGraph, box_of: Mapping[str, Box], group_of: Mapping[Lane, Alike]
) -> tuple[LaneFlow, ...]:
    sizes: dict[tuple[Box, Box], int] = defaultdict(int)
    counted: set[tuple[str, int, object]] = set()
    for edge in placement.edges:
        a, b = box_of.get(edge.source), box_of.get(edge.target)
        if edge.control or edge.dtype in NO_DATA or a is None or b is None or a == b:
            continue
        where = b.device if a.device != b.device else b  # a tensor is sent to a device once, whoever reads it there
        if (edge.source, edge.output, where) in counted:
            continue
        counted.add((edge.source, edge.output, where))
        sizes[a, b] += edge.bytes
    return tuple(
        LaneFlow(a, b, size, a.device != b.device, _times(group_of[a.lane], group_of[b.lane]))
        for (a, b), size in sizes.items()
    )


def _times(alike: Alike, other: Alike) -> int:
    """Return how often the same is sent: once for each lane on another device, or for each pair of those alike."""
    few, many = sorted((alike, other), key=lambda group: len(group.lanes))
    elsewhere = sum(lane.device != few.shown.device for lane in many.lanes)
    return elsewhere if len(few.lanes) == 1 else len(few.lanes)
