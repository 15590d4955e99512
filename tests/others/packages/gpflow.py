"""GPflow's `training_loss`, in float64. (Models whose data are variables of their own have no batch.)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.coverage_models import Training

REQUIREMENTS = ("gpflow",)
PRECISION = "float64"
_INDUCING = 4


def _data(rows: int, outputs: int, classes: bool) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(rows)
    x = rng.uniform(0, 1, (rows, 2))
    y = np.stack([np.sin(3 * x[:, 0] + i) for i in range(outputs)], axis=1) + 0.1 * rng.normal(size=(rows, outputs))
    return tf.constant(x), tf.constant((y > 0).astype(float) if classes else y)


def _training(model: Any, loss: Callable[[Any, Any], tf.Tensor], outputs: int = 1, classes: bool = False) -> Training:
    variables = model.trainable_variables

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(x, y)
        for v, g in zip(variables, tape.gradient(value, variables), strict=True):
            if g is not None:
                v.assign_sub(1e-3 * g)
        return value

    return Training(step, variables, lambda rows: _data(rows, outputs, classes))


def _svgp(likelihood: str, outputs: int = 1, classes: bool = False, **options: Any) -> Training:
    import gpflow

    z = np.random.default_rng(1).uniform(0, 1, (_INDUCING, 2))
    made = getattr(gpflow.likelihoods, likelihood)()
    kernel = gpflow.kernels.SquaredExponential(lengthscales=[0.5, 0.7]) + gpflow.kernels.Linear()
    model = gpflow.models.SVGP(kernel, made, z, num_data=100, num_latent_gps=outputs, **options)
    return _training(model, lambda x, y: model.training_loss((x, y)), outputs, classes)


def _shared() -> Training:
    import gpflow

    z = np.random.default_rng(1).uniform(0, 1, (_INDUCING, 2))
    kernel = gpflow.kernels.SharedIndependent(gpflow.kernels.Matern32(), output_dim=3)
    inducing = gpflow.inducing_variables.SharedIndependentInducingVariables(gpflow.inducing_variables.InducingPoints(z))
    model = gpflow.models.SVGP(kernel, gpflow.likelihoods.Gaussian(), inducing, num_latent_gps=3, num_data=100)
    return _training(model, lambda x, y: model.training_loss((x, y)), 3)


def models() -> dict[str, Callable[[], Training]]:
    """Return the steps."""
    return {
        "SVGP, Gaussian": lambda: _svgp("Gaussian"),
        "SVGP, Bernoulli": lambda: _svgp("Bernoulli", classes=True),
        "SVGP, Student's t, not whitened": lambda: _svgp("StudentT", whiten=False),
        "SVGP, two outputs": lambda: _svgp("Gaussian", outputs=2, q_diag=True),
        "SVGP, shared kernel": _shared,
    }
