"""Draft: an emitted graph while it is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from graphsplit.core.protos.graphdefs import NodeDef, copied, in_order_of_inputs, source_of
from graphsplit.emission.emitted_graph import Origin
from graphsplit.program.program import Op, Program

SIZES_ROLE = "sizes"


class Draft:
    """The nodes of a plan as they are written.

    Args:
      program: what is written.
      shards: those of which copies are written.
      alike: whether names of copies begin alike, so that shards of equal size share the function that is written.

    Attributes:
      nodes: what has been written.
      origins: where every node comes from, by name.
      shards: the shards that are written.
      prefixes: how the names begin of the copies of each shard, and of each device of a group.
      scope: how the names of all other nodes begin that are no operation of the program.
      helper: how what an operation needs besides is called, below its own name, if not below any of the program.
    """

    def __init__(self, program: Program, shards: Sequence[int], alike: bool = False):
        self.program = program
        self.nodes: list[Any] = []
        self.origins: dict[str, Origin] = {}
        self.shards = shards
        base = _unused(program, "shard", "_")
        self.prefixes: dict[int | str, str] = {d: f"{base}_/" if alike else f"{base}_{d}/" for d in shards}
        self.scope = _unused(program, "graphsplit", "/")
        self.helper = _unused_below(program, "graphsplit_")
        self._devices: dict[str, str] = {}
        self._bare: dict[int, Any] = {}  # operations that are copied, without what they read

    def add_groups(self, devices: Iterable[str]) -> None:
        """Let devices have copies of what runs once."""
        base = _unused(self.program, "copy", "_")
        self.prefixes.update({device: f"{base}_{k}/" for k, device in enumerate(dict.fromkeys(devices))})

    def add(self, node: Any, origin: Origin) -> None:
        """Write a node."""
        self.nodes.append(node)
        self.origins[node.name] = origin
        self._devices[node.name] = node.device

    def add_sizes(self, node: Any, shard: int | None) -> None:
        """Write a node that counts rows for a shard, or (None) at home."""
        self.add(node, Origin(None, shard, SIZES_ROLE))

    def device_of(self, reference: str) -> str:
        """Return the device of the node that a reference names."""
        return self._devices[source_of(reference)]

    def copy(self, op: Op, name: str, device: str, inputs: Sequence[str], shard: int | None, role: str = "op") -> Any:
        """Write an operation under a name, and return its node."""
        if shard is None:
            node = copied(op.node, name, inputs)
        else:  # one of several
            if op.index not in self._bare:
                self._bare[op.index] = copied(op.node, "", ())
            node = NodeDef()
            node.CopyFrom(self._bare[op.index])
            node.name = name
            node.input.extend(in_order_of_inputs(inputs))
        node.device = device
        self.add(node, Origin(op.index, shard, role))
        return node


def _unused(program: Program, base: str, end: str) -> str:
    """Return a beginning of names, up to `end`, that no name of the program has."""
    while any(op.name.startswith(f"{base}{end}") for op in program.ops):
        base += "_"
    return base


def _unused_below(program: Program, helper: str) -> str:
    """Return a beginning of last parts of names that none has: one that was written for another axis has the first."""
    while any(f"/{helper}" in op.name for op in program.ops):
        helper += "_"
    return helper
