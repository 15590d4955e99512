"""`connect`: the devices of other processes, on TensorFlow's own runtime."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.clusters.addresses import address_towards, worker_addresses
from graphsplit.clusters.introduction import Introduction, ask_who
from graphsplit.clusters.local_workers import LocalWorkers
from graphsplit.clusters.status import Status, ask_all
from graphsplit.core.devices import canonical_name, task_of
from graphsplit.core.errors import DeviceError, UnsupportedError, WorkerLostError, bullet_list
from graphsplit.core.living_objects import living_objects, with_derived
from graphsplit.core.tensorflow_internals import eager_context_started, own_task
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.version import __version__

JOB, CLIENT = "worker", "client"
# TensorFlow's calls to a worker that has ended wait until it is there again, unless its environment says the first. And
# what is done to a worker's variables eagerly is not waited for by functions that use them, unless it says the second:
# of 2,400 values that were read and then changed by a function, 90 were read too late.
_SETTINGS = {"GRPC_FAIL_FAST": "true", "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "false"}
_PROBE_S = 5.0  # a worker that computes answers in milliseconds
_AGAIN_S = 60.0

OnLost = Callable[[int, str], None]


@dataclass(frozen=True)
class WorkerHealth:
    """How a worker is.

    Attributes:
      task: its number.
      address: where it listens.
      answers: whether it does, now.
      restarted: whether it is another process than the one that the client is connected to.
      devices: what it has now, `GPU:0`.
    """

    task: int
    address: str
    answers: bool
    restarted: bool
    devices: tuple[str, ...]

    @property
    def is_well(self) -> bool:
        """Whether functions run there."""
        return self.answers and not self.restarted

    def __str__(self) -> str:
        how = "answers" if self.is_well else "was started again; reconnect()" if self.answers else "does not answer"
        return f"worker {self.task} ({self.address}): {how}{', ' + ', '.join(self.devices) if self.devices else ''}"


@dataclass(frozen=True)
class Health:
    """How the workers of a cluster are; `print` it.

    Attributes:
      workers: each one.
    """

    workers: tuple[WorkerHealth, ...]

    @property
    def lost(self) -> tuple[int, ...]:
        """The numbers of the workers on which nothing runs."""
        return tuple([worker.task for worker in self.workers if not worker.is_well])

    def __str__(self) -> str:
        return "\n".join(map(str, self.workers))


class Cluster:
    """Workers that this process is connected to. Made by `connect`.

    Attributes:
      workers: their addresses, by number.
      client: the address at which they reach this process.
      deadline_s: how long a worker may not answer before it counts as lost, in seconds; None: 60, or ten times the
        longest call so far if that is more.
      on_lost: called with the number and the address of a worker that is lost while a call waits for it.
      connections: how often it was connected.
      incarnations: of the workers' processes, as of the last time.
    """

    def __init__(self, workers: Sequence[str], client: str, deadline_s: float | None, on_lost: OnLost | None):
        self.workers = tuple(workers)
        self.client = client
        self.deadline_s = deadline_s
        self.on_lost = on_lost
        self.connections = 0
        self.incarnations: tuple[int, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The full names of the workers' devices."""
        return tuple([name for name in map(canonical_name, _existing()) if task_of(name) is not None])

    def devices_of(self, task: int) -> tuple[str, ...]:
        """Return the full names of a worker's devices."""
        return tuple([name for name in self.devices if task_of(name) == (JOB, task)])

    def health(self, timeout_s: float = _PROBE_S) -> Health:
        """Ask all workers how they are, from outside of TensorFlow's runtime; that of a frozen one waits for ever.

        Args:
          timeout_s: how long to wait for answers, in seconds.
        """
        found = []
        for task, status in enumerate(ask_all(self.workers, timeout_s)):
            is_other = status is not None and self._is_other(task, status)
            devices = status.devices if status else ()
            found.append(WorkerHealth(task, self.workers[task], status is not None, is_other, devices))
        return Health(tuple(found))

    def reconnect(self) -> tuple[int, ...]:
        """Take in workers that were started again at their addresses, and return their numbers.

        Functions compiled before run there again. Variables that lived there are gone. (TensorFlow connects to all
        workers or none: as long as one does not answer, none is taken in.)
        """
        found = ask_all(self.workers, _PROBE_S)
        statuses = [status for status in found if status is not None]
        back = [task for task, status in enumerate(statuses) if self._is_other(task, status)]
        if not back or len(statuses) < len(found):
            return ()
        end = time.monotonic() + _AGAIN_S
        while True:
            try:
                self._connect([status.incarnation for status in statuses])
                return tuple(back)
            except tf.errors.UnavailableError:  # its channel to the process before waits a while before it tries again
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def _is_other(self, task: int, status: Status) -> bool:
        return status.incarnation != self.incarnations[task]

    def _connect(self, incarnations: Sequence[int]) -> None:
        spec = tf.train.ClusterSpec({JOB: list(self.workers), CLIENT: [self.client]})
        tf.config.experimental_connect_to_cluster(spec, job_name=CLIENT, task_index=0)
        self.incarnations = tuple(incarnations)
        self.connections += 1

    def __repr__(self) -> str:
        return f"<Cluster of {', '.join(self.workers)}; this process is {self.client}>"


_current: list[Cluster] = []


def current_cluster() -> Cluster | None:
    """Return the cluster that this process is connected to."""
    return _current[0] if _current else None


def connect(
    workers: Iterable[str] | Any,
    *,
    address: str | None = None,
    timeout_s: float = 60.0,
    deadline_s: float | None = None,
    on_lost: OnLost | None = None,
) -> Cluster:
    """Connect to worker processes: their devices become devices of this process, for everything.

    By default `parallelize` and everything else use all GPUs of all workers (without GPUs, the workers' CPUs). Call it
    before any tensor, variable or model is made. Start workers with `graphsplit worker --port 2222`. TensorFlow's
    workers have no passwords: anyone who reaches their ports can use them.

    Args:
      workers: their addresses, `["10.0.0.1:2222", "10.0.0.2:2222"]`, or a `tf.distribute.cluster_resolver` (TF_CONFIG,
        Slurm, Kubernetes): all tasks that it knows but this process.
      address: of this process, `"10.0.0.9:2221"`, where workers have to know it; by default chosen, with a free port.
      timeout_s: how long to wait for workers that do not answer yet, in seconds.
      deadline_s: how long a worker may not answer before a call that needs it raises `WorkerLostError`, in seconds. By
        default 60, or ten times the longest call so far, if that is more. A worker that computes answers.
      on_lost: called with the number and the address of a worker when it is lost while a call waits for it: end its
        process there, and the call ends. (One of `local_workers` is ended anyway.)

    Raises:
      ArgumentError: for no workers, one twice, or what is no address.
      DeviceError: if a worker does not answer in time.
      UnsupportedError: if TensorFlow is connected to others, or has variables already, or versions differ.
    """
    addresses, known = worker_addresses(workers)
    if isinstance(workers, LocalWorkers):
        on_lost = _ending(workers, on_lost)
    if own_task() is not None:
        cluster = current_cluster()
        if cluster is not None and list(cluster.workers) == addresses:
            return cluster
        now = "by other means" if cluster is None else f"to {', '.join(cluster.workers)}"
        raise UnsupportedError(
            f"connect({addresses}): this process is connected {now} already, and TensorFlow would lose later "
            "assignments to variables. To use other workers, start this program again."
        )
    _check_nothing_there()
    apply_settings()
    statuses = _wait_for(addresses, timeout_s)
    cluster = Cluster(addresses, address or known or address_towards(addresses[0]), deadline_s, on_lost)
    cluster._connect([status.incarnation for status in statuses])
    _current.append(cluster)
    _compare_versions(cluster)
    _compare_devices(addresses, statuses)
    return cluster


def _ending(workers: LocalWorkers, on_lost: OnLost | None) -> OnLost:
    """Return what ends a lost process that this one started, and tells the user."""

    def end(task: int, address: str) -> None:
        workers.kill(task)
        if on_lost is not None:
            on_lost(task, address)

    return end


def _wait_for(addresses: Sequence[str], timeout_s: float) -> list[Status]:
    """Return what workers say of themselves, once all do."""
    begin = time.monotonic()
    found: dict[str, Status] = {}
    while True:
        missing = [address for address in addresses if address not in found]
        answers = zip(missing, ask_all(missing, min(_PROBE_S, max(timeout_s, 0.1))), strict=True)
        found |= {address: status for address, status in answers if status is not None}
        if len(found) == len(addresses):
            return [found[address] for address in addresses]
        if time.monotonic() - begin > timeout_s:
            silent = [address for address in addresses if address not in found]
            raise DeviceError(
                f"These workers did not answer within {timeout_s:g} s:\n{bullet_list(silent)}\n"
                "Start each with `graphsplit worker --port ...` and see that this machine may reach the port; "
                "timeout_s=... waits longer."
            )
        time.sleep(0.2)


def apply_settings() -> None:
    """Set how TensorFlow's processes talk to each other, where the environment does not say."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def _check_nothing_there() -> None:
    if not eager_context_started():
        return
    found = living_objects(*with_derived(tf.Variable))
    if found:
        names = ", ".join([v.name for v in found[:3]]) + (", ..." if len(found) > 3 else "")
        raise UnsupportedError(
            f"connect was called after variables were made ({len(found)}: {names}): TensorFlow would silently lose "
            "later assignments to them. Call it first in the program, before any tensor, variable or model is made."
        )


def _compare_versions(cluster: Cluster) -> None:
    """Raise `UnsupportedError` where a worker runs another TensorFlow; warn where another graphsplit, or unknown."""
    for task, address in enumerate(cluster.workers):
        told: Introduction | None = ask_who(f"{_device_prefix(task)}/device:CPU:0")
        if told is None:
            warnings.warn(
                f"Worker {task} ({address}) was not started by `graphsplit worker`: whether it runs TensorFlow "
                f"{tf.__version__} is not known.",
                stacklevel=user_stack_level(),
            )
        elif told.tensorflow.split(".")[:2] != tf.__version__.split(".")[:2]:
            raise UnsupportedError(
                f"Worker {task} ({address}) runs TensorFlow {told.tensorflow}, this process {tf.__version__}: their "
                "graphs differ. Install the same version on all machines."
            )
        elif told.graphsplit != __version__:
            warnings.warn(
                f"Worker {task} ({address}) runs graphsplit {told.graphsplit}, this process {__version__}.",
                stacklevel=user_stack_level(),
            )


def _compare_devices(addresses: Sequence[str], statuses: Sequence[Status]) -> None:
    counts = [sum(name.startswith("GPU") for name in status.devices) for status in statuses]
    if len(set(counts)) > 1:
        listed = ", ".join([f"{count} on {address}" for count, address in zip(counts, addresses, strict=True)])
        warnings.warn(
            f"The workers have different numbers of GPUs: {listed}. All devices get equal numbers of rows; "
            "weights=[...] gives them other shares.",
            stacklevel=user_stack_level(),
        )


def lost_error(cluster: Cluster, tasks: Sequence[int], name: str, undone: bool, since_s: float) -> WorkerLostError:
    """Return the error that says which workers are lost and what to do.

    Args:
      cluster: of the workers.
      tasks: their numbers.
      name: of the function that was called.
      undone: whether the call's changes of variables are taken back.
      since_s: for how long they have not answered, in seconds; 0 if that is not known.
    """
    who = ", ".join([f"worker {task} ({cluster.workers[task]})" for task in tasks])
    how = f"has not answered for {since_s:.0f} s" if since_s >= 1 else "ended, or does not answer"
    what = (
        "The call did not happen: variables elsewhere have the values that they had before it."
        if undone
        else "The call still waits for it, and will be undone when the worker's process ends: end that process."
    )
    error: WorkerLostError = WorkerLostError(
        f"{name}: {who} {how}. {what} Variables that were only there are lost. graphsplit.resilient(...) continues "
        "with the remaining workers; cluster.reconnect() uses a worker again that was started again at its address."
    )
    error.tasks, error.undone = tuple(tasks), undone
    return error


def _existing() -> list[str]:
    return [device.name for device in tf.config.list_logical_devices()]


def _device_prefix(task: int) -> str:
    return f"/job:{JOB}/replica:0/task:{task}"
