"""`graphsplit doctor`: which devices TensorFlow and the driver find here, and whether they compute the same numbers."""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from graphsplit.api.decorators import parallelize
from graphsplit.api.verification import difference_of
from graphsplit.core.devices import available_devices, resolve_devices, short_name, use_logical_devices
from graphsplit.core.gpus import Driver, NoDriverAnswerError, has_gpus, read_driver, read_peer_access
from graphsplit.core.tensorflow_internals import eager_context_started
from graphsplit.core.version import __version__
from graphsplit.planning.amounts import format_bytes

_ALLOWED = 1e-3  # kernels of other devices round otherwise, by 1e-5 as a rule; what is wrong differs in its first digit
_LOGICAL = 4  # CPU devices, where there is no GPU


def doctor(count: int | None, memory_mb: int | None) -> bool:
    """Print what was found, and compare the devices' numbers; return whether all is well.

    Args:
      count: how many devices; None for all GPUs, or, without any, four logical CPU devices.
      memory_mb: divides the GPUs into `count` logical ones of so much memory each.
    """
    driver, unknown = _driver()
    devices = _devices(count, memory_mb)
    print(f"graphsplit {__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}, ", end="")
    print(f"Python {platform.python_version()}, {os.cpu_count()} cores")
    print(f"built for: {_build(tf.sysconfig.get_build_info())}")
    print(f"driver: {unknown or _driver_text(driver)}")
    missing = _missing(driver)
    print(f"GPUs: {_gpus() or f'none{missing}'}")
    print(f"peer access: {_peers(driver)}")
    if has_gpus():
        print("between GPUs: copies and additions, as operations of TensorFlow; NCCL is not used")
    print(f"devices: {', '.join(map(short_name, devices))}{_limits()}")
    print("a training step with a convolution, in float32, against an unsplit one on CPU:0; relative differences:")
    failed = _differing(devices)
    if failed:
        where = " and on ".join(failed)
        print(f"Other numbers than on CPU:0, or none, on {where} (a difference of {_ALLOWED:g} is allowed).")
    elif missing and driver:
        print("CPU devices compute the same numbers, but TensorFlow does not use the GPU that the driver has.")
    else:
        print("Each device, and all of them together, compute the numbers of CPU:0.")
    return not failed and not (missing and driver)


def _devices(count: int | None, memory_mb: int | None) -> tuple[str, ...]:
    if memory_mb is not None:
        return resolve_devices(use_logical_devices(count or 1, kind="GPU", memory_mb=memory_mb))
    if not has_gpus() and not eager_context_started():
        use_logical_devices(count or _LOGICAL)
    return resolve_devices(count) if count else available_devices()


def _build(info: Mapping[str, Any]) -> str:
    if not info.get("is_cuda_build"):
        return "ROCm" if info.get("is_rocm_build") else "CPUs only"
    versions = f"CUDA {info.get('cuda_version', '?')}, cuDNN {info.get('cudnn_version', '?')}"
    return f"{versions}, {' '.join(info.get('cuda_compute_capabilities', ())) or 'GPUs that it does not name'}"


def _driver() -> tuple[Driver | None, str]:
    try:
        return read_driver(), ""
    except NoDriverAnswerError as error:
        return None, f"not known: {error}"


def _driver_text(driver: Driver | None) -> str:
    assert driver is not None
    sizes = [f"{gpu.memory_mb} MiB" if gpu.memory_mb else "memory not told" for gpu in driver.gpus]
    names = [f"{gpu.name}, {size}" for gpu, size in zip(driver.gpus, sizes, strict=True)]
    return f"{driver.version}; its GPUs: {_grouped([str(gpu.index) for gpu in driver.gpus], names)}"


def _gpus() -> str:
    """Return the physical GPUs that TensorFlow may use."""
    gpus, models = tf.config.get_visible_devices("GPU"), []
    for gpu in gpus:
        details = tf.config.experimental.get_device_details(gpu)
        capability = details.get("compute_capability")
        capability_text = f", compute capability {'.'.join(map(str, capability))}" if capability else ""
        models.append(f"{details.get('device_name', 'a model that TensorFlow does not name')}{capability_text}")
    return _grouped([gpu.name.rpartition(":")[2] for gpu in gpus], models)


def _grouped(names: Sequence[str], texts: Sequence[str]) -> str:
    """Return what is said of each, equal ones once: `0, 1: NVIDIA H200`."""
    groups: dict[str, list[str]] = {}
    for name, text in zip(names, texts, strict=True):
        groups.setdefault(text, []).append(name)
    return "; ".join(f"{', '.join(names_of_text)}: {text}" for text, names_of_text in groups.items())


def _missing(driver: Driver | None) -> str:
    """Return why TensorFlow has no GPU, as far as that can be known; "" if it has one, or was told to hide it."""
    if has_gpus():
        return ""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1") or tf.config.list_physical_devices("GPU"):
        return ""
    if not tf.sysconfig.get_build_info().get("is_cuda_build"):
        return ": this TensorFlow is built without CUDA; pip install 'tensorflow[and-cuda]' has it"
    if driver is None:
        return ""
    return (
        ": TensorFlow did not find its CUDA libraries; pip install 'tensorflow[and-cuda]' brings them, and TF_CPP_MIN_"
        "LOG_LEVEL=0 python -c 'import tensorflow as tf; tf.config.list_physical_devices()' says which are missing"
    )


def _peers(driver: Driver | None) -> str:
    """Return which GPUs read each other's memory. TensorFlow's public API does not say; the driver's tool does."""
    if driver is None:
        return "not known: TensorFlow does not tell, and there is no driver to ask"
    try:
        pairs = read_peer_access()
    except NoDriverAnswerError as error:
        return f"not known: {error}; nvidia-smi topo -m shows the links"
    apart = {pair: status for pair, status in pairs.items() if status != "OK"}
    if not pairs:
        return "one GPU has no peers; logical ones on it share its memory"
    if len(apart) == len(pairs):
        return f"no GPU reads another's memory ({', '.join(dict.fromkeys(apart.values()))})"
    exceptions = ", ".join(f"{a} that of {b} ({status})" for (a, b), status in apart.items())
    return f"every GPU reads every other's memory{f', except {exceptions}' if exceptions else ''}"


def _limits() -> str:
    gpus = tf.config.get_visible_devices("GPU")
    cuts = [cut.memory_limit for gpu in gpus for cut in tf.config.get_logical_device_configuration(gpu) or ()]
    return f", of {cuts[0]} MiB each" if cuts else ""


def _differing(devices: Sequence[str]) -> list[str]:
    """Run the step on each device and on all of them, print the differences, and return where they are too large."""
    cases = [(short_name(device), [device]) for device in devices]
    if len(devices) > 1:
        cases.append((f"all {len(devices)}", list(devices)))
    width, failed = max(len(name) for name, _ in cases), []
    arguments = _arguments(2 * len(devices) + 1)  # on no number of devices but one does every one get as many rows
    with _whole_float32():
        expected = _run("/device:CPU:0", tf.function, arguments)
        for name, case_devices in cases:
            try:
                results = _run(case_devices[0], functools.partial(parallelize, devices=case_devices), arguments)
            except tf.errors.OpError as error:
                print(f"  {name:{width}}  fails: {type(error).__name__}: {str(error.message).splitlines()[0][:200]}")
                failed.append(name)
                continue
            differences = [difference_of("", a, b).relative for a, b in zip(expected, results, strict=True)]
            print(f"  {name:{width}}  {max(differences):.1e}{_peak(case_devices)}")
            if not max(differences) <= _ALLOWED:
                failed.append(name)
    return failed


def _arguments(rows: int) -> tuple[tf.Tensor, tf.Tensor]:
    random = np.random.default_rng(0)
    with tf.device("/device:CPU:0"):
        x = tf.constant(random.normal(size=(rows, 8, 8, 3)), tf.float32)
        return x, tf.constant(random.normal(size=(rows, 4)), tf.float32)


def _run(device: str, wrap: Callable[[Any], Any], arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the loss of a training step, made anew with its variables on a device, and what it leaves in these."""
    random = np.random.default_rng(1)
    with tf.device(device):
        kernel = tf.Variable(tf.constant(0.3 * random.normal(size=(3, 3, 3, 8)), tf.float32))
        weights = tf.Variable(tf.constant(0.3 * random.normal(size=(8, 4)), tf.float32))

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            features = tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), [1, 2])
            loss = tf.reduce_mean((tf.tanh(features @ weights) - y) ** 2)
        for variable, gradient in zip((kernel, weights), tape.gradient(loss, (kernel, weights)), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    with tf.device(device):
        loss = wrap(step)(*arguments)
    return [loss, tf.identity(kernel), tf.identity(weights)]


def _peak(devices: Sequence[str]) -> str:
    """Return the most memory that was in use on GPUs so far."""
    gpus = [device for device in devices if "GPU" in device]
    peaks = [tf.config.experimental.get_memory_info(short_name(device))["peak"] for device in gpus]
    return f"  (peak {format_bytes(max(peaks))})" if peaks else ""


@contextmanager
def _whole_float32() -> Iterator[None]:
    """Multiply float32 numbers as such: TensorFloat-32, the default on GPUs, keeps 10 of their 23 bits."""
    was_enabled = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(was_enabled)
