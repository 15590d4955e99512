"""Keras' own tests of `keras.distribution`, from its wheel, with it enabled on TensorFlow."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

import pytest

from tests.helpers.processes import python

ROOT = Path(__file__).parent.parent

AS_THEY_ARE = ["get_device_count", "list_devices", "initialize_validate_job_and_process", "processes"]
AS_THEY_ARE += ["validation_for_device_mesh"]
TRANSLATED = ["variable_assignment_reuse_layout", "e2e_data_parallel_model", "e2e_model_parallel_model"]
TRANSLATED += ["e2e_model_parallel_with_output_sharding"]
OF_JAX = {
    "device_conversion": "jax.Device",
    "initialize_with_all_job_addresses": "jax.distributed.initialize",
    "initialize_with_coordinator_address": "jax.distributed.initialize",
    "distribute_tensor": "jax.sharding.NamedSharding",
    "distribute_tensor_with_jax_layout": "jax.experimental.layout",
    "to_backend_mesh": "jax.sharding.Mesh",
    "to_backend_layout": "jax.sharding.NamedSharding",
    "distribute_data_input": "shards of jax arrays",
}


def run(folder: Path, *arguments: str) -> tuple[int, str]:
    """Run tests in a process of its own, and return how many passed, and what was said."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    (folder / "pytest.ini").write_text("[pytest]\n")
    plugins = ["-p", "tests.helpers.keras_upstream", "-p", "no:cacheprovider"]
    options = ["-q", "-rA", "-c", folder / "pytest.ini", "--rootdir", folder, "-W", "ignore"]
    done = python("-m", "pytest", *plugins, *options, *arguments, timeout=500, cwd=folder, env=environment)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    last = done.stdout.strip().splitlines()[-1]
    assert "skipped" not in last, last
    return int(re.search(r"(\d+) passed", last).group(1)), done.stdout


@pytest.mark.long
def test_of_all_backends(tmp_path: Path):
    passed, _ = run(tmp_path, "--pyargs", "keras.src.distribution.distribution_lib_test")
    assert passed == 39


@pytest.mark.timeout(900)
def test_of_jax(tmp_path: Path):
    file = tmp_path / "translated_test.py"
    assert python("-m", "tests.helpers.keras_upstream", file, cwd=ROOT).returncode == 0
    names = re.findall(r"^    def test_(\w+)\(", file.read_text(), re.MULTILINE)
    assert sorted([*AS_THEY_ARE, *TRANSLATED, *OF_JAX]) == sorted(names), "this Keras has other tests"
    chosen = [f"{file}::JaxDistributionLibTest::test_{name}" for name in (*AS_THEY_ARE, *TRANSLATED)]
    passed, _ = run(tmp_path, *chosen)
    assert passed == 9
    assert file.read_text().count("sharding_of(") == 11


def test_the_wheel_has_them():
    assert importlib.util.find_spec("keras.src.distribution.distribution_lib_test") is not None
