"""Transpiled models in a C++ program: TensorFlow's loader with its defaults, on as many devices and on fewer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs

TENSORFLOW = Path(tf.__file__).parent
PROGRAM = Path(__file__).parent / "helpers" / "serving.cc"
DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
THREADS = 4
REASON = "no C++ compiler, or TensorFlow came without the headers and libtensorflow_cc.so.2 that a program needs"

pytestmark = [
    pytest.mark.skipif(
        shutil.which("g++") is None or not (TENSORFLOW / "libtensorflow_cc.so.2").exists(), reason=REASON
    ),
    pytest.mark.long,  # to compile against TensorFlow's headers takes a minute
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("server") / "serving"
    libraries = ["-l:libtensorflow_cc.so.2", "-l:libtensorflow_framework.so.2", f"-Wl,-rpath,{TENSORFLOW}", "-pthread"]
    command = ["g++", "-std=c++17", "-O0", "-w", str(PROGRAM), "-isystem", str(TENSORFLOW / "include")]
    command += ["-L", str(TENSORFLOW), "-Wl,--no-as-needed", *libraries, "-o", str(program)]
    subprocess.run(command, check=True, timeout=240)
    return program


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    keras.utils.set_random_seed(1)
    folder = tmp_path_factory.mktemp("model")
    net = keras.Sequential([keras.Input((20,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(3)])
    net.export(str(folder / "one"), verbose=False)
    for name, devices, copies in (
        ("sent", DEVICES, False),
        ("copies", DEVICES, True),
        ("copies on GPUs", [f"GPU:{d}" for d in range(3)], True),
    ):
        gs.serving.transpile_saved_model(folder / "one", folder / name, devices, replicate_weights=copies)
    return folder


@pytest.mark.parametrize("devices", [3, 1])
@pytest.mark.parametrize("name", ["sent", "copies", "copies on GPUs"])
def test_the_loaders_defaults_will_do(server: Path, model: Path, name: str, devices: int):
    command = [str(server), str(model / name), str(devices), str(THREADS)]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    signature = tf.saved_model.load(str(model / "one")).signatures["serving_default"]
    for t, line in enumerate(done.stdout.splitlines()):
        [expected] = signature(tf.fill([t + 1, 20], (t + 1) / 10)).values()
        # (the program prints six digits)
        np.testing.assert_allclose([float(text) for text in line.split()], expected[:, 0], rtol=1e-5)
    assert len(done.stdout.splitlines()) == THREADS
