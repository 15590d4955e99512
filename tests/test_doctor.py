"""`graphsplit doctor`: its whole output on this machine, and on others whose TensorFlow and driver are made up."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app
from graphsplit.cli import doctor as command
from tests.helpers import fake_nvidia_smi

BUILD = {"is_cuda_build": True, "cuda_version": "12.5.1", "cudnn_version": "9", "cuda_compute_capabilities": ["sm_60"]}
FIRST = (
    f"graphsplit {gs.__version__}, TensorFlow {tf.__version__}, Keras {keras.__version__}, "
    f"Python {platform.python_version()}, {os.cpu_count()} cores"
)
STEP = "a training step with a convolution, in float32, against an unsplit one on CPU:0; relative differences:"
HOLDS = "Each device, and all of them together, compute the numbers of CPU:0."
ONE = "0, NVIDIA H200, 143771, 570.86.15\n"


@pytest.fixture(autouse=True)
def made_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No driver, one build, nothing hidden: whatever this machine has."""
    fake_nvidia_smi.remove(monkeypatch, tmp_path)
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: BUILD)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def examined(*arguments: object, status: int = 0) -> list[str]:
    """Run it; return its lines, with each difference as one digit of its size: 0 for up to 1e-5."""
    ran = CliRunner().invoke(app, ["doctor", *map(str, arguments)])
    assert ran.exit_code == status, ran.output
    return [re.sub(r"\b\d\.\de-(0[6-9]|[1-9]\d)|\b0\.0e\+00", "0", line) for line in ran.output.splitlines()]


def test_without_gpu_and_driver():
    assert examined("--devices", 2) == [
        FIRST,
        "built for: CUDA 12.5.1, cuDNN 9, sm_60",
        "driver: not known: there is no nvidia-smi here, which comes with NVIDIA's driver",
        "GPUs: none",
        "peer access: not known: TensorFlow does not tell, and there is no driver to ask",
        "devices: CPU:0, CPU:1",
        STEP,
        "  CPU:0  0",
        "  CPU:1  0",
        "  all 2  0",
        HOLDS,
    ]


def test_one_device_is_not_told_twice():
    assert examined("--devices", 1)[6:] == [STEP, "  CPU:0  0", HOLDS]


def test_a_gpu_that_tensorflow_does_not_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_nvidia_smi.install(monkeypatch, tmp_path, ONE, fake_nvidia_smi.ONE_PEER)
    lines = examined("--devices", 1, status=1)
    assert lines[2:5] == [
        "driver: 570.86.15; its GPUs: 0: NVIDIA H200, 143771 MiB",
        "GPUs: none: TensorFlow did not find its CUDA libraries; pip install 'tensorflow[and-cuda]' brings them, and "
        "TF_CPP_MIN_LOG_LEVEL=0 python -c 'import tensorflow as tf; tf.config.list_physical_devices()' says which are "
        "missing",
        "peer access: one GPU has no peers; logical ones on it share its memory",
    ]
    assert lines[-1] == "CPU devices compute the same numbers, but TensorFlow does not use the GPU that the driver has."
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    lines = examined("--devices", 1)
    assert (lines[3], lines[-1]) == ("GPUs: none", HOLDS)


def test_a_build_without_cuda(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tf.sysconfig, "get_build_info", lambda: {"is_cuda_build": False})
    lines = examined("--devices", 1)
    assert lines[1] == "built for: CPUs only"
    assert lines[3] == ("GPUs: none: this TensorFlow is built without CUDA; pip install 'tensorflow[and-cuda]' has it")


def test_two_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """What is said of GPUs; numbers are compared on CPU devices in their place."""
    gpus = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(2)]
    details = {"device_name": "NVIDIA H200", "compute_capability": (9, 0)}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: gpus if kind == "GPU" else [])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda _: details)
    cut = [tf.config.LogicalDeviceConfiguration(memory_limit=500)]
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda _: cut)
    fake_nvidia_smi.install(monkeypatch, tmp_path, ONE + ONE.replace("0", "1", 1), fake_nvidia_smi.TWO_PEERS)
    assert examined("--devices", 2)[2:7] == [
        "driver: 570.86.15; its GPUs: 0, 1: NVIDIA H200, 143771 MiB",
        "GPUs: 0, 1: NVIDIA H200, compute capability 9.0",
        "peer access: every GPU reads every other's memory, except 1 that of 0 (CNS)",
        "between GPUs: copies and additions, as operations of TensorFlow; NCCL is not used",
        "devices: CPU:0, CPU:1, of 500 MiB each",
    ]


@pytest.mark.parametrize(
    ("statuses", "expected"),
    [
        (("OK", "OK"), "every GPU reads every other's memory"),
        (("NS", "NS"), "no GPU reads another's memory (NS)"),
        (("NS", "CNS"), "no GPU reads another's memory (NS, CNS)"),
        (
            ("?", ""),
            "not known: the answer of nvidia-smi topo -p2p r is no table of GPUs; nvidia-smi topo -m shows the links",
        ),
    ],
)
def test_peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, statuses: tuple[str, str], expected: str):
    peers = fake_nvidia_smi.TWO_PEERS.replace("OK\t\n", f"{statuses[0]}\t\n").replace("CNS\tX", f"{statuses[1]}\tX")
    fake_nvidia_smi.install(monkeypatch, tmp_path, ONE + ONE.replace("0", "1", 1), peers)
    assert examined("--devices", 1, status=1)[4] == f"peer access: {expected}"


def wrong(step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: step(x, y) * 1.01


def failing(step: Callable[..., Any]) -> Callable[..., Any]:
    def fail(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        raise tf.errors.UnimplementedError(None, None, "DNN library is not found.\nat a node")

    return fail


@pytest.mark.parametrize("broken", [wrong, failing])
def test_a_device_with_other_numbers(monkeypatch: pytest.MonkeyPatch, broken: Any):
    def parallelize(step: Callable[..., Any], devices: list[str]) -> Callable[..., Any]:
        whole = gs.parallelize(step, devices=devices)
        return broken(whole) if "/device:CPU:1" in devices else whole

    monkeypatch.setattr(command, "parallelize", parallelize)
    lines = examined("--devices", 3, status=1)
    told = "fails: UnimplementedError: DNN library is not found." if broken is failing else "1.0e-02"
    assert lines[7:] == [
        "  CPU:0  0",
        f"  CPU:1  {told}",
        "  CPU:2  0",
        f"  all 3  {told}",
        "Other numbers than on CPU:0, or none, on CPU:1 and on all 3 (a difference of 0.001 is allowed).",
    ]


def test_memory_of_how_many_devices():
    ran = CliRunner().invoke(app, ["doctor", "--memory-mb", "2000"])
    assert ran.exit_code == 2
    assert ran.output == ("Error: --memory-mb 2000 divides the GPUs; say into how many devices: --devices 4.\n")
    ran = CliRunner().invoke(app, ["doctor", "--memory-mb", "2000", "--devices", "2"])
    assert ran.exit_code == 2
    assert ran.output.startswith("Error: use_logical_devices(2, kind='GPU', memory_mb=2000) divides GPUs, and ")
