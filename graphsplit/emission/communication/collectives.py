"""Collectives as ordinary graph nodes: each value of one is written as its primitive, where the plan says.

TensorFlow's runtime inserts the copies between devices wherever an input comes from another device; these nodes only
say what is computed where.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import tensorflow as tf

from graphsplit.core.hosts import host_name
from graphsplit.core.protos.graphdefs import constant_node, make_node
from graphsplit.emission.communication import primitives
from graphsplit.emission.communication.primitives import Nodes
from graphsplit.emission.draft import Draft
from graphsplit.emission.emitted_graph import Origin
from graphsplit.emission.shards.row_counts import RowCounts
from graphsplit.planning.communication.transfers import (
    Collective,
    Concatenation,
    Own,
    Relay,
    Slice,
    Split,
    Sum,
    Value,
    Zeros,
)

_WORDS = {Own: "own", Slice: "slice", Concatenation: "join", Sum: "sum", Zeros: "zeros", Relay: "relay"}


class CollectiveWriter:
    """Writes the values of a collective.

    Args:
      collective: which.
      own: returns the reference of what a move begins with.
      name: a prefix of the nodes' names that nobody else has.
      draft: takes the nodes.
      counts: how many rows each shard has.

    Attributes:
      references: of the values that have been written.
      taken_in: by shard, the node that takes in its part of a sum behind those of the shards before it on its device.
    """

    def __init__(self, collective: Collective, own: Callable[[Own], str], name: str, draft: Draft, counts: RowCounts):
        first = collective.moves[0].tensor
        self.references: list[str] = []
        self.taken_in: dict[int, str] = {}
        self._values = collective.values
        self._own = own
        self._name = name
        self._draft = draft
        self._counts = counts
        self._dtype: tf.DType = draft.dtype(first)
        self._shape = draft.program.shape(first)
        self._origin = Origin(None if collective.is_bucket else first.op, None, collective.kind)
        self._by_hosts = any(isinstance(value, Sum) and value.host for value in self._values)
        self._splits: dict[tuple[int, Split, str], list[str]] = {}
        self._made: dict[object, str] = {}

    def write(self, i: int) -> None:
        """Write a value; those that it is made of are there."""
        value = self._values[i]
        self.references.append(self._write(self._name_of(i), value, [self.references[k] for k in value.of]))

    def _name_of(self, i: int) -> str:
        """Return the name of the node that makes a value: the collective's own, if it is all that is made."""
        value, last = self._values[i], len(self._values) - 1
        if i == last and self._is_last_made():
            return self._name
        turn = value.turn if isinstance(value, Sum) else None
        return f"{self._name}/{_WORDS[type(value)]}_{i}" if turn is None else f"{self._name}/shard_{turn}"

    def _write(self, name: str, value: Value, of: list[str]) -> str:
        if isinstance(value, Own):
            return self._own(value)
        if isinstance(value, Slice):
            return self._slice(name, value, of[0])
        if isinstance(value, Concatenation):
            self._concatenate(name, value, of)
        elif isinstance(value, Sum):
            return self._sum(name, value, of)
        elif isinstance(value, Zeros):
            return self._zeros(name, value, of)
        elif isinstance(value, Relay):
            self._add(primitives.send_on(name, of[0], self._dtype, value.device))
        return name

    def _is_last_made(self) -> bool:
        """Return whether the last value has the collective's own name."""
        return not isinstance(self._values[-1], Slice)

    def _add(self, nodes: Iterable[object]) -> None:
        self._draft.add_all(nodes, self._origin)

    def _is_absent(self, value: Value) -> bool:
        """Return whether a value may turn out not to be there."""
        return value.shard is not None and self._counts.may_be_absent(value.shard)

    def _present(self, value: Value) -> str:
        assert value.shard is not None
        return self._counts.present(value.shard)

    def _wait(self, value: Value) -> str:
        """Return what keeps a constant beside a value from being made if the shard has no rows."""
        return "" if value.shard is None else self._counts.waits_for(value.shard)

    def _slice(self, name: str, value: Slice, source: str) -> str:
        key = value.of[0], value.split, value.device
        if key not in self._splits:
            self._splits[key] = self._split(value, source)
        piece = self._splits[key][value.piece]
        if value.split.block_of is not None or not self._is_absent(value):
            return piece
        self._add([make_node(f"{name}/piece", "Switch", [piece, self._present(value)], value.device, T=self._dtype)])
        return f"{name}/piece:1"

    def _split(self, value: Slice, source: str) -> list[str]:
        axis, layout, block_of, holder, sizes = value.split
        name = f"{self._name}/split_{len(self._splits)}" if self._splits or self._is_last_made() else self._name
        wait = ""
        if layout is None:
            entries = np.array([size // self._dtype.size for size in sizes], np.int64)
            self._add([constant_node(f"{name}/sizes", entries, tf.int64, value.device)])
            counted, pieces = f"{name}/sizes", len(sizes)
        elif block_of is not None:
            counted, pieces = self._counts.own_sizes(name, layout, block_of), len(layout.blocks)
            wait = self._counts.waits_for(block_of)
        else:
            counted = self._counts.split_sizes(name, layout, holder)
            pieces = len(layout.blocks) * len(self._draft.shards)
        nodes, references = primitives.split(name, source, counted, pieces, axis, self._dtype, value.device, wait)
        self._add(nodes)
        return references

    def _concatenate(self, name: str, value: Concatenation, parts: list[str]) -> None:
        nodes: Nodes = []
        if value.shard is None:
            nodes, parts = self._with_no_rows(name, value, parts)
        wait = self._wait(value)
        self._add(nodes + primitives.concatenate(name, parts, value.axis, self._dtype, value.device, wait))

    def _with_no_rows(self, name: str, value: Concatenation, parts: list[str]) -> tuple[Nodes, list[str]]:
        """Return what stands in for what shards without rows give to the whole, and what is concatenated then."""
        absent = {k: self._values[i] for k, i in enumerate(value.of) if self._is_absent(self._values[i])}
        if not absent:
            return [], parts
        nothing, found = f"{name}/nothing", list(parts)
        nodes = primitives.no_rows(nothing, parts[0], value.axis, self._dtype, value.device)
        for k, own in absent.items():
            found[k] = f"{name}/piece_{k}"
            args = parts[k], nothing, self._present(own), self._dtype, value.device, ""
            nodes += primitives.unless_absent(found[k], *args)
        return nodes, found

    def _sum(self, name: str, value: Sum, parts: list[str]) -> str:
        dtype, device = self._dtype, value.device
        if value.turn is not None:
            self.taken_in[value.turn] = name
        begins = self._begins(value)
        parts = [self._or_neutral(name, value, k, part) if k in begins else part for k, part in enumerate(parts)]
        if value.turn is not None and self._counts.may_be_absent(value.turn):
            present = self._counts.present(value.turn)
            self._add([make_node(f"{name}/before", "Switch", [parts[0], present], device, T=dtype)])
            taken = primitives.add(f"{name}/taken", [f"{name}/before:1", parts[1]], value.reduction, dtype, device)
            merged = make_node(name, "Merge", [f"{name}/taken", f"{name}/before"], device, N=2, T=dtype)
            self._add([*taken, merged])
            return name
        total = f"{name}/total" if value.entries else name
        if len(parts) > 1:
            self._add(primitives.add(total, parts, value.reduction, dtype, device))
        else:
            total = parts[0]
        if value.entries:
            self._add(primitives.divide(name, total, value.entries, dtype, device))
        return name

    def _begins(self, value: Sum) -> dict[int, Value]:
        """Return the parts of a sum, by place, that come before all others and may turn out not to be there."""
        parts = {k: self._values[i] for k, i in enumerate(value.of) if k == 0 or value.turn is None}
        return {k: part for k, part in parts.items() if self._is_absent(part)}

    def _or_neutral(self, name: str, value: Sum, k: int, part: str) -> str:
        """Return a part of a sum or, if its shard has no rows, what changes nothing, made of the first shard's."""
        own, first = self._values[value.of[k]], self._values[self._first()]
        single, here = value.turn is None, value.device if value.turn is None else own.device
        instead = self._stand_in(host_name(own.device))
        has_first = single and (not self._by_hosts or host_name(here) == host_name(first.device))
        source = "" if instead or has_first else first.device
        found, present = f"{name}/part_{own.shard}", self._present(own)
        stands = instead or self.references[self._first()]
        nodes = primitives.unless_absent(found, part, stands, present, self._dtype, here, value.reduction, source)
        self._add(nodes)
        return found

    def _first(self) -> int:
        """Return the number of what the first shard gives to a sum."""
        i = max(k for k, value in enumerate(self._values) if isinstance(value, Sum))
        while isinstance(self._values[i], Sum):
            i = self._values[i].of[0]
        return i

    def _stand_in(self, host: str) -> str:
        """Return what stands in, on another host than the first shard's, for parts of shards without rows.

        It is what the first shard has, sent to a gateway if any shard of that host is absent, and dead otherwise.
        """
        first = self._values[self._first()]
        sums = [value for value in self._values if isinstance(value, Sum)]
        gateway = next((value.device for value in sums if value.host == host), "")
        if not gateway or host == host_name(first.device):
            return ""
        if host not in self._made:
            begins = [part for value in sums for part in self._begins(value).values() if host_name(part.device) == host]
            own = [part.shard for part in begins if part.shard is not None]
            name = f"{self._name}/instead_{own[0]}"
            inputs = [self.references[self._first()], self._counts.all_present(own)]
            needed = make_node(f"{name}/needed", "Switch", inputs, first.device, T=self._dtype)
            self._add([needed, *primitives.send_on(name, needed.name, self._dtype, gateway)])
            self._made[host] = name
        return self._made[host]

    def _zeros(self, name: str, value: Zeros, of: list[str]) -> str:
        """Write zeros for a shard: a constant, or made where the value is of which they have the shape."""
        if not of:
            numbers = np.broadcast_to(
                np.zeros((), self._dtype.as_numpy_dtype), [size or 0 for size in self._shape or ()]
            )
            self._add([constant_node(name, numbers, self._dtype, value.device, self._wait(value))])
            return name
        zeros = f"{self._name}/zeros"
        if zeros not in self._made:
            self._made[zeros] = zeros
            self._add([make_node(zeros, "ZerosLike", of, value.device, T=self._dtype)])
        if not self._is_absent(value):
            return zeros
        self._add([make_node(name, "Switch", [zeros, self._present(value)], value.device, T=self._dtype)])
        return f"{name}:1"
