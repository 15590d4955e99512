"""`verify`: the law, checked on the user's own function and data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.api.parallel_function import P, ParallelFunction, R
from graphsplit.core import structures
from graphsplit.core.errors import ArgumentError


@dataclass(frozen=True)
class Difference:
    """One output or variable: the largest absolute difference, and that divided by the largest magnitude."""

    name: str
    absolute: float
    relative: float


@dataclass(frozen=True)
class Report:
    """What `verify` found: one `Difference` for each output and variable, largest first."""

    differences: tuple[Difference, ...]
    devices: tuple[str, ...]

    @property
    def largest(self) -> float:
        """The largest relative difference; 0.0 if everything is equal bit by bit."""
        return max((d.relative for d in self.differences), default=0.0)

    def __str__(self) -> str:
        several = f"{len(self.devices)} device{'s' if len(self.devices) != 1 else ''}"
        lines = [f"{several} against one: largest relative difference {self.largest:.2g}"]
        width = max((len(d.name) for d in self.differences[:10]), default=0)
        for d in self.differences[:10]:
            lines.append(f"  {d.name:{width}}  {d.absolute:.2g} absolute, {d.relative:.2g} relative")
        if len(self.differences) > 10:
            lines.append(f"  ... and {len(self.differences) - 10} more, all smaller")
        return "\n".join(lines)


def verify(function: ParallelFunction[P, R], *args: P.args, **kwargs: P.kwargs) -> Report:
    """Run a parallelized function and its single-device original on the same arguments and state, and compare.

    Variables are given back the values that they had, whether or not the function succeeds. Other state (files,
    tables, what `tf.print` wrote, generators that are not variables) is not.

    Args:
      function: made by `parallelize`.
      *args, **kwargs: its arguments.

    Returns:
      A `Report`; print it.

    Raises:
      ArgumentError: if `function` is not a `ParallelFunction`, or this is not eager code.

    >>> import tensorflow as tf, graphsplit as gs
    >>> mean = gs.parallelize(tf.reduce_mean, devices=2)
    >>> gs.verify(mean, tf.constant([1.0, 2.0, 6.0])).largest < 1e-6
    True
    """
    if not isinstance(function, ParallelFunction):
        raise ArgumentError(f"verify takes a function made by parallelize, got {function!r}.")
    if not tf.executing_eagerly():
        raise ArgumentError("verify runs the function twice and compares numbers: call it outside of tf.function.")
    variables = function.variables(*args, **kwargs)  # traces, which may make variables
    before = [tf.identity(variable) for variable in variables]
    single = tf.function(function.function)

    def run(call: Callable[..., Any]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        try:
            outputs, _ = structures.flatten(structures.map_static(_as_tensor, call(*args, **kwargs)))
            return outputs, [tf.identity(variable) for variable in variables]
        finally:
            for variable, value in zip(variables, before, strict=True):
                variable.assign(value)

    def run_single(*args: Any, **kwargs: Any) -> Any:
        with tf.device(function.home):
            return single(*args, **kwargs)

    outputs, state = run(run_single)
    outputs_n, state_n = run(function)
    found = [difference_of(f"output {i}", a, b) for i, (a, b) in enumerate(zip(outputs, outputs_n, strict=True))]
    names = [getattr(variable, "path", None) or variable.name for variable in variables]
    found += [difference_of(f"variable {n}", a, b) for n, a, b in zip(names, state, state_n, strict=True)]
    return Report(tuple(sorted(found, key=lambda d: -d.relative)), function.devices)


def _as_tensor(value: Any) -> Any:
    """Return a Python number or string as a tensor: `tf.function` returns those as tensors too."""
    return tf.convert_to_tensor(value) if isinstance(value, (bool, int, float, complex, str, bytes)) else value


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
