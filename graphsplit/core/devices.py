"""Devices: which there are, making logical ones, and understanding how users name them."""

from __future__ import annotations

import functools
import os
import re
import warnings
from collections.abc import Iterable, Sequence

import tensorflow as tf

from graphsplit.core.gpus import count_gpus, cut_gpus, too_late
from graphsplit.core.tensorflow_internals import eager_context_started, own_task
from graphsplit.core.user_code import user_stack_level
from graphsplit.errors import ArgumentError, DeviceError, bullet_list

_OF_TASK = re.compile(r"^/job:(\w+)/replica:\d+/task:(\d+)/device:")
_SHORT_OF_TASK = re.compile(r"^(?!(?i:[cg]pu):)(\w+):(\d+)/(?=\w+:)")  # (of a worker, not of a device)
MOST_DEVICES = 1000  # shares of a batch of unknown size are told apart to a thousandth


def use_logical_devices(
    count: int, *, threads_per_device: int | None = None, kind: str = "CPU", memory_mb: int | None = None
) -> tuple[str, ...]:
    """Divide the CPU, or the GPUs, into `count` logical devices, before TensorFlow starts.

    With logical CPU devices you can try, and test, on any machine what graphsplit does with GPUs. With logical GPUs,
    one GPU shows what several do, except for the links between them. The `count` devices are spread evenly over the
    GPUs that TensorFlow sees; GPUs that get none are hidden.

    Args:
      count: how many; at least 1.
      threads_per_device: with a number, each operation uses that many threads, so that a logical device behaves like
        a device of that many cores (the honest setting for benchmarks). All logical devices share one thread pool.
      kind: `"CPU"` or `"GPU"`.
      memory_mb: for GPUs: the memory of each logical device, in MiB, taken from the GPU when TensorFlow starts.

    Returns:
      Their names, `("CPU:0", "CPU:1", ...)`.

    Raises:
      ArgumentError: if `count` or `memory_mb` is not a positive number, `kind` is neither, or the others do not fit it.
      DeviceError: if TensorFlow has already started with other devices, or for GPUs, if there is none, or one has less
        memory than that (where the driver tells it).

    >>> import graphsplit as gs
    >>> gs.use_logical_devices(4)
    ('CPU:0', 'CPU:1', 'CPU:2', 'CPU:3')
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"use_logical_devices(count) takes a positive number of devices, got {count!r}.")
    _check_kind(kind, threads_per_device, memory_mb)
    if memory_mb is not None:
        return cut_gpus(count, memory_mb)
    if eager_context_started():
        if len(tf.config.list_logical_devices("CPU")) != count:
            raise too_late(f"use_logical_devices({count})", "CPU")
    else:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
        if threads_per_device is not None:
            tf.config.threading.set_intra_op_parallelism_threads(threads_per_device)
            # More threads than cores only take turns: a small step on 8 devices and 2 cores took twice as long.
            threads = min(count * threads_per_device, os.cpu_count() or 1)
            tf.config.threading.set_inter_op_parallelism_threads(threads)
    return tuple(f"CPU:{i}" for i in range(count))


def _check_kind(kind: object, threads_per_device: object, memory_mb: object) -> None:
    if kind not in ("CPU", "GPU"):
        raise ArgumentError(f"use_logical_devices(kind={kind!r}): write 'CPU' or 'GPU'; no others can be divided.")
    if kind == "CPU" and memory_mb is not None:
        raise ArgumentError(
            f"use_logical_devices(memory_mb={memory_mb!r}) divides the memory of GPUs; logical CPU devices share the "
            "machine's. Give kind='GPU', or leave memory_mb out."
        )
    if kind == "GPU" and threads_per_device is not None:
        raise ArgumentError(
            f"use_logical_devices(threads_per_device={threads_per_device!r}) is about the threads of CPU devices. Give "
            "kind='CPU', or leave threads_per_device out."
        )
    if kind == "GPU" and memory_mb is None:
        raise ArgumentError(
            "use_logical_devices(kind='GPU') needs memory_mb, each logical GPU's memory in MiB: TensorFlow divides "
            "a GPU by its memory only. Of a GPU with 16 GB, four can have memory_mb=3500."
        )
    if kind == "GPU" and (isinstance(memory_mb, bool) or not isinstance(memory_mb, int) or memory_mb < 1):
        raise ArgumentError(f"use_logical_devices(memory_mb={memory_mb!r}) takes a positive number of MiB.")


def available_devices() -> tuple[str, ...]:
    """Return the devices that computations can run on, in the order in which a number of devices is filled.

    All GPUs if there are any, those of a cluster's workers included; else all logical CPU devices, in a cluster those
    of the workers. Starts TensorFlow.
    """
    names = _existing()
    gpus = tuple(name for name in names if "device:GPU:" in name)
    cpus = tuple(name for name in names if "device:CPU:" in name)
    return gpus or tuple(name for name in cpus if task_of(name) is not None) or cpus


def resolve_devices(
    devices: int | str | Sequence[str] | None, argument: str = "devices", as_said: str = ""
) -> tuple[str, ...]:
    """Return the full names of the devices asked for.

    Args:
      devices: how many, or their names in any of TensorFlow's spellings (`"GPU:0"`, `"/gpu:0"`,
        `"/job:worker/task:1/device:GPU:0"`), or None for all there are.
      argument: how the user calls the option, for messages.
      as_said: what says a number of devices, if it is not that option.

    Warns:
      UserWarning: if all there are is one.

    Raises:
      ArgumentError: for a number below 1, no names at all, a name twice, or something that is no name.
      DeviceError: if some do not exist.
    """
    if devices is None:
        return _all_devices(argument)
    if isinstance(devices, int) and not isinstance(devices, bool):
        return _first_devices(devices, argument, as_said or f"{argument}={devices}")
    names = _full_names(devices, argument)
    check_existing(names, argument, devices)
    return names


def check_existing(names: Sequence[str], argument: str, wanted: object) -> None:
    """Raise `DeviceError` unless this process has all devices of these full names."""
    missing = missing_devices(names)
    if missing:
        what = f"{', '.join(map(short_name, missing))} {'does' if len(missing) == 1 else 'do'} not exist"
        raise DeviceError(f"{argument}={wanted!r}: {what}. This process has:\n{_what_there_is()}")


def in_session_graph() -> bool:
    """Return whether a TensorFlow 1 graph is being built: its session, made later, has devices of its own."""
    return not tf.executing_eagerly() and not tf.compat.v1.executing_eagerly_outside_functions()


def check_runnable(name: str, devices: Sequence[str]) -> None:
    """Raise `DeviceError` unless this process has all devices of a graph, full names; `name` is the function's."""
    missing = missing_devices(devices)
    if missing and not in_session_graph():
        raise DeviceError(
            f"{name} would run on {', '.join(map(short_name, missing))}, which this process does not have. It has:\n"
            f"{_what_there_is()}"
        )


def missing_devices(names: Sequence[str]) -> list[str]:
    """Return those of some devices, full names, that this process does not have."""
    existing = _existing()
    return [name for name in names if name not in existing]


def _all_devices(argument: str) -> tuple[str, ...]:
    """Return all devices there are; warn where that is one, on which nothing runs in parallel."""
    available = available_devices()
    if len(available) == 1:
        warnings.warn(
            f"{argument}=None means all GPUs, or all CPU devices where there is no GPU. Here that is one, "
            f"{short_name(available[0])}: nothing will run in parallel. "
            f"{_how_to_have_more(available)} ({argument}=1 says that one is meant.)",
            stacklevel=user_stack_level(),
        )
    return available


def names_of_devices(devices: int | str | Sequence[str] | None, argument: str = "devices") -> tuple[str, ...]:
    """Return the full names of devices of a process that may be another one than this: they need not exist here.

    A number stands for so many GPUs if this process has any, else CPU devices; None for all GPUs or one CPU device.

    Raises:
      ArgumentError: for a number below 1, no names at all, a name twice, or something that is no name.

    >>> names_of_devices(["GPU:0", "gpu:1"])
    ('/device:GPU:0', '/device:GPU:1')
    """
    if devices is not None and (isinstance(devices, bool) or not isinstance(devices, int)):
        return _full_names(devices, argument)
    gpus = count_gpus()
    count = devices if devices is not None else max(gpus, 1)
    if count < 1:
        raise ArgumentError(f"{argument}={devices!r}: at least one device is needed.")
    if count > MOST_DEVICES:
        raise ArgumentError(f"{argument}={devices!r}: a batch is divided over at most {MOST_DEVICES} devices.")
    return tuple(f"/device:{'GPU' if gpus else 'CPU'}:{i}" for i in range(count))


def _full_names(devices: object, argument: str) -> tuple[str, ...]:
    """Return the full names of devices that are named."""
    if not isinstance(devices, (str, Sequence)):
        raise ArgumentError(f"{argument} takes a number or a list of device names, got {devices!r}.")
    names = tuple(canonical_name(name, argument) for name in ([devices] if isinstance(devices, str) else devices))
    if not names:
        raise ArgumentError(f"{argument} is an empty list; name at least one device.")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ArgumentError(f"{argument} names a device more than once: {', '.join(map(short_name, repeated))}.")
    return names


def canonical_name(name: str, argument: str = "devices") -> str:
    """Return the full form of a device name; a device of this process has no job and task.

    >>> canonical_name("gpu:1")
    '/device:GPU:1'
    >>> canonical_name("worker:1/GPU:0") == canonical_name("/job:worker/task:1/gpu:0")
    True
    """
    if not isinstance(name, str):
        number = f"GPU:{name}" if isinstance(name, int) and not isinstance(name, bool) else ""
        meant = number or str(getattr(name, "name", "")).rpartition("device:")[2]  # (a tf.config.LogicalDevice has it)
        raise ArgumentError(f"{argument} takes device names, got {name!r}." + (f" Write {meant!r}." if meant else ""))
    name = _SHORT_OF_TASK.sub(r"/job:\1/task:\2/", name)
    if name.isdecimal():
        raise ArgumentError(f"{argument}: {name!r} is not a device name; write {argument}={name}, or 'GPU:0'.")
    try:
        spec = tf.DeviceSpec.from_string(name if name.startswith("/") else f"/{name}")
    except ValueError as error:
        raise ArgumentError(f"{argument}: {name!r} is not a device name; write it like 'GPU:0'.") from error
    numbers_fit = all(n is not None and 0 <= n < 2**31 for n in (spec.device_index, spec.task or 0))
    if spec.device_type is None or spec.job == "" or not numbers_fit or not name.isascii():
        raise ArgumentError(f"{argument}: {name!r} is not a device name; write it like 'GPU:0'.")
    if spec.job in (None, "localhost") or (spec.job, spec.task or 0) == own_task():
        return f"/device:{spec.device_type}:{spec.device_index}"
    return str(spec.make_merged_spec(tf.DeviceSpec(replica=spec.replica or 0, task=spec.task or 0)).to_string())


def place(tensor: tf.Tensor) -> str:
    """Return the full name of the device in whose memory a tensor is: the host's for integers of a GPU; "" in a graph.

    >>> place(tf.zeros([2]))
    '/device:CPU:0'
    """
    return _cached_name(getattr(tensor, "backing_device", ""))


@functools.cache
def is_of_dtensor(name: str) -> bool:
    """Return whether a device stands for all of a mesh of DTensor, which says so of what it has divided.

    >>> is_of_dtensor("/job:localhost/replica:0/task:0/device:CUSTOM:0"), is_of_dtensor("")
    (True, False)
    """
    return bool(tf.DeviceSpec.from_string(name).device_type == "CUSTOM")


@functools.cache
def _cached_name(name: str) -> str:
    return canonical_name(name) if name else ""


def names_device(name: str) -> bool:
    """Return whether a node's device asks for one: TensorFlow gives calls of Python functions this process's name.

    >>> names_device("/job:localhost/replica:0/task:0"), names_device("/device:GPU:1"), names_device("")
    (False, True, False)
    """
    spec = tf.DeviceSpec.from_string(name)
    is_this_process = spec.job in (None, "localhost") or (spec.job, spec.task or 0) == own_task()
    return spec.device_type is not None or not is_this_process


def short_name(name: str) -> str:
    """Return a device name as people write it: `GPU:0`, or of another process `worker:1/GPU:0`.

    >>> short_name("/job:worker/replica:0/task:1/device:GPU:0")
    'worker:1/GPU:0'
    """
    if name.startswith("/device:"):
        return name.removeprefix("/device:")
    return _OF_TASK.sub(r"\1:\2/", name)


@functools.cache
def task_of(name: str) -> tuple[str, int] | None:
    """Return the job and task of a device, full name; None for a device of this process.

    >>> task_of("/job:worker/replica:0/task:1/device:GPU:0")
    ('worker', 1)
    >>> task_of("/device:GPU:0")
    """
    if not name.startswith("/job:"):
        return None
    spec = tf.DeviceSpec.from_string(name)
    return str(spec.job), int(spec.task or 0)


def copies_take_time(devices: Iterable[str]) -> bool:
    """Return whether bytes travel between devices, full names: between GPUs, and between processes."""
    names = set(devices)
    return any("device:GPU:" in name for name in names) or len(set(map(task_of, names))) > 1


def name_for_runtime(name: str) -> str:
    """Return a full name as TensorFlow's runtime is given it: in a cluster, `/device:CPU:0` is one of several."""
    own_job = own_task()
    if own_job is None or not name.startswith("/device:"):
        return name
    return f"/job:{own_job[0]}/replica:0/task:{own_job[1]}{name}"


def _existing() -> tuple[str, ...]:
    return tuple(canonical_name(device.name) for device in tf.config.list_logical_devices())


def _first_devices(count: int, argument: str, as_said: str) -> tuple[str, ...]:
    if count < 1:
        raise ArgumentError(f"{as_said}: at least one device is needed.")
    available = available_devices()
    if count > len(available):
        kind = "GPU" if "device:GPU:" in available[0] else "CPU device"
        how_many = f"is only 1 {kind}" if len(available) == 1 else f"are only {len(available)} {kind}s"
        missing = DeviceError(
            f"{as_said}: there {how_many}. This process has:\n{_what_there_is()}\n"
            f'For a plan or a placement only, name them: {argument}=[f"GPU:{{k}}" for k in range({count})].'
        )
        missing.asked = count
        raise missing
    return available[:count]


def _what_there_is() -> str:
    return f"{bullet_list(list(map(short_name, _existing())))}\n{_how_to_have_more(_existing())}"


def _how_to_have_more(existing: Sequence[str]) -> str:
    return _MORE_GPUS if any("device:GPU:" in name for name in existing) else _MORE_CPUS


_MORE_CPUS = "To try several devices without GPUs, call graphsplit.use_logical_devices(n) before TensorFlow starts."
_MORE_GPUS = (
    "A number of devices means GPUs if there are any; name CPU devices to use them. To divide one GPU, call "
    "graphsplit.use_logical_devices(n, kind='GPU', memory_mb=...) before TensorFlow starts."
)
