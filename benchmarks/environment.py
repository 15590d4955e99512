"""What a measurement ran on."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any


def environment() -> dict[str, Any]:
    """Return processor, memory, versions, commit and date."""
    import keras
    import numpy
    import tensorflow as tf

    import graphsplit

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": numpy.__version__,
        "jax": _version_of("jax"),
        "graphsplit": graphsplit.__version__,
        "commit": commit(),
    }


def _version_of(package: str) -> str:
    """Return a package's version without importing it."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def free_bytes() -> int | None:
    """Return how much memory new processes can have, or None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def load_average() -> float:
    """Return how many processes wanted to run during the last minute."""
    return os.getloadavg()[0]


def stolen_seconds() -> float:
    """Return the processor time that this machine's host has given to others since it started; 0 where none says."""
    try:
        first = Path("/proc/stat").read_text().splitlines()[0].split()
    except OSError:
        return 0.0
    return int(first[8]) / os.sysconf("SC_CLK_TCK")


def _gpus() -> list[str]:
    """Return model and compute capability of each GPU, and the driver's version."""
    import tensorflow as tf

    from graphsplit.core.gpus import NoDriverAnswerError, read_driver

    found = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        capability = ".".join(map(str, details.get("compute_capability", "?")))
        found.append(f"{details.get('device_name', gpu.name)}, compute capability {capability}")
    try:
        return [*found, f"driver {read_driver().version}"] if found else []
    except NoDriverAnswerError as error:
        return [*found, f"driver not known: {error}"]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def commit() -> str:
    """Return the commit, marked where graphsplit itself differs from it."""
    root = Path(__file__).parent.parent
    try:
        done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True)
        changed = subprocess.run(["git", "diff", "--quiet", "HEAD", "--", "graphsplit"], cwd=root, capture_output=True)
    except OSError:
        return "unknown"
    return (done.stdout.strip() or "unknown") + ("+changes" if changed.returncode == 1 else "")
