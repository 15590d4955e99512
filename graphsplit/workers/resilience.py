"""`resilient`: a step that goes on when workers are lost, and takes those in again that come back."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

import tensorflow as tf

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.input.host_reading import HostPipeline, is_dataset_function
from graphsplit.api.input.prefetching import END, ReadCall, arguments_of
from graphsplit.api.layouts.variable_layouts import set_variable_layout
from graphsplit.core.device_mesh import STAGE_AXIS, MeshAxes
from graphsplit.core.devices import canonical_name, name_for_runtime, short_name, task_of
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.variables.parted_variables import assign, move_variable, parts_of_variable
from graphsplit.errors import ArgumentError, UnsupportedError, WorkerLostError, bullet_list
from graphsplit.workers.cluster import Cluster, current_cluster

P = ParamSpec("P")
R = TypeVar("R")

_BETWEEN_S = 1.0  # workers that are away are asked for once a second


@dataclass(frozen=True)
class _Layout:
    """How a variable was laid out when all workers were there."""

    layout: str
    devices: tuple[str, ...]
    reshard: bool


def _latest(checkpoint: Any) -> str | None:
    return None if checkpoint is None else checkpoint.latest_checkpoint


class Resilient(Generic[P, R]):
    """A parallelized function that continues when workers are lost. Made by `resilient`.

    Attributes:
      devices: of the next call.
    """

    def __init__(self, step: ParallelFunction[P, R], cluster: Cluster, checkpoint: Any):
        self._step = step
        self._cluster = cluster
        self._checkpoint = checkpoint
        self._all = step.devices
        self._lost: set[int] = set()
        self._functions: dict[tuple[str, ...], ParallelFunction[P, R]] = {step.devices: step}
        self._asked_s = 0.0
        self._layouts: dict[int, _Layout] = {}
        self._known: dict[int, tf.Variable] = {}
        self._since: list[Callable[[ParallelFunction[P, R]], Any]] = []  # the calls since the checkpoint that counts
        self._counts = _latest(checkpoint)
        functools.update_wrapper(self, step.function, updated=())

    @property
    def devices(self) -> tuple[str, ...]:
        """Full names, those of lost workers left out."""
        return self._alive(self._all)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step; without lost workers, as often as it takes.

        Raises:
          WorkerLostError: if no device is left, or state is lost of which there is neither a copy nor a checkpoint.
        """
        result: R = self._run(lambda function: function(*args, **kwargs))
        return result

    def _run(self, call: Callable[[ParallelFunction[P, R]], Any]) -> Any:
        self._take_in()
        if (latest := _latest(self._checkpoint)) != self._counts:
            self._since, self._counts = [], latest
        result = self._until_it_happens(call)
        if self._counts is not None and result is not END:  # (without a checkpoint, no call can be made again)
            self._since.append(call)
        return result

    def map(self, batches: Iterable[Any] | Callable[[], Iterable[Any]]) -> Iterator[R]:
        """Return an iterator over the results for many batches, one call after the other.

        Args:
          batches: a `tf.data.Dataset` or any iterable. A tuple is the function's arguments in order; anything else is
            its only argument. Or a function that returns such a dataset, which each host then reads itself: see
            `ParallelFunction.map`. A worker that comes back skips what the others have read; with `checkpoint`, the
            batches since the last one stay on the hosts.
        """
        if is_dataset_function(batches):
            assert callable(batches)
            return self._results_of_hosts(HostPipeline(self._step._name(), batches))
        assert isinstance(batches, Iterable)
        return self._results(batches)

    def _results(self, batches: Iterable[Any]) -> Iterator[R]:
        call: Callable[..., R] = self
        for batch in batches:
            yield call(*arguments_of(batch))

    def _results_of_hosts(self, pipeline: HostPipeline) -> Iterator[R]:
        for number in itertools.count():
            result = self._run(ReadCall(pipeline, number))
            if result is END:
                return
            yield result

    def save(self) -> str | None:
        """Save a checkpoint between two calls, and return its path; None, with a warning, while a worker is away.

        (`CheckpointManager.save` itself waits for all workers, those that are away included, as long as they are. Until
        it can save again, the calls since the last checkpoint are kept.)

        Raises:
          ArgumentError: if there is no checkpoint manager.
        """
        if self._checkpoint is None:
            raise ArgumentError("save() needs resilient(checkpoint=...), a tf.train.CheckpointManager.")
        self._take_in()
        lost = self._cluster.health().lost
        if lost:
            warnings.warn(
                f"{self._step._name()}: no checkpoint now: worker {', '.join(map(str, lost))} is away, and TensorFlow "
                "waits for all workers when it saves. The calls since the last checkpoint are kept.",
                stacklevel=user_stack_level(),
            )
            return None
        return str(self._checkpoint.save())

    def _until_it_happens(self, call: Callable[[ParallelFunction[P, R]], Any]) -> Any:
        while True:
            function = self._function()
            try:
                result = call(function)
            except WorkerLostError as error:
                self._remember(function)
                self._go_on_without(error)
            else:
                self._remember(function)
                return result

    def _function(self) -> ParallelFunction[P, R]:
        devices = self.devices
        if devices not in self._functions:
            kept = [k for k, device in enumerate(self._all) if device in devices]
            options = self._step._options
            shares = None if options.shares is None else tuple([options.shares[k] for k in kept])
            # (of the batch's axis alone, a mesh says no more than how many devices there are)
            mesh = options.mesh if options.mesh.others else MeshAxes()
            options = replace(options, devices=devices, shares=shares, mesh=mesh, on_mesh=False)
            default = options.tuning["default_device"]
            if default is not None and not self._alive([canonical_name(default)]):
                options = replace(options, tuning={**options.tuning, "default_device": None})
            self._functions[devices] = ParallelFunction(self._step.function, options)
        return self._functions[devices]

    def _alive(self, devices: Sequence[str]) -> tuple[str, ...]:
        return tuple([device for device in devices if not self._is_lost(device)])

    def _remember(self, function: ParallelFunction[P, R]) -> None:
        """Note the variables that a function uses, and how they lie while nobody is lost."""
        for variable in function._variables_so_far():
            self._known[id(variable)] = variable
            parts = parts_of_variable(variable)
            if parts is not None and not isinstance(parts.layout, str):
                raise UnsupportedError(
                    f"resilient: variable {parts.name!r} is cut along an axis of a mesh, and a lost worker would have "
                    "the only copy of its part. Set its layout to 'home', 'replicated' or 'sharded'."
                )
            if parts is not None and not self._lost:
                self._layouts[id(variable)] = _Layout(str(parts.layout), parts.devices, parts.reshards)

    def _go_on_without(self, error: WorkerLostError) -> None:
        """Plan for the workers that are left, with the state that they have.

        Raises:
          WorkerLostError: if that is not enough.
        """
        if not error.undone or not error.tasks:
            raise error
        self._lost |= set(error.tasks)
        if not self.devices:
            raise error
        names = ", ".join([f"{task} ({self._cluster.workers[task]})" for task in error.tasks])
        warnings.warn(
            f"{self._step._name()}: lost worker {names}; the step runs again on "
            f"{', '.join(map(short_name, self.devices))}.",
            stacklevel=user_stack_level(),
        )
        gone = self._gather()
        if gone and self._counts is None:
            lost = WorkerLostError(
                f"{error} These variables have no copy elsewhere:\n"
                f"{bullet_list([v.name for v in gone])}\n"
                'Set their layout to "replicated", keep them in this process, or pass resilient(checkpoint=...) a '
                "tf.train.CheckpointManager that has saved a checkpoint."
            )
            lost.tasks = error.tasks
            raise lost from error
        if gone:
            # (`restore` would then wait for all workers, those that are lost included)
            self._checkpoint.checkpoint.read(self._counts).expect_partial()
        self._lay_out()
        if gone:
            for call in self._since:
                self._until_it_happens(call)

    def _gather(self) -> list[tf.Variable]:
        """Let each variable hold its value itself, on a device that is there; return those whose value is gone."""
        gone = []
        for variable in self._known.values():
            parts = parts_of_variable(variable)
            device = canonical_name(variable.device)
            if parts is not None:
                value = parts.value_without(self._is_lost)
                parts.forget(variable)
            elif self._is_lost(device):
                value = None
            else:
                continue
            if value is None:
                gone.append(variable)
                value = tf.zeros(variable.shape, variable.dtype)
            if self._is_lost(device):
                self._move(variable, value)
            else:
                with tf.device(variable.device):
                    assign(variable.handle, value)  # (where it lay in parts, it is empty)
        return gone

    def _is_lost(self, device: str) -> bool:
        task = task_of(device)
        return task is not None and task[1] in self._lost

    def _move(self, variable: tf.Variable, value: tf.Tensor) -> None:
        """Let a variable whose resource went with its worker live on a device that is there."""
        move_variable(variable, name_for_runtime(self.devices[0]), value)
        self._functions.clear()  # they hold the handle that is gone

    def _lay_out(self) -> None:
        """Lay the variables out as they were, on the devices that are there."""
        groups: dict[_Layout, list[tf.Variable]] = {}
        for key, known in self._layouts.items():
            devices = self._alive(known.devices)
            if len(devices) > 1 and parts_of_variable(self._known[key]) is None:
                groups.setdefault(replace(known, devices=devices), []).append(self._known[key])
        for how, variables in groups.items():
            set_variable_layout(variables, how.layout, how.devices, reshard_after_forward=how.reshard)

    def _take_in(self) -> None:
        """Take workers in that are there again."""
        if not self._lost or time.monotonic() - self._asked_s < _BETWEEN_S:
            return
        self._asked_s = time.monotonic()
        health = self._cluster.health(_BETWEEN_S)
        back = [worker.task for worker in health.workers if worker.task in self._lost]
        if not all(worker.answers for worker in health.workers):
            return
        for variable in self._known.values():
            if (parts := parts_of_variable(variable)) is not None:
                parts.release(variable)
        self._cluster.reconnect()
        self._lost -= set(back)
        self._lay_out()
        warnings.warn(
            f"{self._step._name()}: worker {', '.join(map(str, back))} is back; the next step runs on "
            f"{', '.join(map(short_name, self.devices))}.",
            stacklevel=user_stack_level(),
        )


def resilient(
    step: ParallelFunction[P, R],
    *,
    on_lost: str = "survivors",
    checkpoint: tf.train.CheckpointManager | None = None,
) -> Resilient[P, R]:
    """Return a parallelized function that continues when workers are lost.

    If a worker ends or freezes during a call, the call is undone, planned for the remaining devices, and repeated. A
    worker that is started again at its address is used again by one of the next calls. The results are always those of
    one device: up to rounding, and bit for bit with equal numbers of shards.

    Variables on lost workers are restored from other copies (`variable_layout("replicated")`). If there is none,
    everything is restored from the last checkpoint, and the calls since then are repeated (their arguments are kept
    for that). Without a checkpoint, it is an error. Variables in this process are never lost.

    Args:
      step: made by `parallelize`, on devices of a cluster that `connect` has connected to.
      on_lost: "survivors", what is described here; there is no other yet.
      checkpoint: of the state that the step changes. Call `save()` between calls, as often as you like.

    Raises:
      ArgumentError: if `step` is not a function made by `parallelize`, or `on_lost` is not known.
      UnsupportedError: if this process is not connected to workers.
    """
    if not isinstance(step, ParallelFunction):
        raise ArgumentError(
            f"resilient takes a function that parallelize returned, got {step!r}. For a Keras model, parallelize its "
            "training step: a function that calls the model, the optimizer and the metrics."
        )
    if on_lost != "survivors":
        raise ArgumentError(f"on_lost must be 'survivors', which goes on with the remaining workers, got {on_lost!r}.")
    cluster = current_cluster()
    if step._options.mesh.stages:
        raise UnsupportedError(
            f"resilient with mesh={step._options.mesh.asked!r}: a lost worker would have the only copy of a stage. "
            f"Leave out {STAGE_AXIS!r}."
        )
    if cluster is None:
        raise UnsupportedError("resilient is for workers, and none is connected: call graphsplit.connect first.")
    return Resilient(step, cluster, checkpoint)
