"""What five devices are too few for: one process with twelve runs all of it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.helpers.processes import python

ROOT = Path(__file__).parent.parent
FILES = [f"test_mesh_{topic}.py" for topic in ("axes", "fsdp", "loops", "stages", "units", "variables")]


@pytest.mark.sampled(1)
@pytest.mark.timeout(1900)
@pytest.mark.parametrize("chosen", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_in_a_process_with_twelve_devices(chosen: str):
    files = [f"tests/{name}" for name in FILES]
    call = ["-m", "pytest", *files, "-n", "0", "-q", "-m", f"many and not gpu and {chosen}"]
    environment = {**os.environ, "GRAPHSPLIT_TEST_DEVICES": "12"}
    done = python(*call, cwd=ROOT, env=environment, timeout=1800)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in done.stdout


def test_every_file_of_such_tests_is_run():
    marked = [path.name for path in sorted(Path(__file__).parent.glob("test_*.py")) if "mark.many" in path.read_text()]
    assert [name for name in marked if name != Path(__file__).name] == FILES
