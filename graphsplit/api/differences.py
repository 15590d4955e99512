"""How far apart two runs of a function are, and how far rounding alone would take them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tensorflow as tf

ROUNDED = 8  # units in the last place that any sum of many terms may be off, relative to its largest entry
MARGIN = 16  # how many times what a change in the last place of all that goes in does


@dataclass(frozen=True)
class Difference:
    """One output or variable.

    Attributes:
      name: `output 0` or `variable dense/kernel`.
      absolute: the largest absolute difference.
      relative: that, divided by the largest magnitude.
      rounding: the relative difference that rounding explains, see `verify`.
      again: how far apart two calls on one device are, relative, if that is more than rounding: then there is nothing
        to compare with.
    """

    name: str
    absolute: float
    relative: float
    rounding: float = 0.0
    again: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.relative <= self.rounding and not self.again

    @property
    def share(self) -> float:
        """How much of what rounding explains it takes: more than 1 is no rounding."""
        return self.relative / self.rounding if self.rounding else float("inf") if self.relative else 0.0


_LAST_PLACES = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7, tf.float32: 2.0**-23, tf.float64: 2.0**-52}


def last_place(dtype: tf.DType) -> float:
    """Return a unit in the last place of numbers around 1; 0.0 for types that are not rounded."""
    return _LAST_PLACES.get(dtype.real_dtype, 0.0) if dtype.is_floating or dtype.is_complex else 0.0


def difference_of(name: str, expected: tf.Tensor, actual: tf.Tensor) -> Difference:
    """Return how far one tensor is from another; infinitely far for another shape."""
    a, b = expected.numpy(), actual.numpy()
    if np.shape(a) != np.shape(b):
        return Difference(name, float("inf"), float("inf"))
    if expected.dtype == tf.string:
        differs = float(np.any(a != b))
        return Difference(name, differs, differs)
    kind = np.complex128 if expected.dtype.is_complex else np.float64
    a, b = np.asarray(a, kind), np.asarray(b, kind)
    if not a.size:
        return Difference(name, 0.0, 0.0)
    same_special = (np.isnan(a) & np.isnan(b)) | (a == b)
    distance = np.where(same_special, 0.0, np.abs(np.where(same_special, 0, a) - np.where(same_special, 0, b)))
    largest = float(np.nan_to_num(distance, nan=np.inf).max())
    scale = float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))
    return Difference(name, largest, largest / scale if scale else largest)
