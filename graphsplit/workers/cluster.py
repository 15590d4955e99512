"""Worker processes that this one is connected to, on TensorFlow's own runtime; whether they are alive.

A worker process is asked from outside of the runtime whether it is there, and which one it is. TensorFlow's servers
answer `GetStatus` at any time, computing or not; the runtime itself has no call with a deadline (its own `check_alive`
waits for a frozen process as long as that is frozen). The answer names the devices, each with a number that a process
draws when it starts: another number is another process.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple

import grpc
import tensorflow as tf
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from graphsplit.core.devices import canonical_name, task_of
from graphsplit.core.tensorflow_internals import device_attributes_file
from graphsplit.errors import WorkerLostError
from graphsplit.runtime.connected_workers import connected_workers

JOB, CLIENT = "worker", "client"
PROBE_S = 5.0  # a worker that computes answers in milliseconds
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

    def health(self, timeout_s: float = PROBE_S) -> Health:
        """Ask all workers how they are, from outside of TensorFlow's runtime, which waits for ever for a frozen worker.

        Args:
          timeout_s: how long to wait for answers, in seconds.
        """
        workers = []
        for task, status in enumerate(ask_all(self.workers, timeout_s)):
            is_other = status is not None and self._is_other(task, status)
            devices = status.devices if status else ()
            workers.append(WorkerHealth(task, self.workers[task], status is not None, is_other, devices))
        return Health(tuple(workers))

    def reconnect(self) -> tuple[int, ...]:
        """Take in workers that were started again at their addresses, and return their numbers.

        Functions compiled before run there again. Variables that lived there are gone. (TensorFlow connects to all
        workers or none: as long as one does not answer, none is taken in.)
        """
        answers = ask_all(self.workers, PROBE_S)
        statuses = [status for status in answers if status is not None]
        back = [task for task, status in enumerate(statuses) if self._is_other(task, status)]
        if not back or len(statuses) < len(answers):
            return ()
        end = time.monotonic() + _AGAIN_S
        while True:
            try:
                connect_to(self, statuses)
                return tuple(back)
            except tf.errors.UnavailableError:  # its channel to the process before waits a while before it tries again
                if time.monotonic() > end:
                    raise
            time.sleep(0.2)

    def _is_other(self, task: int, status: Status) -> bool:
        return status.incarnation != self.incarnations[task]

    def __repr__(self) -> str:
        return f"<Cluster of {', '.join(self.workers)}; this process is {self.client}>"


def connect_to(cluster: Cluster, statuses: Sequence[Status]) -> None:
    """Connect this process to the workers of a cluster, which have said what they are."""
    spec = tf.train.ClusterSpec({JOB: list(cluster.workers), CLIENT: [cluster.client]})
    tf.config.experimental_connect_to_cluster(spec, job_name=CLIENT, task_index=0)
    cluster.incarnations = tuple([status.incarnation for status in statuses])
    cluster.connections += 1


def current_cluster() -> Cluster | None:
    """Return the cluster that this process is connected to."""
    workers = connected_workers()
    return None if workers is None else workers.cluster


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
        "The call did not happen: variables on other workers have the values from before the call."
        if undone
        else "The call still waits for it, and will be undone when the worker's process ends: end that process."
    )
    error: WorkerLostError = WorkerLostError(
        f"{name}: {who} {how}. {what} Variables stored only there are lost. gs.workers.resilient(...) continues "
        "with the remaining workers; cluster.reconnect() uses a worker again that was started again at its address."
    )
    error.tasks, error.undone = tuple(tasks), undone
    return error


def _existing() -> list[str]:
    return [device.name for device in tf.config.list_logical_devices()]


_METHOD = "/tensorflow.WorkerService/GetStatus"
_REPEATED, _MESSAGE = 3, 11  # as descriptor.proto numbers labels and types


class Status(NamedTuple):
    """What a worker says of itself.

    Attributes:
      devices: their kinds and numbers, `GPU:0`.
      incarnation: of the process.
    """

    devices: tuple[str, ...]
    incarnation: int


def ask(address: str, timeout_s: float) -> Status | None:
    """Return what the worker at an address says of itself; None if nobody answers in time."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_unary(_METHOD, lambda nothing: nothing, _answer_class().FromString)
        try:
            answer = call(b"", timeout=timeout_s)
        except grpc.RpcError:  # (what went wrong is all the same to who asks whether anybody is there)
            return None
    devices = answer.device_attributes
    names = [attributes.name.rpartition("/device:")[2] for attributes in devices]
    return Status(tuple(names), devices[0].incarnation if devices else 0)


def ask_all(addresses: Sequence[str], timeout_s: float) -> list[Status | None]:
    """Ask several workers at the same time."""
    if not addresses:
        return []
    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(lambda address: ask(address, timeout_s), addresses))


@functools.cache
def _answer_class() -> Any:
    """Return the class of the answer, of which TensorFlow's wheel has the fields' proto, and not its own."""
    attributes = device_attributes_file()
    file = descriptor_pb2.FileDescriptorProto(
        name="graphsplit/worker_status.proto", package="graphsplit", syntax="proto3", dependency=[attributes.name]
    )
    field = file.message_type.add(name="WorkerStatus").field.add(name="device_attributes", number=1)
    field.label, field.type, field.type_name = _REPEATED, _MESSAGE, ".tensorflow.DeviceAttributes"
    pool = descriptor_pool.Default()
    pool.AddSerializedFile(file.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("graphsplit.WorkerStatus"))
