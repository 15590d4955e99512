"""What NVIDIA's driver says of its GPUs, through its own tool, `nvidia-smi`.

TensorFlow's public API tells a GPU's model and compute capability, and neither the driver, nor the memory before it is
taken, nor which GPUs reach each other's memory.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

_LIMIT_S = 20.0
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # the tool underlines its header
_COLUMNS = "index,name,memory.total,driver_version"  # https://docs.nvidia.com/deploy/nvidia-smi


class NoDriverAnswerError(Exception):
    """The driver was asked and does not say; the message is why, and completes "not known: "."""


@dataclass(frozen=True)
class DriverGpu:
    """A GPU as the driver numbers it, which is not always how TensorFlow does; its memory in MiB, None if not told."""

    index: int
    name: str
    memory_mb: int | None


@dataclass(frozen=True)
class Driver:
    """The driver's version and all GPUs of the machine, those hidden from this process included."""

    version: str
    gpus: tuple[DriverGpu, ...]


def read_driver() -> Driver:
    """Ask for the driver's version and GPUs.

    Raises:
      NoDriverAnswerError: if there is no such tool, or no GPU, or it fails.
    """
    lines = [line for line in _ask(f"--query-gpu={_COLUMNS}", "--format=csv,noheader,nounits").splitlines() if line]
    rows = [[part.strip() for part in line.split(",")] for line in lines]
    if not rows or any(len(row) != 4 or not row[0].isdecimal() for row in rows):
        raise NoDriverAnswerError(f"nvidia-smi answered {lines[0] if lines else 'nothing'!r}")
    gpus = [DriverGpu(int(index), name, int(size) if size.isdecimal() else None) for index, name, size, _ in rows]
    return Driver(rows[0][3], tuple(gpus))


def read_peer_access() -> Mapping[tuple[int, int], str]:
    """Ask which GPUs read each other's memory directly: `"OK"`, or the driver's abbreviation of why not, by pair.

    Raises:
      NoDriverAnswerError: as `read_driver`; or if the answer is not the table that it is known to be.
    """
    table = [line.split() for line in _ESCAPES.sub("", _ask("topo", "-p2p", "r")).splitlines()]
    header = next((words for words in table if words and all(re.fullmatch(r"GPU\d+", word) for word in words)), [])
    rows = {words[0]: words[1:] for words in table if words and words[0] in header and words != header}
    if not header or list(rows) != header or any(len(row) != len(header) for row in rows.values()):
        raise NoDriverAnswerError("the answer of nvidia-smi topo -p2p r is no table of GPUs")
    numbers = [int(name.removeprefix("GPU")) for name in header]
    return {(a, b): rows[f"GPU{a}"][k] for a in numbers for k, b in enumerate(numbers) if a != b}


def smallest_memory_mb() -> int | None:
    """Return the memory of the smallest GPU of the machine in MiB, None if that is not known."""
    try:
        sizes = [gpu.memory_mb for gpu in read_driver().gpus]
    except NoDriverAnswerError:
        return None
    return min(size for size in sizes if size is not None) if None not in sizes else None


def _ask(*arguments: str) -> str:
    command = f"nvidia-smi {' '.join(arguments)}"
    try:
        done = subprocess.run(["nvidia-smi", *arguments], capture_output=True, text=True, timeout=_LIMIT_S)
    except FileNotFoundError:
        raise NoDriverAnswerError("there is no nvidia-smi here, which comes with NVIDIA's driver") from None
    except subprocess.TimeoutExpired:
        raise NoDriverAnswerError(f"{command} gave no answer within {_LIMIT_S:.0f} s") from None
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise NoDriverAnswerError(f"{command} ended with {done.returncode}" + (f": {lines[0][:120]}" if lines else ""))
    return done.stdout
