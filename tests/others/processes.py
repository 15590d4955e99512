"""Keras' tests, folder by folder in processes of their own. (Without TensorFlow: what counts does not run.)"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
PASSED, FAILED, SKIPPED, NOT_OURS, DIED = "passed", "failed", "skipped", "not ours", "died"
_FILES_PER_PROCESS, _TESTS_PER_PROCESS = 12, 400  # TensorFlow keeps what it has traced
_MOST_SECONDS = 600  # for one test, twice; on a machine with other work

# What `python -m tests.others keras --NAME` runs.
GROUPS: dict[str, tuple[str, ...]] = {
    "layers": ("layers",),
    "trainers": ("trainers",),
    "optimizers": ("optimizers",),
    "losses": ("losses",),
    "metrics": ("metrics",),
    "callbacks": ("callbacks",),
    "models": ("models",),
    "ops": ("ops",),
    "rest": (
        "activations",
        "applications",
        "backend",
        "constraints",
        "datasets",
        "distillation",
        "distribution",
        "dtype_policies",
        "export",
        "initializers",
        "legacy",
        "quantizers",
        "random",
        "regularizers",
        "saving",
        "testing",
        "tree",
        "utils",
        "wrappers",
    ),
}


@dataclass(frozen=True)
class Options:
    """How tests go through graphsplit; `every`: of each file, every how many tests."""

    devices: int = 3
    layout: str = "home"
    micro_batches: int = 1
    every: int = 1
    keyword: str = ""
    packages: str = ""  # a folder with more packages

    @property
    def how(self) -> str:
        """What a table calls it."""
        layout = "variables on the default device" if self.layout == "home" else f"variables {self.layout}"
        micro_batches = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.devices} devices, {layout}{micro_batches}"

    def words(self) -> list[str]:
        """Return them as pytest takes them."""
        named = {"devices": self.devices, "layout": self.layout, "micro-batches": self.micro_batches}
        words = [f"--others-{name}={value}" for name, value in {**named, "every": self.every}.items()]
        return [*words, *(["-k", self.keyword] if self.keyword else [])]


def keras_folder() -> Path:
    """Return where the installed Keras has its code and tests, without importing it."""
    found = importlib.util.find_spec("keras")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "src"


def files_of(names: Iterable[str]) -> list[Path]:
    """Return the files of tests in folders, or files, of Keras' `src`.

    Raises:
      FileNotFoundError: if there is none.
    """
    found: dict[Path, None] = {}
    for name in names:
        path = keras_folder() / name
        files = sorted(path.rglob("*_test.py")) if path.is_dir() else [path]
        missing = [str(file) for file in files if not file.exists()] or ([] if files else [name])
        if missing:
            raise FileNotFoundError(f"No tests of Keras at {', '.join(missing)}")
        found.update(dict.fromkeys(files))
    return list(found)


def chunks(files: Sequence[Path]) -> Iterator[list[Path]]:
    """Yield the files of each folder, a few at a time."""
    for folder in dict.fromkeys(file.parent for file in files):
        inside = [file for file in files if file.parent == folder]
        for start in range(0, len(inside), _FILES_PER_PROCESS):
            yield inside[start : start + _FILES_PER_PROCESS]


def run(
    files: Sequence[Path], options: Options, log: Path | None = None, done: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Return a line for each test of these files; what ends its process is one of them, and the others go on."""
    return list(each(files, options, log, done))


def each(
    files: Sequence[Path], options: Options, log: Path | None = None, done: Iterable[str] = ()
) -> Iterator[dict[str, Any]]:
    """Yield a line for each test of these files, but for those that are done, process after process.

    What fails through graphsplit is run plainly, in a process of its own.
    """
    names = list(done)
    is_left = True
    while is_left:
        lines, is_left = _run_process(files, options, log, names)
        names += [name for line in lines if (name := line.get("test"))]
        plain = _plain(files, options, log, [line["test"] for line in lines if line.get("through") in (FAILED, DIED)])
        for line in lines:
            outcome = plain.get(line.get("test"), PASSED)
            changed = {} if outcome == PASSED else {"plain": outcome, "through": None}
            yield {**line, **changed, "how": options.how}


def _plain(files: Sequence[Path], options: Options, log: Path | None, names: Sequence[str]) -> dict[str, str]:
    """Return how tests end plainly, by their names."""
    found: dict[str, str] = {}
    while missing := [name for name in names if name not in found]:
        lines, _ = _run_process(files, options, log, (), missing)
        if not lines:
            raise RuntimeError(f"pytest does not find tests that it ran before: {missing}")
        found |= {line["test"]: line["plain"] for line in lines if "test" in line}
    return found


def _run_process(
    files: Sequence[Path], options: Options, log: Path | None, done: Sequence[str], plainly: Sequence[str] = ()
) -> tuple[list[dict[str, Any]], bool]:
    """Return what one process said, a test in which it died included; and whether it left others."""
    with tempfile.TemporaryDirectory() as folder:
        record, skip, only = [Path(folder) / name for name in ("record.jsonl", "done.txt", "only.txt")]
        skip.write_text("\n".join(done))
        only.write_text("\n".join(plainly))
        command = [sys.executable, "-m", "pytest", "-c", str(Path(__file__).parent / "keras_tests.ini")]
        command += [f"--rootdir={keras_folder()}", f"--timeout={_MOST_SECONDS}", *options.words()]
        command += [f"--others-record={record}", f"--others-skip={skip}", f"--others-most={_TESTS_PER_PROCESS}"]
        command += ["--others-plainly", f"--others-only={only}"] if plainly else []
        command += map(str, files)
        ran = subprocess.run(command, cwd=folder, env=environment(options), capture_output=True, text=True, check=False)
        if log is not None:
            with log.open("a") as file:
                file.write(ran.stdout + ran.stderr)
        said = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
    if not said:
        raise RuntimeError(f"pytest ran no test:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    lines = [line for line in said if {"test", "not_collected", "collected"} & set(line)]
    if "finished" in said[-1]:
        return lines, bool(said[-1]["left"])
    begun = said[-1].get("begins")
    if begun is None:
        raise RuntimeError(f"pytest ended with {ran.returncode}:\n{ran.stdout[-2000:]}{ran.stderr[-2000:]}")
    died = {"plain": DIED, "through": None} if plainly else {"plain": PASSED, "through": DIED}
    message = f"the process ended with {ran.returncode}\n{ran.stderr[-1000:]}"
    return [*lines, {"test": begun, **died, "message": message}], True


def environment(options: Options) -> Mapping[str, str]:
    """Return the environment of a process that finds these tests and graphsplit."""
    places = [str(ROOT), options.packages, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, places)), "KERAS_BACKEND": "tensorflow"}
