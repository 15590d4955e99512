"""Steps over several machines: each happens or does not, and ends although a worker does not answer.

A graph over several machines keeps what its variables were, so that a failed step can be undone. On each device, before
anything is written there, the values of all variables that the graph writes are kept in variables of their own, and a
counter goes up; writes wait for that. A kept value shares the memory of the variable until that is written. So whoever
finds the counter gone up after a failure knows that the kept values are of that step, and one that has not gone up says
that nothing was written there. (As in the undo logs of databases, whose word for such values is before-images.) Reading
the values from outside before each step instead costs another round of messages; and without waiting for it, some of
the values that were read would be those of after the step.

A call of TensorFlow's runtime waits for a frozen worker as long as that is frozen, and nothing in the process can end
it. So it waits in a thread of its own, and who called asks the workers from outside how they are.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from graphsplit.core.devices import canonical_name, name_for_runtime, task_of
from graphsplit.core.protos import constant_node, inputs_of, make_node, source_of, with_inputs
from graphsplit.core.tensorflow_internals import RuntimeFunction, is_read, no_recording, resource_value
from graphsplit.core.variables.parted_variables import assign, read_handle
from graphsplit.errors import WorkerLostError
from graphsplit.program.graph.graph import Graph
from graphsplit.runtime.connected_workers import Call, Make
from graphsplit.workers.cluster import Cluster, ask_all, lost_error

Tensors = Sequence[tf.Tensor]
R = TypeVar("R")


@dataclass(frozen=True, eq=False)
class Kept:
    """What keeps a variable's value: it lives as long as a function that writes the variable.

    Attributes:
      of: the variable's handle.
      dtype: of its value.
      variable: what the graph writes.
    """

    of: tf.Tensor
    dtype: tf.DType
    variable: tf.Variable

    @property
    def device(self) -> str:
        """Where the variable lives."""
        return canonical_name(self.of.device)

    def give_back(self) -> None:
        """Let the variable have the value that is kept."""
        with tf.device(self.of.device):
            assign(self.of, read_handle(self.variable.handle, self.dtype))


@dataclass(frozen=True)
class _WrittenStep:
    """A call that writes, as far as it is undone.

    Attributes:
      name: of the function.
      tasks: the workers that it runs on.
      kept: what it keeps.
      devices: of the counters.
      incarnations: of the workers when it began.
    """

    name: str
    tasks: tuple[int, ...]
    incarnations: tuple[int, ...]
    kept: tuple[Kept, ...] = ()
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class _Connected:
    """What is on the workers as long as the same ones are connected.

    Attributes:
      connections: how often the cluster had been connected.
      kept: what keeps variables' values, by the handle's id.
      counters: of each device.
      counts: what the counters are at.
    """

    connections: int
    kept: weakref.WeakValueDictionary[int, Kept] = field(default_factory=weakref.WeakValueDictionary)
    counters: dict[str, tf.Variable] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)


class UndoLog:
    """What is needed to take back the call that is running: the counters that say where it has begun to write.

    Args:
      cluster: of the workers.
    """

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self._watch = Watch(cluster)
        self._lock = threading.RLock()
        self._remote = _Connected(cluster.connections)
        self._pending: tuple[Call[Any], _WrittenStep] | None = None

    @property
    def connections(self) -> int:
        """How often this process was connected to the workers."""
        return self.cluster.connections

    def function(self, name: str, nodes: Sequence[Any], inputs: Sequence[str], make: Make) -> ClusterFunction:
        """Return a function of an emitted graph that runs on workers; see `ClusterFunction`."""
        return ClusterFunction(name, self, nodes, inputs, make)

    def kept(self, handle: tf.Tensor, dtype: tf.DType) -> Kept:
        """Return what keeps the value of a variable."""
        with self._lock:
            if self._remote.connections != self.cluster.connections:  # what was kept on a worker went with it
                self._settle("a call")
                self._remote = _Connected(self.cluster.connections)
            kept_value = self._remote.kept.get(id(handle))
            if kept_value is None:
                with tf.init_scope(), tf.device(handle.device):
                    nothing, shape = tf.constant([], dtype), tf.TensorShape(None)
                    variable = tf.Variable(nothing, trainable=False, shape=shape, name="graphsplit_kept")
                kept_value = self._remote.kept[id(handle)] = Kept(handle, dtype, variable)
            return kept_value

    def counter(self, device: str) -> tf.Tensor:
        """Return the handle of a device's counter."""
        with self._lock:
            if device not in self._remote.counters:
                with tf.init_scope(), tf.device(name_for_runtime(device)):
                    self._remote.counters[device] = tf.Variable(np.int64(0), trainable=False, name="graphsplit_count")
                self._remote.counts[device] = 0
            return self._remote.counters[device].handle

    def read(self, name: str, tasks: tuple[int, ...], run: Callable[[], R]) -> R:
        """Run what writes nothing, and watch the workers that it runs on.

        Raises:
          WorkerLostError: if one of them ends, or does not answer for the deadline.
        """
        call = Call(run)
        try:
            self._watch.wait(call, tasks)
            return call.result()
        except Frozen as frozen:
            raise lost_error(self.cluster, frozen.tasks, name, True, frozen.since_s) from None
        except tf.errors.OpError as error:
            self._raise_if_lost(_WrittenStep(name, tasks, self.cluster.incarnations), error)
            raise

    def write(self, step: _WrittenStep, run: Callable[[], list[tf.Tensor]]) -> list[tf.Tensor]:
        """Run what keeps the values of variables before it writes them; if it fails, they have them again.

        Raises:
          WorkerLostError: if a worker ends, or does not answer for the deadline.
        """
        with self._lock:
            self._settle(step.name)
            call = Call(run)
            try:
                self._watch.wait(call, step.tasks)
                results = call.result()
            except Frozen as frozen:
                if frozen.ended:
                    self._take_back(step)
                else:
                    self._pending = call, step
                raise lost_error(self.cluster, frozen.tasks, step.name, frozen.ended, frozen.since_s) from None
            except BaseException as error:
                if not call.has_ended():  # the user interrupted the wait
                    self._pending = call, step
                    raise
                self._take_back(step)
                self._raise_if_lost(step, error)
                raise
            for device in step.devices:
                self._remote.counts[device] += 1
            return results

    def _settle(self, name: str) -> None:
        """Take back the call that nobody waits for any more, if it has ended."""
        if self._pending is None:
            return
        call, step = self._pending
        if not call.has_ended():
            health = self.cluster.health()
            raise lost_error(self.cluster, health.lost or step.tasks, name, False, self._watch.deadline_s)
        self._pending = None
        self._take_back(step)

    def _take_back(self, step: _WrittenStep) -> None:
        """Let variables on the workers that are left have the values that they had before a call."""
        lost = self._lost(step)

        def undo() -> None:
            for device in step.devices:
                task = task_of(device)
                if task is not None and task[1] in lost:
                    continue
                count = int(read_handle(self._remote.counters[device].handle, tf.int64))
                if count != self._remote.counts[device]:
                    for kept_value in step.kept:
                        if kept_value.device == device:
                            kept_value.give_back()
                self._remote.counts[device] = count

        with no_recording():
            call = Call(undo)
            tasks_left = [task for task in step.tasks if task not in lost]
            try:
                self._watch.wait(call, tasks_left)
            except Frozen as frozen:
                raise lost_error(self.cluster, frozen.tasks, step.name, False, frozen.since_s) from None
            call.result()

    def _lost(self, step: _WrittenStep) -> set[int]:
        incarnations, lost = self.cluster.incarnations, set(self.cluster.health().lost)
        return {task for task in step.tasks if task in lost or incarnations[task] != step.incarnations[task]}

    def _raise_if_lost(self, step: _WrittenStep, error: BaseException) -> None:
        if isinstance(error, (tf.errors.OpError, WorkerLostError)) and (lost := self._lost(step)):
            raise lost_error(self.cluster, sorted(lost), step.name, True, 0.0) from error


class ClusterFunction:
    """A function of an emitted graph that runs on workers, called as a `RuntimeFunction` is.

    (In a graph that somebody else builds, and runs, it is a plain one.) What it lacks is made when it is called.

    Args:
      name: of the user's function.
      log: of the calls that run on the workers.
      nodes, inputs: of the graph.
      make: registers a graph's nodes and inputs with TensorFlow's runtime.
    """

    def __init__(self, name: str, log: UndoLog, nodes: Sequence[Any], inputs: Sequence[str], make: Make):
        self._name = name
        self._log = log
        self._nodes = nodes
        self._inputs = tuple(inputs)
        self._make = make
        tasks = {task for node in nodes if node.device and (task := task_of(canonical_name(node.device)))}
        self._tasks = tuple(sorted(number for _, number in tasks))
        self._written = written_variables(nodes, inputs)
        self._plain: RuntimeFunction | None = None
        self._recording: tuple[RuntimeFunction, tuple[Written, ...], tuple[str, ...]] | None = None
        self._kept_values: tuple[Kept, ...] = ()

    def __call__(self, arguments: Tensors) -> list[tf.Tensor]:
        """Run the function on `arguments`, one tensor for each input.

        Raises:
          WorkerLostError: if a worker ends, or does not answer for the deadline; then the call did not happen.
        """
        if not tf.executing_eagerly():
            return self._as_it_is()(arguments)
        log = self._log
        values = [resource_value(arguments[written.argument]) for written in self._written]
        if not any(values):
            return log.read(self._name, self._tasks, lambda: self._as_it_is()(arguments))
        pairs = [(written, value[0]) for written, value in zip(self._written, values, strict=True) if value]
        function, written, devices = self._recorded(pairs)
        dtypes = [dtype for _, dtype in pairs]
        self._kept_values = tuple([log.kept(arguments[w.argument], t) for w, t in zip(written, dtypes, strict=True)])
        counters = [log.counter(device) for device in devices]
        inputs = [*arguments, *[kept_value.variable.handle for kept_value in self._kept_values], *counters]
        step = _WrittenStep(self._name, self._tasks, log.cluster.incarnations, self._kept_values, devices)
        return log.write(step, lambda: function(inputs))

    def _as_it_is(self) -> RuntimeFunction:
        if self._plain is None:
            self._plain = self._make(self._nodes, self._inputs)
        return self._plain

    def _recorded(
        self, pairs: Sequence[tuple[Written, tf.DType]]
    ) -> tuple[RuntimeFunction, tuple[Written, ...], tuple[str, ...]]:
        if self._recording is None:
            recorded = record(self._nodes, [w for w, _ in pairs], [dtype for _, dtype in pairs])
            devices = tuple([canonical_name(device) for device in recorded.devices])
            function = self._make(recorded.nodes, (*self._inputs, *recorded.inputs))
            self._recording = function, tuple([written for written, _ in pairs]), devices
        return self._recording


_SCOPE = "graphsplit_before"


class Written(NamedTuple):
    """A variable that a graph writes.

    Attributes:
      argument: the position of its handle among the inputs.
      name: of the placeholder.
      device: where it lives.
    """

    argument: int
    name: str
    device: str


class RecordingGraph(NamedTuple):
    """A graph that keeps before-images.

    Attributes:
      nodes: of the graph.
      inputs: placeholders of what it takes besides: a handle for each kept value, then one of a counter for each
        device.
      devices: of the counters.
    """

    nodes: list[Any]
    inputs: list[str]
    devices: list[str]


def written_variables(nodes: Sequence[Any], inputs: Sequence[str]) -> list[Written]:
    """Return the variables that a graph may write: whose handles something takes that does not only read."""
    by_name = Graph(nodes)
    handles = {name for name in inputs if by_name[name].attr["dtype"].type == tf.resource.as_datatype_enum}
    written = {source for node in nodes for source in _sources(node) if source in handles and not is_read(node.op)}
    return [Written(k, name, by_name[name].device) for k, name in enumerate(inputs) if name in written]


def record(nodes: Sequence[Any], written: Sequence[Written], dtypes: Sequence[tf.DType]) -> RecordingGraph:
    """Let a graph keep the values that variables have before it writes them."""
    new: list[Any] = []
    place_by_variable: dict[str, str] = {}
    devices = sorted({variable.device for variable in written})
    scopes = {device: f"{_SCOPE}/{number}" for number, device in enumerate(devices)}
    for k, (variable, dtype) in enumerate(zip(written, dtypes, strict=True)):
        scope, device = scopes[variable.device], variable.device
        place, value = f"{scope}/kept_{k}", f"{scope}/value_{k}"
        new += [_handle(place, device), make_node(value, "ReadVariableOp", [variable.name], device, dtype=dtype)]
        new.append(make_node(f"{scope}/keep_{k}", "AssignVariableOp", [place, value], device, dtype=dtype))
        place_by_variable[variable.name] = place
    for device, scope in scopes.items():
        number_one = constant_node(f"{scope}/one", np.array(1, np.int64), tf.int64, device)
        done = [f"^{scope}/keep_{k}" for k, variable in enumerate(written) if variable.device == device]
        inputs = [f"{scope}/counter", number_one.name, *done]
        count = make_node(f"{scope}/count", "AssignAddVariableOp", inputs, device, dtype=tf.int64)
        new += [number_one, _handle(f"{scope}/counter", device), count]
    waits = {variable.name: f"^{scopes[variable.device]}/count" for variable in written}
    inputs = [*place_by_variable.values(), *[f"{scope}/counter" for scope in scopes.values()]]
    return RecordingGraph([*[_waiting(node, waits) for node in nodes], *new], inputs, devices)


def _waiting(node: Any, waits: dict[str, str]) -> Any:
    """Return a node that waits before it writes, if it does."""
    controls = dict.fromkeys(waits[source] for source in _sources(node) if source in waits and not is_read(node.op))
    return with_inputs(node, [*node.input, *controls]) if controls else node


def _sources(node: Any) -> list[str]:
    return list(map(source_of, inputs_of(node)[0]))


def _handle(name: str, device: str) -> Any:
    return make_node(name, "Placeholder", [], device, dtype=tf.resource)


_PATIENCE_S = 2.0  # a call that takes less asks nobody
_BETWEEN_S = 1.0
_AFTER_S = 10.0  # what a call takes to end once the process that it waits for has ended
_TIMES = 10
_USUAL_S = 60.0


class Frozen(Exception):  # noqa: N818  (it is caught by those who know what to say)
    """Some workers do not answer a call.

    Attributes:
      tasks: their numbers.
      since_s: for how long they have not, in seconds.
      ended: whether the call has ended since.
    """

    def __init__(self, tasks: Sequence[int], since_s: float, ended: bool):
        super().__init__(tasks)
        self.tasks = tuple(tasks)
        self.since_s = since_s
        self.ended = ended


class Watch:
    """Waits for calls, and for how long the longest took.

    Args:
      cluster: whose workers are asked.
    """

    def __init__(self, cluster: Cluster):
        self._cluster = cluster
        self._longest_s = 0.0

    @property
    def deadline_s(self) -> float:
        """How long a worker may not answer."""
        cluster_deadline_s = self._cluster.deadline_s
        return cluster_deadline_s if cluster_deadline_s is not None else max(_USUAL_S, _TIMES * self._longest_s)

    def wait(self, call: Call[Any], tasks: Sequence[int]) -> None:
        """Return when a call has ended.

        Raises:
          Frozen: if workers that it needs do not answer for the deadline.
        """
        begin = time.monotonic()
        if call.has_ended(min(_PATIENCE_S, self.deadline_s)):
            self._longest_s = max(self._longest_s, time.monotonic() - begin)
            return
        answered = dict.fromkeys(tasks, begin)
        while not call.has_ended(_BETWEEN_S):
            addresses = [self._cluster.workers[task] for task in tasks]
            statuses = ask_all(addresses, min(_BETWEEN_S, self.deadline_s))
            now = time.monotonic()
            answered |= {task: now for task, status in zip(tasks, statuses, strict=True) if status is not None}
            silent = [task for task in tasks if now - answered[task] > self.deadline_s]
            if silent and not call.has_ended():
                self._give_up(call, silent, now - min(answered[task] for task in silent))
        self._longest_s = max(self._longest_s, time.monotonic() - begin)

    def _give_up(self, call: Call[Any], tasks: Sequence[int], since_s: float) -> None:
        if self._cluster.on_lost is not None:
            for task in tasks:
                self._cluster.on_lost(task, self._cluster.workers[task])
            call.has_ended(_AFTER_S)
        raise Frozen(tasks, since_s, call.has_ended())
