"""Gateways: the devices through which goes what passes from host to host, so that it passes once.

Between devices of one host there is memory, or a fast link; between hosts there is a network, which all devices of a
host share. So what the devices of a host give to a sum is added up on one of them, and one value leaves the host; and
what several devices of another host read is sent to one of them, and from there to the others. Of many such values,
each goes through the device through which least has gone.

On one host nothing has a gateway.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.core.errors import CheckError
from graphsplit.core.hosts import by_host, host_name
from graphsplit.core.layouts import Layout, Partial, Replicate, Shard, SingleDevice
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.steps import Bucket, Move
from graphsplit.program.program import Program, Tensor

Gateways = Mapping[str, str]
"""By host, the device that adds up what its devices give, or from which they get what comes; without those that need
none."""


MoveGateways = Mapping[Move, tuple[Gateways, ...]]
"""The gateways of moves that have any: of a sum, or of what is sent; for each shard's, if shards exchange."""


def gateways_of(found: MoveGateways, move: Move, piece: int = 0) -> Gateways:
    """Return the gateways of a move: of what it adds up or sends, or of what that is for, or of, one shard."""
    return found[move][piece] if move in found else {}


@dataclass(frozen=True)
class _Passage:
    """A value that devices give to others: a sum of what several have for one, or what one has for several."""

    sources: tuple[str, ...]
    targets: tuple[str, ...]
    bytes: int

    def candidates(self) -> dict[str, list[str]]:
        """Return for each host that needs a gateway the devices that may be it.

        A sum of several hosts is added up host by host in the target's, too: so it has the same bits whichever device
        it is wanted on, and all layouts of variables train alike.
        """
        if len(self.sources) > 1:
            [target] = self.targets
            there, found = host_name(target), by_host(self.sources)
            several = {host: devices for host, devices in found.items() if len(devices) > 1}
            if list(found) == [there]:
                return {}
            return {host: [target] if host == there else devices for host, devices in several.items()}
        [source] = self.sources
        found = by_host(self.targets)
        return {h: devices for h, devices in found.items() if h != host_name(source) and len(devices) > 1}


def find_gateways(
    program: Program, mesh: Mesh, home: str, moves: Sequence[Move], buckets: Sequence[Bucket]
) -> MoveGateways:
    """Return the gateways of moves.

    Args:
      program: whose tensors move.
      mesh: the shards.
      home: the device of whole values that belong to nobody.
      moves: all moves.
      buckets: which of them are made as one.
    """
    passed: Counter[str] = Counter()  # bytes
    found: dict[Move, tuple[Gateways, ...]] = {}
    for together, passages in _passages(program, mesh, home, moves, buckets):
        chosen: list[Gateways] = []
        for passage in passages:
            own = {host: min(devices, key=lambda d: passed[d]) for host, devices in passage.candidates().items()}
            for device in own.values():
                passed[device] += max(passage.bytes, 1)
            chosen.append(own)
        if any(chosen):
            found.update(dict.fromkeys(together, tuple(chosen)))
    return found


def check_gateways(
    program: Program,
    mesh: Mesh,
    home: str,
    moves: Sequence[Move],
    buckets: Sequence[Bucket],
    gateways: MoveGateways,
) -> None:
    """Raise `CheckError` if a value passes twice between two hosts, or through a device that has no part in it."""
    needed: set[Move] = set()
    for together, passages in _passages(program, mesh, home, moves, buckets):
        for move in together:
            name, given = program.ops[move.tensor.op].name, gateways.get(move, ({},) * len(passages))
            if len(given) != len(passages):
                counts = f"{len(given)} of {len(passages)} values"
                raise CheckError(f"The {move.kind} of {name!r} has gateways for {counts}.")
            for passage, own in zip(passages, given, strict=True):
                candidates = passage.candidates()
                needed.update([move] if candidates else [])
                wrong = [host for host in {*candidates, *own} if own.get(host) not in candidates.get(host, ())]
                if wrong:
                    has = own.get(wrong[0], "no device")
                    raise CheckError(f"The {move.kind} of {name!r} passes through {has} on host {wrong[0]!r}.")
    idle = [move for move in gateways if move not in needed]
    if idle:
        name = program.ops[idle[0].tensor.op].name
        raise CheckError(f"The {idle[0].kind} of {name!r} needs no gateways, and has some.")


def _passages(
    program: Program, mesh: Mesh, home: str, moves: Sequence[Move], buckets: Sequence[Bucket]
) -> Iterator[tuple[Sequence[Move], Sequence[_Passage]]]:
    """Yield moves that are made together, in order, and what they pass on; what stays where it is, too."""
    bucket_of = {move: number for number, bucket in enumerate(buckets) for move in bucket.moves}
    together: dict[object, list[Move]] = {}
    for move in moves:
        is_sent = isinstance(move.source, SingleDevice) and isinstance(move.target, (SingleDevice, Replicate))
        key: object = bucket_of.get(move, (move.tensor, move.source) if is_sent else move)
        together.setdefault(key, []).append(move)
    for alike in together.values():
        if isinstance(alike[0].source, SingleDevice):
            yield alike, _sent(program, mesh, home, alike)
        else:
            yield alike, _of_shards(program, mesh, home, alike)


def _sent(program: Program, mesh: Mesh, home: str, alike: Sequence[Move]) -> list[_Passage]:
    """Return what is sent of whole values: each of the moves begins on the same device."""
    found: list[str] = []
    for move in alike:
        if isinstance(move.target, SingleDevice):
            found.append(move.target.device or home)
        elif isinstance(move.target, Replicate):
            found += _devices_of_shards(program, mesh, move.tensor)
        else:
            return []  # each shard gets its own
    return [_Passage((_device(alike[0].source, home),), tuple(dict.fromkeys(found)), _bytes(program, alike))]


def _of_shards(program: Program, mesh: Mesh, home: str, alike: Sequence[Move]) -> list[_Passage]:
    """Return what the shards give to sums, or to all others."""
    move, size = alike[0], _bytes(program, alike)
    own = _devices_of_shards(program, mesh, move.tensor)
    sources = tuple(dict.fromkeys(own))
    if isinstance(move.source, Partial) and isinstance(move.target, SingleDevice):
        return [_Passage(sources, (move.target.device or home,), size)]
    if isinstance(move.source, Partial) and isinstance(move.target, Shard):
        return [_Passage(sources, (device,), size // mesh.shards) for device in mesh.devices]
    if isinstance(move.source, Shard) and isinstance(move.target, Replicate):
        targets = tuple(dict.fromkeys(mesh.devices))
        return [_Passage((device,), targets, round(size * mesh.share(d))) for d, device in enumerate(own)]
    return []


def _devices_of_shards(program: Program, mesh: Mesh, tensor: Tensor) -> list[str]:
    stage = program.stages.of(program.ops[tensor.op].name)
    return [mesh.device_of(d, stage) for d in range(mesh.shards)]


def _device(layout: Layout, home: str) -> str:
    return (layout.device if isinstance(layout, SingleDevice) else "") or home


def _bytes(program: Program, moves: Sequence[Move]) -> int:
    return sum([program.bytes(tensor) for tensor in dict.fromkeys([move.tensor for move in moves])])
