"""The command line, as a newcomer types it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def graphsplit(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "graphsplit"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)


def test_polyfit():
    done = graphsplit("demo", "polyfit", "--devices", "3", "--batch", "50", "--steps", "1500")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    coefficients = [float(row.split("│")[4]) for row in done.stdout.splitlines() if row.startswith("│")]
    for found, true in zip(coefficients, (5.0, 0.0, 3.0), strict=True):
        assert abs(found - true) < 0.25
    assert re.search(
        r"Plan: [\d.]+ % of the FLOPs sharded on 3 devices, .* sent a step; limited by launching operations\n",
        done.stdout,
    )
    assert "shard 2: CPU:2, 16 rows" in done.stdout
    difference = re.search(r"Largest difference of a coefficient at any step: (\S+)", done.stdout)
    assert difference
    assert float(difference.group(1)) < 1e-5


def test_errors_are_for_the_user():
    done = graphsplit("demo", "polyfit", "--devices", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--devices" in done.stderr
