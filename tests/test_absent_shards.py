"""Shards without rows, in loops and branches, taking turns: nothing waits for what they never send."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
KINDS = ["effects", "rows", "scanned", "branches", "training", "GRU", "SimpleRNN"]


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in ("arrays", "LSTM") else pytest.mark.long) for k in KINDS]
)
def test_fewer_rows_than_shards(kind: str):
    command = [sys.executable, "-m", "tests.helpers.absent_shards_worker", kind]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"never returned: {(error.stdout or b'').decode().splitlines()[-1:]}")
    assert done.returncode == 0, done.stdout[-300:] + done.stderr[-2000:]
    *lines, last = done.stdout.splitlines()
    assert last == "all"
    off = {line.rpartition(" ")[0]: float(line.split()[-1]) for line in lines}
    assert max(off.values()) < 1e-5, {name: value for name, value in off.items() if value >= 1e-5}
