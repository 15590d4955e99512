"""`connect`: the devices of other processes, on TensorFlow's own runtime.

A worker started by `graphsplit worker` tells the versions that it runs. TensorFlow runs a `numpy_function` wherever it
is placed, and finds the Python function there under a token. So a worker makes one before anything else: the client
calls it by the token that the first of a process has.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.addresses import address_towards, worker_addresses
from graphsplit.core.garbage_collection import living_objects, with_derived
from graphsplit.core.tensorflow_internals import eager_context_started, own_task
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.version import __version__
from graphsplit.errors import DeviceError, UnsupportedError, bullet_list
from graphsplit.runtime.connected_workers import note_connected
from graphsplit.workers.cluster import JOB, PROBE_S, Cluster, OnLost, Status, ask_all, connect_to, current_cluster
from graphsplit.workers.local_workers import LocalWorkers
from graphsplit.workers.undo_log import UndoLog

# TensorFlow's calls to a worker that has ended wait until it is there again, unless its environment says the first. And
# what is done to a worker's variables eagerly is not waited for by functions that use them, unless it says the second:
# of 2,400 values that were read and then changed by a function, 90 were read too late.
_SETTINGS = {"GRPC_FAIL_FAST": "true", "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "false"}


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
    addresses, own_address = worker_addresses(workers)
    if isinstance(workers, LocalWorkers):
        on_lost = _ending(workers, on_lost)
    if own_task() is not None:
        cluster = current_cluster()
        if cluster is not None and list(cluster.workers) == addresses:
            return cluster
        how_connected = "by other means" if cluster is None else f"to {', '.join(cluster.workers)}"
        raise UnsupportedError(
            f"connect({addresses}): this process is connected {how_connected} already, and TensorFlow would lose later "
            "assignments to variables. To use other workers, start this program again."
        )
    _check_nothing_there()
    apply_settings()
    statuses = _wait_for(addresses, timeout_s)
    cluster = Cluster(addresses, address or own_address or address_towards(addresses[0]), deadline_s, on_lost)
    connect_to(cluster, statuses)
    note_connected(UndoLog(cluster))
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
    status_by_address: dict[str, Status] = {}
    while True:
        missing = [address for address in addresses if address not in status_by_address]
        answers = zip(missing, ask_all(missing, min(PROBE_S, max(timeout_s, 0.1))), strict=True)
        status_by_address |= {address: status for address, status in answers if status is not None}
        if len(status_by_address) == len(addresses):
            return [status_by_address[address] for address in addresses]
        if time.monotonic() - begin > timeout_s:
            silent = [address for address in addresses if address not in status_by_address]
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
    variables = living_objects(*with_derived(tf.Variable))
    if variables:
        names = ", ".join([v.name for v in variables[:3]]) + (", ..." if len(variables) > 3 else "")
        raise UnsupportedError(
            f"connect was called after variables were made ({len(variables)}: {names}): TensorFlow would silently lose "
            "later assignments to them. Call it first in the program, before any tensor, variable or model is made."
        )


def _compare_versions(cluster: Cluster) -> None:
    """Raise `UnsupportedError` where a worker runs another TensorFlow; warn where another graphsplit, or unknown."""
    for task, address in enumerate(cluster.workers):
        answer: Introduction | None = ask_who(f"{_device_prefix(task)}/device:CPU:0")
        if answer is None:
            warnings.warn(
                f"Worker {task} ({address}) was not started by `graphsplit worker`: whether it runs TensorFlow "
                f"{tf.__version__} is not known.",
                stacklevel=user_stack_level(),
            )
        elif answer.tensorflow.split(".")[:2] != tf.__version__.split(".")[:2]:
            raise UnsupportedError(
                f"Worker {task} ({address}) runs TensorFlow {answer.tensorflow}, this process {tf.__version__}: their "
                "graphs differ. Install the same version on all machines."
            )
        elif answer.graphsplit != __version__:
            warnings.warn(
                f"Worker {task} ({address}) runs graphsplit {answer.graphsplit}, this process {__version__}.",
                stacklevel=user_stack_level(),
            )


def _compare_devices(addresses: Sequence[str], statuses: Sequence[Status]) -> None:
    counts = [sum(name.startswith("GPU") for name in status.devices) for status in statuses]
    if len(set(counts)) > 1:
        listed = ", ".join([f"{count} on {address}" for count, address in zip(counts, addresses, strict=True)])
        warnings.warn(
            f"The workers have different numbers of GPUs: {listed}. All devices get equal numbers of rows; "
            "shares=[...] gives them other shares.",
            stacklevel=user_stack_level(),
        )


def _device_prefix(task: int) -> str:
    return f"/job:{JOB}/replica:0/task:{task}"


TOKEN = "pyfunc_0"


class Introduction(NamedTuple):
    """What a worker tells.

    Attributes:
      tensorflow, graphsplit: versions.
      pid: of its process.
    """

    tensorflow: str
    graphsplit: str
    pid: int


def introduce(graphsplit_version: str) -> Any:
    """Let this process answer `ask_who`, as long as what is returned lives."""
    introduction = json.dumps(Introduction(tf.__version__, graphsplit_version, os.getpid())._asdict()).encode()

    def answer_who(*asked: Any) -> Any:
        if asked:
            raise UnsupportedError(
                "This worker was asked to run a Python function of the client, which it does not have."
            )
        return np.array(introduction, object)

    graph = tf.Graph()
    with graph.as_default():
        answer = tf.numpy_function(answer_who, [], tf.string)
    token = answer.op.get_attr("token").decode()
    assert token == TOKEN, f"something else of this process had {TOKEN} before it introduced itself: {token}"
    return graph


def ask_who(device: str) -> Introduction | None:
    """Return what the worker that has a device tells of itself; None if it was not started by `graphsplit worker`."""
    with tf.device(device):
        try:
            [answer] = tf.raw_ops.PyFunc(input=[], token=TOKEN, Tout=[tf.string])
            return Introduction(**json.loads(answer.numpy()))
        except (tf.errors.InvalidArgumentError, tf.errors.UnknownError, TypeError, ValueError):
            return None  # it has no such function, or another one
