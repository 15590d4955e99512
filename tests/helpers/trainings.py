"""The law of trainings of Keras models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

import graphsplit as gs
from benchmarks.coverage_models import Training
from tests.helpers.float64 import EXACT
from tests.helpers.law import assert_law

Made = Callable[[], Training]


def assert_training(
    made: Made, rows: tuple[int, ...], *, at_home: tuple[str, ...] = (), tolerance: float = EXACT, **options: Any
) -> gs.inspect.Plan:
    """Train both ways on batches of these sizes; what carries the batch and runs at home is exactly `at_home`."""

    def make() -> tuple[Callable[..., Any], Any]:
        keras.utils.set_random_seed(1)
        training = made()
        start_elsewhere(training.variables)
        return training.step, training.variables

    plan = assert_law(make, [made().inputs(n) for n in rows], at_home=None, tolerance=tolerance, **options)
    carrying = [*[op.type for op, _ in plan.unsharded_ops], *[op.type for op in plan.rows_kept]]
    assert sorted(carrying) == sorted(at_home), str(plan)
    return plan


def start_elsewhere(variables: Any) -> None:
    """Let no variable start at zero: one without a gradient would stay there, and its rounding errors be compared."""
    for variable in variables:
        if tf.as_dtype(variable.dtype).is_floating:
            variable.assign(variable + 0.01 * tf.random.uniform(variable.shape, 0.5, 1.0, variable.dtype))
