"""Task costs: how long each task of a plan takes on its device; what is alike is asked once.

Loops and branches take what their bodies do, iteration by iteration, and so do the bytes of the lists that their
iterations fill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.gpus import has_moving_kernel, kernel_devices
from graphsplit.emission.kernels import Kernel, Kernels
from graphsplit.emission.shards.sizes import described_on
from graphsplit.planning.alike_shards import kinds_of_shards
from graphsplit.planning.communication.transfers import Concatenation, Slice
from graphsplit.planning.costs.buffers import kept_each_iteration
from graphsplit.planning.costs.families import FREE, PASSED_ON, family_of
from graphsplit.planning.costs.seconds import Costs, sample_key
from graphsplit.planning.costs.work import Described, Work, bytes_of, is_known, work_of
from graphsplit.planning.plan import Plan
from graphsplit.planning.tasks import OPERATION, PlannedTask, Result
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.program import SIZES, Op, Program
from graphsplit.program.reading.trip_counts import iterations_of


class TaskCost(NamedTuple):
    """What a task takes.

    Attributes:
      type: of the operation that it is, or `"NoOp"`.
      family: of its work.
      seconds: from its start to its end.
      own_s: of that, how long the device works for the operation alone.
      work: of the operation.
    """

    type: str
    family: str = FREE
    seconds: float = 0.0
    own_s: float = 0.0
    work: Work = Work(FREE)


class TaskCosts:
    """How long tasks take.

    Args:
      plan: what runs.
      tasks: all of it.
      costs_on: of single operations on a device.
      note: takes a sentence on what is known only when it runs.
      seconds_of_iteration: how long an iteration of a loop takes that is split over the devices.
    """

    def __init__(
        self,
        plan: Plan,
        tasks: Sequence[PlannedTask],
        costs_on: Callable[[str], Costs],
        note: Callable[[str], None],
        seconds_of_iteration: Callable[[Plan], float],
    ):
        self._plan = plan
        self._tasks = tasks
        self._costs_on = costs_on
        self._unknown_size = costs_on(plan.default_device).unknown_size
        self._note = note
        self._seconds_of_iteration = seconds_of_iteration
        self._kinds = kinds_of_shards(plan)
        self._cost_by_key: dict[object, TaskCost] = {}
        self._on_host: dict[int, bool] = {}
        self._open = {op.index for op in plan.program.ops if not all(map(is_known, _made(op)))}
        self._sizes: dict[int, tuple[int, ...]] = {}
        self._in_lists: dict[tuple[int, int | None], Mapping[int, int]] = {}
        pairs = zip(plan.program.ops, plan.steps, strict=True)
        self._kernels = Kernels(plan, tasks)
        self._differing_ops = {op.index for op, step in pairs if self._kernels.differ(op, step.shards)}

    def of(self, task: PlannedTask) -> TaskCost:
        """Return what a task takes that is not sent."""
        key: object = None
        if task.kind == OPERATION and task.op is not None:
            kind = None if task.shard is None else self._kinds[task.shard]
            key = (task.op, kind, task.shard if task.op in self._differing_ops else None)
            if (known_cost := self._cost_by_key.get(key)) is not None:
                return known_cost
        kernels = self._kernels.of(task)
        key = key or (self._costs_on(task.device), self._dtype(task), self._moved(task), *kernels)
        if key not in self._cost_by_key:
            self._cost_by_key[key] = self._cost(task, kernels) if kernels else TaskCost("NoOp")
        return self._cost_by_key[key]

    def runs_on_host(self, task: PlannedTask) -> bool:
        """Return whether GPUs have no kernel for what a task becomes, with its types."""
        ops = self._plan.program.ops
        is_op = task.kind == OPERATION and task.op is not None and ops[task.op].type != SIZES
        if not is_op:
            return not has_moving_kernel(self.of(task).type, self._dtype(task), "GPU")
        op = ops[task.op or 0]
        if op.index not in self._on_host:
            self._on_host[op.index] = "GPU" not in kernel_devices(op.node)
        return self._on_host[op.index]

    def bytes(self, result: Result) -> int:
        """Return the size of a result: as planned, or if it follows from data, with what such sizes count as."""
        task = self._tasks[result.task]
        if task.op not in self._open:
            return task.bytes[result.index]
        if result.task not in self._sizes:
            self._sizes[result.task] = self._sizes_of(task)
        return self._sizes[result.task][result.index]

    def is_open(self, task: PlannedTask) -> bool:
        """Return whether the size of what a task makes follows from data."""
        return task.op in self._open

    def bytes_in_lists(self, task: PlannedTask) -> Mapping[int, int]:
        """Return the bytes of the lists of tensors that a loop returns, by output; nothing for other tasks."""
        op = self._plan.program.ops[task.op] if task.kind == OPERATION and task.op is not None else None
        if op is None or not op.bodies:
            return {}
        if (op.index, task.shard) not in self._in_lists:
            plans, d = self._plans(op, task.shard)
            self._in_lists[op.index, task.shard] = bytes_in_lists(op, plans, self._plan.rows, d, self._unknown_size)
        return self._in_lists[op.index, task.shard]

    def _sizes_of(self, task: PlannedTask) -> tuple[int, ...]:
        bytes_read = [self.bytes(result) for result in task.reads if result is not None]
        if task.kind == OPERATION and task.op is not None:
            _, makes = self._described(self._plan.program.ops[task.op], task.shard)
            return tuple([bytes_of(tensor, self._unknown_size) for tensor in makes])[: len(task.bytes)]
        if isinstance(task.value, Concatenation):
            return (sum(bytes_read),)
        pieces = len(task.bytes) if isinstance(task.value, Slice) else 1
        return (max(bytes_read, default=0) // pieces,) * len(task.bytes)

    def _cost(self, task: PlannedTask, kernels: Sequence[Kernel]) -> TaskCost:
        (first, *more_kernels), costs = kernels, self._costs_on(task.device)
        family, is_own = family_of(first.type), task.kind == OPERATION and task.op is not None
        if family in (FREE, PASSED_ON):
            work, own_s = Work(family), 0.0
            seconds = costs.seconds(work)
        elif is_own:
            time, work = self._of_operation(self._plan.program.ops[task.op or 0], task.shard, first.type, costs)
            self._note(time.unknown)
            family, own_s = work.family, time.seconds
            seconds = own_s if self._plan.program.ops[task.op or 0].bodies else costs.started(own_s)
        else:
            work = self._work_of(first, task)
            own_s = costs.own_s(work, f"{first.type} {int(work.bytes)} B")
            seconds = costs.started(own_s)
        for kernel in more_kernels:
            beside = self._work_of(kernel, task)
            is_free = beside.family in (FREE, PASSED_ON)
            seconds += costs.seconds(beside) if is_free else costs.started(costs.own_s(beside))
        return TaskCost(first.type, family, seconds, own_s, work)

    def _work_of(self, kernel: Kernel, task: PlannedTask) -> Work:
        """Return the work of an operation that is none of the program: it goes over what it reads and makes once."""
        dtype, family, moved = self._dtype(task), family_of(kernel.type), self._moved(task) or kernel.bytes
        made_bytes = sum(self._sizes_of(task) if self.is_open(task) else task.bytes)
        flops = (
            max(moved - 2 * made_bytes, min(moved, made_bytes)) / (dtype.size or 4) if family == "elementwise" else 0.0
        )
        return Work(family, dtype.name, flops, moved)

    def _dtype(self, task: PlannedTask) -> tf.DType:
        dtypes = () if task.op is None else self._plan.program.ops[task.op].out_dtypes
        return dtypes[0] if dtypes else tf.float32

    def _moved(self, task: PlannedTask) -> int:
        """Return the bytes that a value of a move reads and writes whose size follows from data; 0 for others."""
        if task.op not in self._open or task.kind == OPERATION:
            return 0
        return sum(self._sizes_of(task)) + sum([self.bytes(result) for result in task.reads if result is not None])

    def _of_operation(self, op: Op, d: int | None, op_type: str, costs: Costs) -> tuple[BodyTime, Work]:
        """Return how long the device works for an operation, and the work."""
        if op.bodies:
            return self._of_bodies(op, d, costs), Work("other")
        reads, makes = self._described(op, d)
        is_sampled, work = bool(costs.device.samples), work_of(op_type, op.attr, reads, makes, self._unknown_size)
        unknown = f"the sizes of {op.type} {op.name!r} are known only when it runs" if work.is_least else ""
        sample = sample_key(op.node, reads, makes).partition(" ")[2] if is_sampled else ""
        return BodyTime(costs.own_s(work, f"{op_type} {sample}" if is_sampled else ""), unknown), work

    def _of_bodies(self, op: Op, d: int | None, costs: Costs) -> BodyTime:
        """Return how long the functions take that an operation runs."""
        bodies = self._plan.steps[op.index].bodies
        if d is not None or not bodies:
            plans, shard = self._plans(op, d)
            return seconds_of_bodies(op, plans, self._plan.rows, shard, costs)
        seconds = sum([self._seconds_of_iteration(plan) for plan in bodies.values()])  # they are split over the devices
        iterations = iterations_of(op)
        if iterations is None:
            return BodyTime(seconds, f"how often {op.type} {op.name!r} iterates is known only when it runs")
        return BodyTime(int(iterations.number) * seconds)

    def _plans(self, op: Op, d: int | None) -> tuple[Mapping[str, object], int | None]:
        """Return how a shard runs the functions of an operation, and which it is; on whole tensors, none."""
        shards = self._plan.steps[op.index].shards
        plans = shards.bodies if d is not None and shards else {}
        return plans, d if plans else None

    def _described(self, op: Op, d: int | None) -> tuple[Sequence[Described], Sequence[Described]]:
        """Return what an operation reads and makes, on a shard or (None) once."""
        return described_on(self._plan.program, op, self._plan.steps[op.index].shards, self._plan.rows, d)


def _made(op: Op) -> Sequence[Described]:
    return list(zip(op.out_shapes, op.out_dtypes, strict=True))


_ITERATION_OPS = 3  # `Switch`, `Merge` and `NextIteration` of each value that a loop carries, in every iteration


@dataclass(frozen=True)
class BodyTime:
    """How long a loop or branch takes.

    Attributes:
      seconds: in all iterations.
      unknown: why that is only the least; "" if it is known.
    """

    seconds: float
    unknown: str = ""


def seconds_of_bodies(op: Op, plans: Mapping[str, Any], rows: tuple[int, ...], d: int | None, costs: Costs) -> BodyTime:
    """Return how long an operation takes that runs functions: all iterations of a loop, the longest branch.

    Args:
      op: the loop, branch or call.
      plans: the plans by which the shard runs its functions, by name; empty where they run on whole tensors.
      rows: of every shard.
      d: which shard; None for whole tensors.
      costs: of single operations.
    """
    times = [_seconds_of_body(body, plans.get(name), rows, d, costs) for name, body in op.bodies.items()]
    unknown = next((time.unknown for time in times if time.unknown), "")
    flow = CONTROL_FLOW.get(op.type)
    if flow is None or not flow.loops:
        branches = flow is not None and len(times) > 1
        return BodyTime((max if branches else sum)([time.seconds for time in times]), unknown)
    iterations = iterations_of(op)
    carried = _ITERATION_OPS * len(op.inputs) * costs.device.overhead_s
    iteration_s = sum([time.seconds for time in times]) + carried
    if iterations is None:
        return BodyTime(iteration_s, f"how often {op.type} {op.name!r} iterates is known only when it runs")
    return BodyTime(int(iterations.number) * iteration_s, unknown)


def _seconds_of_body(body: Program, plan: Any, rows: tuple[int, ...], d: int | None, costs: Costs) -> BodyTime:
    seconds, unknown = 0.0, ""
    for op, plans, reads, makes in body_operations(body, plan, rows, d):
        if op.bodies:
            inner = seconds_of_bodies(op, plans, rows, d, costs)
            seconds, unknown = seconds + inner.seconds, unknown or inner.unknown
            continue
        work = work_of(op.type, op.attr, reads, makes, costs.unknown_size)
        seconds += costs.seconds(work, sample_key(op.node, reads, makes))
        if work.is_least:
            unknown = unknown or f"the sizes of {op.type} {op.name!r} are known only when it runs"
    return BodyTime(seconds, unknown)


class BodyOperation(NamedTuple):
    """An operation of a function that a loop, branch or call runs.

    Attributes:
      op: of the function.
      plans: how it runs functions in each iteration, by name.
      reads, makes: shapes and dtypes, of the shard's part.
    """

    op: Op
    plans: Mapping[str, Any]
    reads: Sequence[Described]
    makes: Sequence[Described]


def body_operations(body: Program, plan: Any, rows: tuple[int, ...], d: int | None) -> Iterator[BodyOperation]:
    """Yield what runs of a function: see `seconds_of_bodies`."""
    for i, op in enumerate(body.ops):
        step = plan.steps[i] if plan is not None else None
        sharded = step.shards if step is not None else None
        if step is not None and not (step.once or sharded):
            continue
        yield BodyOperation(op, sharded.bodies if sharded else {}, *described_on(body, op, sharded, rows, d))


def bytes_in_lists(
    op: Op, plans: Any, rows: tuple[int, ...], d: int | None, unknown_size: int | None
) -> dict[int, int]:
    """Return what a loop has put into the lists that it returns, by output; nothing for others than loops.

    Args:
      op: the operation that runs functions.
      plans: the plans by which the shard runs its functions, by name; empty where they run on whole tensors.
      rows: of every shard.
      d: which shard; None for whole tensors.
      unknown_size: what sizes count as that are not known.
    """
    iterations = iterations_of(op)
    if iterations is None:
        return {}
    plan = plans.get(function_names(op.node)[1])

    def size_of(body: Program, reader: Op, operand: int) -> int:
        sharded = plan.steps[reader.index].shards if plan is not None else None
        reads, _ = described_on(body, reader, sharded, rows, d)
        return bytes_of(reads[operand], unknown_size)

    return {k: int(iterations.number) * size for k, size in kept_each_iteration(op, size_of).items()}
