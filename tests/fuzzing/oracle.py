"""The verdict on a program: a `tf.function` of the same lines decides.

What a sum in another order may change is measured, not guessed: the program runs on one device with every value
multiplied by 1 plus a few roundings. What moves by about as much as the difference is no difference.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import graphsplit as gs
from tests.fuzzing.program import Program
from tests.fuzzing.verdicts import DIFFERENT, EQUAL, NOT_TRACEABLE, RAISED, REFUSED, UNSTABLE, Verdict

_NOISY_RUNS = 3
_NOISE = {"float64": 1e-13, "complex128": 1e-13, "float32": 3e-7, "complex64": 3e-7, "float16": 1e-3, "bfloat16": 1e-2}
_TOLERANCE = {"float64": 1e-9, "float32": 3e-4, "float16": 0.02, "bfloat16": 0.1}
_COARSE = [("bfloat16", "bfloat16"), ("float16", "float16|astype\\('e'\\)"), ("float32", "float32|astype\\('[fF]'\\)")]
_TOO_SMALL = "operations forward that take time, and each stage needs one of its own"  # a program, for its mesh
_SHAKES = 100.0  # the noise is a few hundred roundings, and a sum in another order moves by a few


def judge(program: Program, say: Callable[[str], None] = lambda _: None) -> Verdict:
    """Run a program on one device and on several, and compare.

    Args:
      say: told what runs next, for whoever finds this process dead.
    """
    say("one device")
    try:
        expected = _flat(program.load()["results"](False))
    except Exception as error:  # TensorFlow itself cannot run this
        return Verdict(NOT_TRACEABLE, _said(error))
    say("several devices")
    try:
        actual = _flat(program.load()["results"](True))
    except gs.errors.UnsupportedError as error:
        return Verdict(REFUSED, _said(error))
    except Exception as error:
        return Verdict(REFUSED if _TOO_SMALL in str(error) else RAISED, _said(error))
    if any((a is None) != (b is None) for a, b in zip(expected, actual, strict=False)):
        expected = _none_as_in_eager_code(program, expected)
    tolerance = _tolerance(program.source, expected)
    found = _differences(expected, actual, tolerance, [0.0] * len(expected))
    if not found:
        return Verdict(EQUAL)
    say("noise")
    moved = _noise(program, expected)
    if moved is None:
        return Verdict(UNSTABLE, "does not run with noise")
    stable = _differences(expected, actual, tolerance, moved)
    return Verdict(DIFFERENT, "; ".join(stable)) if stable else Verdict(UNSTABLE, "; ".join(found))


def _flat(results: Any) -> list[Any]:
    """Return all tensors of all calls, read; None where there is no gradient."""
    flat = tf.nest.flatten(results, expand_composites=True)
    return [None if value is None else np.asarray(value) for value in flat]


def _none_as_in_eager_code(program: Program, expected: Sequence[Any]) -> list[Any]:
    """Return what is expected, with None where eager code has no gradient.

    A `tf.function` finds zeros there if it is differentiated more than once: TensorFlow changes it the first time.
    """
    tf.config.run_functions_eagerly(True)
    try:
        eager = _flat(program.load()["results"](False))
    except Exception:  # what does not run without tf.function is compared with that alone
        return list(expected)
    finally:
        tf.config.run_functions_eagerly(False)
    pairs = zip(expected, eager, strict=True)
    return [None if b is None and a is not None and not np.any(a) else a for a, b in pairs]


def _tolerance(source: str, expected: Sequence[Any]) -> float:
    """Return what is tolerated, relative to the largest entry: that of the coarsest numbers."""
    kinds = {value.dtype.name for value in expected if value is not None}
    for name, pattern in _COARSE:
        if name in kinds or ("complex64" in kinds and name == "float32") or re.search(pattern, source):
            return _TOLERANCE[name]
    return _TOLERANCE["float64"]


def _differences(expected: Sequence[Any], actual: Sequence[Any], tolerance: float, moved: Sequence[float]) -> list[str]:
    """Return what differs by more than what is tolerated, and by more than what moves anyway."""
    if len(expected) != len(actual):
        return [f"{len(actual)} results instead of {len(expected)}"]
    found = []
    for i, (a, b, noise) in enumerate(zip(expected, actual, moved, strict=True)):
        if (a is None) != (b is None):
            found.append(f"result {i}: {_brief(b)} instead of {_brief(a)}")
        elif a is not None and (a.shape != b.shape or a.dtype != b.dtype):
            found.append(f"result {i}: {b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
        elif a is not None and not distance(a, b) <= max(tolerance * scale(a), _SHAKES * noise):
            found.append(f"result {i}: {_brief(b)} instead of {_brief(a)}, {distance(a, b):.2g} apart")
    return found


def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of two arrays; infinite where one is no number and the other is."""
    if a.dtype.kind not in "fciub" and a.dtype.name != "bfloat16":
        return float("inf") if np.any(a != b) else 0.0
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    a, b = a.astype(wide), b.astype(wide)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        apart = np.where(same, 0.0, np.abs(np.where(same, 0, a) - np.where(same, 0, b)))
    return float(np.max(np.nan_to_num(apart, nan=np.inf), initial=0.0))


def scale(a: np.ndarray) -> float:
    """Return the size of the largest entry; 0 for what must be equal."""
    if a.dtype.kind not in "fc" and a.dtype.name != "bfloat16":
        return 0.0
    sizes = np.abs(a.astype(np.complex128))
    return float(np.max(sizes[np.isfinite(sizes)], initial=1e-30))


def _noise(program: Program, expected: Sequence[Any]) -> list[float] | None:
    """Return by how much each result moves when all values are shaken; None if that raises."""
    moved = [0.0] * len(expected)
    noisy = program.noisy()
    for run in range(_NOISY_RUNS):
        try:
            shaken = _flat(noisy.load(jitter=_Jitter(run))["results"](False))
        except Exception:
            return None
        for i, (a, b) in enumerate(zip(expected, shaken, strict=True)):
            same_kind = a is not None and b is not None and a.shape == b.shape
            apart = distance(a, b) if same_kind else 0.0 if a is None and b is None else float("inf")
            moved[i] = max(moved[i], apart)
    return moved


class _Jitter:
    """Multiplies floating-point tensors by 1 plus noise."""

    def __init__(self, seed: int):
        self._seed = seed
        self._counter = itertools.count()

    def __call__(self, value: Any) -> Any:
        return tf.nest.map_structure(self._shake, value, expand_composites=True)

    def _shake(self, x: Any) -> Any:
        size = _NOISE.get(x.dtype.name) if isinstance(x, (tf.Tensor, tf.Variable)) else None
        if size is None:
            return x
        seed = [self._seed, next(self._counter)]
        noise = tf.random.stateless_normal(tf.shape(x), seed, dtype=tf.float64)
        return x * tf.cast(1.0 + size * noise, x.dtype)


def _brief(value: Any) -> str:
    return "None" if value is None else np.array2string(value, threshold=6, edgeitems=2, precision=6).replace("\n", "")


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:2000]
