"""The law for compiled shards: training, unknown batches, random numbers, mixed precision, Keras, statistics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from graphsplit.emission import check_emitted, emit
from graphsplit.emission.clusters import LEFT_OUT
from graphsplit.emission.communication import CollectiveWriter
from tests.helpers.float64 import EXACT, float64
from tests.helpers.law import assert_close, assert_law, squares_step
from tests.helpers.policies import policy

__all__ = ["float64", "policy"]


def rows(*shape: int, seed: int = 0, dtype: Any = tf.float64) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [seed, 5], dtype=dtype)


def with_a_loop() -> tuple[Callable[..., Any], list[tf.Variable]]:
    """Return a training step with a recurrent loop, dropout by a stateless seed, and a counter."""
    w, count = tf.Variable(rows(3, 3)), tf.Variable(0, dtype=tf.int64)

    def step(x: tf.Tensor) -> Any:
        count.assign_add(1)
        with tf.GradientTape() as tape:
            h = x
            for _ in tf.range(3):
                h = tf.tanh(h @ w)
            h = tf.nn.experimental.stateless_dropout(h, 0.5, [1, 2])
            loss = tf.reduce_mean((h @ w) ** 2)
        w.assign_sub(0.1 * tape.gradient(loss, w))
        return loss, h

    return step, [w, count]


def test_a_loop_dropout_and_a_counter() -> None:
    plan = assert_law(with_a_loop, [(rows(7, 3),)] * 2, jit_compile=True)
    assert plan.jit_compile


@pytest.mark.long
def test_any_number_of_rows() -> None:
    calls = [(rows(n, 3),) for n in (7, 4, 1, 2)]
    plan = assert_law(with_a_loop, calls, jit_compile=True, tuning={"reduce_retracing": True})
    assert plan.program.batch_is_unknown


def tied_embeddings() -> tuple[Callable[..., Any], list[tf.Variable]]:
    """Return a step whose update waits until all shards have looked rows up, beside what is computed in between."""
    table, count = tf.Variable(rows(16, 4)), tf.Variable(0)

    def step(ids: tf.Tensor) -> Any:
        keep = tf.cast(ids >= 0, table.dtype)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, ids) @ tf.transpose(table) * keep[..., None])
            loss /= tf.maximum(tf.reduce_sum(keep), 1.0)
        table.assign_sub(0.01 * tf.convert_to_tensor(tape.gradient(loss, table)))
        count.assign_add(1)
        return loss

    return step, [table, count]


IDS = [(tf.constant(np.arange(n * 3).reshape(n, 3) % 16),) for n in (5, 2, 1, 3)]


def test_an_update_waits_for_shards_that_have_no_rows() -> None:
    plan = assert_law(tied_embeddings, IDS, jit_compile=True, tuning={"reduce_retracing": True}, sharded=["GatherV2"])
    assert plan.program.batch_is_unknown


def test_results_of_what_never_ran_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphsplit.emission.clusters.LEFT_OUT", LEFT_OUT - {"ControlTrigger"})
    parallel = gs.parallelize(tied_embeddings()[0], devices=3, jit_compile=True, tuning={"reduce_retracing": True})
    parallel(*IDS[0])
    with pytest.raises(gs.errors.CheckError, match=r"result 0 is float32 \(0,\), and was traced as float64 \(\)"):
        parallel(*IDS[2])
    plan = parallel.plan(*IDS[2])
    with pytest.raises(gs.errors.CheckError, match=r"its call .* is dead without"):
        check_emitted(plan, emit(plan))


def test_what_stands_in_for_shards_without_rows_is_in_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    written = CollectiveWriter._add

    def careless(self: Any, *node: Any, is_instead: bool = False, **attributes: Any) -> str:
        return written(self, *node[:4], **attributes)

    step, tuning = tied_embeddings()[0], {"reduce_retracing": True, "exchange_bytes": 1 << 19}
    parallel = gs.parallelize(step, devices=3, jit_compile=True, tuning=tuning)
    parallel(*IDS[0])
    parallel(*IDS[2])
    plan = parallel.plan(*IDS[2])
    check_emitted(plan, emit(plan))
    monkeypatch.setattr(CollectiveWriter, "_add", careless)
    with pytest.raises(gs.errors.CheckError, match=r"its call .* is dead with "):
        check_emitted(plan, emit(plan))


@pytest.mark.long
def test_variables_in_parts() -> None:
    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        w = tf.Variable(rows(8, 8))
        gs.set_variable_layout([w], "sharded", 3)

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.tanh(tf.nn.softplus(x @ w) @ w) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    assert_law(make, [(rows(7, 8),)] * 2, jit_compile=True)


@pytest.mark.long
def test_draws_of_a_generator() -> None:
    def make() -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
        generator = tf.random.Generator.from_seed(3)

        def fn(x: tf.Tensor) -> Any:
            noise = generator.normal(tf.shape(x), dtype=x.dtype)
            return tf.tanh(tf.sin(x) + noise) * 2

        return fn, [generator.state]

    assert_law(make, [(rows(7, 3),)] * 2, jit_compile=True)


def network() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Conv2D(4, 3, use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    return keras.Sequential([keras.Input((8, 8, 3)), *layers])


@pytest.mark.parametrize(("exchange_bytes", "borders"), [(0, 3), (1 << 19, 2)])
@pytest.mark.parametrize("count", [1, 2])
def test_borders_for_each_layer_of_statistics(count: int, exchange_bytes: int, borders: int) -> None:
    """Forward the mean, then the variance, backward two sums at once; mean and variance together between GPUs."""
    layers: list[Any] = []
    for _ in range(count):
        layers += [keras.layers.Conv2D(4, 3, padding="same"), keras.layers.BatchNormalization()]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers, keras.layers.Flatten(), keras.layers.Dense(2)])

    def step(x: tf.Tensor, training: bool) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=training) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    parallel = gs.parallelize(step, devices=2, jit_compile=True, tuning={"exchange_bytes": exchange_bytes})
    for training, expected in ((False, 1), (True, borders * count + 1)):
        nodes = parallel.graph_def(tf.TensorSpec((4, 8, 8, 3)), training).node
        names = [node.name for node in nodes if node.attr["_XlaMustCompile"].b]
        assert len([name for name in names if "/shard_1/" in name]) == expected


@pytest.mark.long
@pytest.mark.usefixtures("float64", "plain_oracle")
def test_statistics_over_shards() -> None:
    def make() -> tuple[Callable[..., Any], Sequence[Any]]:
        model = network()
        return squares_step(model)

    x = tf.reshape(rows(7, 192), (7, 8, 8, 3))
    assert_law(make, [(x,)] * 2, jit_compile=True, tolerance=EXACT)


@pytest.mark.long
@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"], indirect=True)
def test_mixed_precision(policy: str) -> None:
    def make() -> tuple[Callable[..., Any], Sequence[Any]]:
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(4, dtype="float32")]
        model = keras.Sequential([keras.Input((3,)), *layers])
        return squares_step(model)

    # XLA keeps what it fuses in float32, where operation by operation each result is rounded to 11 (8) bits
    tolerance = 2e-2 if policy == "mixed_bfloat16" else 2e-3
    assert_law(make, [(rows(7, 3, dtype=tf.float32),)] * 2, jit_compile=True, tolerance=tolerance)


@pytest.mark.long
@pytest.mark.parametrize("flavor", [keras, tf_keras], ids=["keras", "tf_keras"])
def test_metrics_of_a_fit_with_a_smaller_last_batch(flavor: Any) -> None:
    x, y = rows(10, 3).numpy().astype("float32"), (rows(10, 2, seed=1).numpy() > 0).astype("float32")
    found = []
    for several in (False, True):
        flavor.utils.set_random_seed(1)
        entry = flavor.Input((3,)) if flavor is keras else flavor.layers.InputLayer((3,))
        template = flavor.Sequential([entry, flavor.layers.Dense(4, "tanh"), flavor.layers.Dense(2, "sigmoid")])
        model = gs.multi_gpu_model(template, 3) if several else template
        asked = {"jit_compile": True} if several else {}
        model.compile("adam", "binary_crossentropy", metrics=["accuracy", "AUC"], **asked)
        history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        found.append((list(history.history.values()), model.get_weights()))
    for a, b in zip(tf.nest.flatten(found[1]), tf.nest.flatten(found[0]), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


def test_batches_that_are_sent_ahead() -> None:
    w = tf.Variable(rows(3, 3))
    parallel = gs.parallelize(lambda x: tf.tanh(tf.sin(x @ w) * 2), devices=3, jit_compile=True)
    batches = [rows(n, 3, seed=n) for n in (7, 7, 5)]
    for batch, found in zip(batches, parallel.map(batches), strict=True):
        assert_close(found, tf.tanh(tf.sin(batch @ w) * 2))
