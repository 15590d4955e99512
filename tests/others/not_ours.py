"""What of Keras' tests says nothing of graphsplit, each with its reason."""

from __future__ import annotations

import fnmatch

# Patterns of pytest's names of tests, without the folders before keras/src.
NOT_OURS: dict[str, str] = {}


def reason_against(name: str) -> str:
    """Return why a test says nothing of graphsplit; nothing if it does."""
    name = name.rpartition("keras/src/")[2]
    return next((reason for pattern, reason in NOT_OURS.items() if fnmatch.fnmatchcase(name, pattern)), "")
