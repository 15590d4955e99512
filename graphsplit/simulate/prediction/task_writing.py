"""What a plan runs, as a machine has to run it: its tasks on streams, links and threads, and what they hold.

`Routes` say which links a tensor takes from one device to another, and how long each is busy with it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphsplit.core.garbage_collection import collection_paused
from graphsplit.planning.chains import SIGNAL
from graphsplit.planning.communication.transfers import Concatenation, Slice
from graphsplit.planning.costs.buffers import SAME_BUFFER
from graphsplit.planning.costs.families import FREE
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.seconds import Costs
from graphsplit.planning.device_bytes import held_inside, result_buffers, sides_of_tasks
from graphsplit.planning.plan import Plan
from graphsplit.planning.tasks import COPY, HANDED_ON, OPERATION, SEND, PlannedTask, Result
from graphsplit.planning.waits import TURN, ordered_tasks_of
from graphsplit.program.sides import EVERYWHERE, Side
from graphsplit.simulate.prediction.buffers import Buffer, allocated
from graphsplit.simulate.prediction.compiled_work import Member, compiled_together, work_of_call
from graphsplit.simulate.prediction.replay import Resource, Task, replay
from graphsplit.simulate.prediction.taken_sides import longer_sides, other_choices, with_sides_taken
from graphsplit.simulate.prediction.task_costs import TaskCost, TaskCosts


@dataclass(frozen=True)
class MachineTasks:
    """What a plan runs, as a machine has to run it.

    Attributes:
      tasks: all of them; those on sides of branches that are not taken do nothing.
      buffers: what they make.
      resources: what they use.
      arguments: bytes of the function's arguments, by device.
      sent_bytes: that are sent between devices.
      unknown: what could only be estimated from below, one sentence each.
      arguments_given: how many tensors a call gives to the graph, the handles of variables among them.
      on_other_sides: the same with other sides of branches taken, until each was.
    """

    tasks: tuple[Task, ...] = field(repr=False)
    buffers: tuple[Buffer, ...] = field(repr=False)
    resources: dict[str, Resource] = field(repr=False)
    arguments: dict[str, int]
    sent_bytes: int = 0
    unknown: tuple[str, ...] = ()
    arguments_given: int = 0
    on_other_sides: tuple[MachineTasks, ...] = field(default=(), repr=False)


_OVERWRITES = "elementwise"
_OVERWRITE = frozenset(  # kernels that write a result over their first operand, if nobody else reads that
    {"LogSoftmax", "Softmax", "SoftmaxCrossEntropyWithLogits", "SparseSoftmaxCrossEntropyWithLogits"}
)
_MOST_TASKS = 1 << 40


@collection_paused()
def machine_tasks(plan: Plan, machine: Machine, costs: Costs) -> MachineTasks:
    """Return what a machine has to do for a plan; of branches that are the program's, on the sides that take longer.

    Args:
      plan: what runs; all sizes of its arguments are known.
      machine: its devices have the names of the plan's.
      costs: of single operations on them.
    """
    return _MachineTaskWriter(plan, machine, costs).write()


class _MachineTaskWriter:
    """Writes tasks for a machine: one for each of a plan's, or for those that XLA compiles together; and signals."""

    def __init__(self, plan: Plan, machine: Machine, costs: Costs):
        self._plan = plan
        self._machine = machine
        self._costs = costs
        host = machine.host_device
        self._host_costs = costs if host is None else Costs(host, costs.unknown_size)
        self._found = ordered_tasks_of(plan)
        self._planned = self._found.tasks
        self._groups = compiled_together(plan)
        self._call_of = {n: g for g, numbers in enumerate(self._groups) for n in numbers if len(numbers) > 1}
        self._number = [-1] * len(self._planned)  # of what is written for each of the plan's tasks
        self._uses: dict[tuple[str, str, bool], tuple[tuple[str, ...], tuple[float, ...]]] = {}
        self._unknown: dict[str, None] = {}
        self._prices = TaskCosts(plan, self._planned, self._costs_on, self._note, self._seconds_of_iteration)
        devices = dict.fromkeys([*plan.devices, *[task.device for task in self._planned], plan.default_device])
        self._routes = Routes(machine, [device for device in devices if not machine.is_host(device)])
        self._tasks: list[Task] = []
        self._planned_sides = sides_of_tasks(plan, self._planned)
        self._sides: list[Side] = []  # of each that is written
        self._held_by_calls: list[tuple[int, int]] = []  # compiled calls, and what they hold for themselves
        self._signals: dict[tuple[tuple[int, ...], str], int] = {}
        self._names = {d: f"shard_{d}/" for d in range(plan.mesh.shards)}

    def write(self) -> MachineTasks:
        for numbers in self._groups:
            task = self._planned[numbers[0]]
            if len(numbers) > 1:
                self._write_call(numbers)
            elif task.kind == SEND:
                self._write_send(numbers[0], task)
            else:
                self._write_task(numbers[0], task)
        ops = self._plan.program.ops
        placeholders = [t for t in self._planned if t.kind == OPERATION and ops[t.op or 0].type == "Placeholder"]
        arguments: dict[str, int] = {}
        for task in placeholders:
            if task.op in self._plan.program.inputs:
                arguments[task.device] = arguments.get(task.device, 0) + sum(task.bytes)
        resources, unknown = self._routes.resources(), tuple(self._unknown)
        run = MachineTasks(tuple(self._tasks), self._buffers(), resources, arguments, 0, unknown, len(placeholders))
        return self._on_longer_sides(run) if any(self._sides) else _with_bytes(run)

    def _on_longer_sides(self, run: MachineTasks) -> MachineTasks:
        choice = longer_sides(run.tasks, self._sides, run.resources)
        longer, *others = [
            _with_bytes(replace(run, tasks=tasks, buffers=buffers))
            for choice_of_sides in (choice, *other_choices(self._sides, choice))
            for tasks, buffers in [with_sides_taken(run.tasks, run.buffers, self._sides, choice_of_sides)]
        ]
        return replace(longer, on_other_sides=tuple(others))

    def _costs_on(self, device: str) -> Costs:
        return self._host_costs if self._machine.is_host(device) else self._costs

    def _write_task(self, n: int, task: PlannedTask) -> None:
        cost, after = self._prices.of(task), self._before((n,))
        if self._has_constants(task) and all(self._tasks[k].kind == "wait" for k in after):
            after.append(self._add(Task("constants", device=task.device, kind="wait", type="Const")))
        on_stream = cost.seconds > 0 and self._routes.computes_on(task.device).startswith("stream")
        on_host = on_stream and self._prices.runs_on_host(task)
        self._compute((n,), self._name(task), after, cost, on_host=on_host)

    def _has_constants(self, task: PlannedTask) -> bool:
        """Return whether it reads constants of its own: where nothing else is waited for, they say when it begins."""
        return isinstance(task.value, (Slice, Concatenation)) or (task.kind == OPERATION and None in task.reads)

    def _write_call(self, numbers: Sequence[int]) -> None:
        members, inside = {}, set(numbers)
        for n in numbers:
            cost = self._prices.of(self._planned[n])
            reads = tuple([result for result in self._planned[n].reads if result is not None])
            members[n] = Member(cost.family, reads, cost.own_s, cost.work, bool(reads) and cost.type in SAME_BUFFER)
        returned = [result for result in self._read_by_others if result.task in inside]
        costs = self._costs_on(self._planned[numbers[0]].device)
        work = work_of_call(members, returned, self._prices.bytes, costs.own_s)
        cost = TaskCost("PartitionedCall", "compiled", costs.started(work.seconds))
        name = f"compiled/{self._name(self._planned[numbers[0]])}"
        self._held_by_calls.append((self._compute(numbers, name, self._before(numbers), cost), work.held_bytes))

    @functools.cached_property
    def _read_by_others(self) -> Sequence[Result]:
        """What others than those of the same call read, or is returned."""
        results = dict.fromkeys(self._found.returned)
        for n, task in enumerate(self._planned):
            call = self._call_of.get(n)
            results.update(
                dict.fromkeys([r for r in task.reads if r and (call is None or self._call_of.get(r.task) != call)])
            )
        return list(results)

    def _compute(
        self, numbers: Sequence[int], name: str, after: Sequence[int], cost: TaskCost, *, on_host: bool = False
    ) -> int:
        """Write what some tasks, which run as one, compute."""
        device = self._planned[numbers[0]].device
        kind = "wait" if cost.family == FREE or not cost.seconds else "compute"
        uses, slowdown = self._on(device, cost.family, on_host) if kind == "compute" else ((), (1.0,))
        run = uses, cost.seconds, tuple(after), 0.0, len(self._tasks), slowdown
        return self._add(Task(name, *run, device, kind, cost.type, family=cost.family), numbers)

    def _on(self, device: str, family: str, on_host: bool) -> tuple[tuple[str, ...], tuple[float, ...]]:
        """Return what work of a family occupies on a device, and how much longer it takes beside other work there."""
        key = (device, family, on_host)
        if key not in self._uses:
            host, name = self._machine.host, self._routes.computes_on(device)
            if on_host:
                name = f"threads of host {self._machine.host_of(device)}"
            slowdown = host.slowdown_of.get(family, host.slowdown) if name.startswith("threads") else (1.0,)
            self._uses[key] = (name,), slowdown
        return self._uses[key]

    def _add(self, task: Task, numbers: Sequence[int] = ()) -> int:
        """Write a task, and return its number; `numbers` are the tasks of the plan that it runs."""
        for n in numbers:
            self._number[n] = len(self._tasks)
        self._tasks.append(task)
        of_numbers = [self._planned_sides[n] for n in numbers] if self._planned_sides else []
        self._sides.append(frozenset.intersection(*of_numbers) if of_numbers else EVERYWHERE)
        return len(self._tasks) - 1

    def _before(self, numbers: Sequence[int]) -> list[int]:
        """Return what some tasks, which run as one, come after."""
        written: dict[int, None] = {}
        for n in numbers:
            device = self._planned[n].device
            written.update({self._number[r.task]: None for r in self._planned[n].reads if r and r.task not in numbers})
            ended: dict[str, dict[int, None]] = {}
            for k in self._found.waits[n]:
                if k not in numbers:
                    ended.setdefault(self._planned[k].device, {})[self._number[k]] = None
            written.update(ended.pop(device, {}))
            written.update({self._signal([*tasks], source, device): None for source, tasks in ended.items()})
        return list(written)

    def _name(self, task: PlannedTask) -> str:
        shard = self._names.get(-1 if task.shard is None else task.shard, "")
        name = "" if task.op is None else self._plan.program.ops[task.op].name
        return shard + name if task.is_made or task.kind in (SEND, TURN) else f"{task.kind}/{shard}{name}"

    def _note(self, unknown: str) -> None:
        if unknown:
            self._unknown[unknown] = None

    def _seconds_of_iteration(self, plan: Plan) -> float:
        """Return how long a body takes whose work is split over the devices."""
        inner = machine_tasks(plan, self._machine, self._costs)
        self._unknown.update(dict.fromkeys(inner.unknown))
        return replay(inner.tasks, inner.resources).seconds

    def _write_send(self, n: int, task: PlannedTask) -> None:
        operand = task.reads[0]
        assert operand is not None
        source = self._planned[operand.task].device
        count, route = self._prices.bytes(Result(n)), self._routes.between(source, task.device)
        if self._prices.is_open(task) and self._costs.unknown_size is None:
            self._note(f"the size of {self._name(task)!r}, which is sent, is known only when it runs")
        busy = route.busy_s + count / route.bytes_per_s
        name, kind = self._name(task), "send" if task.sent_for in (OPERATION, COPY) else task.sent_for
        after = (self._number[operand.task],)
        rank = self._rank(source, task.device)
        run = route.uses, busy, after, route.latency_s, rank, (1.0,)
        self._add(Task(name, *run, source, "send", kind, count, task.device, latency_s=route.least_s), (n,))

    def _rank(self, source: str, device: str) -> int:
        return self._routes.rank(source, device) * _MOST_TASKS + len(self._tasks)

    def _signal(self, ended: Sequence[int], source: str, device: str) -> int:
        """Return the task that tells a device, once, that some tasks of another one have ended."""
        key = (tuple(sorted(ended)), device)
        if key not in self._signals:
            route = self._routes.between(source, device)
            uses = route.uses if route.busy_s else ()  # (it takes threads, or a shared link; others only delay it)
            rank, name = self._rank(source, device), f"^{self._tasks[key[0][0]].name}"
            run = uses, route.busy_s, key[0], route.latency_s, rank, (1.0,)
            kind = "send" if uses else "wait"
            self._signals[key] = self._add(Task(name, *run, source, kind, SIGNAL, 0, device, latency_s=route.least_s))
        return self._signals[key]

    def _buffers(self) -> tuple[Buffer, ...]:
        """Return what all tasks make, and who reads it."""
        results, of = result_buffers(self._plan, self._planned, self._is_copied)
        returned = {of[result.task][result.index] for result in self._found.returned}
        operands: list[list[int]] = []
        readers: list[list[int]] = [[] for _ in results]
        for task, number in zip(self._planned, self._number, strict=True):
            operands.append([k for r in task.reads if r is not None and (k := of[r.task][r.index]) is not None])
            for k in operands[-1]:
                readers[k].append(number)
        sizes = [allocated(self._size(n, index)) for n, index in results]
        buffers = []
        for k, (n, _) in enumerate(results):
            g = self._number[n]
            if n in self._call_of and k not in returned and all(reader == g for reader in readers[k]):
                sizes[k] = 0  # it is in a call
            is_over = self._tasks[g].family == _OVERWRITES or self._tasks[g].type in _OVERWRITE
            onto = tuple([other for other in operands[n] if sizes[other] == sizes[k]]) if is_over else ()
            fields = self._tasks[g].name, self._planned[n].device, sizes[k], g, tuple(readers[k]), onto, k in returned
            buffers.append(Buffer(*fields))
        for g, size in self._held_by_calls:
            buffers.append(Buffer(f"inside of {self._tasks[g].name}", self._tasks[g].device, allocated(size), g))
        for n, device, size in held_inside(self._plan, self._planned):
            g = self._number[n]
            buffers.append(Buffer(f"inside of {self._tasks[g].name}", device, allocated(size), g))
        return tuple(buffers)

    def _size(self, n: int, index: int) -> int:
        """Return the bytes of a result: of a list of tensors that a loop returns, of those in it."""
        task = self._planned[n]
        if task.kind == HANDED_ON and (operand := task.reads[0]):
            return self._size(*operand)
        return self._prices.bytes_in_lists(task).get(index) or self._prices.bytes(Result(n, index))

    def _is_copied(self, task: PlannedTask) -> bool:
        """Return whether what is sent takes memory where it arrives."""
        operand = task.reads[0]
        assert operand is not None
        return self._routes.between(self._planned[operand.task].device, task.device).copies


def _with_bytes(run: MachineTasks) -> MachineTasks:
    return replace(run, sent_bytes=sum([task.bytes for task in run.tasks if task.kind == "send"]))


_LINKS = ("link from", "link to", "host link from", "host link to")  # of each device


@dataclass(frozen=True)
class LinkRoute:
    """A way from one device to another.

    Attributes:
      uses: the links' directions, for all of which it waits.
      bytes_per_s: of the slowest of them.
      latency_s: from the last byte sent to the reader's start.
      busy_s: how long they are busy besides.
      copies: whether what arrives takes memory there.
    """

    uses: tuple[str, ...]
    bytes_per_s: float
    latency_s: float
    busy_s: float
    copies: bool

    @property
    def least_s(self) -> float:
        """What it takes however few bytes are sent."""
        return self.latency_s + self.busy_s


class Routes:
    """The links between devices of a machine.

    Args:
      machine: what there is.
      devices: those that are used.
    """

    def __init__(self, machine: Machine, devices: Sequence[str]):
        self._machine = machine
        self._devices = tuple(devices)
        self._computes_on: dict[str, str] = {}
        self._routes: dict[tuple[str, str], LinkRoute] = {}
        self._number = {device: i for i, device in enumerate(devices)}

    def resources(self) -> dict[str, Resource]:
        """Return what tasks can use: streams of devices, directions of links, threads and memory of hosts."""
        machine, hosts = self._machine, {self._machine.host_of(device) for device in self._devices}
        resources: dict[str, Resource] = {}
        for host in sorted(hosts):
            devices_of_host = sum(machine.host_of(device) == host for device in self._devices)
            threads = machine.threads(devices_of_host) if machine.device.kind == "CPU" else machine.host.threads
            resources[f"threads of host {host}"] = Resource(threads, newest_first=True)
            resources[f"memory of host {host}"] = Resource()
            for link in (machine.link, machine.host_link):
                if link is not None and link.shared:
                    resources[f"{link.name} of host {host}"] = Resource()
            resources.update({f"network {way} host {host}": Resource() for way in ("from", "to")})
        for device in self._devices:
            resources[f"stream of {device}"] = Resource()
            resources.update({f"{link} {device}": Resource() for link in _LINKS})
        return resources

    def computes_on(self, device: str) -> str:
        """Return what an operation occupies: the stream of a GPU, or a thread, as logical CPU devices do.

        The host of GPUs runs operations on large tensors by all its threads, which its memory keeps waiting: two at a
        time take as long as one after the other.
        """
        if device not in self._computes_on:
            machine = self._machine
            cpus = f"{'memory' if machine.is_host(device) else 'threads'} of host {machine.host_of(device)}"
            is_cpu = machine.device.kind == "CPU" or machine.is_host(device)
            self._computes_on[device] = cpus if is_cpu else f"stream of {device}"
        return self._computes_on[device]

    def between(self, source: str, target: str) -> LinkRoute:
        """Return the way of a tensor from one device to another."""
        if (source, target) not in self._routes:
            self._routes[source, target] = self._between(source, target)
        return self._routes[source, target]

    def _between(self, source: str, target: str) -> LinkRoute:
        machine = self._machine
        source_host, target_host = machine.host_of(source), machine.host_of(target)
        if source_host != target_host:
            network = machine.network
            assert network is not None  # a machine without one has one host
            uses = (f"network from host {source_host}", f"network to host {target_host}")
            return LinkRoute(uses, network.bytes_per_s, network.latency_s, 0.0, True)
        link = machine.link
        if machine.device.kind == "CPU":  # a send and a receive, which threads run
            return LinkRoute((f"threads of host {source_host}",), link.bytes_per_s, 0.0, link.latency_s, link.copies)
        name = "link"
        if machine.host_link is not None and (machine.is_host(source) or machine.is_host(target)):
            name, link = "host link", machine.host_link
        if link.shared:
            return LinkRoute(
                (f"{link.name} of host {source_host}",), link.bytes_per_s, link.latency_s, 0.0, link.copies
            )
        ways = [(source, "from"), (target, "to")]
        used = tuple([f"{name} {way} {device}" for device, way in ways if device in self._number])
        return LinkRoute(used, link.bytes_per_s, link.latency_s, 0.0, link.copies)

    def rank(self, source: str, target: str) -> int:
        """Return when a device's turn is that is sent something at the same time as others: round the circle.

        If all send to all, no two then send to the same one at the same time.
        """
        count = len(self._devices)
        return (self._number.get(target, 0) - self._number.get(source, 0)) % max(count, 1)
