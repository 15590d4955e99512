"""Buffers: which bytes are alive on each device at a time, given when every task ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from graphsplit.core.intervals import alive
from graphsplit.simulate.prediction.replay import TaskTimes


class Buffer(NamedTuple):
    """What a task makes and others read.

    Attributes:
      name: for people.
      device: where it lies.
      bytes: how large it is.
      maker: the position of the task that makes it.
      readers: those that read it.
      onto: buffers over which its maker may write it, if nobody reads them any more: operands of its size.
      kept: whether it is there until the end: it is returned.
    """

    name: str
    device: str
    bytes: int
    maker: int
    readers: tuple[int, ...] = ()
    onto: tuple[int, ...] = ()
    kept: bool = False


@dataclass(frozen=True)
class Memory:
    """What one device holds.

    Attributes:
      state_bytes: variables that live there.
      argument_bytes: the function's arguments that lie there.
      live_bytes: the most that is alive at a time of what operations make and what is sent.
      largest: what is alive then, largest first, with its bytes.
      steps: how the live bytes change: (time, bytes from then on).
    """

    state_bytes: int = 0
    argument_bytes: int = 0
    live_bytes: int = 0
    largest: tuple[tuple[str, int], ...] = ()
    steps: tuple[tuple[float, int], ...] = field(default=(), repr=False)

    @property
    def peak_bytes(self) -> int:
        """The most that it holds at a time."""
        return self.state_bytes + self.argument_bytes + self.live_bytes


_LARGEST = 8
_PIECE_BYTES = 256


def allocated(count: int) -> int:
    """Return how many bytes TensorFlow's allocators hand out for so many: a multiple of 256 (`bfc_allocator.h`).

    >>> allocated(4), allocated(1024)
    (256, 1024)
    """
    return -(-count // _PIECE_BYTES) * _PIECE_BYTES


def live_memory(buffers: Sequence[Buffer], schedule: TaskTimes) -> dict[str, Memory]:
    """Return what is alive on each device: each buffer from its maker's start to the end of its last reader."""
    spans_by_device: dict[str, dict[int, tuple[float, float]]] = {}
    for k, span in _spans(buffers, schedule).items():
        spans_by_device.setdefault(buffers[k].device, {})[k] = span
    return {device: _memory_of(spans, buffers) for device, spans in spans_by_device.items()}


def _memory_of(spans: Mapping[int, tuple[float, float]], buffers: Sequence[Buffer]) -> Memory:
    steps = alive([(*span, buffers[k].bytes) for k, span in spans.items()])
    at, most = max(steps, key=lambda step: step[1])
    alive_at_peak = [buffers[k] for k, (start, end) in spans.items() if start <= at < end]
    largest = sorted([(-buffer.bytes, buffer.name) for buffer in alive_at_peak])[:_LARGEST]
    return Memory(live_bytes=most, largest=tuple([(name, -size) for size, name in largest]), steps=tuple(steps))


def _spans(buffers: Sequence[Buffer], schedule: TaskTimes) -> dict[int, tuple[float, float]]:
    """Return from when to when each buffer is alive; one that is written over another prolongs that."""
    ends = [_last_read(buffer, schedule) for buffer in buffers]
    root = list(range(len(buffers)))
    over = [k for k, buffer in enumerate(buffers) if buffer.onto]
    for k in sorted(over, key=lambda k: (schedule.starts[buffers[k].maker], buffers[k].maker)):
        buffer = buffers[k]
        for other in buffer.onto:
            under = root[other]
            if buffers[under].kept or ends[under] > schedule.ends[buffer.maker]:
                continue  # returned, or read by others later
            if any(
                schedule.ends[i] > schedule.starts[buffer.maker] for i in buffers[other].readers if i != buffer.maker
            ):
                continue
            root[k] = under
            ends[under] = max(ends[under], ends[k])
            break
    allocated_buffers = (k for k in range(len(buffers)) if root[k] == k and buffers[k].bytes)
    return {k: (schedule.starts[buffers[k].maker], ends[k]) for k in allocated_buffers}


def _last_read(buffer: Buffer, schedule: TaskTimes) -> float:
    made_s = schedule.ends[buffer.maker]
    if buffer.kept:
        return max(schedule.seconds, made_s)
    return max(made_s, max([schedule.ends[i] for i in buffer.readers], default=0.0))


def most_memory(memories: Sequence[Mapping[str, Memory]]) -> dict[str, Memory]:
    """Return of each device that in which most is alive."""
    names = dict.fromkeys([device for memory in memories for device in memory])
    return {
        device: max([memory[device] for memory in memories if device in memory], key=lambda usage: usage.live_bytes)
        for device in names
    }


def with_state(
    memory: Mapping[str, Memory], state: Mapping[str, int], arguments: Mapping[str, int]
) -> dict[str, Memory]:
    """Return what devices hold, with the variables and arguments that lie there."""
    names = dict.fromkeys([*memory, *state, *arguments])
    return {
        d: replace(memory.get(d, Memory()), state_bytes=state.get(d, 0), argument_bytes=arguments.get(d, 0))
        for d in names
    }
