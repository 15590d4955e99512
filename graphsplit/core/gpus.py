"""GPUs: several logical devices out of each, what NVIDIA's driver says of them, and what has a kernel there.

A GPU is divided before TensorFlow starts. TensorFlow's public API tells a GPU's model and compute capability, and
neither the driver, nor the memory before it is taken, nor which GPUs reach each other's memory: `nvidia-smi` does.
Which kinds of device have a kernel for an operation follows from the types that the operation has.
"""

from __future__ import annotations

import functools
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.core.protos import make_node
from graphsplit.core.tensorflow_internals import eager_context_started, op_definition, registered_kernels
from graphsplit.errors import DeviceError


def has_gpus() -> bool:
    """Return whether TensorFlow has a GPU to use: one that is there and was not hidden."""
    return bool(tf.config.get_visible_devices("GPU"))


def count_gpus() -> int:
    """Return how many GPU devices this process has, or will have when TensorFlow starts; it does not start here."""
    gpus = tf.config.get_visible_devices("GPU")
    return sum(len(tf.config.get_logical_device_configuration(gpu) or [None]) for gpu in gpus)


def gpu_memory_bytes(devices: Sequence[str]) -> int | None:
    """Return the memory of the smallest of these GPUs of this process; None for other devices, or if it is not told."""
    if not all(name.startswith("/device:GPU:") for name in devices):
        return None
    gpus = tf.config.get_visible_devices("GPU")
    limits = [cut.memory_limit for gpu in gpus for cut in tf.config.get_logical_device_configuration(gpu) or ()]
    memory_mb = min(limits) if limits and None not in limits else smallest_memory_mb()
    return None if memory_mb is None else memory_mb * 2**20


def cut_gpus(count: int, memory_mb: int) -> tuple[str, ...]:
    """Divide the GPUs that TensorFlow may use into `count` logical ones: see `use_logical_devices`."""
    call = f"use_logical_devices({count}, kind='GPU', memory_mb={memory_mb})"
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        raise DeviceError(
            f"{call} divides GPUs, and TensorFlow finds none here; `graphsplit doctor` says what it finds. To try "
            f"several devices without GPUs: use_logical_devices({count})."
        )
    shares = [count // len(gpus) + (i < count % len(gpus)) for i in range(len(gpus))]
    if eager_context_started():
        _check_started(call, gpus, [memory_mb] * count)
    else:
        _check_memory(call, max(shares), memory_mb)
        used = {gpu: share for gpu, share in zip(gpus, shares, strict=True) if share}
        tf.config.set_visible_devices(list(used), "GPU")
        for gpu, share in used.items():
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=memory_mb)
            tf.config.set_logical_device_configuration(gpu, [limit] * share)
    return tuple(f"GPU:{i}" for i in range(count))


def _check_memory(call: str, most: int, memory_mb: int) -> None:
    """Raise `DeviceError` if a GPU would have to hold more than it has. (TensorFlow would fail at its first tensor.)"""
    have_mb = smallest_memory_mb()
    if have_mb is not None and most * memory_mb > have_mb:
        raise DeviceError(
            f"{call}: {most} logical GPUs of {memory_mb} MB on one GPU need {most * memory_mb} MB, and it has "
            f"{have_mb} MB, of which the driver keeps some hundred. Give memory_mb={have_mb * 9 // 10 // most} or less."
        )


def _check_started(call: str, gpus: list[tf.config.PhysicalDevice], wanted: list[int]) -> None:
    limits = [cut.memory_limit for gpu in gpus for cut in tf.config.get_logical_device_configuration(gpu) or ()]
    if limits != wanted:
        how = f" of {', '.join(map(str, dict.fromkeys(limits)))} MB" if limits else ", which are not divided"
        raise too_late(call, "GPU", how)


def too_late(call: str, kind: str, how: str = "") -> DeviceError:
    """Return the error for what was asked when TensorFlow had already started with devices of a kind."""
    existing = len(tf.config.list_logical_devices(kind))
    first = "Call it first in the program, before any tensor, variable or model is made."
    if "ipykernel" in sys.modules:
        first = "Restart the notebook's runtime and run this cell first, before any that makes a tensor or model."
    error: DeviceError = DeviceError(
        f"{call} was called after TensorFlow had started with {existing} {kind} device{'s' if existing != 1 else ''}"
        f"{how}; devices are fixed from then on. {first}"
    )
    return error


_LIMIT_S = 20.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # the tool underlines its header
_COLUMNS = "index,name,memory.total,driver_version"  # https://docs.nvidia.com/deploy/nvidia-smi


class NoDriverAnswerError(Exception):
    """The driver was asked and does not say; the message is why, and completes "not known: "."""


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver numbers it, which is not always how TensorFlow does; its memory in MiB, None if not told."""

    index: int
    name: str
    memory_mb: int | None


@dataclass(frozen=True)
class Driver:
    """The driver's version and all GPUs of the machine, those hidden from this process included."""

    version: str
    gpus: tuple[DriverGpu, ...]


def read_driver() -> Driver:
    """Ask for the driver's version and GPUs.

    Raises:
      NoDriverAnswerError: if there is no such tool, or no GPU, or it fails.
    """
    lines = [line for line in _ask(f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits").splitlines() if line]
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    if not rows or any(len(row) != 4 or not row[0].isdecimal() for row in rows):
        raise NoDriverAnswerError(f"nvidia-smi answered {lines[0] if lines else 'nothing'!r}")
    gpus = [DriverGpu(int(index), name, int(size) if size.isdecimal() else None) for index, name, size, _ in rows]
    return Driver(rows[0][3], tuple(gpus))


def read_peer_access() -> Mapping[tuple[int, int], str]:
    """Ask which GPUs read each other's memory directly: `"OK"`, or the driver's abbreviation of why not, by pair.

    Raises:
      NoDriverAnswerError: as `read_driver`; or if the answer is not the table that it is known to be.
    """
    table = [line.split() for line in _ESCAPES.sub("", _ask("topo", "-p2p", "r")).splitlines()]
    header = next((words for words in table if words and all(re.fullmatch(r"GPU\d+", word) for word in words)), [])
    rows = {words[0]: words[1:] for words in table if words and words[0] in header and words != header}
    if not header or list(rows) != header or any(len(row) != len(header) for row in rows.values()):
        raise NoDriverAnswerError("the answer of nvidia-smi topo -p2p r is no table of GPUs")
    numbers = [int(name.removeprefix("GPU")) for name in header]
    return {(a, b): rows[f"GPU{a}"][k] for a in numbers for k, b in enumerate(numbers) if a != b}


def smallest_memory_mb() -> int | None:
    """Return the memory of the smallest GPU of the machine in MiB, None if that is not known."""
    try:
        sizes = [gpu.memory_mb for gpu in read_driver().gpus]
    except NoDriverAnswerError:
        return None
    return min(size for size in sizes if size is not None) if None not in sizes else None


def _ask(*arguments: str) -> str:
    command = f"nvidia-smi {' '.join(arguments)}"
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError:
        raise NoDriverAnswerError("there is no nvidia-smi here, which comes with NVIDIA's driver") from None
    except subprocess.TimeoutExpired:
        raise NoDriverAnswerError(f"{command} gave no answer within {_LIMIT_S:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise NoDriverAnswerError(f"{command} ended with {done.returncode}" + (f": {lines[0][:120]}" if lines else ""))
    return done.stdout


_DEFAULT = "DEFAULT"  # kernels for every kind of device that has none of its own: TensorFlow's `DEVICE_DEFAULT`
_KINDS = ("CPU", "GPU")
_INDICES = {"SplitV": {"Tlen": tf.int64}, "ConcatV2": {"Tidx": tf.int32}, "Slice": {"Index": tf.int32}}


def kernel_devices(node: Any) -> frozenset[str]:
    """Return the kinds of device (`"CPU"`, `"GPU"`) that run a `NodeDef`, as TensorFlow's placer finds out.

    The kernels for GPUs are known wherever TensorFlow is built with CUDA, also where there is no GPU.

    >>> import tensorflow as tf
    >>> from graphsplit.core.protos import make_node
    >>> sorted(kernel_devices(make_node("y", "StringUpper", ["x"])))
    ['CPU']
    """
    op_type = str(node.op)
    label = node.attr["_kernel"].s.decode() if "_kernel" in node.attr else ""
    return _devices(op_type, label, tuple([_types(node, name) for name in _constrained(op_type)]))


@functools.cache
def can_be_cut(dtype: tf.DType, kind: str = "CPU") -> bool:
    """Return whether a kind of device has kernels that cut tensors of a type along an axis, and join them again.

    >>> can_be_cut(tf.float32), can_be_cut(tf.qint8)
    (True, False)
    """
    if dtype in (tf.resource, tf.variant):
        return True  # (handles and lists are never cut: each shard has its own)
    return all(has_moving_kernel(op_type, dtype, kind) for op_type in ("SplitV", "ConcatV2", "Slice"))


@functools.cache
def has_moving_kernel(op_type: str, dtype: tf.DType, kind: str) -> bool:
    """Return whether a kind of device has a kernel for an operation, in the form in which tensors are moved by it.

    >>> has_moving_kernel("SplitV", tf.float32, "CPU"), has_moving_kernel("SplitV", tf.qint8, "CPU")
    (True, False)
    """
    return kind in kernel_devices(make_node("moving", op_type, [], T=dtype, **_INDICES.get(op_type, {})))


class RegisteredKernel(NamedTuple):
    """A registered kernel.

    Attributes:
      kind: of device.
      constraints: the types (their enums) that attributes may have.
      label: what the operation's `_kernel` must be.
    """

    kind: str
    constraints: tuple[tuple[str, frozenset[int]], ...]
    label: str


def kernel_of(definition: Any) -> RegisteredKernel:
    """Return what a `KernelDef` says."""
    constraints = tuple((c.name, frozenset(c.allowed_values.list.type)) for c in definition.constraint)
    return RegisteredKernel(definition.device_type, constraints, definition.label)


@functools.cache
def _kernels(op_type: str) -> tuple[RegisteredKernel, ...]:
    """Return the kernels of an op type for the kinds of device that a placer knows."""
    kinds = {*_KINDS, _DEFAULT}
    return tuple(kernel_of(kernel) for kernel in registered_kernels(op_type) if kernel.device_type in kinds)


@functools.cache
def _constrained(op_type: str) -> tuple[str, ...]:
    """Return the attributes whose types kernels of an op type ask for."""
    return tuple(dict.fromkeys(name for kernel in _kernels(op_type) for name, _ in kernel.constraints))


@functools.cache
def _devices(op_type: str, label: str, types: tuple[tuple[int, ...], ...]) -> frozenset[str]:
    """Return the kinds of device with a kernel for these types of `_constrained`: a step has hundreds of each."""
    types_of = dict(zip(_constrained(op_type), types, strict=True))
    fitting = {
        kernel.kind
        for kernel in _kernels(op_type)
        if kernel.label == label and all(allowed.issuperset(types_of[name]) for name, allowed in kernel.constraints)
    }
    return frozenset(kind for kind in _KINDS if kind in fitting or _DEFAULT in fitting)


def fits(node: Any, constraints: tuple[tuple[str, frozenset[int]], ...]) -> bool:
    """Return whether the types that an operation has are among those that a kernel takes."""
    return all(allowed.issuperset(_types(node, name)) for name, allowed in constraints)


def _types(node: Any, name: str) -> tuple[int, ...]:
    value = node.attr[name] if name in node.attr else _default(str(node.op), name)
    return (value.type,) if value.WhichOneof("value") == "type" else tuple(value.list.type)


@functools.cache
def _default(op_type: str, name: str) -> Any:
    return next(a.default_value for a in op_definition(op_type).attr if a.name == name)
