"""What moves between devices, by the kinds of moves that plans have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphsplit.core.devices import short_name
from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.records import PlacedOp, Transfer


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
    found = [MovedTensors(kind, tuple(transfers)) for kind, transfers in members.items()]
    return sorted(found, key=lambda moved: (-moved.bytes, moved.kind))


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
