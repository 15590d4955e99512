"""What graphsplit needs to run, and what to say where it is not there. Imports nothing heavy."""

from __future__ import annotations

import sys

OLDEST, NEWEST = (2, 16, 2), (2, 22)  # of TensorFlow, as in setup.cfg

_HOW = (
    "pip install tensorflow, or tensorflow[and-cuda] for GPUs of NVIDIA. Distributions of other names, such as "
    "tensorflow-cpu, do as well; pip install --no-deps then installs graphsplit beside them."
)


def explained(error: ImportError) -> ImportError:
    """Return an error that says what to install, if the want of a fitting TensorFlow explains that an import failed."""
    name = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and name == "tensorflow" and not sys.modules.get("tensorflow"):
        return ImportError(f"graphsplit runs on TensorFlow, which this Python does not have: {_HOW}", name="tensorflow")
    version = str(getattr(sys.modules.get("tensorflow"), "__version__", ""))
    if version and not _fits(version):
        oldest, newest = ".".join(map(str, OLDEST)), ".".join(map(str, NEWEST))
        return ImportError(
            f"graphsplit runs on TensorFlow {oldest} to {newest}, and this is {version}, in which something is missing "
            f"that it needs ({error}). {_HOW}",
            name="tensorflow",
        )
    return error


def _fits(version: str) -> bool:
    numbers = tuple([int(part) for part in version.split(".")[:2]])
    return OLDEST[:2] <= numbers <= NEWEST
