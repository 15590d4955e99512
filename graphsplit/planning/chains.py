"""The longest chain of exchanges: how often in a row a device waits for another one, while a plan runs once.

An exchange is what one device sends and another waits for: a tensor, or the mere signal that something has run. It
takes at least the latency of a link, however few bytes it has. Exchanges beside each other overlap; in a chain they add
up.

They are counted from the plan's tasks. The emitted graph has a longer chain where only emission knows of an exchange:
numbers of rows, of a batch whose size is not known, and signals that go through another device of their host. Of a loop
that runs once and whose iterations are split over devices, the exchanges of an iteration are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from graphsplit.planning.amounts import count_text
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.tasks import SEND
from graphsplit.planning.waits import OrderedTasks, ordered_tasks_of
from graphsplit.program.program import Op

SIGNAL = "signal"
"""The kind of an exchange that carries no tensor."""

_LEAST_SHARE, _MOST_LAYERS = 0.1, 3  # of a chain, that a layer needs to be named; that are named


class Exchange(NamedTuple):
    """What one device sends and another one waits for.

    Attributes:
      source, target: the devices, full names.
      kind: of the move that it belongs to, `"all-reduce"`; `"op"` for none; `"signal"`, if nothing is read of it.
      name: of the operation that has made, or run, what the other device waits for.
      layer: the class of the layer that this operation belongs to, or whose gradient it is; "" for none.
    """

    source: str
    target: str
    kind: str
    name: str
    layer: str


@dataclass(frozen=True)
class ExchangeChain:
    """Exchanges between devices, each of which waits for the one before it.

    Attributes:
      exchanges: first to last.

    >>> ahead = Exchange("GPU:0", "GPU:1", "all-reduce", "norm/moments/mean", "BatchNormalization")
    >>> back = Exchange("GPU:1", "GPU:0", "all-reduce", "gradient_tape/norm/Sum", "BatchNormalization")
    >>> str(ExchangeChain((ahead, back)))
    '2 exchanges, 2 of them of BatchNormalization'
    """

    exchanges: tuple[Exchange, ...] = field(default=(), repr=False)

    def __len__(self) -> int:
        return len(self.exchanges)

    @property
    def layers(self) -> Mapping[str, int]:
        """How many of the exchanges each class of layers has, the most first; those of no layer are left out."""
        return dict(Counter([exchange.layer for exchange in self.exchanges if exchange.layer]).most_common())

    def __str__(self) -> str:
        most = [(n, layer) for layer, n in self.layers.items() if n > max(1, _LEAST_SHARE * len(self))][:_MOST_LAYERS]
        return ", ".join([count_text(len(self), "exchange"), *[f"{n} of them of {layer}" for n, layer in most]])


def longest_chain(plan: Decisions) -> ExchangeChain:
    """Return the longest chain of exchanges of a plan; of several, one of them."""
    ordered = ordered_tasks_of(plan)
    lengths, task_before = [0] * len(ordered.tasks), [-1] * len(ordered.tasks)
    for n in ordered.positions_in_order:
        for source in ordered.sources[n]:
            length = lengths[source] + _is_exchange(ordered, source, n)
            if task_before[n] < 0 or length > lengths[n]:
                lengths[n], task_before[n] = length, source
    last = max(range(len(lengths)), key=lengths.__getitem__, default=-1)
    pairs = list(_pairs_behind(task_before, last))[::-1]
    collectives = {result.task: c for (c, _), result in ordered.values.items() if result is not None}
    return ExchangeChain(
        tuple([_exchange(plan, ordered, collectives, *pair) for pair in pairs if _is_exchange(ordered, *pair)])
    )


def _pairs_behind(task_before: Sequence[int], last: int) -> Iterator[tuple[int, int]]:
    """Yield the tasks of a chain with those for which they wait, last to first."""
    while last >= 0 and task_before[last] >= 0:
        yield task_before[last], last
        last = task_before[last]


def _is_exchange(ordered: OrderedTasks, source: int, n: int) -> bool:
    """Return whether a task is on another device than one for which it waits. (What is sent is where it goes.)"""
    return ordered.tasks[source].device != ordered.tasks[n].device


def _exchange(plan: Decisions, ordered: OrderedTasks, collectives: Mapping[int, int], source: int, n: int) -> Exchange:
    source_task, task = ordered.tasks[source], ordered.tasks[n]
    if source_task.op is not None:
        ops = [plan.program.ops[source_task.op]]
    else:  # what moves several together, or the end of a turn
        moves = plan.collectives[collectives[source]].moves if source in collectives else ()
        ops = [plan.program.ops[move.tensor.op] for move in moves]
    is_read = any(read is not None and read.task == source for read in task.reads)
    kind = SIGNAL if not is_read else task.sent_for if task.kind == SEND else task.kind
    return Exchange(source_task.device, task.device, kind, ops[0].name if ops else "", _layer_of(plan, ops))


def _layer_of(plan: Decisions, ops: Sequence[Op]) -> str:
    """Return the class of layers to which most of some operations belong."""
    return Counter([plan.program.layer_of(op) for op in ops]).most_common(1)[0][0] if ops else ""
