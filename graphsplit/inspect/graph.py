"""Which operation runs where, as a graph that answers questions. The views draw it, and it knows none of them.

Questions are functions of operations and edges; `Placement` has them as methods. Which forward operation a backward one
belongs to follows from names, and from what it reads.
"""

from __future__ import annotations

import csv
import fnmatch
import functools
import io
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from graphsplit.core import patterns
from graphsplit.core.devices import canonical_name, short_name
from graphsplit.core.storage import forms
from graphsplit.errors import PlacementError, bullet_list
from graphsplit.inspect.records import NO_DATA, Change, DeviceTotals, Edge, PlacedOp, Transfer
from graphsplit.program.graph.graph import reached

if TYPE_CHECKING:
    import networkx as nx


class Transfers(tuple[Transfer, ...]):
    """What is sent between devices, largest first. `pandas.DataFrame(transfers)` has a row for each, too."""

    __slots__ = ()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a line for each as `.csv`, its columns named as the fields of `Transfer`; readers have a space between.

        The last column is empty, and its name says who wrote the file.

        Raises:
          ArgumentError: for another suffix.
          StorageError: if writing fails, or if graphsplit did not write the file at `path`. That file is not changed.
        """
        path, text = os.fspath(path), io.StringIO()
        forms.check_table_suffix(path, "transfers")
        rows = csv.writer(text)
        rows.writerow([*[field.name for field in fields(Transfer)], forms.MARK])
        rows.writerows([[*astuple(sent)[:-1], " ".join(sent.readers), ""] for sent in self])
        forms.write(path, text.getvalue().encode())


class PlacementGraph:
    """Where every operation of a graph runs: requested and, if it has been run, actual.

    Attributes:
      ops: every operation by name, those in function bodies, loops and branches included.
      edges: every tensor and control dependency between them.
      actual: whether the operations' actual devices are known.
      rows: rows of the batch on each shard; empty where nothing is split.
      graph_def: the graph as a `GraphDef` with devices, for `save("x.pb")`; None if there is none.
      added: names of nodes that TensorFlow's optimizer put into the graph that ran.
    """

    def __init__(
        self,
        ops: Sequence[PlacedOp],
        edges: Sequence[Edge],
        *,
        actual: bool = False,
        rows: Sequence[int] = (),
        graph_def: Any = None,
        added: Sequence[str] = (),
        title: str = "placement",
    ):
        self.ops = {op.name: op for op in ops}
        self.edges = tuple(edges)
        self.actual = actual
        self.rows = tuple(rows)
        self.graph_def = graph_def
        self.added = tuple(added)
        self.title = title

    @functools.cached_property
    def graph(self) -> nx.MultiDiGraph:
        """The placement as a `networkx.MultiDiGraph`: a node per operation, an edge per tensor and control dependency.

        A node has the fields of `PlacedOp` as attributes, and `device`. An edge has `bytes`, `dtype`, `output`,
        `control` and `crosses`. A tensor that several operations of a device read has several edges and is sent there
        once: the first such edge has its `sent_bytes`, the others 0, so that these add up to what is sent. (`transfers`
        also sees through operations that TensorFlow removed.)
        """
        import networkx as nx  # hundreds of modules, for those who ask

        graph = nx.MultiDiGraph(actual=self.actual, title=self.title)
        for op in self.ops.values():
            fields = {name: value for name, value in vars(op).items() if name != "name"}
            graph.add_node(op.name, **fields, device=op.device)
        sent: set[tuple[str, int, str]] = set()
        for edge in self.edges:
            is_between = crosses(self.ops[edge.source], self.ops[edge.target])
            key = edge.source, edge.output, self.ops[edge.target].device
            is_sent = is_between and not edge.control and edge.dtype not in NO_DATA and key not in sent
            sent.update([key] if is_sent else [])
            graph.add_edge(
                edge.source,
                edge.target,
                bytes=edge.bytes,
                dtype=edge.dtype,
                output=edge.output,
                control=edge.control,
                crosses=is_between,
                sent_bytes=edge.bytes if is_sent else 0,
            )
        return graph

    @functools.cached_property
    def transfers(self) -> Transfers:
        """Every tensor that is sent from one device to another, largest first; `transfers.save("transfers.csv")`."""
        return Transfers(find_transfers(self.ops, self.edges))

    @functools.cached_property
    def devices(self) -> dict[str, DeviceTotals]:
        """What each device has to do: operations, FLOPs, parameter and activation bytes, bytes received and sent."""
        return total_by_device(self.ops.values(), self.transfers)

    @property
    def balance(self) -> float:
        """The busiest device's FLOPs over the devices' mean; 1.0 is perfect balance."""
        flops = [totals.flops for totals in self.devices.values()]
        return max(flops) * len(flops) / sum(flops) if any(flops) else 1.0

    @functools.cached_property
    def unsharded_ops(self) -> tuple[PlacedOp, ...]:
        """The operations that work on rows of the batch and run once, on one device; the most expensive first."""
        return tuple(sorted((op for op in self.ops.values() if op.unsharded_reason), key=lambda op: -op.gathered_bytes))

    @property
    def moved(self) -> tuple[PlacedOp, ...]:
        """The operations that ran elsewhere than asked; each has its `reason`."""
        return tuple(op for op in self.ops.values() if op.moved)

    @property
    def missing(self) -> tuple[PlacedOp, ...]:
        """The operations that are not in the graph that ran; each has its `reason`."""
        return tuple(op for op in self.ops.values() if not op.ran)

    @functools.cached_property
    def gradients(self) -> tuple[GradientPair, ...]:
        """Backward operations with the forward operation that each differentiates, where that can be told."""
        return tuple(pair_gradients(self.ops, self.graph))

    def select(self, pattern: str) -> list[PlacedOp]:
        """Return the operations whose name or type matches a shell pattern: `"dense/*"`, `"MatMul"`.

        One with a `/` matches a name from its beginning or from any `/` on: names begin with the shard (`"shard_2/*"`)
        and the model. `*` stands for slashes, too. Layers are called as in their model: Keras 3's scope `dense_1` is
        that of the layer `dense`.

        Raises:
          PlacementError: if the pattern matches nothing; it names those near it.
        """
        selected = select(self.ops.values(), pattern)
        if not selected:
            raise PlacementError(
                f"No operation of {self.title} matches {pattern!r}.{_near(self.ops.values(), pattern)}"
            )
        return selected

    def assert_on(self, pattern: str, device: str) -> None:
        """Raise `PlacementError` unless operations match `pattern`, see `select`, and all of them are on `device`."""
        wanted, selected = canonical_name(device), [op for op in self.select(pattern) if op.ran]
        if not selected:
            suggestion = _near([op for op in self.ops.values() if op.ran], pattern)
            raise PlacementError(f"No operation of {self.title} that runs matches {pattern!r}.{suggestion}")
        wrong = [f"{op.name} on {short_name(op.device) or 'no device'}" for op in selected if op.device != wanted]
        if wrong:
            raise PlacementError(
                f"{len(wrong)} of the {len(selected)} operations that match {pattern!r} are not on "
                f"{short_name(wanted)}:\n" + bullet_list(wrong, 20)
            )

    def assert_colocated_gradients(self) -> None:
        """Raise `PlacementError` unless every backward operation is on the device of its forward operation."""
        wrong = [str(pair) for pair in self.gradients if not pair.colocated]
        if wrong:
            raise PlacementError(
                f"{len(wrong)} of {len(self.gradients)} backward operations are not with the forward operation that "
                f"they differentiate:\n{bullet_list(wrong, 20)}"
            )

    def diff(self, other: PlacementGraph) -> list[Change]:
        """Return what is different in `other`: operations that came or went, or changed device, shapes or FLOPs."""
        return compare(self.ops, other.ops)

    def __repr__(self) -> str:
        return f"<Placement of {self.title}: {len(self.ops)} operations on {len(self.devices)} devices>"


def _near(ops: Iterable[PlacedOp], pattern: str) -> str:
    similar = near(ops, pattern)
    return f" Similar names: {', '.join(map(repr, similar))}." if similar else ""


_NOT_ACTIVATIONS = frozenset({"Const", "Placeholder", "VarHandleOp", "ReadVariableOp", "VariableV2"})


def find_transfers(ops: Mapping[str, PlacedOp], edges: Sequence[Edge]) -> list[Transfer]:
    """Return every tensor that crosses devices, largest first; one that several ops of a device read, once."""
    edges = [edge for edge in edges if not edge.control and edge.dtype not in NO_DATA]
    readers: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    sizes: dict[tuple[str, int, str], int] = {}
    for edge, origin in _through_removed(ops, edges):
        target = ops[edge.target]
        if not crosses(ops[origin.source], target):
            continue
        key = (origin.source, origin.output, target.device)
        readers[key].append(edge.target)
        sizes[key] = origin.bytes
    transfers = [
        Transfer(name, output, ops[name].device, device, sizes[name, output, device], tuple(dict.fromkeys(targets)))
        for (name, output, device), targets in readers.items()
    ]
    return sorted(transfers, key=lambda t: (-t.bytes, t.source, t.target_device))


def _through_removed(ops: Mapping[str, PlacedOp], edges: Sequence[Edge]) -> list[tuple[Edge, Edge]]:
    """Return every edge with the edge that fed it: itself, unless its source was removed and only passed data on."""
    feeds: dict[str, list[Edge]] = defaultdict(list)
    for edge in edges:
        if not ops[edge.target].ran and ops[edge.target].reason.startswith(("removed", "lowered")):
            feeds[edge.target].append(edge)
    pairs = []
    for edge in edges:
        origins = reached([edge], lambda e: feeds.get(e.source, ())) if edge.source in feeds else [edge]
        pairs += [(edge, origin) for origin in origins if origin.source not in feeds]
    return pairs


def crosses(source: PlacedOp, target: PlacedOp) -> bool:
    """Return whether a tensor from one operation to the other changes devices: both take part, and elsewhere."""
    return source.ran and target.ran and source.device != target.device


def total_by_device(ops: Iterable[PlacedOp], transfers: Iterable[Transfer]) -> dict[str, DeviceTotals]:
    """Return what each device has to do, by device, in their order."""
    totals: dict[str, DeviceTotals] = {}
    for op in ops:
        if not op.ran:
            continue
        totals_before = totals.get(op.device, DeviceTotals(op.device))
        totals[op.device] = replace(
            totals_before,
            ops=totals_before.ops + 1,
            flops=totals_before.flops + (op.flops or 0),
            parameter_bytes=totals_before.parameter_bytes + op.parameter_bytes,
            activation_bytes=totals_before.activation_bytes + (0 if op.type in _NOT_ACTIVATIONS else op.output_bytes),
        )
    for transfer in transfers:
        sender, receiver = totals[transfer.source_device], totals[transfer.target_device]
        totals[sender.device] = replace(sender, sent_bytes=sender.sent_bytes + transfer.bytes)
        totals[receiver.device] = replace(receiver, received_bytes=receiver.received_bytes + transfer.bytes)
    return {device: totals[device] for device in sorted(totals, key=natural_order)}


def natural_order(name: str) -> tuple[object, ...]:
    """Return a sort key in which CPU:2 comes before CPU:10."""
    head, _, tail = name.rpartition(":")
    return (head, int(tail)) if tail.isdigit() else (name, -1)


def topological_order(graph: nx.MultiDiGraph) -> list[str]:
    """Return the nodes so that every one follows its inputs, and else stay in the order in which the graph has them.

    Where a graph has loops (TensorFlow 1), the edges back are ignored.
    """
    import networkx as nx

    again = [name for name, op_type in graph.nodes(data="type") if op_type in ("NextIteration", "RefNextIteration")]
    if again:
        graph = graph.copy()
        graph.remove_edges_from(list(graph.out_edges(again)))
    position = {name: i for i, name in enumerate(graph)}
    return list(nx.lexicographical_topological_sort(graph, position.__getitem__))


def reading_order(graph: nx.MultiDiGraph) -> list[str]:
    """Return the topological order with constants and the like just before the first operation that reads them."""
    rank = {name: float(i) for i, name in enumerate(topological_order(graph))}
    for name in reversed(list(rank)):
        after = [rank[target] for target in graph.successors(name)]
        if after and not graph.in_degree(name) and graph.nodes[name]["type"] != "Placeholder":
            rank[name] = min(after) - 0.5
    return sorted(rank, key=lambda name: rank[name])


def select(ops: Iterable[PlacedOp], pattern: str) -> list[PlacedOp]:
    """Return the operations whose name or type matches a shell pattern: `MatMul`, or, from any `/` on, `dense/*`.

    Layers are called as in their model: if that finds something, names as TensorFlow has them are not looked at.
    """
    ops = list(ops)
    plain = layer_names(ops)
    by_layer_name = [
        op for op in ops if plain.get(op.name, op.name) != op.name and _matches(plain[op.name], op.type, pattern)
    ]
    return by_layer_name or [op for op in ops if _matches(op.name, op.type, pattern)]


def _matches(name: str, op_type: str, pattern: str) -> bool:
    if "/" in pattern:
        return patterns.fits(name, pattern)
    # (a type's name is that of operations in many scopes, too)
    return fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(op_type, pattern)


def layer_names(ops: Sequence[PlacedOp]) -> dict[str, str]:
    """Return names of operations with the scopes of layers called as these are, for models of Keras 3.

    Keras 3 enters each layer's scope twice, so that TensorFlow gives it a number: `dense_1` is the layer `dense`. The
    variables, which have the layers' own names, tell.
    """
    numbered = any(_is_numbered(op.variable.split("/")[:-1], op.name.split("/")) for op in ops if op.variable)
    return {op.name: _without_numbers(op) for op in ops} if numbered else {}


def _is_numbered(layers: Sequence[str], scopes: Sequence[str]) -> bool:
    """Return whether a variable's layers are scopes of its handle, with numbers; models may be around them."""
    starts = range(len(scopes) - len(layers) + 1) if layers else ()
    windows = [scopes[start : start + len(layers)] for start in starts]
    if any(list(layers) == list(window) for window in windows):
        return False
    patterns = [rf"{re.escape(layer)}(_\d+)?" for layer in layers]
    return any(all(map(re.fullmatch, patterns, window)) for window in windows)


def _without_numbers(op: PlacedOp) -> str:
    *scopes, last = op.own_name.removeprefix(op.written).split("/")
    first = 0 if op.shard is None or op.written else 1  # `shard_2` is no layer
    return (
        op.prefix
        + op.written
        + "/".join([*scopes[:first], *[re.sub(r"_\d+$", "", scope) for scope in scopes[first:]], last])
    )


def near(ops: Iterable[PlacedOp], pattern: str) -> list[str]:
    """Return a few patterns like one, which match operations: scopes, names outside of scopes, and types."""
    ops = list(ops)
    plain = layer_names(ops)
    names = patterns.scopes_and_names(plain.get(op.name, op.name) for op in ops)
    return patterns.near(pattern, [*names, *(op.type for op in ops)])


def compare(before: Mapping[str, PlacedOp], after: Mapping[str, PlacedOp]) -> list[Change]:
    """Return what is different: operations that came, went, or changed in device, type, shapes or FLOPs."""
    changes = []
    for name in sorted({*before, *after}):
        a, b = before.get(name), after.get(name)
        if a is None or b is None:
            changes.append(Change(name, "operation", a.type if a else "", b.type if b else ""))
            continue
        for what in ("type", "device", "shard", "shapes", "flops", "ran"):
            x, y = getattr(a, what), getattr(b, what)
            if x != y:
                changes.append(Change(name, what, str(x), str(y)))
    return changes


_NOT_WORK = frozenset({"Const", "Placeholder", "ReadVariableOp", "VarHandleOp", "Identity", "NoOp", "Shape"})


@dataclass(frozen=True)
class GradientPair:
    """A backward operation and the forward operation that it differentiates."""

    backward: PlacedOp
    forward: PlacedOp

    @property
    def colocated(self) -> bool:
        """Return whether both run on the same device."""
        return self.backward.device == self.forward.device

    def __str__(self) -> str:
        return (
            f"{self.backward.name} on {self.backward.device or 'no device'}, "
            f"{self.forward.name} on {self.forward.device or 'no device'}"
        )


def pair_gradients(ops: Mapping[str, PlacedOp], graph: nx.MultiDiGraph) -> list[GradientPair]:
    """Return every backward operation that does work with its forward operation, where that can be told.

    By name: `gradient_tape/dense/MatMul/MatMul_1` and `gradients/dense/MatMul_grad/MatMul_1` differentiate
    `dense/MatMul`, within the same shard; the backward function of a call differentiates the call whose results it
    reads. Else by data: an operation that reads a forward operation's result (`ReluGrad` its `Relu`) belongs to it.
    """
    calls = _calls_of_backward_functions(ops, graph)
    pairs = []
    for op in ops.values():
        if not op.backward or op.type in _NOT_WORK or not op.ran:
            continue
        forward = _by_name(op, ops, calls) or _by_data(op, ops, graph)
        if forward is None or not forward.ran:
            continue
        if op.shard is None and forward.shard is not None and not op.unsharded_reason:
            continue  # a value without rows of the batch, made once for all shards
        pairs.append(GradientPair(op, forward))
    return pairs


def _split(name: str) -> tuple[str, str, str] | None:
    """Split a backward operation's name into what is before `gradients`, that word, and what is after."""
    parts = name.split("/")
    for i, part in enumerate(parts):
        if part in ("gradient_tape", "gradients"):
            return "/".join(parts[:i]), part, "/".join(parts[i + 1 :])
    return None


def _by_name(op: PlacedOp, ops: Mapping[str, PlacedOp], calls: Mapping[str, list[str]]) -> PlacedOp | None:
    split = _split(op.name)
    if split is None:
        return None
    scope_before, _, name_after = split
    scope = name_after.rpartition("/")[0]
    candidates = [scope, scope.removesuffix("_grad"), *(c for c in [scope.rpartition("_grad/")[0]] if c)]
    for candidate in filter(None, candidates):
        for prefix in (scope_before, *calls.get(scope_before, ())):
            name = f"{prefix}/{candidate}" if prefix else candidate
            if name in ops and not ops[name].backward:
                return ops[name]
    return None


def _by_data(op: PlacedOp, ops: Mapping[str, PlacedOp], graph: nx.MultiDiGraph) -> PlacedOp | None:
    forward = [
        ops[source]
        for source in graph.predecessors(op.name)
        if not ops[source].backward and ops[source].type not in _NOT_WORK and ops[source].shard == op.shard
    ]
    named = [f for f in forward if f.type + "Grad" == op.type]
    candidates = named or forward
    return candidates[0] if candidates else None


def _calls_of_backward_functions(ops: Mapping[str, PlacedOp], graph: nx.MultiDiGraph) -> dict[str, list[str]]:
    """Return, for the name of each call of a backward function, the forward calls whose results it reads."""
    calls: dict[str, set[str]] = defaultdict(set)
    for op in ops.values():
        split = _split(op.name) if op.backward else None
        if split is None or split[1] != "gradients":
            continue
        for source in graph.predecessors(op.name):
            if not ops[source].backward and "/" in source and ops[source].type not in _NOT_WORK:
                for end in range(1, source.count("/") + 1):
                    calls[split[0]].add("/".join(source.split("/")[:end]))
    return {call: sorted(names, key=lambda name: (-name.count("/"), name)) for call, names in calls.items()}
