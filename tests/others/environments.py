"""An environment with other packages on top of this one's: what is here stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.others.processes import ROOT


class Environment:
    """A virtual environment in a folder, made on first use; it sees the packages of this process, too."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._python = folder / "bin" / "python"

    @property
    def python(self) -> str:
        """Its interpreter."""
        if not self._python.exists():
            venv.create(self._folder, with_pip=True)
            [packages] = self._folder.glob("lib/python*/site-packages")
            (packages / "parent.pth").write_text(sysconfig.get_path("purelib") + "\n")
            frozen = subprocess.run([sys.executable, "-m", "pip", "freeze", "--exclude-editable"], **_QUIET)
            (self._folder / "constraints.txt").write_text(frozen.stdout)
        return str(self._python)

    def install(self, requirements: Iterable[str]) -> str:
        """Install packages beside those that are here, whose versions stay; return why not, or nothing."""
        for requirement in requirements:
            *options, package = requirement.split(" ", 1) if requirement.startswith("--") else [requirement]
            command = [self.python, "-m", "pip", "install", "--quiet", *options, package]
            ran = subprocess.run([*command, "-c", str(self._folder / "constraints.txt")], **_QUIET)
            if ran.returncode:
                errors = [line for line in ran.stderr.splitlines() if line.startswith("ERROR")]
                return (errors or ran.stderr.splitlines() or ["pip says nothing"])[-1][:300]
        return ""

    def run(self, *words: str) -> Iterator[str]:
        """Run a module of this repository there; yield its lines as they come.

        Raises:
          subprocess.CalledProcessError: if it fails; with the end of what it said beside them.
        """
        variables = {**os.environ, "PYTHONPATH": str(ROOT), "KERAS_BACKEND": "tensorflow", "TF_USE_LEGACY_KERAS": "1"}
        if "keras_hub" in words:
            del variables["TF_USE_LEGACY_KERAS"]
        command = [self.python, "-m", *words]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=errors, text=True
            )
            assert process.stdout is not None
            with process:
                yield from process.stdout
            if process.returncode:
                errors.seek(0)
                raise subprocess.CalledProcessError(process.returncode, command, stderr=errors.read()[-500:])


_QUIET = {"capture_output": True, "text": True, "check": False}
