"""Packages that not everybody needs: how to have them."""

from __future__ import annotations


def how_to_install(package: str, extra: str) -> str:
    """Return what to type: the package, or the extra that names it, where graphsplit is a clone.

    >>> how_to_install("matplotlib", "plots")
    "pip install matplotlib, or, in a clone of graphsplit, pip install '.[plots]'"
    """
    return f"pip install {package}, or, in a clone of graphsplit, pip install '.[{extra}]'"
