"""Logical GPUs and NVIDIA's driver on machines without them: what TensorFlow and the driver say is put in their mouths.

How TensorFlow itself takes it is seen on a GPU only: `tests/test_gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.cli import demo
from graphsplit.core import devices
from graphsplit.core import gpus as own_gpus
from graphsplit.core.gpus import (
    DriverGpu,
    NoDriverAnswerError,
    read_driver,
    read_peer_access,
    smallest_memory_mb,
)
from tests.helpers import fake_nvidia_smi
from tests.helpers.messages import message

TWO = "0, NVIDIA H200, 143771, 570.86.15\n1, NVIDIA L4, 23034, 570.86.15\n"


class Machine:
    """A machine with GPUs, as `tf.config` shows it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int, started: bool = False):
        self.visible = [tf.config.PhysicalDevice(f"/physical_device:GPU:{i}", "GPU") for i in range(gpus)]
        self.cuts: dict[Any, Any] = {}
        answers: dict[str, Callable[..., Any]] = {
            "get_visible_devices": lambda kind: self.visible if kind == "GPU" else [],
            "set_visible_devices": lambda chosen, kind: setattr(self, "visible", chosen),
            "set_logical_device_configuration": self.cuts.__setitem__,
            "get_logical_device_configuration": self.cuts.get,
            "list_logical_devices": lambda kind="CPU": [tf.config.LogicalDevice(n, kind) for n in self.names(kind)],
        }
        for name, answer in answers.items():
            monkeypatch.setattr(tf.config, name, answer)
        monkeypatch.setattr(own_gpus, "eager_context_started", lambda: started)

    def names(self, kind: str) -> list[str]:
        count = sum(len(self.cuts.get(gpu, [None])) for gpu in self.visible)
        return [f"/device:{kind}:{i}" for i in range(count if kind == "GPU" else 1)]

    @property
    def memory(self) -> dict[str, list[int]]:
        return {gpu.name[-5:]: [cut.memory_limit for cut in cuts] for gpu, cuts in self.cuts.items()}


@pytest.fixture
def silent_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fake_nvidia_smi.remove(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("gpus", "count", "memory"),
    [
        (1, 4, {"GPU:0": [500] * 4}),
        (2, 3, {"GPU:0": [500, 500], "GPU:1": [500]}),
        (8, 2, {"GPU:0": [500], "GPU:1": [500]}),
    ],
)
def test_spread_over_the_gpus(silent_driver: None, monkeypatch: pytest.MonkeyPatch, gpus: int, count: int, memory: Any):
    machine = Machine(monkeypatch, gpus)
    assert gs.use_logical_devices(count, kind="GPU", memory_mb=500) == tuple(f"GPU:{i}" for i in range(count))
    assert machine.memory == memory
    assert len(machine.visible) == len(memory)  # the others are hidden
    assert own_gpus.count_gpus() == count
    assert len(devices.names_of_devices(None)) == count


def test_again_after_the_start(silent_driver: None, monkeypatch: pytest.MonkeyPatch):
    machine = Machine(monkeypatch, 1, started=True)
    assert message(gs.errors.DeviceError, lambda: gs.use_logical_devices(2, kind="GPU", memory_mb=500)) == (
        "use_logical_devices(2, kind='GPU', memory_mb=500) was called after TensorFlow had started with 1 GPU device, "
        "which are not divided; devices are fixed from then on. Call it first in the program, before any tensor, "
        "variable or model is made."
    )
    machine.cuts[machine.visible[0]] = [tf.config.LogicalDeviceConfiguration(memory_limit=500)] * 2
    assert gs.use_logical_devices(2, kind="GPU", memory_mb=500) == ("GPU:0", "GPU:1")
    assert message(gs.errors.DeviceError, lambda: gs.use_logical_devices(2, kind="GPU", memory_mb=600)) == (
        "use_logical_devices(2, kind='GPU', memory_mb=600) was called after TensorFlow had started with 2 GPU devices "
        "of 500 MB; devices are fixed from then on. Call it first in the program, before any tensor, variable or model "
        "is made."
    )


def test_no_gpu():
    assert message(gs.errors.DeviceError, lambda: gs.use_logical_devices(4, kind="GPU", memory_mb=500)) == (
        "use_logical_devices(4, kind='GPU', memory_mb=500) divides GPUs, and TensorFlow finds none here; `graphsplit "
        "doctor` says what it finds. To try several devices without GPUs: use_logical_devices(4)."
    )


def test_more_memory_than_there_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    machine = Machine(monkeypatch, 2)
    fake_nvidia_smi.install(monkeypatch, tmp_path, TWO)
    assert message(gs.errors.DeviceError, lambda: gs.use_logical_devices(3, kind="GPU", memory_mb=12_000)) == (
        "use_logical_devices(3, kind='GPU', memory_mb=12000): 2 logical GPUs of 12000 MB on one GPU need 24000 MB, and "
        "it has 23034 MB, of which the driver keeps some hundred. Give memory_mb=10365 or less."
    )
    assert not machine.cuts
    assert len(gs.use_logical_devices(3, kind="GPU", memory_mb=10_365)) == 3


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "TPU"}, "use_logical_devices(kind='TPU'): write 'CPU' or 'GPU'; no others can be divided."),
        ({"kind": None}, "use_logical_devices(kind=None): write 'CPU' or 'GPU'; no others can be divided."),
        (
            {"memory_mb": 500},
            "use_logical_devices(memory_mb=500) divides the memory of GPUs; logical CPU devices share the "
            "machine's. Give kind='GPU', or leave memory_mb out.",
        ),
        (
            {"kind": "GPU", "memory_mb": 500, "threads_per_device": 1},
            "use_logical_devices(threads_per_device=1) is about the threads of CPU devices. Give kind='CPU', or leave "
            "threads_per_device out.",
        ),
        (
            {"kind": "GPU"},
            "use_logical_devices(kind='GPU') needs memory_mb, each logical GPU's memory in MiB: TensorFlow divides "
            "a GPU by its memory only. Of a GPU with 16 GB, four can have memory_mb=3500.",
        ),
        *[
            (
                {"kind": "GPU", "memory_mb": wrong},
                f"use_logical_devices(memory_mb={wrong!r}) takes a positive number of MiB.",
            )
            for wrong in (0, -1, 2.5, True, "1GB")
        ],
    ],
)
def test_options(options: dict[str, Any], expected: str):
    assert message(gs.errors.ArgumentError, lambda: gs.use_logical_devices(2, **options)) == expected


def test_more_devices_than_gpus(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(devices, "_existing", lambda: ("/device:CPU:0", "/device:GPU:0"))
    assert message(gs.errors.DeviceError, lambda: devices.resolve_devices(4)) == (
        "devices=4: there is only 1 GPU. This process has:\n  - CPU:0\n  - GPU:0\n"
        "A number of devices means GPUs if there are any; name CPU devices to use them. To divide one GPU, call "
        "graphsplit.use_logical_devices(n, kind='GPU', memory_mb=...) before TensorFlow starts.\n"
        'For a plan or a placement only, name them: devices=[f"GPU:{k}" for k in range(4)].'
    )


def test_a_demo_on_more_devices_than_gpus(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(demo, "count_gpus", lambda: 1)
    assert demo.demo_devices(5) == tuple(f"/device:CPU:{d}" for d in range(5))
    assert capsys.readouterr().out == "5 logical CPU devices: there are fewer GPUs. `--devices 1` takes those.\n"


def test_the_driver_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_nvidia_smi.install(monkeypatch, tmp_path, TWO, fake_nvidia_smi.TWO_PEERS)
    driver = read_driver()
    assert driver.version == "570.86.15"
    assert driver.gpus == (DriverGpu(0, "NVIDIA H200", 143771), DriverGpu(1, "NVIDIA L4", 23034))
    assert smallest_memory_mb() == 23034
    assert read_peer_access() == {(0, 1): "OK", (1, 0): "CNS"}


def test_memory_that_the_driver_does_not_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    fake_nvidia_smi.install(monkeypatch, tmp_path, "0, NVIDIA GB10, [N/A], 580.1\n")
    assert read_driver().gpus == (DriverGpu(0, "NVIDIA GB10", None),)
    assert smallest_memory_mb() is None


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ({"gpus": "No devices were found\n", "status": 6}, "ended with 6: No devices were found"),
        ({"gpus": "", "status": 1}, "ended with 1"),
        ({"gpus": "No devices were found\n"}, "nvidia-smi answered 'No devices were found'"),
        ({"gpus": ""}, "nvidia-smi answered 'nothing'"),
        ({"seconds": 9}, "gave no answer within 0 s"),
    ],
)
def test_the_driver_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answers: dict[str, Any], expected: str):
    fake_nvidia_smi.install(monkeypatch, tmp_path, **answers)
    monkeypatch.setattr(own_gpus, "_LIMIT_S", 0.3 if "seconds" in answers else 20.0)
    command = "nvidia-smi --query-gpu=index,name,memory.total,driver_version --format=csv,noheader,nounits "
    with pytest.raises(NoDriverAnswerError) as caught:
        read_driver()
    assert str(caught.value) == (expected if expected.startswith("nvidia-smi") else command + expected)


def test_no_driver(silent_driver: None):
    with pytest.raises(NoDriverAnswerError) as caught:
        read_driver()
    assert str(caught.value) == "there is no nvidia-smi here, which comes with NVIDIA's driver"
    assert smallest_memory_mb() is None


@pytest.mark.parametrize("table", ["", "GPU0\tGPU1\nGPU0\tX\tOK\n", "GPU0\tGPU1\nGPU0\tX\nGPU1\tX\tOK\n", "invalid\n"])
def test_a_table_that_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, table: str):
    fake_nvidia_smi.install(monkeypatch, tmp_path, peers=table)
    with pytest.raises(NoDriverAnswerError) as caught:
        read_peer_access()
    assert str(caught.value) == "the answer of nvidia-smi topo -p2p r is no table of GPUs"
