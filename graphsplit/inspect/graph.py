"""Which operation runs where, as a graph that answers questions. The views draw it, and it knows none of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from graphsplit.core.devices import canonical_name, short_name
from graphsplit.errors import PlacementError, bullet_list
from graphsplit.inspect import questions
from graphsplit.inspect.gradients import GradientPair, pair_gradients
from graphsplit.inspect.records import NO_DATA, Change, DeviceTotals, Edge, PlacedOp, Transfer

if TYPE_CHECKING:
    import networkx as nx


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
            crosses = questions.crosses(self.ops[edge.source], self.ops[edge.target])
            key = edge.source, edge.output, self.ops[edge.target].device
            is_sent = crosses and not edge.control and edge.dtype not in NO_DATA and key not in sent
            sent.update([key] if is_sent else [])
            graph.add_edge(
                edge.source,
                edge.target,
                bytes=edge.bytes,
                dtype=edge.dtype,
                output=edge.output,
                control=edge.control,
                crosses=crosses,
                sent_bytes=edge.bytes if is_sent else 0,
            )
        return graph

    @functools.cached_property
    def transfers(self) -> tuple[Transfer, ...]:
        """Every tensor that is sent from one device to another, largest first."""
        return tuple(questions.find_transfers(self.ops, self.edges))

    @functools.cached_property
    def devices(self) -> dict[str, DeviceTotals]:
        """What each device has to do: operations, FLOPs, parameter and activation bytes, bytes received and sent."""
        return questions.total_by_device(self.ops.values(), self.transfers)

    @property
    def balance(self) -> float:
        """The busiest device's FLOPs over the devices' mean; 1.0 is perfect balance."""
        flops = [totals.flops for totals in self.devices.values()]
        return max(flops) * len(flops) / sum(flops) if any(flops) else 1.0

    @functools.cached_property
    def home_ops_with_batch(self) -> tuple[PlacedOp, ...]:
        """The operations that work on rows of the batch and run once, on one device; the most expensive first."""
        return tuple(sorted((op for op in self.ops.values() if op.home_reason), key=lambda op: -op.gathered_bytes))

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
        found = questions.select(self.ops.values(), pattern)
        if not found:
            raise PlacementError(
                f"No operation of {self.title} matches {pattern!r}.{_near(self.ops.values(), pattern)}"
            )
        return found

    def assert_on(self, pattern: str, device: str) -> None:
        """Raise `PlacementError` unless operations match `pattern`, see `select`, and all of them are on `device`."""
        asked, found = canonical_name(device), [op for op in self.select(pattern) if op.ran]
        if not found:
            near = _near([op for op in self.ops.values() if op.ran], pattern)
            raise PlacementError(f"No operation of {self.title} that runs matches {pattern!r}.{near}")
        wrong = [f"{op.name} on {short_name(op.device) or 'no device'}" for op in found if op.device != asked]
        if wrong:
            raise PlacementError(
                f"{len(wrong)} of the {len(found)} operations that match {pattern!r} are not on {short_name(asked)}:\n"
                + bullet_list(wrong, 20)
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
        return questions.compare(self.ops, other.ops)

    def __repr__(self) -> str:
        return f"<Placement of {self.title}: {len(self.ops)} operations on {len(self.devices)} devices>"


def _near(ops: Iterable[PlacedOp], pattern: str) -> str:
    found = questions.near(ops, pattern)
    return f" Similar names: {', '.join(map(repr, found))}." if found else ""
