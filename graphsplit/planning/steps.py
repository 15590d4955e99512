"""What a plan consists of: what becomes of each operation, and what travels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graphsplit.core.layouts import Layout, Partial, Replicate, Shard
from graphsplit.program.program import Tensor
from graphsplit.rules import Sharded


@dataclass(frozen=True)
class Step:
    """What becomes of one operation: it may run at home, on the shards, on both, or (dead code) nowhere.

    Attributes:
      home: whether it runs once, at home, on whole tensors.
      shards: how it runs on every shard, or None.
      reason: why it runs at home although it carries rows of the batch; "" where it carries none.
      bodies: for a loop or branch at home around work on the batch, the plans of its functions, by name: the loop
        stays one loop, and each turn is split over the devices.
    """

    home: bool = False
    shards: Sharded | None = None
    reason: str = ""
    bodies: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Reshard:
    """A tensor that changes its layout. Happens once, however many operations read the result."""

    tensor: Tensor
    source: Layout
    target: Layout

    @property
    def kind(self) -> str:
        """Return the field's name for it."""
        if isinstance(self.source, Replicate):
            return "split" if isinstance(self.target, Shard) else "zero-fill"
        if isinstance(self.source, Partial):
            return "all-reduce" if isinstance(self.target, Replicate) else "reduce-scatter"
        return "all-gather" if isinstance(self.target, Replicate) else "all-to-all"


@dataclass(frozen=True)
class Pack:
    """Small tensors that travel as one: each has one axis, and all have the same dtype.

    Attributes:
      kind: "whole values", joined at home and sent to each device; or "all-reduce", joined on each shard.
      tensors: what is joined.
    """

    kind: str
    tensors: tuple[Tensor, ...]
