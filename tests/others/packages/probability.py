"""Variational inference and likelihoods of TensorFlow Probability, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.coverage_models import Training

REQUIREMENTS = ("tensorflow-probability",)
PRECISION = "float64"
_FEATURES = 3


def _data(rows: int, classes: bool = False) -> tuple[tf.Tensor, tf.Tensor]:
    rng = np.random.default_rng(rows)
    x = rng.normal(size=(rows, _FEATURES))
    y = x @ np.array([1.0, -2.0, 0.5]) + 0.1 * rng.normal(size=rows)
    return tf.constant(x), tf.constant((y > 0).astype(float) if classes else y)


def _training(variables: Any, loss: Callable[..., tf.Tensor], inputs: Callable[[int], Any]) -> Training:
    variables = list(variables)

    def step(*data: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            value = loss(*data)
        for v, g in zip(variables, tape.gradient(value, variables), strict=True):
            v.assign_sub(1e-2 * g)
        return value

    return Training(step, variables, inputs)


def _regression(classes: bool) -> Training:
    """Bayesian regression: a mean-field posterior, by `tfp.vi.monte_carlo_variational_loss`."""
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    location, scale = (
        tf.Variable(tf.zeros(_FEATURES, tf.float64)),
        tf.Variable(tf.fill([_FEATURES], tf.constant(-1.0, tf.float64))),
    )

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        posterior = tfd.Independent(tfd.Normal(location, tf.nn.softplus(scale)), 1)
        prior = tfd.Independent(tfd.Normal(tf.zeros(_FEATURES, tf.float64), tf.constant(1.0, tf.float64)), 1)

        def log_probability(w: tf.Tensor) -> tf.Tensor:
            mean = tf.einsum("nf,sf->sn", x, w)
            rows = tfd.Bernoulli(logits=mean) if classes else tfd.Normal(mean, tf.constant(0.5, tf.float64))
            return prior.log_prob(w) + tf.reduce_sum(rows.log_prob(y), axis=-1)

        return tfp.vi.monte_carlo_variational_loss(log_probability, posterior, sample_size=4, seed=(1, 2))

    return _training([location, scale], loss, lambda rows: _data(rows, classes))


def _autoencoder() -> Training:
    """A variational autoencoder with `tfp` distributions, reparameterized with numbers from the batch."""
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    rng = np.random.default_rng(0)
    encode, decode = [tf.Variable(0.3 * rng.normal(size=shape)) for shape in ((_FEATURES, 4), (2, _FEATURES))]

    def loss(x: tf.Tensor, noise: tf.Tensor) -> tf.Tensor:
        mean, scale = tf.split(x @ encode, 2, axis=1)
        posterior = tfd.MultivariateNormalDiag(mean, tf.nn.softplus(scale))
        z = posterior.mean() + posterior.stddev() * noise
        prior = tfd.MultivariateNormalDiag(tf.zeros(2, tf.float64), tf.ones(2, tf.float64))
        likelihood = tfd.Independent(tfd.Normal(z @ decode, tf.constant(0.3, tf.float64)), 1)
        return tf.reduce_mean(tfd.kl_divergence(posterior, prior) - likelihood.log_prob(x))

    def inputs(rows: int) -> tuple[tf.Tensor, tf.Tensor]:
        return _data(rows)[0], tf.constant(np.random.default_rng(rows).normal(size=(rows, 2)))

    return _training([encode, decode], loss, inputs)


def _mixture() -> Training:
    """A mixture of Gaussians with full covariances by maximum likelihood."""
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    rng = np.random.default_rng(0)
    logits, means = tf.Variable(np.zeros(4)), tf.Variable(rng.normal(size=(4, _FEATURES)))
    triangles = tf.Variable(np.tile(np.eye(_FEATURES), (4, 1, 1)))

    def loss(x: tf.Tensor) -> tf.Tensor:
        parts = tfd.MultivariateNormalTriL(means, tf.linalg.band_part(triangles, -1, 0))
        mixture = tfd.MixtureSameFamily(tfd.Categorical(logits=logits), parts)
        return -tf.reduce_mean(mixture.log_prob(x))

    return _training([logits, means, triangles], loss, lambda rows: (_data(rows)[0],))


def _flow() -> Training:
    """A flow of RealNVP's couplings."""
    import tensorflow_probability as tfp

    tfb, tfd = tfp.bijectors, tfp.distributions
    rng = np.random.default_rng(0)
    weights = [tf.Variable(0.3 * rng.normal(size=shape)) for shape in ((1, 4), (2, 2))]

    def shift_and_scale(weight: tf.Variable, kept: int) -> Callable[..., Any]:
        def function(x: tf.Tensor, size: int, **_: Any) -> tuple[tf.Tensor, tf.Tensor]:
            shift, log_scale = tf.split(tf.tanh(x @ weight), 2, axis=-1)
            return shift, log_scale

        return function

    def loss(x: tf.Tensor) -> tf.Tensor:
        chain = [tfb.RealNVP(1, shift_and_log_scale_fn=shift_and_scale(weights[0], 1)), tfb.Permute([2, 0, 1])]
        chain.append(tfb.RealNVP(2, shift_and_log_scale_fn=shift_and_scale(weights[1], 2)))
        base = tfd.MultivariateNormalDiag(tf.zeros(_FEATURES, tf.float64), tf.ones(_FEATURES, tf.float64))
        return -tf.reduce_mean(tfd.TransformedDistribution(base, tfb.Chain(chain)).log_prob(x))

    return _training(weights, loss, lambda rows: (_data(rows)[0],))


def _hidden_markov() -> Training:
    """A hidden Markov model on sequences."""
    import tensorflow_probability as tfp

    tfd = tfp.distributions
    start, change, means = [
        tf.Variable(np.random.default_rng(i).normal(size=s)) for i, s in enumerate(((3,), (3, 3), (3,)))
    ]

    def loss(x: tf.Tensor) -> tf.Tensor:
        chain = tfd.HiddenMarkovModel(
            tfd.Categorical(logits=start),
            tfd.Categorical(logits=change),
            tfd.Normal(means, tf.constant(1.0, tf.float64)),
            num_steps=5,
        )
        return -tf.reduce_mean(chain.log_prob(x))

    def inputs(rows: int) -> tuple[tf.Tensor]:
        return (tf.constant(np.random.default_rng(rows).normal(size=(rows, 5))),)

    return _training([start, change, means], loss, inputs)


def models() -> dict[str, Callable[[], Training]]:
    """Return the steps."""
    return {
        "Bayesian linear regression, VI": lambda: _regression(classes=False),
        "Bayesian logistic regression, VI": lambda: _regression(classes=True),
        "Variational autoencoder": _autoencoder,
        "Mixture of Gaussians": _mixture,
        "RealNVP": _flow,
        "Hidden Markov model": _hidden_markov,
    }
