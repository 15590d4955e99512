"""What moves between devices, gathered: weights to each device, gradients from each device, rows of an argument."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphsplit.core.devices import short_name
from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.records import NO_DATA, PlacedOp, Transfer
from graphsplit.inspect.views.lanes import home_device
from graphsplit.planning.amounts import format_bytes

WEIGHTS, GRADIENTS, SUMS = "weights", "gradients", "sums over rows"
ACTIVATIONS, WHOLE = "activations", "values of all rows"
_SAME_VALUES = frozenset(
    {
        *("Cast", "ConcatV2", "ExpandDims", "Identity", "IdentityN", "Pack", "ReadVariableOp", "Reshape", "Split"),
        *("SplitV", "Squeeze", "StopGradient", "StridedSlice", "Transpose", "Unpack"),
    }
)
_SUMMING = frozenset({"AddN", "AddV2", "Sum", "AccumulateNV2"})
_SUMS = frozenset({"reduce", "reduce-scatter", "all-reduce"})  # roles
_HANDLES = frozenset({"VarHandleOp", "VariableV2", "VarIsInitializedOp"})
_DEPTH = 12  # how far back an operation is looked for that is more than a copy, a cut or a cast


@dataclass(frozen=True)
class Route:
    """Transfers of one kind in one direction.

    Attributes:
      what: what is sent: weights, gradients, sums over rows, rows of an argument, activations, values of all rows;
        values, where nothing is split.
      direction: `"to each"`: from home to other devices; `"from each"`: from them to home; `"between"`: them.
      bytes_by_device: what each of these devices receives, or for `"from each"` sends.
      tensors: how many transfers there are.
    """

    what: str
    direction: str
    bytes_by_device: Mapping[str, int]
    tensors: int

    @property
    def bytes(self) -> int:
        """The bytes of all of them."""
        return sum(self.bytes_by_device.values())

    @property
    def bytes_each(self) -> int:
        """The bytes of the device that has most of them."""
        return max(self.bytes_by_device.values(), default=0)

    def __str__(self) -> str:
        amount = format_bytes(self.bytes_each)
        if len(self.bytes_by_device) == 1:
            [device] = self.bytes_by_device
            way = {"to each": "to", "from each": "from", "between": "to"}[self.direction]
            return f"{self.what} {way} {short_name(device)}, {amount}"
        even = len(set(self.bytes_by_device.values())) == 1
        where, each = ("between devices", " each") if self.direction == "between" else (f"{self.direction} device", "")
        return f"{self.what} {where}, {'' if even else 'up to '}{amount}{each}"


def routes_of(placement: PlacementGraph) -> tuple[list[Route], list[int]]:
    """Return what moves, largest first, and for each transfer of the placement the number of its route."""
    home, kinds = home_device(placement.ops.values()), Kinds(placement)
    members: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, transfer in enumerate(placement.transfers):
        members[kinds.of(transfer), _direction(transfer, home)].append(number)
    found = [(_route(*key, [placement.transfers[i] for i in own]), own) for key, own in members.items()]
    found.sort(key=lambda pair: (-pair[0].bytes, pair[0].what, pair[0].direction))
    number_of = {i: number for number, (_, own) in enumerate(found) for i in own}
    return [route for route, _ in found], [number_of[i] for i in range(len(placement.transfers))]


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


def _direction(transfer: Transfer, home: str) -> str:
    if transfer.source_device == home:
        return "to each"
    return "from each" if transfer.target_device == home else "between"


def _route(what: str, direction: str, transfers: Sequence[Transfer]) -> Route:
    amounts: dict[str, int] = defaultdict(int)
    for transfer in transfers:
        amounts[transfer.source_device if direction == "from each" else transfer.target_device] += transfer.bytes
    return Route(what, direction, dict(amounts), len(transfers))


@dataclass(frozen=True, eq=False)
class Kinds:
    """What transfers carry, by where their values come from.

    Attributes:
      placement: whose transfers.
      found: the operations from which values come, as far as they were asked for.
    """

    placement: PlacementGraph
    found: dict[tuple[str, int], tuple[PlacedOp, ...]] = field(default_factory=dict)

    @functools.cached_property
    def _whole(self) -> str:
        return WHOLE if any(op.shard is not None for op in self._ops.values()) else "values"

    @property
    def _ops(self) -> Mapping[str, PlacedOp]:
        return self.placement.ops

    def called(self, name: str) -> str:
        """Return what users call the value that an operation hands on, a variable or rows of an argument, or ""."""
        origins = [op for op in self._origins(name, _DEPTH) if op.type != "Const"]
        if len(origins) != 1:
            return ""
        return origins[0].variable or (f"rows of {origins[0].argument}" if origins[0].argument else "")

    def of(self, transfer: Transfer) -> str:
        """Return what a transfer carries; see `Route`."""
        source = self._ops[transfer.source]
        kinds = {kind for op in self._origins(source.name, _DEPTH) if (kind := self._kind(op, transfer))}
        if len(kinds) < 2:
            return kinds.pop() if kinds else "constants"
        return GRADIENTS if GRADIENTS in kinds else self._whole

    def _kind(self, op: PlacedOp, transfer: Transfer) -> str:
        """Return what a value is that an operation made; "" for a constant, which may be among others."""
        if op.type == "Const":
            return ""
        if op.variable or op.type in _HANDLES:
            return WEIGHTS
        if op.type == "Placeholder":
            return f"rows of {op.argument}" if op.argument else "arguments"
        summed = all(self._ops[name].type in _SUMMING or self._packs(name) for name in transfer.readers)
        if op.shard is None and not (summed and self._packs(op.name)):
            return self._whole
        return (GRADIENTS if op.backward else SUMS) if summed else ACTIVATIONS

    def _packs(self, name: str) -> bool:
        """Return whether an operation of graphsplit sums, or takes apart or puts together what is summed."""
        return self._ops[name].role in _SUMS

    def _origins(self, name: str, depth: int) -> tuple[PlacedOp, ...]:
        """Return the operations from which a value comes, which others hand on."""
        if (name, depth) not in self.found:
            self.found[name, depth] = self._find_origins(name, depth)
        return self.found[name, depth]

    def _find_origins(self, name: str, depth: int) -> tuple[PlacedOp, ...]:
        op = self._ops[name]
        if op.type not in _SAME_VALUES or not depth:
            return (op,)
        before = [
            source
            for source, _, data in self.placement.graph.in_edges(name, data=True)
            if not data["control"] and (data["dtype"] not in NO_DATA or self._ops[source].variable)
        ]
        found = {o.name: o for source in before for o in self._origins(source, depth - 1)}
        return tuple(found.values()) or (op,)
