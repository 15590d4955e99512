"""Contention: how much slower a step is while copies of it run on the other threads."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphsplit.costs.machine import Machine
from graphsplit.costs.seconds import Costs
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.emission.side_by_side import side_by_side
from graphsplit.planning.plan import Plan
from graphsplit.prediction.replay import replay
from graphsplit.prediction.task_writing import tasks_of
from graphsplit.prediction.timing import Call
from graphsplit.runtime.executable import runtime_function
from graphsplit.runtime.handles import captured

_PASSES, _CLOSE = 8, 2e-3
_TIMES = (0.5, 2.0)  # as much as any operations slow each other down


@dataclass(frozen=True)
class Copies:
    """The same step on several devices, each on all rows, at the same time.

    Attributes:
      plan: of the first.
      graph: of all.
      devices: how many there are.
      run: runs them.
    """

    plan: Plan = field(repr=False)
    graph: EmittedGraph = field(repr=False)
    devices: int
    run: Call = field(repr=False)


def copies_at_once(
    function: Callable[..., Any],
    devices: Sequence[str],
    micro_batches: int,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Copies:
    """Return a step on each of some devices, ready to run at once. Its variables are the same for all."""
    from graphsplit.api.decorators import parallelize

    steps = [parallelize(function, devices=[device], micro_batches=micro_batches) for device in devices]
    planned = [step._planned(*args, **kwargs) for step in steps]
    graph = side_by_side([emit(each.plan) for each in planned])
    given = (*graph.inputs, *graph.captures)
    called = runtime_function("copies", graph, graph.nodes, given, graph.outputs, graph.effects, {}, whole=True)

    def run() -> list[Any]:
        tensors = [tensor for each in planned for tensor in each.tensors]
        return called([*tensors, *[tensor for each in planned for tensor in captured(each.trace, each.plan)]])

    return Copies(planned[0].plan, graph, len(devices), run)


def contended(machine: Machine, copies: Sequence[Copies], seconds: Sequence[float]) -> Machine:
    """Return a machine whose threads slow each other down so much that copies are predicted to take what they took.

    Args:
      machine: one device is predicted on it as it was measured.
      copies: of a step, in different numbers of micro-batches.
      seconds: what each took.
    """
    times = [_times(machine, each, took_s) for each, took_s in zip(copies, seconds, strict=True)]
    return _slowed(machine, statistics.median(times))


def _times(machine: Machine, copies: Copies, seconds: float) -> float:
    """Return how many times as much threads would have to slow each other down for copies to take so long."""
    least, most = _TIMES
    times = 1.0
    written = tasks_of(copies.plan, copies.graph, machine, Costs(machine.device))
    call_s = machine.call_s(copies.devices, written.given)
    for _ in range(_PASSES):
        tasks = [task._replace(slowdown=_scaled(task.slowdown, times)) for task in written.tasks]
        ran_s = replay(tasks, written.resources).seconds
        if abs(call_s + ran_s - seconds) < _CLOSE * seconds:
            break
        times = min(max(times * max(seconds - call_s, _CLOSE * seconds) / ran_s, least), most)
    return times


def _scaled(slowdown: Sequence[float], times: float) -> tuple[float, ...]:
    """Return slowdowns of 1, 2, ... threads, so many times as large: at least 1, at most as if they took turns."""
    first, *others = slowdown
    return (first, *[min(max(1.0, ratio * times), float(n)) for n, ratio in enumerate(others, 2)])


def _slowed(machine: Machine, times: float) -> Machine:
    host = machine.host
    of = {family: _scaled(slowdown, times) for family, slowdown in host.slowdown_of.items()}
    return replace(machine, host=replace(host, slowdown=_scaled(host.slowdown, times), slowdown_of=of))
