"""How much of a plan's work runs on the shards, how evenly devices work, and what keeps the rest on one device.

Times come from a model of one machine, and are only compared with each other.

Shares count everything that runs, optimizers and reductions included, each operation once, and say what of the batch
does not run on the shards, whichever way it came there. The balance counts what each device does: an operation that
runs on every device counts on each. What runs once and follows from rows has a cause: the first operation on its way
that made or read them there. Rows are known by where they come from: they were gathered, or born in an operation from
nothing that had them, and they last as long as an axis has the batch's length, or a multiple of it; or, behind an
operation that picks some of them, as many as it picks, which may not be known. What follows from variables alone has
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphsplit.core.layouts import Layout, Partial, Shard
from graphsplit.core.sizes import is_one, is_same, quotient
from graphsplit.planning.costs.seconds import seconds_of
from graphsplit.planning.costs.work import data_in, flops_of, has_uncounted_flops
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.places import Places
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.reading.trip_counts import times_run

_BORN = "rows are made in it, and too little work follows to split them"
_FOLLOWS = "it reads rows that are whole"


@dataclass(frozen=True)
class Cause:
    """Why work on the batch runs once.

    Attributes:
      op: the first operation there that makes or reads rows.
      reason: why it runs once.
      followers: what follows from it, runs once and has rows.
      flops: of all of these.
      is_most: whether they are so many if all rows are picked of which data tell how many are, or fewer.
      uncounted: of these operations those whose floating-point operations are not counted, as ranks are not known.
    """

    op: Op
    reason: str
    followers: tuple[Op, ...]
    flops: int
    is_most: bool = False
    uncounted: tuple[Op, ...] = ()

    @property
    def counts(self) -> bool:
        """Whether it is any arithmetic, as far as that is known."""
        return bool(self.flops or self.uncounted)


@dataclass(frozen=True)
class Shares:
    """What runs where, of all that runs: sharded on the shards, the rest once, on whole values.

    Attributes:
      flops, sharded_flops: floating-point operations, bodies of loops in each iteration, where their number is known.
      bytes, sharded_bytes: of all results.
      seconds, sharded_seconds: on a reference device; of what runs on the shards and once, on the shards.
      causes: of work on the batch that runs once, those of the costliest first.
      by_device: floating-point operations of each device.
      without_rows: those of what runs once and follows from no rows there, by type: optimizers, what is made of sums.
      without_rows_on: the same by device.
    """

    flops: int
    sharded_flops: int
    bytes: int
    sharded_bytes: int
    seconds: float
    sharded_seconds: float
    causes: tuple[Cause, ...]
    by_device: Mapping[str, float]
    without_rows: Mapping[str, float]
    without_rows_on: Mapping[str, float]

    @property
    def are_most(self) -> bool:
        """Whether the sharded share is at most this much: something on the default device is not counted."""
        return any(cause.uncounted for cause in self.causes)

    @property
    def run_once(self) -> float:
        """The share of all floating-point operations that work on the batch and run once."""
        return sum(cause.flops for cause in self.causes) / self.flops if self.flops else 0.0


def shares_of(plan: Decisions) -> Shares:
    """Return how much of a plan runs on the shards, and what keeps the rest of the work on the batch from it."""
    counted: list[Any] = [0] * len(_COUNTED)
    finder = _Causes(plan)
    causes = finder.causes()
    by_device: dict[str, float] = {}
    without_rows: dict[str, float] = {}
    without_rows_on: dict[str, float] = {}
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if step.bodies:
            inside, times = [shares_of(body) for body in step.bodies.values()], times_run(op) or 1
            amounts = [times * sum([getattr(body_shares, name) for body_shares in inside]) for name in _COUNTED]
            causes += [
                replace(cause, flops=times * cause.flops) for body_shares in inside for cause in body_shares.causes
            ]
            _add(
                by_device,
                *[(device, times * flops) for body_shares in inside for device, flops in body_shares.by_device.items()],
            )
            _add(
                without_rows,
                *[(kind, times * flops) for body_shares in inside for kind, flops in body_shares.without_rows.items()],
            )
            _add(
                without_rows_on,
                *[(on, times * flops) for body_shares in inside for on, flops in body_shares.without_rows_on.items()],
            )
        elif step.once or step.shards:
            sharded, flops, own_bytes = not step.once, finder.flops(op), sum(op.out_bytes)
            seconds = seconds_of(plan.program, op) * (times_run(op) or 1)
            on_shards = (flops * sharded, own_bytes * sharded, seconds * bool(step.shards))
            amounts = [flops, own_bytes, seconds, *on_shards]
            _add(by_device, *_on_devices(plan, op, flops))
            if not sharded and flops and not finder.is_blamed(op):
                _add(without_rows, (op.type, flops))
                _add(without_rows_on, *_on_devices(plan, op, flops))
        else:
            continue
        counted = [a + b for a, b in zip(counted, amounts, strict=True)]
    causes.sort(key=lambda cause: -cause.flops)
    counts = dict(zip(_COUNTED, counted, strict=True))
    return Shares(
        **counts,
        causes=tuple(causes),
        by_device=by_device,
        without_rows=without_rows,
        without_rows_on=without_rows_on,
    )


def _add(amounts: dict[str, float], *device_amounts: tuple[str, float]) -> None:
    for device, amount in device_amounts:
        amounts[device] = amounts.get(device, 0.0) + amount


def _on_devices(plan: Decisions, op: Op, flops: int) -> Iterator[tuple[str, float]]:
    """Return how many of an operation's floating-point operations each device does."""
    step, mesh = plan.steps[op.index], plan.mesh
    if step.once:
        yield from [(device, float(flops)) for device in plan.places.once(op)]
    if step.shards:
        is_cut = any(isinstance(layout, (Shard, Partial)) for layout in (*step.shards.wants, *step.shards.gives))
        yield from [
            (shard_device, flops * (mesh.share(d) if is_cut else 1))
            for d, shard_device in enumerate(plan.places.on_shards(op))
        ]


_COUNTED = ("flops", "bytes", "seconds", "sharded_flops", "sharded_bytes", "sharded_seconds")


class _Causes:
    """Follows rows through what runs once."""

    def __init__(self, plan: Decisions):
        self._plan = plan
        self._program: Program = plan.program
        self._blamed: dict[int, int] = {}  # operations that run once that have rows -> their cause
        self._picked: dict[int, list[Any]] = {}  # causes -> how many rows are picked in it and behind it
        self._most: dict[int, int] = {}  # causes -> how many these are at most: all that are read
        self._has_data = data_in(plan.program, plan.batch)

    def causes(self) -> list[Cause]:
        plan = self._plan
        if not plan.mesh.shards or plan.devices == (plan.default_device,):
            return []
        kept_ids = set(map(id, plan.rows_kept))
        for op, step in zip(plan.program.ops, plan.steps, strict=True):
            # (rows are looked up where their table is, or a part of it)
            is_beside = op.device or op.index in plan.owners.groups
            if step.once and not step.bodies and not step.for_rows and not is_beside and id(op) not in kept_ids:
                cause = self._cause_of(op)
                if cause is not None:
                    self._blamed[op.index] = cause
                    self._note_picked(op, cause)
        groups: dict[int, list[Op]] = {}
        for position, cause in self._blamed.items():
            groups.setdefault(cause, []).append(self._program.ops[position])
        return [self._cause(self._program.ops[first], ops) for first, ops in groups.items()]

    def is_blamed(self, op: Op) -> bool:
        """Return whether an operation is one of the causes, or follows from one."""
        return op.index in self._blamed

    def flops(self, op: Op) -> int:
        """Return the floating-point operations of one that runs; what picks rows counts as if it picked all."""
        cause = self._blamed.get(op.index)
        return flops_of(op, None if cause is None else self._most[cause]) * (times_run(op) or 1)

    def _cause(self, first: Op, ops: list[Op]) -> Cause:
        is_most = any(flops_of(op) * (times_run(op) or 1) != self.flops(op) for op in ops)
        reads = any(self._made_in_pieces(tensor) for tensor in first.inputs)
        reason = self._plan.steps[first.index].reason or (_FOLLOWS if reads else _BORN)
        most = self._most[self._blamed[first.index]]
        uncounted = tuple([op for op in ops if has_uncounted_flops(op, most)])
        followers = tuple([op for op in ops if op is not first])
        return Cause(first, reason, followers, sum(map(self.flops, ops)), is_most, uncounted)

    def _cause_of(self, op: Op) -> int | None:
        """Return the operation that is to blame for the rows that one that runs once has, if it has any."""
        if op.is_constant or op.type == "Placeholder":
            return None
        blamed = [self._blamed[t.op] for t in op.inputs if t.op in self._blamed and self._has_rows_behind(t)]
        if blamed:
            return blamed[0]
        if self._plan.steps[op.index].reason or any(self._made_in_pieces(tensor) for tensor in op.inputs):
            return op.index
        is_captured = any(self._is_captured(t) for i, t in enumerate(op.inputs) if i not in op.constants)
        born = self._has_data[op.index] and not any(self._has_data[tensor.op] for tensor in op.inputs)
        rows = any(self._has_rows(Tensor(op.index, k), exactly=True) for k in range(len(op.out_shapes)))
        return op.index if is_captured or (born and rows and not self._plan.steps[op.index].shards) else None

    def _made_in_pieces(self, tensor: Tensor) -> bool:
        step = self._plan.steps[tensor.op]
        if step.for_rows:
            return not step.for_rows.adds
        return isinstance(self._layout(tensor), Shard)

    def _has_rows_behind(self, tensor: Tensor) -> bool:
        """Return whether what follows from a cause has rows: all of them, or as many as were picked."""
        shape, picked = self._program.shape(tensor), self._picked[self._blamed[tensor.op]]
        if shape is None or None in shape or self._has_rows(tensor):
            return True
        return any(is_same(size, length) for size in shape for length in picked)

    def _note_picked(self, op: Op, cause: int) -> None:
        """Note how many rows an operation that follows from a cause picks of those that it reads, and how many at most.

        Their axis is as long as the batch, or that on which they were in pieces.
        """
        picked, most = self._picked.setdefault(cause, []), int(self._plan.batch)
        for layout in [layout for t in op.inputs if isinstance(layout := self._layout(t), Shard)]:
            most = max(most, int(layout.size(self._plan.batch)))
            lengths = [shape[layout.axis] for shape in op.out_shapes if shape and layout.axis < len(shape)]
            picked += [length for length in lengths if not is_one(length)]
        self._most[cause] = max(most, self._most.get(cause, 0))

    def _layout(self, tensor: Tensor) -> Layout | None:
        step = self._plan.steps[tensor.op]
        return None if step.once or step.shards is None else step.shards.gives[tensor.index]

    def _is_captured(self, tensor: Tensor) -> bool:
        """Return whether a tensor is a capture or a constant with the batch's rows. (No argument: see `split`.)"""
        op = self._program.ops[tensor.op]
        captured = op.is_constant or tensor.op in self._program.captures
        return captured and self._has_rows(tensor, exactly=True)

    def _has_rows(self, tensor: Tensor, exactly: bool = False) -> bool:
        shape, batch = self._program.shape(tensor), self._plan.batch
        if exactly:
            return any(is_same(size, batch) for size in shape or ())
        counts = [quotient(size, batch) for size in shape or () if size is not None]
        return any(isinstance(count, int) and count > 0 for count in counts)


def devices_of_shards(plan: Decisions) -> tuple[str, ...]:
    """Return the devices that run sharded operations: of shards, their columns and their stages."""
    devices: dict[str, None] = {}
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if step.shards:
            devices.update(dict.fromkeys(_devices_of(op, plan.places)))
        for body in step.bodies.values():
            devices.update(dict.fromkeys(devices_of_shards(body)))
    return tuple(devices)


def computing_devices(plan: Decisions) -> tuple[str, ...]:
    """Return the devices that a plan is for: those that run sharded operations, or those that were asked for."""
    return devices_of_shards(plan) or plan.default_devices


def balance_of(shares: Shares, devices: Sequence[str]) -> float:
    """Return what devices compute over their number times what the busiest computes: 1 if all compute alike.

    Everything counts that a device computes, also what others compute as well; what carries out moves does not.
    """
    most = max(shares.by_device.values(), default=0.0) * len(devices)
    return sum(shares.by_device.values()) / most if most else 1.0


def _devices_of(op: Op, places: Places) -> Iterator[str]:
    """Yield the devices on which shards run an operation, and what it calls."""
    yield from places.on_shards(op)
    for body in op.bodies.values():
        for inner in body.ops:
            yield from _devices_of(inner, places.within(op))
