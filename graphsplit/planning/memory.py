"""Memory: how many bytes are alive on each device at a time, while a plan runs once in its own order.

Counted is what operations make: activations, gradients, what is moved. Arguments, variables and constants are there
before. What a kernel needs besides is not known, and an operation that writes its result over its operand is counted
with both.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from graphsplit.core.layouts import Partial, Shard, SingleDevice, is_whole
from graphsplit.planning.decisions import Decisions, flow_of
from graphsplit.planning.phases import find_phases
from graphsplit.planning.steps import Move
from graphsplit.planning.turns import find_turns
from graphsplit.program.program import COPIES, Op, Tensor

_SAME_BUFFER = frozenset(
    {
        *("CheckNumerics", "EnsureShape", "ExpandDims", "Identity", "PreventGradient", "Reshape", "Squeeze"),
        *("StopGradient", COPIES),
    }
)
_NO_BUFFER = frozenset({"Const", "Placeholder", "ReadVariableOp", "Sizes"})


def live_bytes(plan: Decisions, shards: Collection[int] | None = None) -> dict[str, int]:
    """Return the most bytes that are alive at a time on each device; sizes that are not known count as planned.

    Args:
      plan: what runs.
      shards: which of them run, beside what runs once; None: all.
    """
    return _Replay(plan, range(plan.mesh.shards) if shards is None else shards).most()


def held_bytes(plan: Decisions) -> int:
    """Return the most bytes that the shards hold while all of them wait for each other."""
    level = {i: phase.level for phase in plan.phases for i in phase.ops}
    last: dict[Tensor, int] = {}
    for op in plan.sharded_ops:
        for tensor in _own(plan, op):
            last[tensor] = max(level[op.index], last.get(tensor, 0))
    held = [(level[t.op], p, plan.program.bytes(t)) for t, p in last.items() if _has_buffer(plan.program.ops[t.op])]
    waits = sorted({phase.level for phase in plan.phases})
    return max([sum([size for first, p, size in held if first <= wait < p]) for wait in waits], default=0)


def _has_buffer(op: Op) -> bool:
    return op.type not in _NO_BUFFER and op.type not in _SAME_BUFFER


def _own(plan: Decisions, op: Op) -> Iterator[Tensor]:
    """Return what a shard reads of what it made itself."""
    shards = plan.steps[op.index].shards
    assert shards is not None
    for i, (tensor, want) in enumerate(zip(op.inputs, shards.wants, strict=True)):
        made = plan.steps[tensor.op].shards
        if i not in shards.makes and made is not None and made.gives[tensor.index] == want:
            yield tensor


Place = int | str | None  # the shard that has a value, or the device that has it whole; None: where it is made whole


@dataclass(frozen=True)
class _Buffer:
    tensor: Tensor
    place: Place


class _Replay:
    """Every operation in the order of the plan, and when what it makes is needed last."""

    def __init__(self, plan: Decisions, shards: Collection[int]):
        self._plan = plan
        self._shards = shards
        self._ops = plan.program.ops
        self._first = [d for d in range(plan.mesh.shards) if plan.mesh.before(d) is None]
        sources = (move for move in plan.moves if not is_whole(move.source) and is_whole(move.target))
        self._put_together: dict[Tensor, Move] = {move.tensor: move for move in sources}
        self._uses: dict[_Buffer, list[int]] = {}

    @functools.cached_property
    def _run(self) -> list[tuple[int, int | None]]:
        return list(self._copies())

    def most(self) -> dict[str, int]:
        """Return the most bytes on each device."""
        self._note_uses()
        alive: dict[str, int] = {}
        most: dict[str, int] = {}
        ends: dict[int, list[tuple[str, int]]] = {}
        made: set[_Buffer] = set()
        for n, (i, d) in enumerate(self._run):
            op = self._ops[i]
            outputs = [_Buffer(Tensor(i, k), d) for k in range(len(op.out_shapes))]
            for buffer in [*self._reads(op, d), *outputs]:
                root = self._root(buffer)
                if root in made or not (_has_buffer(self._ops[root.tensor.op]) or self._is_sent(root)):
                    continue
                made.add(root)
                device, size = self._size(root)
                alive[device] = alive.get(device, 0) + size
                ends.setdefault(max(self._uses.get(root, [n])), []).append((device, size))
                most[device] = max(most.get(device, 0), alive[device])
            for device, size in ends.pop(n, ()):
                alive[device] -= size
        return most

    def _note_uses(self) -> None:
        for n, (i, d) in enumerate(self._run):
            for buffer in self._reads(self._ops[i], d):
                self._uses.setdefault(self._root(buffer), []).append(n)
        for tensor, move in self._put_together.items():
            self._keep_parts(tensor, move)

    def _copies(self) -> Iterator[tuple[int, int | None]]:
        """Return what runs, in order: what runs once as soon as the shards are ready for it, then phase by phase."""
        plan = self._plan
        flow, phases, turns = flow_of(plan), plan.phases, plan.turns
        if not phases:
            phases = find_phases(flow, plan.collectives)
            turns = find_turns(plan.program, phases, plan.mesh, {})
        level = {i: phase.level for phase in phases for i in phase.ops}
        after, once = [-1] * len(self._ops), list[tuple[int, int]]()
        for op in plan.home_ops:
            found = [level[s.op] if s.on_shards else after[s.op] for s in flow.of_whole(op.index)]
            after[op.index] = max(found, default=-1)
            once.append((after[op.index], op.index))
        once.sort(reverse=True)
        for turn in turns:
            while once and once[-1][0] < phases[turn.phase].level:
                yield once.pop()[1], None
            if turn.shard in self._shards:
                yield from ((i, turn.shard) for i in phases[turn.phase].ops)
        yield from ((i, None) for _, i in reversed(once))

    def _reads(self, op: Op, d: int | None) -> Iterator[_Buffer]:
        if d is None:
            yield from (_Buffer(tensor, None) for tensor in op.inputs)
            return
        own, shards = set(_own(self._plan, op)), self._plan.steps[op.index].shards
        assert shards is not None
        nearest = self._plan.program.nearest(op, self._plan.shard_device(op, d)) if op.type == COPIES else None
        for i, tensor in enumerate(op.inputs):
            if i not in shards.makes and nearest in (None, tensor):
                yield _Buffer(tensor, d if tensor in own else self._sent(op, tensor, shards.wants[i], d))

    def _sent(self, op: Op, tensor: Tensor, want: object, d: int) -> Place:
        """Return where shard `d` reads a whole value, or its piece of one: where that is made, or what was sent."""
        device = self._plan.shard_device(op, d)
        if device == self._device(_Buffer(tensor, None)):
            return None
        return d if isinstance(want, Shard) else device

    def _root(self, buffer: _Buffer) -> _Buffer:
        """Return the buffer that a value shares."""
        while True:
            op, d = self._ops[buffer.tensor.op], buffer.place
            moved = d is None and buffer.tensor in self._put_together
            if op.type not in _SAME_BUFFER or moved or isinstance(d, str):
                return buffer
            if d is None:
                buffer = _Buffer(op.inputs[0], None)
            elif self._plan.steps[op.index].shards is None:
                return buffer
            else:
                buffer = next(self._reads(op, d))

    def _keep_parts(self, tensor: Tensor, move: Move) -> None:
        """Keep what the shards give until it is put together; sums are added up as they come."""
        uses = self._uses.get(_Buffer(tensor, None), [])
        if not uses:
            return
        added_up = isinstance(move.source, Partial)
        for d in self._first if added_up else self._shards:
            last = max(uses) if added_up and len(self._first) == 1 else min(uses)
            self._uses.setdefault(self._root(_Buffer(tensor, d)), []).append(last)

    def _is_sent(self, buffer: _Buffer) -> bool:
        """Return whether a buffer is what a device was sent of a variable that lives on another one."""
        return isinstance(buffer.place, str) and self._ops[buffer.tensor.op].type == "ReadVariableOp"

    def _size(self, buffer: _Buffer) -> tuple[str, int]:
        """Return the device of a buffer, and its bytes."""
        plan, tensor, d = self._plan, buffer.tensor, buffer.place
        size, device = plan.program.bytes(tensor), self._device(buffer)
        if isinstance(d, int):
            shards = plan.steps[tensor.op].shards
            if shards is None or isinstance(shards.gives[tensor.index], Shard):
                size = round(size * plan.mesh.share(d))
        elif d is None and tensor in self._put_together:
            added_up = isinstance(self._put_together[tensor].source, Partial)
            size *= not (added_up and len(self._first) == 1)
        return device, size

    def _device(self, buffer: _Buffer) -> str:
        plan, tensor, d = self._plan, buffer.tensor, buffer.place
        if isinstance(d, str):
            return d
        if d is not None:
            return plan.shard_device(self._ops[tensor.op], d)
        if tensor in self._put_together:
            target = self._put_together[tensor].target
            return (target.device if isinstance(target, SingleDevice) else "") or plan.home
        return plan.owners.of_ops[tensor.op] or plan.home
