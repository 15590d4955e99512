"""Models that are broken, and what the command line says of them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from graphsplit.cli import app
from tests.helpers.saved_model_cases import text


def said(*arguments: Any) -> str:
    """Run a command that fails; return its message."""
    ran = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(ran.exception, SystemExit), ran.exception
    assert ran.exit_code == 2
    assert ran.output.startswith("Error: "), ran.output
    return ran.output.removeprefix("Error: ").removesuffix("\n")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "original"
    text(str(folder))
    return folder


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(model, tmp_path / "broken"))
