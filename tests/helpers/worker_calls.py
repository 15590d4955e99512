"""Calls over worker processes that are all well: everything equals one device."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.worker_scene import Network, case, rows, same, trained


@case("calls")
def devices_by_default(workers, cluster) -> None:
    assert gs.available_devices() == cluster.devices
    assert [gs.core.devices.short_name(d) for d in cluster.devices] == [
        *("worker:0/CPU:0", "worker:0/CPU:1"),
        *("worker:1/CPU:0", "worker:1/CPU:1"),
    ]
    assert gs.parallelize(lambda x: x).devices == cluster.devices
    assert gs.parallelize(lambda x: x, devices=["CPU:1", "worker:1/CPU:0"]).devices == (
        *("/device:CPU:1", "/job:worker/replica:0/task:1/device:CPU:0"),
    )
    assert gs.connect(workers) is cluster
    assert [worker.is_well for worker in cluster.health().workers] == [True, True]


@case("calls")
def train_steps(workers, cluster) -> None:
    expected = trained(3)
    for options in (
        {"devices": ["CPU:0", "worker:0/CPU:1", "worker:1/CPU:0"]},
        {"tuning": {"default_device": "worker:1/CPU:1"}, "micro_batches": 2},
    ):
        network = Network()
        step = gs.parallelize(network.train, **options)
        for k in range(3):
            step(rows(5 + k % 3))
        same(network.values(), expected.values(), str(options))


@case("calls")
def state_on_workers(workers, cluster) -> None:
    expected = trained(3)
    for layout in ("replicated", "sharded"):  # ("home": most other cases)
        network = Network(device="/job:worker/task:0/device:CPU:0")
        gs.set_variable_layout(network, layout)
        step = gs.parallelize(network.train)
        for k in range(3):
            step(rows(5 + k % 3))
        same(network.values(), expected.values(), layout)
        gs.set_variable_layout(network, "home")


@case("more")
def tapes_outside(workers, cluster) -> None:
    w = tf.Variable(rows(6, 3))
    f = gs.parallelize(lambda x: tf.nn.softplus(x @ w))
    x = rows(5)
    for fn in (f, lambda x: tf.nn.softplus(x @ w)):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = fn(x)
        gradients = tape.gradient(y, [x, w])
        if fn is f:
            found = [y, *gradients]
        else:
            same(found, [y, *gradients])


@case("calls")
def tapes_outside_of_batches_of_any_size(workers, cluster) -> None:
    """Also of fewer rows than devices: who has none is told by what crosses to each host once."""
    w = tf.Variable(rows(6, 3))

    def plain(x):
        return tf.nn.softplus(x @ w), tf.reduce_max(x @ w, 0)

    f = gs.parallelize(tf.function(plain, input_signature=[tf.TensorSpec((None, 6), tf.float64)]))
    for count in (5, 2, 1):
        found, x = [], rows(count)
        for fn in (f, plain):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = fn(x)
            found.append([*y, *tape.gradient(y, [x, w])])
        same(*found, f"{count} rows")


@case("more")
def batches_ahead(workers, cluster) -> None:
    batches = [rows(n) for n in (5, 4, 5, 1)]
    f = gs.parallelize(lambda x: tf.cumsum(x, axis=1) * 2)
    same(list(f.map(batches)), [tf.cumsum(x, axis=1) * 2 for x in batches])


@case("calls")
def loops_draws_and_tables(workers, cluster) -> None:
    keys = tf.lookup.KeyValueTensorInitializer(tf.range(4, dtype=tf.int64), tf.range(4, dtype=tf.int64) ** 2)
    table = tf.lookup.StaticHashTable(keys, -1)

    def f(x):
        for _ in tf.range(3):
            x = tf.sin(x) + tf.random.stateless_uniform(tf.shape(x), [3, 4], dtype=x.dtype)
        return x, table.lookup(tf.cast(tf.argmax(x, 1), tf.int64)), tf.random.stateless_normal(tf.shape(x), [5, 6])

    same(tf.nest.flatten(gs.parallelize(f)(rows())), tf.nest.flatten(tf.function(f)(rows())))


@case("more")
def callbacks_run_in_the_client(workers, cluster) -> None:
    seen = []

    def note(values):
        seen.append((os.getpid(), values.tolist()))
        return values.sum()

    def f(x):
        y = 2 * x
        total = tf.numpy_function(note, [y], tf.float64)
        tf.print("total:", total, output_stream=sys.stderr)
        return y / total

    x = tf.range(1, 6, dtype=tf.float64)[:, None]
    same([gs.parallelize(f, tuning={"default_device": "worker:1/CPU:0"})(x)], [x / 15])
    assert seen == [(os.getpid(), [[2.0], [4.0], [6.0], [8.0], [10.0]])], seen


@case("more")
def predicted_where_they_lie(workers, cluster) -> None:
    network = Network(device="/job:worker/task:0/device:CPU:0")
    gs.set_variable_layout(network, "sharded")
    try:
        predicted = gs.predict(network.train, rows(8), devices=4, machine="cpu")
        division = next(iter(predicted.plan.state.divisions.values()))
        assert len(set(division.devices)) == len(division.devices), division.devices
        would = gs.predict(network.train, rows(8), devices=4, machine="cpu", variables="sharded")
        assert {k: own.devices for k, own in predicted.plan.state.divisions.items()} == {
            k: own.devices for k, own in would.plan.state.divisions.items()
        }
    finally:
        gs.set_variable_layout(network, "home")


@case("more")
def what_really_ran(workers, cluster) -> None:
    w = tf.Variable(rows(6, 3))
    products = gs.parallelize(lambda x: tf.tanh(x @ w)).placement(rows(8), actual=True).select("MatMul")
    assert sorted(op.actual for op in products) == sorted(cluster.devices), products


@case("more")
def verified(workers, cluster) -> None:
    network = Network()
    report = gs.verify(gs.parallelize(network.train), rows())
    assert str(report).startswith("PASS"), str(report)


@case("more")
def stages(workers, cluster) -> None:
    first, second = tf.Variable(rows(6, 6)), tf.Variable(rows(6, 6))

    one = gs.on_device(lambda x: tf.tanh(x @ first), "worker:0/CPU:0")
    other = gs.on_device(lambda h: h @ second, "worker:1/CPU:1")
    f = gs.parallelize(lambda x: other(one(x)), devices=["worker:0/CPU:0"])
    same([f(rows())], [tf.tanh(rows() @ first) @ second])
    assert "worker:1/CPU:1" in str(f.plan(rows()))


@case("more")
def keras_fit(workers, cluster) -> None:
    """A model whose last batch is uneven, with BatchNormalization, dropout, metrics and Adam, under fit and predict."""
    import keras

    def trained_model(parallel: bool):
        keras.utils.set_random_seed(1)
        layers = [
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
        ]
        model = keras.Sequential([keras.Input((6,), dtype="float64"), *layers, keras.layers.Dense(1)])
        model = gs.multi_gpu_model(model) if parallel else model
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
        x = rows(22).numpy()
        history = model.fit(x, x.sum(1), batch_size=8, epochs=2, shuffle=False, verbose=0)
        return [*history.history["loss"], *history.history["mae"], model.predict(x, verbose=0), *model.get_weights()]

    before = keras.config.floatx()
    keras.config.set_floatx("float64")
    try:
        expected, found = trained_model(False), trained_model(True)
    finally:
        keras.config.set_floatx(before)
    for a, b in zip(found, expected, strict=True):
        assert np.allclose(a, b, rtol=1e-9, atol=1e-9), (a, b)


@case("calls")
def errors_name_the_line(workers, cluster) -> None:
    table = tf.Variable(tf.ones((4, 2)))
    f = gs.parallelize(lambda ids: tf.gather(table, ids))
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        f(tf.constant([0, 1, 2, 100]))
    assert str(raised.value).startswith("worker:1/CPU:1, row 3, worker_calls.py:"), raised.value
    assert "indices[0] = 100 is not in [0, 4)" in str(raised.value), raised.value


@case("calls")
def another_cluster(workers, cluster) -> None:
    with pytest.raises(gs.errors.UnsupportedError) as raised:
        gs.connect(["127.0.0.1:9"])
    assert str(raised.value) == (
        f"connect(['127.0.0.1:9']): this process is connected to {', '.join(workers)} already, and TensorFlow would "
        "lose later assignments to variables. To use other workers, start this program again."
    )
