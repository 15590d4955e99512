"""Handles: what a function captured, as its plan takes it: variables that lie in parts as these, others whole."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import tensorflow as tf

from graphsplit.core.devices import task_of
from graphsplit.core.initial_values import check_values
from graphsplit.core.tensorflow_internals import tape_watches
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import VariableParts, are_any_parts, layout_changes, parts_of
from graphsplit.core.variables.running_calls import calls
from graphsplit.errors import UnsupportedError
from graphsplit.planning.plan import Plan
from graphsplit.runtime.connected_workers import connected_workers
from graphsplit.tracing.trace import Trace

ArrivedT = TypeVar("ArrivedT")


class LayoutsChangedError(UnsupportedError):
    """Another thread changed layouts of a function's variables since it was planned. Calls catch it and plan again."""

    def __init__(self, name: str):
        super().__init__(f"{name}: another thread changed layouts of its variables. Nothing has run. Call it again.")


class Layouts:
    """How the variables lie that a function captured: as they did when it was planned, or as was decided then.

    Args:
      trace, plan: of the function.
      lies: what was decided; None for nothing.

    Attributes:
      lies: see there; once it is applied, as they lie.
    """

    def __init__(self, trace: Trace, plan: Plan, lies: Arrangement | None = None):
        self._trace = trace
        self.lies = Arrangement() if lies is None else lies
        self._found: Sequence[VariableParts | None] | None = layouts_of(trace)
        self._changes = layout_changes()
        if plan.state.changes not in (None, self._changes):  # how they lay while it was planned, nobody knows any more
            self._found = None

    @property
    def hold(self) -> bool:
        """Whether they lie so now."""
        changes = layout_changes()
        if self._found is None or (self._changes != changes and self._found != layouts_of(self._trace)):
            return False
        if not (self.lies.is_applied or self.lies.holds):
            return False
        self._changes = changes
        return True

    @property
    def settled(self) -> bool:
        """Whether nothing is left to be moved. (What is planned for devices that are not here does not run.)"""
        return self.lies.is_applied or bool(self.lies.default_device)

    def settle(self) -> None:
        """Move the variables to where it was decided that they lie, if they have not been moved: before a call.

        Raises:
          LayoutsChangedError: if they no longer lie as they did when it was decided.
          UnsupportedError: if some would have to move while a graph is built.
        """
        with calls.lock:
            if self.settled:
                return
            if not self.hold:
                raise LayoutsChangedError(self._trace.function.name)
            if not tf.executing_eagerly() and self.lies.moves:
                raise UnsupportedError(
                    f"{self.lies.reason or 'A layout'} lays variables out in the first call, and this one is in a "
                    "tf.function, while a graph is built. Call the function once outside before, or lay them out by "
                    "gs.set_variable_layout."
                )
            self.lies.apply()
            self._found, self._changes = layouts_of(self._trace), layout_changes()


@contextlib.contextmanager
def held_captures(trace: Trace, plan: Plan, layouts: Layouts | None = None) -> Iterator[list[tf.Tensor]]:
    """Give the `captured` tensors to a call, and let no value move as long as it runs.

    Args:
      trace, plan: see there.
      layouts: how the variables have to lie; None for anyhow.

    Raises:
      LayoutsChangedError: if they do not.
    """
    if not tf.executing_eagerly():  # it runs when somebody calls the graph
        yield captured(trace, plan)
        return

    def find() -> list[tf.Tensor]:
        if layouts is not None and not layouts.hold:
            raise LayoutsChangedError(trace.function.name)
        return _arrived(trace, plan) if are_any_parts() else list(trace.captures)

    def ask(settled: Callable[[], ArrivedT]) -> ArrivedT:
        return asked_of_workers(trace, settled) if are_any_parts() else settled()

    check_values(trace.captures)
    if trace.draws is not None:
        trace.draws.follow_seeding()
    call = object()
    try:
        yield calls.begin(call, trace.captures, find, ask)
    finally:
        calls.end(call)


def captured(trace: Trace, plan: Plan) -> list[tf.Tensor]:
    """Return the tensors for the captures of a plan's program, in its order, each variable's value where it is read.

    Raises:
      ArgumentError: for variables that have no values yet.
    """
    check_values(trace.captures)
    if not are_any_parts():
        return list(trace.captures)
    # values may have to move first, and from a worker that does not answer they never arrive
    return asked_of_workers(trace, lambda: _arrived(trace, plan))


def asked_of_workers(trace: Trace, ask: Callable[[], ArrivedT]) -> ArrivedT:
    """Return what somebody asks of a function's variables, some of which may be on worker processes.

    Raises:
      WorkerError: if one of these does not answer.
    """
    workers = connected_workers() if tf.executing_eagerly() else None
    if workers is None:
        return ask()
    pairs = zip(trace.captures, layouts_of(trace), strict=True)
    devices = [device for handle, parts in pairs for device in (parts.devices if parts else [handle.device])]
    tasks = {task[1] for device in devices if (task := task_of(device))}
    return workers.read("values of variables", tuple(sorted(tasks)), ask) if tasks else ask()


def origins_of(trace: Trace, plan: Plan) -> list[tuple[str, int]]:
    """Return, for each capture of a plan's program, the placeholder of the captured variable, and which part it is."""
    program = trace.program
    origins = plan.state.parts or [(k, 0) for k in range(len(trace.captures))]
    return [(program.ops[program.captures[k]].name, part) for k, part in origins]


def _arrived(trace: Trace, plan: Plan) -> list[tf.Tensor]:
    origins = plan.state.parts
    if not origins:
        return [_whole(handle) for handle in trace.captures]
    arrived = []
    several: dict[int, list[tf.Tensor] | None] = {}  # each variable is asked once: a call takes thousands of parts
    for k, part in origins:
        if k not in several:
            several[k] = _parts(trace, plan, k)
        handles = several[k]
        arrived.append(handles[part] if handles is not None else _whole(trace.captures[k]))
    return arrived


def _parts(trace: Trace, plan: Plan, k: int) -> list[tf.Tensor] | None:
    """Return the handles of a captured variable's parts; None if the plan takes it whole."""
    parts = parts_of(trace.captures[k])
    name = trace.program.ops[trace.program.captures[k]].name
    return None if parts is None or name in plan.state.whole else parts.handles()


def layouts_of(trace: Trace) -> list[VariableParts | None]:
    """Return how the variables lie that a function captured."""
    return [parts_of(handle) for handle in trace.captures]


def watches(tensors: Sequence[tf.Tensor], variables: Sequence[tf.Variable] = ()) -> bool:
    """Return whether an active `GradientTape` watches these tensors and variables, whose values stay where they are."""
    if not are_any_parts():
        return tape_watches(tensors, variables)
    with raw_handles():
        return tape_watches(tensors, variables)


def _whole(handle: tf.Tensor) -> tf.Tensor:
    parts = parts_of(handle)
    return handle if parts is None else parts.whole_handle()
