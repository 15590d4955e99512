"""Every script in `examples/` runs, small, as a user runs it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

RUNS = {
    "vector_addition.py": ["--size", "17"],
    "polynomial_fit.py": ["--steps", "50", "--devices", "3"],
    "polynomial_fit_tf1.py": ["--steps", "2500"],
    "training_loop.py": ["--steps", "5"],
    "strategy_side_by_side.py": ["--samples", "330", "--batch", "64", "--epochs", "2"],
    "model_parallel_lstm.py": [
        "--samples",
        "9",
        "--timesteps",
        "4",
        "--features",
        "3",
        "--units",
        "5",
        "--steps",
        "30",
    ],
    "large_layers.py": ["--steps", "2", "--blocks", "1", "--width", "16"],
    "minigooglenet.py": ["--samples", "18", "--batch", "9", "--epochs", "1", "--devices", "2"],
    "multi_gpu_xception.py": [
        "--devices",
        "8",
        "--image-size",
        "71",
        "--samples",
        "8",
        "--per-device",
        "1",
        "--classes",
        "5",
    ],
}


def run(name, folder):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(EXAMPLES.parent)}
    command = [sys.executable, "-W", "error::UserWarning:graphsplit", str(EXAMPLES / name), *RUNS[name]]
    process = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
    assert process.returncode == 0, process.stderr[-3000:]
    return process.stdout


def test_every_example_is_run():
    assert {path.name for path in EXAMPLES.glob("*.py")} - {"machine.py"} == set(RUNS)


@pytest.mark.long
def test_vector_addition(tmp_path):
    printed = run("vector_addition.py", tmp_path)
    assert "largest difference: 0.0" in printed
    assert "all work on the batch is sharded" in printed


def test_polynomial_fit(tmp_path):
    printed = run("polynomial_fit.py", tmp_path)
    assert "2 MatMul" in printed  # the product and its gradient
    assert re.search(r"^w = \['4\.\d+'", printed, re.MULTILINE)


def test_polynomial_fit_tf1(tmp_path):
    printed = run("polynomial_fit_tf1.py", tmp_path)
    assert re.search(r"device 0: [1-9]\d* gradient operations\ndevice 1: [1-9]\d* gradient", printed)
    coefficients = [float(value) for value in re.findall(r"'(-?[\d.]+)'", printed)]
    assert coefficients == pytest.approx([5, 0, 3], abs=0.1)


def test_training_loop(tmp_path):
    printed = run("training_loop.py", tmp_path)
    assert float(re.search(r"largest difference of a weight: (\S+)", printed)[1]) < 1e-6


@pytest.mark.long
def test_strategy_side_by_side(tmp_path):
    printed = run("strategy_side_by_side.py", tmp_path)
    differences = [float(value) for value in re.findall(r"largest difference (\S+)", printed)]
    assert differences[0] == 0
    assert differences[1] > 1e-3  # MirroredStrategy gives other numbers
    assert differences[2] < 1e-5


@pytest.mark.long
def test_model_parallel_lstm(tmp_path):
    printed = run("model_parallel_lstm.py", tmp_path)
    assert re.findall(r"stage \S+ on [^:]+:\d", printed) == [
        "stage lstm on CPU:0",
        "stage lstm on CPU:1",
        "stage merge on CPU:0",
    ]
    assert "/device:CPU:0: 3 matrix products forward, 6 backward\n" in printed  # the head's too
    assert "/device:CPU:1: 2 matrix products forward, 4 backward\n" in printed
    before, after = re.search(r"loss (\S+) at first, (\S+) after", printed).groups()
    assert float(after) < float(before)


@pytest.mark.long
def test_large_layers(tmp_path):
    printed = run("large_layers.py", tmp_path)
    assert float(re.search(r"largest difference: (\S+)", printed)[1]) < 1e-5
    assert "mesh: batch=2, model=2" in printed
    assert "computed in place" in printed
    assert "gathered before it is used" not in printed


@pytest.mark.long
def test_minigooglenet(tmp_path):
    printed = run("minigooglenet.py", tmp_path)
    first, second = (float(value) for value in re.findall(r"losses (\S+)", printed))
    assert second == pytest.approx(first, rel=1e-3)


@pytest.mark.long
def test_multi_gpu_xception(tmp_path):
    printed = run("multi_gpu_xception.py", tmp_path)
    assert "shard 7: CPU:7, 1 row" in printed
    assert float(re.search(r"after loading: (\S+)", printed)[1]) < 1e-5
