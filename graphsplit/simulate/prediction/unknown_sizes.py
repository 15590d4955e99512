"""Sizes that follow from data: what they count as."""

from __future__ import annotations

from graphsplit.errors import ArgumentError


def checked_unknown_size(size: object) -> int | None:
    """Return what `unknown_size` says.

    Raises:
      ArgumentError: unless it is a number of at least 0, or None.

    >>> checked_unknown_size(128)
    128
    """
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size >= 0):
        return size
    raise ArgumentError(f"unknown_size must be the number to assume for sizes that depend on data, 128, got {size!r}.")
