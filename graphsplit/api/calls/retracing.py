"""The warning for a function that is called with many signatures: each has a plan, and costs what the first one did."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from graphsplit.core import structures
from graphsplit.core.user_code import user_stack_level
from graphsplit.errors import RetracingWarning, bullet_list

MANY_SIGNATURES = 8


def warn_of_retracing(name: str, signatures: Sequence[structures.Branch]) -> None:
    """Warn, once, when a function has reached `MANY_SIGNATURES` signatures; name the arguments that differ."""
    if len(signatures) != MANY_SIGNATURES:
        return
    lines = [f"{path}: {_several(values)}" for path, values in _differing(signatures).items()]
    warnings.warn(
        f"{name} has been called with {MANY_SIGNATURES} signatures, and has a plan for each:\n{bullet_list(lines)}\n"
        "A plan takes seconds for a large model. Pad or bucket lengths so that few shapes occur; or leave sizes that "
        'change open, by parallelize(..., tuning={"reduce_retracing": True}). Pass Python numbers that change as '
        "tensors.",
        RetracingWarning,
        stacklevel=user_stack_level(),
    )


def _differing(signatures: Sequence[structures.Branch]) -> dict[str, list[str]]:
    """Return what each argument was, for those that were not always the same."""
    seen: dict[str, list[str]] = {}
    for signature in signatures:
        for path, leaf in structures.paths(signature):
            shape = "unknown" if leaf.shape is None else str(list(leaf.shape))
            _note(seen, path, f"{leaf.dtype.name}{shape}")
        for path, value in structures.static_leaves(signature):
            _note(seen, path, repr(value))
    return {path: values for path, values in seen.items() if len(values) > 1}


def _note(seen: dict[str, list[str]], path: str, value: Any) -> None:
    values = seen.setdefault(path, [])
    if value not in values:
        values.append(value)


def _several(values: Sequence[str], most: int = 4) -> str:
    return ", ".join(values[:most]) + (f", ... ({len(values)} in all)" if len(values) > most else "")
