"""Programs that train in other ways: teachers, pseudo-labels, mixed rows, augmentation, accumulation, averages."""

from __future__ import annotations

import keras
import tensorflow as tf
from keras import layers

from benchmarks.programs.building import (
    Training,
    classify,
    draws,
    image_encoder,
    labels,
    learner,
    numbers,
    perceptron,
    pictures,
    training,
)

CLASSES = 5


def distillation() -> Training:
    """A small network learns the labels and what a larger one says at a high temperature."""
    teacher, student = perceptron(20, 64, 64, CLASSES), perceptron(20, 16, CLASSES)
    divergence = keras.losses.KLDivergence()

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        soft, said = teacher(x, training=False), student(x, training=True)
        distilled = divergence(tf.nn.softmax(soft / 10.0, 1), tf.nn.softmax(said / 10.0, 1)) * 100.0
        return 0.1 * classify(said, y) + 0.9 * distilled

    return training(loss, student.trainable_variables, lambda n: (numbers(n, 20), labels(n)))


def fix_match() -> Training:
    """Labelled rows and three times as many without: confident predictions become labels of stronger views."""
    network = image_encoder(16, 3, CLASSES)

    def loss(x: tf.Tensor, y: tf.Tensor, weak: tf.Tensor, strong: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(x)[0]
        folded = [tf.reshape(views, [-1, 16, 16, 3]) for views in (weak, strong)]
        said = network(tf.concat([x, *folded], 0), training=True)
        known, rest = said[:rows], said[rows:]
        weakly, strongly = tf.split(rest, 2)
        sure = tf.stop_gradient(tf.nn.softmax(weakly))
        mask = tf.cast(tf.reduce_max(sure, 1) > 0.25, said.dtype)
        guessed = keras.losses.sparse_categorical_crossentropy(tf.argmax(sure, 1), strongly, from_logits=True)
        return classify(known, y) + tf.reduce_mean(mask * guessed)

    def inputs(n: int) -> tuple[tf.Tensor, ...]:
        views = [tf.reshape(pictures(3 * n, seed=s), [n, 3, 16, 16, 3]) for s in (1, 2)]
        return pictures(n), labels(n), *views

    return training(loss, network.trainable_variables, inputs, state=network.non_trainable_variables)


def mix_up() -> Training:
    """Rows mixed with other rows by shares that are drawn from a beta distribution."""
    network, noise = image_encoder(16, 3, CLASSES), draws(2)

    def loss(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        rows = tf.shape(x)[0]
        gammas = [keras.random.gamma((rows,), 0.2, seed=noise) for _ in range(2)]
        share = gammas[0] / (gammas[0] + gammas[1] + 1e-7)
        mixed = x * share[:, None, None, None] + x[::-1] * (1 - share)[:, None, None, None]
        target = tf.one_hot(y, CLASSES, dtype=x.dtype)
        target = target * share[:, None] + target[::-1] * (1 - share)[:, None]
        said = network(mixed, training=True)
        return tf.reduce_mean(keras.losses.categorical_crossentropy(target, said, from_logits=True))

    state = [*network.non_trainable_variables, noise.state]
    return training(loss, network.trainable_variables, lambda n: (pictures(n), labels(n)), state=state)


def augmented() -> Training:
    """Random flips, turns, zooms, shifts, crops, contrast and brightness as layers of the network."""
    image = layers.Input((16, 16, 3))
    x = layers.RandomFlip("horizontal", seed=1)(image)
    x = layers.RandomRotation(0.1, seed=2)(x)
    x = layers.RandomZoom(0.2, seed=3)(x)
    x = layers.RandomTranslation(0.1, 0.1, seed=4)(x)
    x = layers.RandomContrast(0.2, seed=5)(x)
    x = layers.RandomBrightness(0.2, (0.0, 1.0), seed=6)(x)
    x = layers.RandomCrop(12, 12, seed=7)(x)
    network = keras.Model(image, image_encoder(12, 3, CLASSES)(x))
    state = network.non_trainable_variables
    return training(
        lambda x, y: classify(network(x, training=True), y),
        network.trainable_variables,
        lambda n: (pictures(n), labels(n)),
        state=state,
    )


def _stepped_by(optimizer: keras.optimizers.Optimizer) -> Training:
    network = perceptron(20, 64, CLASSES)
    return training(
        lambda x, y: classify(network(x, training=True), y),
        network.trainable_variables,
        lambda n: (numbers(n, 20), labels(n)),
        optimizer,
    )


def accumulated() -> Training:
    """Keras' own accumulation: weights change at every third step."""
    return _stepped_by(keras.optimizers.Adam(0.01, epsilon=1e-3, gradient_accumulation_steps=3))


def averaged() -> Training:
    """The optimizer keeps moving averages of all weights, and puts them in their place at times; clipped by norm."""
    optimizer = keras.optimizers.Lion(0.01, use_ema=True, ema_momentum=0.9, ema_overwrite_frequency=2, clipnorm=1.0)
    return _stepped_by(optimizer)


def mean_teacher() -> Training:
    """A teacher that is the student's moving average; a consistency loss on noisy rows."""
    student, teacher, noise = perceptron(20, 64, CLASSES), perceptron(20, 64, CLASSES), draws(9)
    teacher.set_weights(student.get_weights())
    learn = learner(student.trainable_variables)

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            noisy = x + 0.1 * keras.random.normal(tf.shape(x), seed=noise)
            said = student(noisy, training=True)
            gap = tf.nn.softmax(said) - tf.nn.softmax(teacher(x, training=False))
            loss = classify(said, y) + tf.reduce_mean(gap**2)
        learn(tape, loss)
        for own, other in zip(teacher.weights, student.weights, strict=True):
            own.assign(0.95 * own + 0.05 * other)
        return loss

    return Training(step, [*student.variables, *teacher.variables, noise.state], lambda n: (numbers(n, 20), labels(n)))
