"""The pytest plugin, in processes of their own."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from graphsplit.cli.pytest_plugin import make_devices
from tests.helpers.processes import python

TESTS = """
import pytest
import tensorflow as tf

@pytest.mark.parametrize("_", range(2))
def test_devices(logical_devices, _):
    assert logical_devices == tuple(f"CPU:{i}" for i in range({count}))
    assert len(tf.config.list_logical_devices("CPU")) == {count}
"""


def ran(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTEST_XDIST_WORKER": "gw0"}  # as in a test that runs pytest
    done = python("-m", "pytest", "-p", "no:cacheprovider", "-q", *arguments, cwd=folder, env=environment)
    return done.stdout + done.stderr


def test_the_fixture_makes_devices(tmp_path: Path):
    (tmp_path / "test_it.py").write_text(TESTS.replace("{count}", "4"))
    assert "2 passed" in ran(tmp_path)


@pytest.mark.long
def test_the_option_comes_before_everything(tmp_path: Path):
    (tmp_path / "conftest.py").write_text("import tensorflow as tf\nONE = tf.constant(1)\n")
    (tmp_path / "test_it.py").write_text(TESTS.replace("{count}", "3"))
    assert "2 passed" in ran(tmp_path, "--graphsplit-devices", "3", "-n", "2")
    found = ran(tmp_path)
    assert "UsageError: use_logical_devices(4) was called after TensorFlow had started with 1 CPU device;" in found


def test_what_is_asked_for_is_checked():
    with pytest.raises(pytest.UsageError) as error:
        make_devices(0)
    assert str(error.value) == (
        "--graphsplit-devices 0: use_logical_devices(count) takes a positive number of devices, got 0."
    )
    with pytest.raises(pytest.UsageError) as error:
        make_devices(7)
    assert str(error.value) == (
        "use_logical_devices(7) was called after TensorFlow had started with 5 CPU devices; devices are fixed from "
        "then on. Call it first in the program, before any tensor, variable or model is made.\n"
        "Something started it before the tests: a conftest.py, a plugin, or the top of a module that makes a tensor, "
        "variable or model. Run pytest --graphsplit-devices 7, which comes before them all, or start TensorFlow inside "
        "of tests only."
    )


def test_in_a_notebook_it_says_restart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "ipykernel", sys)
    with pytest.raises(pytest.UsageError) as error:
        make_devices(7)
    assert str(error.value).startswith(
        "use_logical_devices(7) was called after TensorFlow had started with 5 CPU devices; devices are fixed from "
        "then on. Restart the notebook's runtime and run this cell first, before any that makes a tensor or model.\n"
    )
