"""`resilient`: a step that goes on when workers are lost, and takes those in again that come back."""

from __future__ import annotations

import functools
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, ParamSpec, TypeVar

import numpy as np
import tensorflow as tf

from graphsplit.api.calls.chosen_devices import stages_asked
from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.input_pipelines import END, HostPipeline, ReadCall, arguments_of, is_dataset_function
from graphsplit.api.layouts.variable_layouts import set_variable_layout
from graphsplit.core.device_mesh import BATCH_AXIS, MeshAxes
from graphsplit.core.devices import canonical_name, name_for_runtime, short_name, task_of
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.variables.arrangements import forget_stage, lying_now
from graphsplit.core.variables.parted_variables import assign, move_variable, parts_of_variable
from graphsplit.errors import ArgumentError, UnsupportedError, WorkerLostError, bullet_list
from graphsplit.workers.cluster import Cluster, current_cluster, lost_error

P = ParamSpec("P")
R = TypeVar("R")

_BETWEEN_S = 1.0  # workers that are away are asked for once a second


@dataclass(frozen=True)
class _LayoutBefore:
    """How a variable was laid out when all workers were there, and over which devices."""

    layout: Any
    over: tuple[str, ...]
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
        self._axes = _axes_of(step)
        self._rows = self._axes.by_growing(step.devices)
        self._lost: set[int] = set()
        self._loss: WorkerLostError | None = None  # after which variables are yet to be laid out
        self._gone: dict[int, tf.Variable] = {}  # those whose values went with a worker
        self._programs = 0  # how many were looked at
        self._functions: dict[tuple[str, ...], ParallelFunction[P, R]] = {step.devices: step}
        self._asked_s = 0.0
        self._layouts: dict[int, _LayoutBefore] = {}
        self._variables: dict[int, tf.Variable] = {}
        self._since: list[Callable[[ParallelFunction[P, R]], Any]] = []  # the calls since the checkpoint that counts
        self._behind: list[Callable[[ParallelFunction[P, R]], Any]] = []  # those of them that are to be repeated
        self._counts = _latest(checkpoint)
        functools.update_wrapper(self, step.function, updated=())

    @property
    def devices(self) -> tuple[str, ...]:
        """Full names: without those of lost workers, and those that are too few for another row of a mesh."""
        rows = self._rows_left()
        return self._axes.with_rows(rows)[1] if rows else ()

    @property
    def _devices_left(self) -> list[str]:
        """All devices that are there, row by row."""
        return self._alive([device for row in self._rows for device in row])

    def _rows_left(self) -> list[list[str]]:
        """Return the rows of the next call: as many as the devices that are there fill."""
        devices_left, length = self._devices_left, len(self._rows[0])
        return [devices_left[k : k + length] for k in range(0, len(devices_left) // length * length, length)]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the step; without lost workers, as often as it takes.

        Raises:
          WorkerLostError: if too few devices are left, or state is lost of which there is neither a copy nor a
            checkpoint.
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
        self._until_it_happens(lambda _: None)  # (a call that raised may have left others to be repeated)
        return str(self._checkpoint.save())

    def _until_it_happens(self, call: Callable[[ParallelFunction[P, R]], Any]) -> Any:
        while True:
            self._recover()
            try:
                while self._behind:
                    self._call(self._behind[0])
                    del self._behind[0]
                return self._call(call)
            except WorkerLostError as error:
                self._lose(error)

    def _call(self, call: Callable[[ParallelFunction[P, R]], Any]) -> Any:
        function = self._function()
        try:
            return call(function)
        finally:
            self._remember(function)

    def _function(self) -> ParallelFunction[P, R]:
        devices = self.devices
        if devices not in self._functions:
            (axes, _), options = self._axes.with_rows(self._rows_left()), self._step._options
            shares = options.shares
            if shares is not None:
                rows_and_shares = zip(self._axes.table(self._step.devices), shares, strict=False)
                share_of = {device: share for row, share in rows_and_shares for device in np.ravel(row)}
                shares = [min([share_of[device] for device in np.ravel(row)]) for row in axes.table(devices)]
            mesh = axes if options.mesh else options.mesh
            options = replace(options, devices=devices, shares=shares, mesh=mesh)
            default = options.tuning["default_device"]
            if default is not None and not self._alive([canonical_name(default)]):
                options = replace(options, tuning={**options.tuning, "default_device": None})
            self._functions[devices] = ParallelFunction(self._step.function, options)
        return self._functions[devices]

    def _alive(self, devices: Sequence[str]) -> list[str]:
        return [device for device in devices if not self._is_lost(device)]

    def _remember(self, function: ParallelFunction[P, R]) -> None:
        """Note the variables that a function uses, and how they lie while nobody is lost.

        Raises:
          UnsupportedError: for stages whose devices the user's function names.
        """
        programs = function._programs_so_far()
        if len(programs) != self._programs:
            stages = [stage for program in programs for stage in program.all_stages()]
            if away := [stage for stage in stages if len(stage.devices) > 1 or task_of(stage.default_device)]:
                raise UnsupportedError(
                    f"resilient: {away[0]} is a stage by on_device, which names devices that may be lost. Leave out "
                    "on_device, and give parallelize stages= or a mesh with an axis 'stage'."
                )
            self._programs = len(programs)
        self._variables.update({id(variable): variable for variable in function._variables_so_far()})
        if not self._lost:
            lying = [(k, record) for k, v in self._variables.items() if (record := lying_now(v)).division is not None]
            self._layouts = {key: _LayoutBefore(record.layout, record.over, record.reshards) for key, record in lying}

    def _lose(self, error: WorkerLostError) -> None:
        """Note which workers are lost, and let each variable hold its value itself.

        Raises:
          WorkerLostError: if the call did not end.
        """
        if not error.undone or not error.tasks:
            raise error
        self._lost |= set(error.tasks)
        self._loss = error
        if self.devices:
            names = ", ".join([f"{task} ({self._cluster.workers[task]})" for task in error.tasks])
            warnings.warn(
                f"{self._step._name()}: lost worker {names}; the step runs again on {self._where()}.",
                stacklevel=user_stack_level(),
            )
        self._gather()

    def _where(self) -> str:
        """Say on which devices the next call runs."""
        axes, devices = self._axes.with_rows(self._rows_left())
        named = f", mesh {axes}" if axes.others or axes.stages else ""
        return ", ".join(map(short_name, devices)) + named

    def _recover(self) -> None:
        """After a loss, lay the variables out on the devices of the next call, as of the last complete one.

        Raises:
          WorkerLostError: see `_check_is_enough`.
        """
        if self._loss is None:
            return
        self._check_is_enough(self._loss)
        if self._gone:
            # (`restore` would then wait for all workers, those that are lost included)
            self._checkpoint.checkpoint.read(self._counts).expect_partial()
            self._behind, self._gone = [*self._since], {}
        self._lay_out()
        self._loss = None

    def _check_is_enough(self, loss: WorkerLostError) -> None:
        """Raise `WorkerLostError` if values are gone for good, or too few devices are left."""
        if self._gone and self._counts is None:
            why = (
                f"These variables have no copy elsewhere:\n{bullet_list([v.name for v in self._gone.values()])}\n"
                'Set their layout to "replicated", keep them in this process, or pass resilient(checkpoint=...) a '
                "tf.train.CheckpointManager that has saved a checkpoint."
            )
        elif not self.devices:
            least, left_names = self._axes.with_rows(self._rows[:1])[0], ", ".join(map(short_name, self._devices_left))
            why = (
                f"The step needs at least mesh={least.asked!r}, and these devices are left: {left_names or 'none'}. "
                "Start the lost workers again at their addresses, and call again."
            )
        else:
            return
        error = WorkerLostError(f"{loss} {why}")
        error.tasks = loss.tasks
        raise error from loss

    def _gather(self) -> None:
        """Let each variable hold its value itself, on a device that is there; note those whose value is gone."""
        for key, variable in self._variables.items():
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
                self._gone[key] = variable
                value = tf.zeros(variable.shape, variable.dtype)
            if self._is_lost(device):
                self._move(variable, value)
            else:
                with tf.device(variable.device):
                    assign(variable.handle, value)  # (where it lay in parts, it is empty)

    def _is_lost(self, device: str) -> bool:
        task = task_of(device)
        return task is not None and task[1] in self._lost

    def _move(self, variable: tf.Variable, value: tf.Tensor) -> None:
        """Let a variable whose resource went with its worker live on a device that is there."""
        move_variable(variable, name_for_runtime([*self._devices_left, canonical_name("CPU:0")][0]), value)
        self._functions.clear()  # they hold the handle that is gone

    def _lay_out(self) -> None:
        """Lay the variables out as they were, on the devices that are there."""
        mesh = self._function()._options.mesh
        for variable in self._variables.values():
            forget_stage(variable)  # (its devices are another stage's by now; it is known again with the plan)
        groups: dict[_LayoutBefore, list[tf.Variable]] = {}
        for key, lying in self._layouts.items():
            variable, over = self._variables[key], self.devices if mesh else tuple(self._alive(lying.over))
            is_chosen = not mesh and not isinstance(lying.layout, str)  # by an automatic plan, which will choose again
            # (copies are where the variable itself is)
            stays = lying.layout == "replicated" and not mesh.stages and canonical_name(variable.device) not in over
            if len(over) > 1 and not is_chosen and not stays and parts_of_variable(variable) is None:
                groups.setdefault(replace(lying, over=over), []).append(variable)
        for how, variables in groups.items():
            set_variable_layout(
                variables, how.layout, how.over, mesh=mesh.asked or None, reshard_after_forward=how.reshard
            )

    def _take_in(self) -> None:
        """Take workers in that are there again."""
        if not self._lost or time.monotonic() - self._asked_s < _BETWEEN_S:
            return
        self._asked_s = time.monotonic()
        health = self._cluster.health(_BETWEEN_S)
        if not all(worker.answers for worker in health.workers):
            return
        unnoticed = [worker.task for worker in health.workers if worker.restarted and worker.task not in self._lost]
        if unnoticed:
            self._lose(lost_error(self._cluster, unnoticed, self._step._name(), True, 0.0))
        back = [worker.task for worker in health.workers if worker.task in self._lost]
        for variable in self._variables.values():
            if (parts := parts_of_variable(variable)) is not None:
                parts.release(variable)
        self._cluster.reconnect()
        self._lost -= set(back)
        if self._loss is None:
            self._lay_out()
        warnings.warn(
            f"{self._step._name()}: worker {', '.join(map(str, back))} is back; the next step runs on {self._where()}.",
            stacklevel=user_stack_level(),
        )


def _axes_of(step: ParallelFunction[P, R]) -> MeshAxes:
    """Return the axes of a step's devices, of which whole rows are left: those of its mesh, or pipelines, or shards."""
    options, count = step._options, len(step.devices)
    stages = None if options.schedule == "interleaved" else stages_asked(options, step.devices)
    depth = 0 if stages is None else len(stages.devices)
    return options.mesh or MeshAxes(((BATCH_AXIS, count // max(depth, 1)),), stages=depth, stage_at=1)


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

    A mesh keeps its other axes and gets fewer rows: of `{"batch": 2, "model": 2}` with one device lost,
    `{"batch": 1, "model": 2}` is left. So do pipelines of stages.

    Variables on lost workers are restored from other copies (`variable_layout("replicated")`). If there is none,
    everything is restored from the last checkpoint, and the calls since then are repeated (their arguments are kept
    for that). Without a checkpoint, it is an error. Variables in this process are never lost.

    Args:
      step: made by `parallelize`, on devices of a cluster that `connect` has connected to.
      on_lost: "survivors", what is described here; there is no other yet.
      checkpoint: of the state that the step changes. Call `save()` between calls, as often as you like.

    Raises:
      ArgumentError: if `step` is not a function made by `parallelize`, or `on_lost` is not known.
      UnsupportedError: if this process is not connected to workers; from the first call, for stages by `on_device` on
        workers.
    """
    if not isinstance(step, ParallelFunction):
        raise ArgumentError(
            f"resilient takes a function that parallelize returned, got {step!r}. For a Keras model, parallelize its "
            "training step: a function that calls the model, the optimizer and the metrics."
        )
    if on_lost != "survivors":
        raise ArgumentError(f"on_lost must be 'survivors', which goes on with the remaining workers, got {on_lost!r}.")
    cluster = current_cluster()
    if cluster is None:
        raise UnsupportedError("resilient is for workers, and none is connected: call graphsplit.connect first.")
    return Resilient(step, cluster, checkpoint)
