"""Packages that not everybody needs: how to have them."""

from __future__ import annotations

from typing import Any

from graphsplit.core.errors import UnsupportedError


def how_to_install(package: str, extra: str) -> str:
    """Return what to type: the package, or the extra that names it, where graphsplit is a clone.

    >>> how_to_install("matplotlib", "plots")
    "pip install matplotlib, or, in a clone of graphsplit, pip install '.[plots]'"
    """
    return f"pip install {package}, or, in a clone of graphsplit, pip install '.[{extra}]'"


def figure_class(what: str) -> Any:
    """Return matplotlib's `Figure`.

    Args:
      what: needs it, the subject of a sentence.

    Raises:
      UnsupportedError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UnsupportedError(f"{what} needs matplotlib: {how_to_install('matplotlib', 'plots')}.") from error
    return Figure
