"""The networks that the workloads train, as ordinary Keras models. Only worker processes import this file."""

from __future__ import annotations

import keras
from keras import layers


@keras.saving.register_keras_serializable("benchmarks")
class Polynomial(layers.Layer):
    """w2 x^2 + w1 x + w0 of x, shape [rows]."""

    def build(self, _):
        self.w = self.add_weight(shape=(3, 1), initializer="zeros", name="w")

    def call(self, x):
        features = keras.ops.stack([keras.ops.square(x), x, keras.ops.ones_like(x)], 1)
        return keras.ops.squeeze(keras.ops.matmul(features, self.w), 1)


def polynomial() -> keras.Model:
    x = layers.Input((), dtype="float32")
    return keras.Model(x, Polynomial()(x))


def perceptron(features: int, hidden: int, depth: int, classes: int = 10, normalized: bool = False) -> keras.Model:
    model = keras.Sequential([layers.Input((features,))])
    for _ in range(depth):
        model.add(layers.Dense(hidden, use_bias=not normalized))
        if normalized:
            model.add(layers.BatchNormalization())
        model.add(layers.Activation("relu"))
    model.add(layers.Dense(classes))
    return model


def mini_googlenet(width: float = 1.0, classes: int = 10, normalized: bool = False) -> keras.Model:
    """MiniGoogLeNet (Zhang et al., https://arxiv.org/abs/1611.03530, figure 3) for 32x32 colour images."""

    def conv(x, filters: int, size: int, strides: int = 1, padding: str = "same"):
        filters = max(1, round(filters * width))
        x = layers.Conv2D(filters, size, strides, padding, use_bias=not normalized)(x)
        return layers.Activation("relu")(layers.BatchNormalization()(x) if normalized else x)

    def inception(x, ones: int, threes: int):
        return layers.Concatenate()([conv(x, ones, 1), conv(x, threes, 3)])

    def downsample(x, filters: int):
        return layers.Concatenate()([conv(x, filters, 3, 2, "valid"), layers.MaxPooling2D(3, 2)(x)])

    image = layers.Input((32, 32, 3))
    x = conv(image, 96, 3)
    x = downsample(inception(inception(x, 32, 32), 32, 48), 80)
    for ones, threes in ((112, 48), (96, 64), (80, 80), (48, 96)):
        x = inception(x, ones, threes)
    x = downsample(x, 96)
    x = inception(inception(x, 176, 160), 176, 160)
    x = layers.AveragePooling2D(7)(x)
    x = layers.Dropout(0.5)(layers.Flatten()(x))
    return keras.Model(image, layers.Dense(classes)(x))


@keras.saving.register_keras_serializable("benchmarks")
class Unchanged(layers.Layer):
    """What it is given; it takes the arguments of the BatchNormalization whose place it takes."""

    def call(self, x, **_):
        return x


def resnet50(side: int, classes: int = 10, normalized: bool = True) -> keras.Model:
    model = keras.applications.ResNet50(
        weights=None, input_shape=(side, side, 3), classes=classes, classifier_activation=None
    )
    if normalized:
        return model

    def without_normalization(layer: keras.Layer) -> keras.Layer:
        if isinstance(layer, layers.BatchNormalization):
            return Unchanged(name=layer.name)
        return layer.__class__.from_config(layer.get_config())

    return keras.models.clone_model(model, clone_function=without_normalization)


def lstm(steps: int, features: int, units: int, classes: int = 10) -> keras.Model:
    return keras.Sequential([layers.Input((steps, features)), layers.LSTM(units), layers.Dense(classes)])


def transformer(
    words: int, length: int, width: int, heads: int, blocks: int, classes: int = 10, pooled: bool = True
) -> keras.Model:
    """Pre-normalisation encoder blocks (https://arxiv.org/abs/2002.04745) over token ids, mean over the positions."""
    tokens = layers.Input((length,), dtype="int32")
    x = layers.Embedding(words, width)(tokens)
    for _ in range(blocks):
        normalized = layers.LayerNormalization()(x)
        x = x + layers.MultiHeadAttention(heads, width // heads)(normalized, normalized)
        hidden = layers.Dense(4 * width, "gelu")(layers.LayerNormalization()(x))
        x = x + layers.Dense(width)(hidden)
    x = layers.LayerNormalization()(x)
    return keras.Model(tokens, layers.Dense(classes)(layers.GlobalAveragePooling1D()(x) if pooled else x))
