"""The command line, as a newcomer types it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import graphsplit as gs
from graphsplit.cli import app
from graphsplit.cli.commands import number
from graphsplit.cli.demo import points_in
from tests.helpers.processes import python


def graphsplit(*arguments: str) -> subprocess.CompletedProcess[str]:
    program = Path(sys.executable).parent / "graphsplit"
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=200)


def polyfit(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "graphsplit.cli", "demo", "polyfit", "--devices", "3", *arguments)


def test_polyfit():
    done = polyfit("--batch", "50", "--steps", "1500")
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


def test_polyfit_of_points_in_a_file(tmp_path: Path):
    x = np.random.default_rng(0).uniform(0, 3000, 137)
    file = tmp_path / "points.csv"
    file.write_text("time,height\n" + "".join(f"{a},{2 * a * a - 4 * a + 1e6}\n" for a in x))
    printed = polyfit("--steps", "600", "--data", str(file)).stdout
    both = [[float(cell) for cell in row.split("│")[2:4]] for row in printed.splitlines() if row.startswith("│")]
    np.testing.assert_allclose(both, np.array([[2.0] * 2, [-4.0] * 2, [1e6] * 2]), rtol=1e-2, atol=100)
    np.testing.assert_allclose(*zip(*both, strict=True), rtol=1e-3)
    file.write_text("x;y\n1;2\n")
    with pytest.raises(gs.errors.ArgumentError, match=r"points.csv', line 2: a line is 'x,y', got '1;2'"):
        points_in(str(file))
    for text in ("", "x,y\n", "1,nan\n"):
        file.write_text(text)
        with pytest.raises(gs.errors.ArgumentError, match="has no points, or one that is not finite"):
            points_in(str(file))


def test_errors_are_for_the_user():
    done = graphsplit("demo", "polyfit", "--devices", "0")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--devices" in done.stderr
    assert "takes a number of at least 1, got 0" in done.stderr
    with pytest.raises(typer.BadParameter, match=r"takes a number from 0 to 1, got 1\.5"):
        number("--share", "", least=0, most=1).callback(1.5)


def commands(command: Any) -> list[Any]:
    inner = getattr(command, "commands", {})
    return [each for own in inner.values() for each in commands(own)] if inner else [command]


@pytest.mark.parametrize("command", commands(typer.main.get_command(app)), ids=lambda command: command.name)
def test_what_an_option_takes_is_a_plain_word(command: Any):
    is_flag = [getattr(option, "is_flag", False) for option in command.params]
    named = [option.metavar for option, flag in zip(command.params, is_flag, strict=True) if not flag]
    assert None not in named, command.get_help(command.make_context(command.name, [], resilient_parsing=True))
    assert not any(getattr(option, "min", None) is not None for option in command.params)  # shown as [x>=1]
