"""Graph: node protos, and who reads whom; walks: what follows from what, over anything that numbers or names say."""

from __future__ import annotations

import graphlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.protos import source_of
from graphsplit.errors import CheckError


@dataclass(frozen=True, eq=False)
class Graph:
    """The nodes of a graph, or of the body of a function. What is asked of them is worked out once.

    To wait for a node counts as reading it. Who reads whom is kept by position: a graph of 400,000 nodes takes seconds.

    Attributes:
      nodes: `NodeDef`s. What they read must not change while somebody asks.
      outside: names that nodes may read and that are none of them: the arguments of a function.

    >>> from graphsplit.core.protos import make_node
    >>> graph = Graph([make_node("c", "Mul", ["a", "b:1"]), make_node("b", "Exp", ["a"]), make_node("a", "Const", [])])
    >>> graph.order, graph.after(["b"]) == {"b", "c"}
    (['a', 'b', 'c'], True)
    """

    nodes: Sequence[Any]
    outside: frozenset[str] = frozenset()

    @classmethod
    def of_function(cls, function: Any) -> Graph:
        """Return the graph of the body of a `FunctionDef`."""
        return cls(function.node_def, frozenset([argument.name for argument in function.signature.input_arg]))

    def __getitem__(self, name: str) -> Any:
        """Return the node of a name."""
        return self.nodes[self.place[name]]

    def __contains__(self, name: str) -> bool:
        """Return whether there is a node of a name."""
        return name in self.place

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.place)

    def check(self) -> None:
        """Raise `CheckError` unless names are unique and everything that is read exists."""
        len(self.sources)

    @cached_property
    def place(self) -> Mapping[str, int]:
        """The positions of the nodes, by name. Raises `CheckError` if two have the same name."""
        place_by_name = {node.name: k for k, node in enumerate(self.nodes)}
        if len(place_by_name) < len(self.nodes):
            twice = next(node.name for k, node in enumerate(self.nodes) if place_by_name[node.name] != k)
            raise CheckError(f"Two nodes have the same name: {twice!r}.")
        return place_by_name

    @cached_property
    @collection_paused()
    def sources(self) -> Sequence[Sequence[int]]:
        """The positions of what each node reads, each once. Raises `CheckError` if there is no such node."""
        all_sources: list[Sequence[int]] = []
        place = self.place
        for node in self.nodes:
            sources: dict[int, None] = {}
            for reference in node.input:
                source = place.get(reference)
                if source is None:
                    source = place.get(source_of(reference))
                if source is not None:
                    sources[source] = None
                elif source_of(reference) not in self.outside:
                    raise CheckError(f"The node {node.name!r} reads {reference!r}, which does not exist.")
            all_sources.append(tuple(sources))
        return all_sources

    @cached_property
    @collection_paused()
    def readers(self) -> Sequence[Sequence[int]]:
        """The positions of those that read each node."""
        return readers_of(self.sources)

    @cached_property
    def positions_in_order(self) -> Sequence[int]:
        """The positions of `order`."""
        return in_order(self.sources, list(self.place))

    @property
    def order(self) -> list[str]:
        """The names, each behind those that its node reads, otherwise as they are listed.

        Raises `CheckError` if nodes wait for each other; it names them.
        """
        names = list(self.place)
        return [names[k] for k in self.positions_in_order]

    def before(self, names: Iterable[str]) -> set[str]:
        """Return the names of the nodes that some are made from, themselves included."""
        return self._reached(names, self.sources)

    def after(self, names: Iterable[str]) -> set[str]:
        """Return the names of the nodes that are made from some, themselves included."""
        return self._reached(names, self.readers)

    def _reached(self, names: Iterable[str], following: Sequence[Sequence[int]]) -> set[str]:
        places = reached([self.place[name] for name in names], following.__getitem__)
        return {self.nodes[k].name for k in places}


PlaceT = TypeVar("PlaceT", bound=Hashable)


def reached(roots: Iterable[PlaceT], following: Callable[[PlaceT], Iterable[PlaceT]]) -> Set[PlaceT]:
    """Return what is reached from some places, themselves first, in the order in which it was found.

    >>> list(reached([4], lambda k: [k // 2] if k else []))
    [4, 2, 1, 0]
    """
    reached_places = dict.fromkeys(roots)
    pending = list(reached_places)
    while pending:
        for place in following(pending.pop()):
            if place not in reached_places:
                reached_places[place] = None
                pending.append(place)
    return reached_places.keys()


def readers_of(sources: Iterable[Iterable[int]]) -> list[list[int]]:
    """Return for each position those that it is a source of, in order.

    >>> readers_of([[], [0], [0, 1]])
    [[1, 2], [2], []]
    """
    sources = list(sources)
    readers: list[list[int]] = [[] for _ in sources]
    for k, sources_of_place in enumerate(sources):
        for source in sources_of_place:
            readers[source].append(k)
    return readers


def in_order(sources: Sequence[Iterable[int]], names: Sequence[str] | None = None) -> list[int]:
    """Return positions, each behind its sources, otherwise as they are given.

    Args:
      sources: of each position.
      names: by which an error calls the positions.

    Raises:
      CheckError: if some wait for each other; it names them.

    >>> in_order([[2], [], [1]])
    [1, 2, 0]
    """
    is_done, is_begun = [False] * len(sources), [False] * len(sources)
    order: list[int] = []
    for first in range(len(sources)):
        stack = [first]
        while stack:
            k = stack[-1]
            waiting = [] if is_done[k] else [source for source in sources[k] if not is_done[source]]
            if waiting:
                if is_begun[k]:
                    raise CheckError(f"Nodes of a graph wait for each other: {_circle(sources, names)}.")
                is_begun[k] = True
                stack += reversed(waiting)
                continue
            stack.pop()
            if not is_done[k]:
                is_done[k] = True
                order.append(k)
    return order


def _circle(sources: Sequence[Iterable[int]], names: Sequence[str] | None) -> str:
    try:
        graphlib.TopologicalSorter(dict(enumerate(sources))).prepare()
    except graphlib.CycleError as error:
        return ", ".join([repr(names[k]) if names else str(k) for k in error.args[1]])
    return ""
