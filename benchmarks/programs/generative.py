"""Programs that learn to make data: autoencoders, adversaries, flows, diffusion."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras import layers, ops

from benchmarks.programs.building import (
    Training,
    draws,
    learner,
    pictures,
    training,
)


class Sampling(layers.Layer):
    """Draws from the normal distribution that an encoder describes, and adds its divergence to the losses."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = draws(11)

    def call(self, mean: Any, log_variance: Any) -> Any:
        self.add_loss(-0.5 * ops.mean(ops.sum(1 + log_variance - mean**2 - ops.exp(log_variance), 1)))
        return mean + ops.exp(0.5 * log_variance) * keras.random.normal(ops.shape(mean), seed=self.draws)


def vae() -> Training:
    """A convolutional variational autoencoder whose sampling is a layer."""
    image = layers.Input((16, 16, 1))
    x = layers.Conv2D(16, 3, 2, "same", activation="relu")(image)
    x = layers.Dense(16, "relu")(layers.Flatten()(layers.Conv2D(16, 3, 2, "same", activation="relu")(x)))
    sampling = Sampling()
    code = sampling(layers.Dense(4)(x), layers.Dense(4)(x))
    x = layers.Reshape((4, 4, 16))(layers.Dense(4 * 4 * 16, "relu")(code))
    x = layers.Conv2DTranspose(16, 3, 2, "same", activation="relu")(x)
    model = keras.Model(image, layers.Conv2DTranspose(1, 3, 2, "same", activation="sigmoid")(x))

    def loss(x: tf.Tensor) -> tf.Tensor:
        rebuilt = model(x, training=True)
        return tf.reduce_mean(ops.sum(keras.losses.binary_crossentropy(x, rebuilt), (1, 2))) + sum(model.losses)

    return training(loss, model.trainable_variables, lambda n: (pictures(n, 16, 1),), state=[sampling.draws.state])


def generator_and_critic(size: int = 8) -> tuple[keras.Model, keras.Model]:
    """Return a network from noise to images, and one from images to a score."""
    generator = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(size * size // 4 * 8, use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Reshape((size // 2, size // 2, 8)),
            layers.Conv2DTranspose(8, 4, 2, "same", use_bias=False),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Conv2D(1, 3, padding="same", activation="tanh"),
        ]
    )
    critic = keras.Sequential(
        [
            layers.Input((size, size, 1)),
            layers.Conv2D(8, 4, 2, "same"),
            layers.LeakyReLU(),
            layers.Dropout(0.3, seed=5),
            layers.Conv2D(16, 4, 2, "same"),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    return generator, critic


def gan() -> Training:
    """Two tapes over one pass, two optimizers; the noise is drawn inside of the step."""
    generator, critic = generator_and_critic()
    noise = draws(3)
    learn_generator, learn_critic = learner(generator.trainable_variables), learner(critic.trainable_variables)
    entropy = keras.losses.BinaryCrossentropy(from_logits=True)

    def step(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as generating, tf.GradientTape() as judging:
            made = generator(keras.random.normal((tf.shape(images)[0], 8), seed=noise), training=True)
            real, fake = critic(images, training=True), critic(made, training=True)
            generator_loss = entropy(tf.ones_like(fake), fake)
            critic_loss = entropy(tf.ones_like(real), real) + entropy(tf.zeros_like(fake), fake)
        learn_generator(generating, generator_loss)
        learn_critic(judging, critic_loss)
        return generator_loss, critic_loss

    return Training(step, [*generator.variables, *critic.variables, noise.state], lambda n: (pictures(n, 8, 1),))


def wgan_gp() -> Training:
    """Three turns of the critic with a penalty on its gradient, and one of the generator."""
    generator, critic = generator_and_critic()
    noise = draws(3)
    learn_generator, learn_critic = learner(generator.trainable_variables), learner(critic.trainable_variables)

    def penalty(real: tf.Tensor, made: tf.Tensor) -> tf.Tensor:
        alpha = keras.random.uniform((tf.shape(real)[0], 1, 1, 1), seed=noise)
        between = real + alpha * (made - real)
        with tf.GradientTape() as tape:
            tape.watch(between)
            score = critic(between, training=True)
        norm = tf.sqrt(tf.reduce_sum(tape.gradient(score, between) ** 2, [1, 2, 3]) + 1e-12)
        return tf.reduce_mean((norm - 1.0) ** 2)

    def make(rows: Any) -> tf.Tensor:
        return generator(keras.random.normal((rows, 8), seed=noise), training=True)

    def step(images: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        rows = tf.shape(images)[0]
        for _ in range(3):
            with tf.GradientTape() as tape:
                made = make(rows)
                cost = tf.reduce_mean(critic(made, training=True)) - tf.reduce_mean(critic(images, training=True))
                critic_loss = cost + 10.0 * penalty(images, made)
            learn_critic(tape, critic_loss)
        with tf.GradientTape() as tape:
            generator_loss = -tf.reduce_mean(critic(make(rows), training=True))
        learn_generator(tape, generator_loss)
        return generator_loss, critic_loss

    return Training(step, [*generator.variables, *critic.variables, noise.state], lambda n: (pictures(n, 8, 1),))


def _translator() -> keras.Model:
    image = layers.Input((8, 8, 3))
    x = layers.ReLU()(
        layers.GroupNormalization(-1)(layers.Conv2D(8, 3, padding="same")(ops.pad(image, _ALL_BY_ONE, "reflect")))
    )
    skip = x
    x = layers.ReLU()(
        layers.GroupNormalization(-1)(layers.Conv2D(8, 3, padding="valid")(ops.pad(x, _ALL_BY_ONE, "reflect")))
    )
    x = layers.Add()([x, skip])
    return keras.Model(image, layers.Conv2D(3, 3, activation="tanh")(x))


_ALL_BY_ONE = ((0, 0), (1, 1), (1, 1), (0, 0))


def cycle_gan() -> Training:
    """Two translators and two critics, four optimizers, one persistent tape."""
    there, back = _translator(), _translator()
    critics = [
        keras.Sequential(
            [layers.Input((8, 8, 3)), layers.Conv2D(8, 4, 2, "same"), layers.LeakyReLU(), layers.Conv2D(1, 3)]
        )
        for _ in "ab"
    ]
    nets = [there, back, *critics]
    learners = [learner(net.trainable_variables) for net in nets]

    def judged(scores: tf.Tensor, real: float) -> tf.Tensor:
        return tf.reduce_mean((scores - real) ** 2)

    def step(one: tf.Tensor, other: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape(persistent=True) as tape:
            made_other, made_one = there(one, training=True), back(other, training=True)
            cycled = tf.reduce_mean(abs(back(made_other) - one)) + tf.reduce_mean(abs(there(made_one) - other))
            same = tf.reduce_mean(abs(there(other) - other)), tf.reduce_mean(abs(back(one) - one))
            losses = [
                judged(critics[1](made_other), 1.0) + 10.0 * cycled + 5.0 * same[0],
                judged(critics[0](made_one), 1.0) + 10.0 * cycled + 5.0 * same[1],
                0.5 * (judged(critics[0](one), 1.0) + judged(critics[0](made_one), 0.0)),
                0.5 * (judged(critics[1](other), 1.0) + judged(critics[1](made_other), 0.0)),
            ]
        for learn, loss in zip(learners, losses, strict=True):
            learn(tape, loss)
        return losses

    variables = [variable for net in nets for variable in net.variables]
    return Training(step, variables, lambda n: (pictures(n, 8), pictures(n, 8, seed=1)))
