"""Levels: how often all shards have waited for each other before an operation runs.

An operation may belong to several levels: it can run as soon as what it reads is there, or wait until it is needed.
It waits with those that read it, so that little is held between levels. What only leads to values that no shard reads
again, the gradient of a weight, runs at once: that frees what it reads.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphsplit.planning.propagation.flow import Flow, Source
from graphsplit.planning.schedule.scheduling import seeds_of
from graphsplit.program.program import Op


def levels_on_shards(flow: Flow) -> list[int]:
    """Return the number of waits before what runs on the shards, by position; 0 for others.

    Args:
      flow: what depends on what.
    """
    return _Levels(flow).find()


class _Levels:
    def __init__(self, flow: Flow):
        self._flow = flow
        self._ops = flow.program.ops
        self._seeds = seeds_of(flow.program)
        self._wanted: dict[tuple[int, bool], int] = {}
        self._whole, self._shards = [0] * len(self._ops), [0] * len(self._ops)

    def find(self) -> list[int]:
        self._count()
        if any(self._shards):
            self._look_back()
            self._count()
        return self._shards

    def _copies(self, op: Op) -> Iterator[tuple[bool, list[Source]]]:
        """Return how an operation runs, on the shards or once, and what it then depends on."""
        step = self._flow.steps[op.index]
        if step.home:
            yield False, list(self._flow.of_whole(op.index))
        if step.shards:
            yield True, list(self._flow.of_shard(op.index))

    def _level(self, position: int, on_shards: bool) -> int:
        return (self._shards if on_shards else self._whole)[position]

    def _count(self) -> None:
        """Count the waits: as few as can be, or as many as are wanted."""
        first = len(self._ops) + 1  # what comes from outside comes after all that runs before
        given = set(self._flow.program.inputs[len(self._flow.program.inputs) - self._flow.program.seeds :])
        for op in self._ops:
            for on_shards, sources in self._copies(op):
                least = self._wanted.get((op.index, on_shards), first if op.index in given else 0)
                before = [self._level(s.op, s.on_shards) + s.of_all for s in sources]
                (self._shards if on_shards else self._whole)[op.index] = max([least, *before])

    def _look_back(self) -> None:
        """Find which operations can wait with what reads them."""
        wanted = self._wanted
        for op in reversed(self._ops):
            for on_shards, sources in self._copies(op):
                own = wanted.get((op.index, on_shards))
                for source in sources:
                    if self._seeds[source.op] == self._seeds[op.index]:
                        self._let_wait(source, own, self._level(op.index, on_shards) if on_shards else None)

    def _let_wait(self, source: Source, wanted: int | None, level: int | None) -> None:
        """Note what a reader says of its source: when it is wanted; or at its own level, if that is a later one.

        Args:
          source: what is read.
          wanted: when the reader is wanted, if anybody says.
          level: the reader's, if it is on the shards.
        """
        own = self._level(source.op, source.on_shards)
        if wanted is None and level is not None and (level > own or not source.on_shards):
            wanted = level
        if wanted is not None:
            key = (source.op, source.on_shards)
            self._wanted[key] = min(self._wanted.get(key, wanted), wanted - source.of_all)
