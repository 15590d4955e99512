"""What is true only inside of a scope of Keras (values of variables, their dtype, the phase) is not used outside."""

from __future__ import annotations

import warnings

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs

WAYS = {
    "on_device": lambda layer: gs.on_device(layer, "CPU:1"),
    "parallelize": lambda layer: gs.parallelize(layer, devices=3),
}
X = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
Y = np.ones((7, 1), np.float32)


def staged(wrap, kind=keras):
    """Return a model with a layer that is called through what `wrap` gives, and the same model without."""

    class Staged(kind.Model):
        def __init__(self, wrap):
            super().__init__()
            self.encoder, self.last = kind.layers.Dense(16, activation="tanh"), kind.layers.Dense(1)
            self.encode = wrap(self.encoder)

        def call(self, x):
            return self.last(self.encode(x))

    models = Staged(wrap), Staged(lambda layer: layer)
    for model in models:
        model(X)  # builds it, in a scope in which variables are initializers' constants
    models[0].set_weights(models[1].get_weights())
    return models


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("gpus", [1, 2])
def test_a_layer_of_a_built_model_learns(way: str, gpus: int):
    split, plain = staged(WAYS[way])
    for model in (split, plain):
        trained = gs.multi_gpu_model(model, gpus=2) if gpus > 1 and model is split else model
        trained.compile("adam", "mse")
        trained.fit(X, Y, epochs=3, batch_size=4, shuffle=False, verbose=0)
    for mine, other in zip(split.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-6)
    np.testing.assert_allclose(split(X), plain(X), atol=2e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(split(X) ** 2)
    assert all(gradient is not None for gradient in tape.gradient(loss, split.trainable_variables))


def test_the_work_is_sharded_after_it_was_built():
    split, _ = staged(WAYS["parallelize"])
    assert "MatMul" in {op.type for op in split.encode.plan(X).sharded_ops}


@pytest.mark.parametrize("kind", [keras, tf_keras])
@pytest.mark.parametrize("first", [True, False])
def test_each_phase_has_a_trace_of_its_own(kind, first: bool):
    class Noisy(kind.Model):
        def __init__(self):
            super().__init__()
            self.drop = kind.layers.Dropout(0.5)
            self.split = gs.parallelize(self.drop, devices=2)

        def call(self, x):
            return self.split(x)

    model = Noisy()
    kept = {training: np.array_equal(model(X, training=training), X) for training in (first, not first, first)}
    assert kept == {True: False, False: True}


@pytest.mark.parametrize("first", ["in the layer", "outside"])
def test_each_dtype_of_variables_has_a_trace_of_its_own(first: str):
    class Half(keras.layers.Layer):
        def __init__(self):
            super().__init__(dtype="mixed_float16")
            self.w = self.add_weight(shape=(5, 3), initializer="ones")
            self.split = gs.parallelize(self.product, devices=2)

        def product(self, x):
            return tf.cast(x, tf.float32) @ tf.cast(self.w * 1.0001, tf.float32)  # which no half is

        def call(self, x):
            return self.split(x)

    x, layer = tf.ones((4, 5), tf.float16), Half()
    calls = {"in the layer": lambda: layer(x), "outside": lambda: layer.split(x)}
    found = {name: float(calls[name]()[0, 0]) for name in sorted(calls, key=lambda name: name != first)}
    outside = float(layer.product(x)[0, 0])
    layer.split = layer.product
    assert found == {"in the layer": float(layer(x)[0, 0]), "outside": outside}
    assert found["in the layer"] != found["outside"]


def test_stateless_calls_use_the_values_that_they_are_given():
    split, plain = staged(WAYS["parallelize"])
    values = [tf.ones_like(variable.value) for variable in plain.trainable_variables]
    with pytest.warns(UserWarning, match="is called in a keras.StatelessScope, .* on one device. To split it, "):
        found, _ = split.stateless_call(values, [], X)
    expected, _ = plain.stateless_call(values, [], X)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it is said once
        again, _ = split.stateless_call([2 * value for value in values], [], X)
    np.testing.assert_allclose(again, plain.stateless_call([2 * value for value in values], [], X)[0], rtol=1e-6)
    np.testing.assert_allclose(split(X), plain(X), atol=1e-6)


@pytest.mark.parametrize("ask", ["plan", "gradient_plan", "graph_def", "variables", "placement", "map"])
def test_no_trace_of_a_stateless_scope_is_kept(ask: str):
    layer = keras.layers.Dense(4)
    layer.build((None, 5))
    split = gs.parallelize(layer, devices=3)
    ones = [(variable, tf.ones(variable.shape)) for variable in layer.variables]

    def asked():
        with keras.StatelessScope(ones):
            return list(split.map([X])) if ask == "map" else getattr(split, ask)(X)

    for _ in range(2):  # before and after there is a trace of other values
        with pytest.raises(gs.errors.UnsupportedError, match=r"StatelessScope.*outside of the scope"):
            asked()
        np.testing.assert_allclose(split(X), layer(X), atol=1e-6)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(split(X))
    assert all(gradient is not None for gradient in tape.gradient(loss, layer.trainable_variables))


def test_each_value_that_layers_hand_on_has_a_trace_of_its_own():
    class Scaling(keras.layers.Layer):
        def __init__(self, inner=None):
            super().__init__()
            self._register_call_context_args("scale")
            self.inner = inner and gs.parallelize(inner, devices=2)

        def call(self, x, scale=None):
            return self.inner(x) if self.inner else x * tf.cast(scale, tf.float32)

    layer = Scaling(Scaling())
    scales = [2.0, 3.0, tf.constant(2.5), tf.constant(3.5), np.float32(4.5), np.array(5), 1, tf.fill((1,), 6.0)]
    found = [float(layer(tf.ones((4, 2)), scale=scale)[0, 0]) for scale in scales]
    assert found == [2.0, 3.0, 2.5, 3.5, 4.5, 5.0, 1.0, 6.0]


def test_a_function_around_stateless_calls_is_split():
    split, plain = staged(WAYS["parallelize"])
    values = [tf.ones_like(variable.value) for variable in plain.trainable_variables]
    step = gs.parallelize(lambda x, values: split.stateless_call(values, [], x)[0], devices=3, split={"values": None})
    np.testing.assert_allclose(step(X, values), plain.stateless_call(values, [], X)[0], rtol=1e-6)
    assert "MatMul" in {op.type for op in step.plan(X, values).sharded_ops}
