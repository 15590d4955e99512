"""What graphsplit needs to run, what not everybody needs, and what to say without it. Imports nothing heavy."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from graphsplit.errors import UnsupportedError

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


def how_to_install(package: str, extra: str) -> str:
    """Return what to type: the package, or the extra that names it, where graphsplit is a clone.

    >>> how_to_install("matplotlib", "plots")
    "pip install matplotlib, or, in a clone of graphsplit, pip install '.[plots]'"
    """
    return f"pip install {package}, or, in a clone of graphsplit, pip install '.[{extra}]'"


def needed(module: str, extra: str, what: str) -> Any:
    """Return a module that not everybody needs.

    Args:
      extra: which extra of graphsplit installs it.
      what: needs it, the subject of a sentence.

    Raises:
      UnsupportedError: if it is not installed; it says what to type.

    >>> needed("no_such_module", "plots", "A picture")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    graphsplit.errors.UnsupportedError: A picture needs no_such_module: pip install no_such_module, or, in a clone ...
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UnsupportedError(f"{what} needs {package}: {how_to_install(package, extra)}.") from error
