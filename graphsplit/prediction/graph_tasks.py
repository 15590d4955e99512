"""Tasks of a graph: every node where it runs, every tensor that changes devices on its way, once."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from graphsplit.prediction.buffers import Buffer
from graphsplit.prediction.replay import Resource, Task
from graphsplit.prediction.threads import Threads


class Placed(NamedTuple):
    """What a task is.

    Attributes:
      device: where it runs; of something sent, where it comes from.
      kind: `"compute"`, `"send"` or `"wait"` (what takes no time).
      type: of the operation; the kind of move that something sent belongs to.
      bytes: that are sent.
      target: where they are sent.
    """

    device: str
    kind: str
    type: str
    bytes: int = 0
    target: str = ""


@dataclass(frozen=True)
class GraphTasks:
    """An emitted graph, as a machine has to run it.

    Attributes:
      tasks: all of them.
      placed: what each is.
      buffers: what they make.
      resources: what they use.
      arguments: bytes of the function's arguments, by device.
      sent_bytes: that are sent between devices.
      unknown: what could only be estimated from below, one sentence each.
      given: how many tensors a call gives to the graph, the handles of variables among them.
    """

    tasks: tuple[Task, ...] = field(repr=False)
    placed: tuple[Placed, ...] = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    resources: dict[str, Resource | Threads] = field(repr=False)
    arguments: dict[str, int]
    sent_bytes: int = 0
    unknown: tuple[str, ...] = ()
    given: int = 0
