"""What a plan consists of: what becomes of each operation, and what travels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from graphsplit.core.layouts import MOVES, SINGLE_DEVICE, Layout
from graphsplit.program.program import Tensor
from graphsplit.rules import Sharded


class RowsMoved(NamedTuple):
    """What moves for an operation that runs once, as that is fewer bytes than a table on each device.

    Attributes:
      rows: what the operation reads of the shards' and makes for them.
      table: from which it takes rows, or to which it adds them.
      adds: whether it adds them.
    """

    rows: tuple[Tensor, ...]
    table: Tensor
    adds: bool


@dataclass(frozen=True)
class Step:
    """What becomes of one operation: it may run whole, on the shards, on both, or (dead code) nowhere.

    Attributes:
      once: whether it runs once, on whole tensors, on the device of what it serves; for copies of a variable on each
        device of their group (`Owners.groups`).
      shards: how it runs on every shard, or None.
      for_rows: what moves because it runs once, of what could run on the shards and would move a table; or None.
      reason: why it runs once, or is one loop for all shards, although it carries rows; "" where it carries none.
      bodies: for a loop or branch that runs once around work on the batch, the plans of its functions, by name: the
        loop stays one loop, and each iteration is split over the devices.
    """

    once: bool = False
    shards: Sharded | None = None
    reason: str = ""
    bodies: Mapping[str, Any] = field(default_factory=dict)
    for_rows: RowsMoved | None = None


def spread(layouts: Sequence[Layout], shards: int) -> list[range]:
    """Return which of the values that shards have of some tensors, all in one row, are those of each tensor.

    Each shard has one; of what is on a single device there is one for all.

    >>> from graphsplit.core.layouts import REPLICATE
    >>> spread([SINGLE_DEVICE, REPLICATE, SINGLE_DEVICE], 2)
    [range(0, 1), range(1, 3), range(3, 4)]
    """
    ends = list(accumulate([1 if layout == SINGLE_DEVICE else shards for layout in layouts], initial=0))
    return [range(*pair) for pair in pairwise(ends)]


@dataclass(frozen=True)
class Move:
    """A tensor that changes its layout. Happens once, however many operations read the result."""

    tensor: Tensor
    source: Layout
    target: Layout

    @property
    def kind(self) -> str:
        """Return the field's name for it."""
        return MOVES[type(self.source), type(self.target)]
