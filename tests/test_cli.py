"""The command line, as a newcomer types it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from graphsplit.cli import app
from graphsplit.cli.running import number


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
