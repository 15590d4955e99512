"""The warning for a function that is called with many signatures: each has a plan, and costs what the first one did."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from graphsplit.core import structures
from graphsplit.core.errors import bullet_list
from graphsplit.core.user_code import user_stack_level

MANY_SIGNATURES = 8


class RetracingWarning(UserWarning):
    """A parallelized function is called with many different signatures, each of which costs about what the first cost.

    It is said once, at the eighth. The message names the arguments that differ. Pad to a few lengths; leave sizes open
    by `reduce_retracing=True`; pass Python numbers that change as tensors. (A function is traced and planned for each
    signature; a step of a Keras model is planned for each, from a trace that leaves the rows open.)

    >>> import warnings, tensorflow as tf, graphsplit as gs
    >>> square = gs.parallelize(tf.square, devices=2)
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     for rows in range(1, 9):
    ...         _ = square(tf.ones(rows))
    >>> print(told[0].category.__name__, told[0].message, sep=": ")  # doctest: +NORMALIZE_WHITESPACE
    RetracingWarning: square has been called with 8 signatures, and has a plan for each:
      - x: float32[1], float32[2], float32[3], float32[4], ... (8 in all)
    A plan takes seconds for a large model. Pad or bucket lengths so that few shapes occur; or leave sizes that change
    open, by parallelize(..., reduce_retracing=True). Pass Python numbers that change as tensors.
    """


def warn_of_retracing(name: str, signatures: Sequence[structures.Branch]) -> None:
    """Warn, once, when a function has reached `MANY_SIGNATURES` signatures; name the arguments that differ."""
    if len(signatures) != MANY_SIGNATURES:
        return
    lines = [f"{path}: {_several(values)}" for path, values in _differing(signatures).items()]
    warnings.warn(
        f"{name} has been called with {MANY_SIGNATURES} signatures, and has a plan for each:\n{bullet_list(lines)}\n"
        "A plan takes seconds for a large model. Pad or bucket lengths so that few shapes occur; or leave sizes that "
        "change open, by parallelize(..., reduce_retracing=True). Pass Python numbers that change as tensors.",
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
