"""Training steps of well-known networks for `benchmarks.chains`: planned at their usual sizes, and never run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from benchmarks import networks

ROWS = 32  # of the batch, on each device
Step = tuple[Callable[..., Any], Sequence[tf.TensorSpec]]


def supervised(model: keras.Model, devices: int, optimizer: Any = None, targets: Sequence[int] = ()) -> Step:
    """Return a training step of a classifier, and specifications of its arguments; `targets`: the shape of a label."""
    optimizer = optimizer or keras.optimizers.SGD(0.1, 0.9)
    optimizer.build(model.trainable_variables)

    def train_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(x, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    [example], rows = model.inputs, ROWS * devices
    return train_step, [
        tf.TensorSpec((rows, *example.shape[1:]), example.dtype),
        tf.TensorSpec((rows, *targets), tf.int32),
    ]


def application(name: str) -> Callable[[int], Step]:
    """Return what makes the training step of a network of `keras.applications`."""
    return lambda devices: supervised(
        getattr(keras.applications, name)(weights=None, classifier_activation=None), devices
    )


def u_net(devices: int) -> Step:
    """Two levels down and up again; five BatchNormalizations; a label for every pixel."""

    def block(x: Any, filters: int) -> Any:
        return layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(filters, 3, padding="same")(x)))

    image = layers.Input((128, 128, 3))
    one = block(image, 32)
    two = block(layers.MaxPooling2D()(one), 64)
    x = block(layers.MaxPooling2D()(two), 128)
    x = block(layers.Concatenate()([layers.Conv2DTranspose(64, 2, 2)(x), two]), 64)
    x = block(layers.Concatenate()([layers.Conv2DTranspose(32, 2, 2)(x), one]), 32)
    return supervised(keras.Model(image, layers.Conv2D(10, 1)(x)), devices, targets=(128, 128))


def lstm(devices: int) -> Step:
    model = keras.Sequential([layers.Input((64,), dtype="int32"), layers.Embedding(8192, 256)])
    for layer in (layers.LSTM(256, return_sequences=True), layers.LSTM(256), layers.Dense(10)):
        model.add(layer)
    return supervised(model, devices, keras.optimizers.Adam())


def transformer(devices: int, optimizer: Any = None, policy: str = "float32") -> Step:
    """A language model of 4 blocks, with a causal mask."""
    with _policy(policy):
        tokens = layers.Input((256,), dtype="int32")
        x = layers.Embedding(8192, 512)(tokens)
        for _ in range(4):
            normalized = layers.LayerNormalization()(x)
            x = x + layers.MultiHeadAttention(8, 64)(normalized, normalized, use_causal_mask=True)
            x = x + layers.Dense(512)(layers.Dense(2048, "gelu")(layers.LayerNormalization()(x)))
        model = keras.Model(tokens, layers.Dense(8192, dtype="float32")(x))
    return supervised(model, devices, optimizer or keras.optimizers.Adam(), targets=(256,))


@contextlib.contextmanager
def _policy(name: str) -> Iterator[None]:
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def gan(devices: int) -> Step:
    """A generator and a critic of convolutions, three BatchNormalizations in all, an optimizer for each."""
    maker = keras.Sequential(
        [
            layers.Input((64,)),
            layers.Dense(8 * 8 * 64),
            layers.Reshape((8, 8, 64)),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2DTranspose(64, 4, 2, "same"),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2DTranspose(3, 4, 2, "same", activation="tanh"),
        ]
    )
    critic = keras.Sequential(
        [
            layers.Input((32, 32, 3)),
            layers.Conv2D(64, 4, 2, "same"),
            layers.LeakyReLU(),
            layers.Conv2D(128, 4, 2, "same"),
            layers.BatchNormalization(),
            layers.LeakyReLU(),
            layers.Flatten(),
            layers.Dense(1),
        ]
    )
    optimizers = keras.optimizers.Adam(2e-4, 0.5), keras.optimizers.Adam(2e-4, 0.5)
    for optimizer, model in zip(optimizers, (maker, critic), strict=True):
        optimizer.build(model.trainable_variables)

    def train_step(x: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as one, tf.GradientTape() as other:
            real, fake = critic(x, training=True), critic(maker(noise, training=True), training=True)
            makers = tf.reduce_mean(tf.nn.softplus(-fake))
            critics = tf.reduce_mean(tf.nn.softplus(-real)) + tf.reduce_mean(tf.nn.softplus(fake))
        optimizers[0].apply(one.gradient(makers, maker.trainable_variables), maker.trainable_variables)
        optimizers[1].apply(other.gradient(critics, critic.trainable_variables), critic.trainable_variables)
        return makers, critics

    return train_step, [tf.TensorSpec((ROWS * devices, 32, 32, 3)), tf.TensorSpec((ROWS * devices, 64))]


def clip(devices: int) -> Step:
    """Two encoders whose rows are compared, each with all of the other: CLIP's loss, with a learnt temperature."""
    encoders = [
        keras.Sequential([layers.Input((512,)), layers.Dense(1024, "gelu"), layers.Dense(256)]) for _ in range(2)
    ]
    temperature = keras.Variable(2.0, name="temperature")
    weights = [*encoders[0].trainable_variables, *encoders[1].trainable_variables, temperature]
    optimizer = keras.optimizers.Adam()
    optimizer.build(weights)

    def train_step(images: tf.Tensor, texts: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            pairs = zip(encoders, (images, texts), strict=True)
            one, other = (tf.math.l2_normalize(encoder(x, training=True), 1) for encoder, x in pairs)
            scores = tf.matmul(one, other, transpose_b=True) * tf.exp(temperature.value)
            own = tf.range(tf.shape(scores)[0])
            both = [tf.nn.sparse_softmax_cross_entropy_with_logits(own, s) for s in (scores, tf.transpose(scores))]
            loss = tf.reduce_mean(both)
        optimizer.apply(tape.gradient(loss, weights), weights)
        return loss

    return train_step, [tf.TensorSpec((ROWS * devices, 512))] * 2


NETWORKS: dict[str, Callable[[int], Step]] = {
    **{name: application(name) for name in ("ResNet50", "MobileNetV2", "EfficientNetB0", "Xception", "DenseNet121")},
    "MiniGoogLeNet": lambda n: supervised(networks.mini_googlenet(normalized=True), n),
    "U-Net, five BatchNormalizations": u_net,
    "LSTM, two layers": lstm,
    "transformer": transformer,
    "transformer, clipnorm": lambda n: transformer(n, keras.optimizers.Adam(clipnorm=1.0)),
    "transformer, global_clipnorm": lambda n: transformer(n, keras.optimizers.Adam(global_clipnorm=1.0)),
    "transformer, mixed_bfloat16": lambda n: transformer(n, policy="mixed_bfloat16"),
    "transformer, mixed_float16 with loss scaling": lambda n: transformer(
        n, keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()), "mixed_float16"
    ),
    "GAN, three BatchNormalizations": gan,
    "CLIP": clip,
}
