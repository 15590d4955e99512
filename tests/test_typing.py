"""Types: what mypy sees of a user's script, whose errors are expected where it says so and nowhere else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "tests" / "typing" / "user_script.py"


# Strict, as the project itself is checked; which ignores are of no use is asked of the script alone, by its first line.
# What is wrong in the project is not said, as it is not of what is installed: with numpy 1, where each array's type has
# to name that of its entries, that is much.
def check(script: Path, cache: Path) -> subprocess.CompletedProcess[str]:
    options = [f"--cache-dir={cache}", "--config-file", "pyproject.toml", "--follow-imports=silent"]
    command = [sys.executable, "-m", "mypy", *options, str(script)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=280)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mypy")


@pytest.mark.long
def test_a_user_script(cache: Path):
    done = check(SCRIPT, cache)
    assert done.stdout.splitlines()[-1:] == ["Success: no issues found in 1 source file"], done.stdout + done.stderr


@pytest.mark.long
def test_the_check_can_fail(cache: Path, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text("import graphsplit as gs\n\nlength: str = gs.parallelize(len, devices=2)([1])\n")
    done = check(script, cache)
    assert 'Incompatible types in assignment (expression has type "int", variable has type "str")' in done.stdout
