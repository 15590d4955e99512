"""Communication as ordinary graph nodes: each value of a collective is written as its primitive, where the plan says.

TensorFlow's runtime inserts the copies between devices wherever an input comes from another device; these nodes only
say what is computed where. A value of a shard that turns out to have no rows is dead, and so is whatever reads it, up
to where something else stands in for it.

What is small, and no move of the plan, goes to a host once, however many of its devices want it (`relay_within_hosts`):
numbers and truths about rows, zeros, and the signals that keep an order travel as messages of their own, and between
hosts a message takes long, whatever it carries. (What a plan moves has gateways: `planning/communication/gateways.py`.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import REPLICATE, Partial, Shard, group_of
from graphsplit.core.protos import (
    constant_node,
    host_of,
    make_node,
    output_type,
    set_inputs,
    source_of,
    split_reference,
)
from graphsplit.emission.emitted_graph import RELAY_ROLE, SIZES_ROLE, Draft, Origin
from graphsplit.emission.shards.row_counts import RowCounts
from graphsplit.planning.communication.transfers import (
    Collective,
    Concatenation,
    Merged,
    Own,
    Packed,
    Relay,
    Slice,
    Slicing,
    Sum,
    Value,
    Zeros,
    is_total,
    shards_behind,
)

PAIRWISE = {"max": "Maximum", "min": "Minimum", "prod": "Mul", "all": "LogicalAnd", "any": "LogicalOr"}
_NEUTRAL = {"sum": "ZerosLike", "mean": "ZerosLike", "prod": "OnesLike"}
_WORDS = {
    Packed: "packed",
    Merged: "merged",
    Slice: "slice",
    Concatenation: "join",
    Sum: "sum",
    Zeros: "zeros",
    Relay: "relay",
}


class CollectiveWriter:
    """Writes the values of a collective.

    Args:
      collective: which.
      reference_of_source: returns the reference of what a move begins with, by its number among the values.
      name: a prefix of the nodes' names that nobody else has.
      draft: takes the nodes.
      counts: how many rows each shard has.
      averaged: of moments, the layout of what they are of.
    """

    def __init__(
        self,
        collective: Collective,
        reference_of_source: Callable[[int], str],
        name: str,
        draft: Draft,
        counts: RowCounts,
        averaged: Shard | None = None,
    ):
        self._moves = collective.moves
        self._averaged_over = averaged
        self._is_bucket = collective.is_bucket
        is_exchange = collective.moves[0].target == REPLICATE and isinstance(collective.moves[0].source, Partial)
        of_shards = list(enumerate(collective.reads[0])) if is_exchange else []
        self._shards = {device: d for d, (_, device) in reversed(of_shards)}  # which add up what all have
        first = collective.moves[0].tensor
        self._written: list[str] = []
        self._values = collective.values
        self._reference_of_source = reference_of_source
        self._name = name
        self._draft = draft
        self._counts = counts
        self._dtype: tf.DType = draft.program.dtype(first)
        self._shape = draft.program.shape(first)
        self._origin = Origin(None if collective.is_bucket else first.op, None, collective.kind)
        self._by_hosts = any(is_total(value) and value.host for value in self._values)
        self._splits: dict[tuple[int, Slicing, str], list[str]] = {}
        self._made: dict[object, str] = {}
        self._turns = Counter(value.turn for value in self._values if isinstance(value, Sum))

    def reference(self, i: int) -> str:
        """Return the reference of a value; the first time, write all up to it, each behind those that it is made of."""
        for k in range(len(self._written), i + 1):
            value = self._values[k]
            of = [self.reference(part) for part in value.of]
            self._written.append("" if isinstance(value, Own) else self._write(self._name_of(k), value, of))
        return self._reference_of_source(i) if isinstance(self._values[i], Own) else self._written[i]

    def _name_of(self, i: int) -> str:
        """Return the name of the node that makes a value: the collective's own, if it is all that is made."""
        value, last = self._values[i], len(self._values) - 1
        if i == last and self._is_last_made():
            return self._name
        if isinstance(value, Sum) and value.turn is not None and self._turns[value.turn] == 1:
            return f"{self._name}/shard_{value.turn}"
        return f"{self._name}/{_WORDS[type(value)]}_{i}"

    def _write(self, name: str, value: Value, of: list[str]) -> str:
        if isinstance(value, Slice):
            return self._slice(name, value, of[0])
        if isinstance(value, Sum):
            return self._sum(name, value, of)
        if isinstance(value, Zeros):
            return self._zeros(name, value, of)
        if isinstance(value, Merged):
            return self._merged(name, value, of)
        if isinstance(value, Packed):
            return self._add(name, "Pack", of, value.device, N=len(of), axis=0)
        if isinstance(value, Concatenation):
            self._concatenate(name, value, self._as_vectors(name, value, of) if self._is_bucket else of)
        elif isinstance(value, Relay):
            self._add(name, "Identity", of, value.device)
        return name

    def _is_last_made(self) -> bool:
        """Return whether the last value has the collective's own name."""
        return not isinstance(self._values[-1], Slice)

    def _add(
        self, name: str, kind: str, inputs: Sequence[str], device: str, is_instead: bool = False, **attributes: Any
    ) -> str:
        """Write a node, most of which say of what type the tensors are, and return its name.

        What stands in for a shard without rows belongs to no shard: it is dead where all have some.
        """
        attributes = attributes if kind.startswith(("Gather", "Logical")) else {"T": self._dtype, **attributes}
        origin = self._origin if is_instead else self._origin_on(device)
        self._draft.add(make_node(name, kind, inputs, device, **attributes), origin)
        return name

    def _origin_on(self, device: str) -> Origin:
        """Return where a node on a device comes from: of what all shards add up, each has its own."""
        return self._origin._replace(shard=self._shards.get(device))

    def _constant(self, name: str, value: Any, dtype: tf.DType, device: str, wait: str = "") -> str:
        """Write a constant, and return its name."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        self._draft.add(constant_node(name, array, dtype, device, wait), self._origin_on(device))
        return name

    def _is_absent(self, value: Value) -> bool:
        """Return whether a value may turn out not to be there."""
        return value.shard is not None and self._counts.may_be_absent(value.shard)

    def _present(self, value: Value) -> str:
        assert value.shard is not None
        return self._counts.present(value.shard)

    def _wait(self, value: Value) -> str:
        """Return what keeps a constant beside a value from being made if the shard has no rows."""
        return "" if value.shard is None else self._counts.presence_control(value.shard)

    def _slice(self, name: str, value: Slice, source: str) -> str:
        key = value.of[0], value.split, value.device
        if key not in self._splits:
            self._splits[key] = self._split(value, source)
        piece = self._splits[key][value.piece]
        if value.split.sizes:
            shape = [size or 0 for size in self._draft.program.shape(self._moves[value.piece].tensor) or ()]
            return piece if len(shape) < 2 else self._reshaped(f"{name}/tensor", piece, shape, value.device)
        is_dead = self._values[value.of[0]].shard is not None  # with what is split
        if is_dead or value.split.shards or not self._is_absent(value):
            return piece
        return self._add(f"{name}/piece", "Switch", [piece, self._present(value)], value.device) + ":1"

    def _split(self, value: Slice, source: str) -> list[str]:
        axis, layout, shards, holder, sizes = value.split
        name = f"{self._name}/split_{len(self._splits)}" if self._splits or self._is_last_made() else self._name
        wait = ""
        if layout is None and not self._shape:
            self._add(name, "Unpack", [source], value.device, num=len(sizes), axis=0)
            return [f"{name}:{i}" for i in range(len(sizes))]
        if layout is None:
            entries = [size // self._dtype.size for size in sizes]
            counted, pieces = self._constant(f"{name}/sizes", entries, tf.int64, value.device), len(sizes)
        elif len(shards) == 1:
            [[d]] = shards
            counted, pieces = self._counts.own_sizes(name, layout, d), len(layout.blocks)
            wait = self._counts.presence_control(d)
        else:
            counted = self._counts.split_sizes(name, layout, holder, value.device, shards)
            pieces = len(layout.blocks) * len(shards or group_of(layout) or self._draft.shards)
        counted_along = self._constant(f"{name}/axis", axis, tf.int32, value.device, wait)
        self._add(name, "SplitV", [source, counted, counted_along], value.device, num_split=pieces, Tlen=tf.int64)
        return [f"{name}:{i}" for i in range(pieces)]

    def _as_vectors(self, name: str, value: Concatenation, parts: list[str]) -> list[str]:
        """Write as vectors what a bucket joins, one tensor of each move."""
        shapes = [self._draft.program.shape(move.tensor) for move in self._moves]
        return [
            part if len(shape or ()) == 1 else self._reshaped(f"{name}/vector_{k}", part, [-1], value.device)
            for k, (part, shape) in enumerate(zip(parts, shapes, strict=True))
        ]

    def _reshaped(self, name: str, source: str, shape: Sequence[int], device: str) -> str:
        to = self._constant(f"{name}/shape", shape, tf.int32, device)  # (of int64 a GPU's would be copied to its host)
        return self._add(name, "Reshape", [source, to], device, Tshape=tf.int32)

    def _concatenate(self, name: str, value: Concatenation, parts: list[str]) -> None:
        if value.shard is None:
            parts = self._with_no_rows(name, value, parts)
        axis = self._constant(f"{name}/axis", value.axis, tf.int32, value.device, self._wait(value))
        self._add(name, "ConcatV2", [*parts, axis], value.device, N=len(parts), Tidx=tf.int32)

    def _with_no_rows(self, name: str, value: Concatenation, parts: list[str]) -> list[str]:
        """Return what is concatenated if there is something that stands in for what shards without rows give."""
        absent = {k: self._values[i] for k, i in enumerate(value.of) if self._is_absent(self._values[i])}
        if not absent:
            return parts
        nothing, device = f"{name}/nothing", value.device
        indices = self._constant(f"{nothing}/indices", [], tf.int32, device)
        axis = self._constant(f"{nothing}/axis", value.axis, tf.int32, device)
        types = {"Tparams": self._dtype, "Tindices": tf.int32, "Taxis": tf.int32}
        self._add(nothing, "GatherV2", [parts[0], indices, axis], device, **types)
        pieces = list(parts)
        for k, absent_value in absent.items():
            pieces[k] = self._unless_absent(f"{name}/piece_{k}", parts[k], nothing, absent_value, device)
        return pieces

    def _unless_absent(
        self, name: str, part: str, instead: str, shard_value: Value, device: str, reduction: str = "", source: str = ""
    ) -> str:
        """Write what is `part` if its shard has rows, else what changes nothing.

        That is made of something else of the same shape: zeros for a sum, ones for a product, for `max` and the like
        what another shard has; no `reduction`: that itself. It is dead where it is not needed: given the device on
        which it is, as `source`, it is not sent.
        """
        absent = self._add(f"{name}/instead", "Switch", [instead, self._present(shard_value)], source or device, True)
        if reduction in _NEUTRAL:
            absent = self._add(f"{name}/neutral", _NEUTRAL[reduction], [absent], device, True)
        return self._add(name, "Merge", [part, absent], device, True, N=2)

    def _sum(self, name: str, value: Sum, parts: list[str]) -> str:
        device = value.device
        begins = self._begins(value)
        parts = [self._or_neutral(name, value, k, part) if k in begins else part for k, part in enumerate(parts)]
        if value.turn is not None and self._counts.may_be_absent(value.turn):
            present = self._counts.present(value.turn)
            switch = self._add(f"{name}/before", "Switch", [parts[0], present], device)
            taken = self._added_up(f"{name}/taken", [f"{switch}:1", parts[1]], value.reduction, device)
            return self._add(name, "Merge", [taken, switch], device, N=2)
        total = parts[0]
        if len(parts) == 1 and not value.entries:
            return self._add(name, "Identity", parts, device)
        if len(parts) > 1:
            total = self._added_up(f"{name}/total" if value.entries else name, parts, value.reduction, device)
        if value.entries:
            count = self._constant(f"{name}/count", value.entries, self._dtype, device)
            self._add(name, "RealDiv", [total, count], device)
        return name

    def _added_up(self, name: str, parts: Sequence[str], reduction: str, device: str) -> str:
        """Write what reduces values in order; those of a mean are added up.

        The order is fixed, so a step gives the same bits every time it runs. One op per reduction: of a ResNet50
        training step on 8 logical CPU devices, neither a chain of additions nor a tree over the devices is faster than
        `AddN` (`benchmarks/choices.py`).
        """
        if reduction in ("sum", "mean"):
            return self._add(name, "AddN", parts, device, N=len(parts))
        result = parts[0]
        for i, part in enumerate(parts[1:], 1):
            node_name = name if i == len(parts) - 1 else f"{name}/upto_{i}"
            result = self._add(node_name, PAIRWISE[reduction], [result, part], device)
        return result

    def _begins(self, value: Sum) -> dict[int, Value]:
        """Return the parts of a sum, by place, that come before all others and may turn out not to be there."""
        parts = {k: self._values[i] for k, i in enumerate(value.of) if k == 0 or value.turn is None}
        return {k: part for k, part in parts.items() if self._is_absent(part)}

    def _or_neutral(self, name: str, value: Sum, k: int, part: str) -> str:
        """Return a part of a sum or, if its shard has no rows, what changes nothing, made of the first shard's."""
        shard_value = self._values[value.of[k]]
        number = self._first(shard_value)
        first = self._values[number]
        single, device = value.turn is None, value.device if value.turn is None else shard_value.device
        instead = self._stand_in(host_name(shard_value.device), number)
        has_first = single and (not self._by_hosts or host_name(device) == host_name(first.device))
        source = "" if instead or has_first else first.device
        stands = instead or self.reference(number)
        return self._unless_absent(
            f"{name}/part_{shard_value.shard}", part, stands, shard_value, device, value.reduction, source
        )

    def _first(self, part: Value) -> int:
        """Return the number of what the first shard gives to a sum to which another one gives a part."""
        while isinstance(part, Relay):
            part = self._values[part.of[0]]
        piece = part.piece if isinstance(part, Slice) else None
        alike = [k for k, value in enumerate(self._values) if type(value) is type(part)]
        return next(k for k in alike if piece is None or self._values[k].piece == piece)  # type: ignore[attr-defined]

    def _stand_in(self, host: str, number: int) -> str:
        """Return what stands in, on another host than the first shard's, for parts of shards without rows.

        It is what the first shard has, of this number, sent to a gateway if any shard of that host is absent, and dead
        otherwise.
        """
        first = self._values[number]
        sums = [value for value in self._values if isinstance(value, Sum) and self._begins_with(value, number)]
        gateway = next((value.device for value in sums if value.host == host), "")
        if not gateway or host == host_name(first.device):
            return ""
        if (host, number) not in self._made:
            begins = [part for value in sums for part in self._begins(value).values() if host_name(part.device) == host]
            shards = [part.shard for part in begins if part.shard is not None]
            name = f"{self._name}/instead_{shards[0]}" + ("" if not isinstance(first, Slice) else f"_{first.piece}")
            inputs = [self.reference(number), self._counts.all_present(shards)]
            needed = self._add(f"{name}/needed", "Switch", inputs, first.device)
            self._made[host, number] = self._add(name, "Identity", [needed], gateway)
        return self._made[host, number]

    def _begins_with(self, value: Sum, number: int) -> bool:
        """Return whether a sum is one of those to whose total what is of this number belongs."""
        parts = [self._values[i] for i in value.of]
        while isinstance(parts[0], (Sum, Relay)):
            parts = [self._values[i] for i in parts[0].of]
        return self._first(parts[0]) == number

    def _merged(self, name: str, value: Merged, parts: list[str]) -> str:
        """Write the mean of all rows, and their variance around it; see `planning/moments.py`."""
        device, key = value.device, (value.of, value.device)
        if key not in self._made:
            instead = parts[0] if not self._by_hosts else ""
            for k, part in enumerate(parts):
                shard_value = self._values[value.of[k]]
                if self._is_absent(shard_value):
                    has_first = shard_value.device == value.device or self._by_hosts
                    source = "" if has_first else self._values[value.of[0]].device
                    instead = instead or self._no_moments(f"{name}/nothing", device)
                    parts[k] = self._unless_absent(
                        f"{name}/part_{shard_value.shard}", part, instead, shard_value, device, "", source
                    )
            packed, count = self._add(f"{name}/all", "Pack", parts, device, N=len(parts), axis=0), len(self._moves)
            self._add(f"{name}/apart", "Unpack", [packed], device, num=count, axis=1)
            self._made[key] = f"{name}/apart"
            self._made["mean", key] = self._averaged(f"{name}/mean", f"{name}/apart", value)
        apart, mean = self._made[key], self._made["mean", key]
        if not value.which:
            return mean
        spread = self._add(f"{name}/spread", "SquaredDifference", [apart, mean], device)
        return self._averaged(name, self._add(f"{name}/both", "AddV2", [f"{apart}:1", spread], device), value)

    def _no_moments(self, name: str, device: str) -> str:
        """Write what stands in for the moments of no rows on another host than the first shard's: nothing is sent."""
        shape = [len(self._moves), *[size or 0 for size in self._shape or ()]]
        return self._constant(name, np.zeros(shape, self._dtype.as_numpy_dtype), self._dtype, device)

    def _averaged(self, name: str, source: str, value: Merged) -> str:
        """Write the mean over shards, or groups of them, of what each has, by their shares of the rows."""
        device = value.device
        axis = self._constant(f"{name}/axis", 0, tf.int32, device)
        assert self._averaged_over is not None
        rank, groups = len(self._shape or ()), [shards_behind(self._values, i) for i in value.of]
        shares = self._counts.shares(f"{name}/shares", self._averaged_over, self._dtype, rank, device, groups)
        if shares is None:
            return self._add(name, "Mean", [source, axis], device, Tidx=tf.int32)
        weighted = self._add(f"{name}/weighted", "Mul", [source, shares], device)
        return self._add(name, "Sum", [weighted, axis], device, Tidx=tf.int32)

    def _zeros(self, name: str, value: Zeros, of: list[str]) -> str:
        """Write zeros for a shard: a constant, or made where the value is of which they have the shape."""
        if not of:
            zero = np.zeros((), self._dtype.as_numpy_dtype)
            numbers = np.broadcast_to(zero, [size or 0 for size in self._shape or ()])
            return self._constant(name, numbers, self._dtype, value.device, self._wait(value))
        zeros = f"{self._name}/zeros"
        if zeros not in self._made:
            self._made[zeros] = self._add(zeros, "ZerosLike", of, value.device)
        if not self._is_absent(value):
            return zeros
        return self._add(name, "Switch", [zeros, self._present(value)], value.device) + ":1"


_SENT_ON = frozenset({SIZES_ROLE, "zero-fill"})  # roles


def relay_within_hosts(draft: Draft) -> None:
    """Let devices that want the same of another host get it, all but one, from one of their own host.

    What a node waits for on another host, or on another device of its own, becomes one signal first.

    Args:
      draft: all nodes of a graph; it gets those that send on.
    """
    _join_signals(draft)
    if len({host_name(node.device) for node in draft.nodes}) == 1:
        return
    by_name = {node.name: node for node in draft.nodes}
    for (reference, _), readers in _wanted(draft).items():
        if len({reader.device for reader in readers}) == 1:
            continue
        relay, device = f"{draft.scope}/relay_{len(draft.nodes)}", readers[0].device
        if reference[0] == "^":
            node, instead = make_node(relay, "NoOp", [reference], device), f"^{relay}"
        else:
            name, index = split_reference(reference)
            dtype = tf.as_dtype(output_type(by_name[name], index))
            node, instead = make_node(relay, "Identity", [reference], host_of(device), T=dtype), relay
        for reader in readers:
            set_inputs(reader, [instead if r == reference else r for r in reader.input])
        draft.add(node, Origin(None, None, RELAY_ROLE))


def _join_signals(draft: Draft) -> None:
    """Let a node that waits for several of another device, or host, wait for one there, which waits for them."""
    joined: dict[tuple[str, ...], str] = {}
    for node in tuple(draft.nodes):
        by_place: dict[str, list[str]] = {}
        for signal in [r for r in node.input if r[0] == "^"]:
            device = draft.device_of(signal[1:])
            if not (device and node.device):
                continue  # (a loader says where it is)
            is_near = host_name(device) == host_name(node.device)
            by_place.setdefault(device if is_near else host_name(device), []).append(signal)
        by_place.pop(node.device, None)
        for signals in by_place.values():
            if len(signals) > 1:
                key = tuple(sorted(signals))
                if key not in joined:
                    joined[key] = f"{draft.scope}/relay_{len(draft.nodes)}"
                    relay = make_node(joined[key], "NoOp", key, draft.device_of(key[0][1:]))
                    draft.add(relay, Origin(None, None, RELAY_ROLE))
                set_inputs(node, [f"^{joined[key]}" if r in signals else r for r in node.input])


def _wanted(draft: Draft) -> dict[tuple[str, str], list[Any]]:
    """Return who reads, or waits for, what of other hosts that may be sent on: by reference and host."""
    readers: dict[tuple[str, str], list[Any]] = {}
    hosts = {name: host_name(draft.device_of(name)) for name in draft.origins}
    small = {name for name, origin in draft.origins.items() if origin.role in _SENT_ON}
    for node in draft.nodes:
        host = hosts[node.name]
        for reference in dict.fromkeys(node.input) if node.device else ():
            source = source_of(reference)
            if (reference[0] == "^" or source in small) and hosts[source] != host:
                readers.setdefault((reference, host), []).append(node)
    return readers
