"""`python -m tests.others.model_worker PACKAGE OPTIONS`: three training steps of a package's models, both ways.

The options are those of `model_table`, as JSON. Prints a line of JSON for each model. Runs in an environment that has
the package.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf

import graphsplit as gs
from benchmarks.coverage_models import Training
from benchmarks.coverage_programs import count, start_elsewhere
from tests.fuzzing.oracle import distance, scale
from tests.others.model_table import Options

ROWS = 7  # uneven on any number of devices
STEPS = 3
NOTABLE = 1e-6  # a difference of which is said what rounding alone makes
LAYOUTS = ("home", "sharded")


def outcomes(package: Any, options: Options) -> Iterator[dict[str, Any]]:
    """Yield what became of each model of a package."""
    models = package.models()
    for name in options.names or models:
        if name in models and name not in options.done:
            yield {"name": name, **_limited(package, name, options)}


def _limited(package: Any, name: str, options: Options) -> dict[str, Any]:
    """Return what became of a model, or that it took too long."""
    try:
        with _at_most(options.seconds):
            return _outcome_of(package, name, options)
    except _TooLong:
        return {"not_run": f"it took longer than {options.seconds} s"}


def _outcome_of(package: Any, name: str, options: Options) -> dict[str, Any]:
    precision = "float32" if name in getattr(package, "FLOAT32", ()) else package.PRECISION
    keras.config.set_floatx(precision)
    keras.config.set_dtype_policy(precision)
    keras.backend.clear_session()
    keras.utils.set_random_seed(1)
    try:
        training = package.models()[name]()
        start_elsewhere(training.variables)  # (a bias of keys has no gradient: what stays at zero is rounding)
        plain = _Run(training, tf.function(training.step))
    except Exception as error:  # a version without this model, or one that does not run: nothing of ours
        return {"not_run": _said(error)}
    try:
        return outcome(training, plain, options.devices)
    except Exception as error:
        return {"raised": _said(error)}


class _TooLong(BaseException):
    """What `_at_most` raises: no `except Exception` of a model may take it."""


@contextmanager
def _at_most(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome(training: Training, plain: _Run, numbers_of_devices: Sequence[int]) -> dict[str, Any]:
    """Return the largest difference over all ways of running, and how much was sharded."""
    largest, first_call = 0.0, 0.0
    for devices in numbers_of_devices:
        for layout in LAYOUTS:
            parallel = gs.parallelize(training.step, devices=devices)
            plain.restore()
            if layout != "home":
                laid_out = parallel.variables(*training.inputs(ROWS))
                gs.set_variable_layout(list(laid_out), layout, devices)
            found = _Run(training, parallel)
            largest = max(largest, *map(_apart, plain.results, found.results))
            if layout != "home":
                gs.set_variable_layout(list(laid_out), "home", devices)
            elif devices == numbers_of_devices[-1]:
                first_call = found.first_s / _Run(training, tf.function(training.step), 1).first_s  # (all is warm)
                plan = parallel.plan(*training.inputs(ROWS))
    plain.restore()
    flops, sharded, whole = count(training, numbers_of_devices[-1])
    dtype = coarsest(plan)
    return {
        "devices": list(numbers_of_devices),
        "difference": largest,
        "rounding": rounding(training, plain, tf.as_dtype(dtype)) if largest > NOTABLE else None,
        "dtype": dtype,
        "share": sharded / flops if flops else 0.0,
        "whole": whole,
        "at_home": [f"{op.type}: {reason}" for op, reason in plan.unsharded_ops],
        "first_call": first_call,
    }


def rounding(training: Training, plain: _Run, dtype: tf.DType) -> float:
    """Return how far the same steps go apart on one device where each variable differs in its last place."""
    plain.restore()
    epsilon = np.finfo(dtype.as_numpy_dtype).eps
    for number, variable in enumerate(training.variables):
        if tf.as_dtype(variable.dtype).is_floating:
            variable.assign(variable * (1 + epsilon * (-1) ** number))
    found = _Run(training, tf.function(training.step))
    plain.restore()
    return max(map(_apart, plain.results, found.results))


def coarsest(plan: gs.inspect.Plan) -> str:
    """Return the coarsest type in which a step computes: norms and rotations of some models are always in float32."""
    types = {
        dtype.name
        for op in plan.program.ops
        for dtype, shape in zip(op.out_dtypes, op.out_shapes, strict=True)
        if shape != ()  # (learning rates and counters)
    }
    return "float32" if "float32" in types else "float64"


class _Run:
    """Steps of a model: what they returned, and what they left in variables, one array after the other."""

    def __init__(self, training: Training, step: Callable[..., Any], steps: int = STEPS):
        self._variables = [v if isinstance(v, tf.Variable) else v.value for v in training.variables]
        self._before = [tf.identity(v) for v in self._variables]
        self.results: list[np.ndarray] = []
        for i in range(steps):
            started = time.perf_counter()
            self.results.append(np.asarray(step(*training.inputs(ROWS))))
            if i == 0:
                self.first_s = time.perf_counter() - started
        self.results += [np.asarray(tf.identity(v)) for v in self._variables]

    def restore(self) -> None:
        """Give variables the values from before."""
        for variable, value in zip(self._variables, self._before, strict=True):
            variable.assign(value)


def _apart(expected: np.ndarray, actual: np.ndarray) -> float:
    size = scale(expected) if expected.dtype.kind == "f" else 1.0
    return distance(expected, actual) / max(size, 1e-6)


def _said(error: Exception) -> str:
    ours = [line for line in traceback.format_exception(error) if f"{Path(gs.__file__).parent}{os.sep}" in line]
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    places = {i + step for i, line in enumerate(lines) if line.startswith("File ") for step in (0, 1)}
    message = re.sub(r"\x1b\[\d*m", "", " ".join(line for i, line in enumerate(lines) if i not in places))
    return f"{type(error).__name__}: {message[:400]} {ours[-1].strip()[:200] if ours else ''}".strip()


def main(words: list[str]) -> None:
    """Print what became of each model."""
    options = Options(**json.loads(words[1]))
    gs.use_logical_devices(max(options.devices) + 1)  # (`count` wants one more, for what is at home)
    for found in outcomes(importlib.import_module(f"tests.others.packages.{words[0]}"), options):
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
