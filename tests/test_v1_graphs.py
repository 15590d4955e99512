"""`make_parallel` in TensorFlow 1 graphs: towers, shared variables, colocated gradients, all in sessions."""

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit import make_parallel
from tests.helpers.messages import message

v1 = tf.compat.v1


@pytest.fixture(autouse=True)
def graph():
    with tf.Graph().as_default() as made:
        v1.set_random_seed(0)
        yield made


def session(devices=4):
    return v1.Session(config=v1.ConfigProto(device_count={"CPU": devices}))


def test_the_articles_vector_addition():
    a = v1.placeholder(tf.float32, [None])
    b = v1.placeholder(tf.float32, [None])
    c = make_parallel(lambda a, b: a + b, 2, a=a, b=b)
    for size in (1, 2, 7):
        with session() as sess:
            x, y = np.arange(size, dtype="float32"), np.ones(size, "float32")
            np.testing.assert_array_equal(sess.run(c, {a: x, b: y}), x + y)
    sums = [op.device for op in a.graph.get_operations() if op.type == "AddV2" and op.inputs[0].op.type == "SplitV"]
    assert sums == ["/device:CPU:0", "/device:CPU:1"]


def model(x, y):
    w = v1.get_variable("w", shape=[3, 1])

    f = tf.stack([tf.square(x), x, tf.ones_like(x)], 1)
    yhat = tf.squeeze(tf.matmul(f, w), 1)

    return tf.square(yhat - y)


def test_the_articles_polynomial_fit(graph):
    np.random.seed(0)
    x = v1.placeholder(tf.float32)
    y = v1.placeholder(tf.float32)
    loss = make_parallel(model, 2, x=x, y=y)
    optimizer = v1.train.AdamOptimizer(0.1)
    train_op = optimizer.minimize(tf.reduce_mean(loss), colocate_gradients_with_ops=True)
    with session() as sess:
        sess.run(v1.global_variables_initializer())
        for _ in range(2500):
            x_val = np.random.uniform(-10.0, 10.0, size=100)
            sess.run(train_op, {x: x_val, y: 5 * np.square(x_val) + 3})
        (w,) = sess.run(v1.trainable_variables("w"))
    np.testing.assert_allclose(w[:, 0], [5, 0, 3], atol=0.1)
    for i in range(2):
        backward = [op for op in graph.get_operations() if op.name.startswith(f"gradients/tower_{i}/")]
        assert {op.device for op in backward} == {f"/device:CPU:{i}"}
        assert any("MatMul" in op.type for op in backward)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("rows", [1, 2, 5, 16, 17])
def test_gradients_are_those_of_one_device_and_stay_with_their_towers(graph, rows):
    x, y = v1.placeholder(tf.float32, [None]), v1.placeholder(tf.float32, [None])
    with v1.variable_scope("shared", reuse=v1.AUTO_REUSE, initializer=tf.ones_initializer()):
        parallel = tf.reduce_mean(make_parallel(model, 3, x=x, y=y))
        single = tf.reduce_mean(model(x, y))
    (w,) = v1.trainable_variables()
    (expected,) = v1.gradients(single, [w])
    before = set(graph.get_operations())
    (actual,) = v1.gradients(parallel, [w], colocate_gradients_with_ops=True)
    products = [op for op in graph.get_operations() if op.type == "MatMul" and op not in before]
    assert {op.device for op in products} == {f"/device:CPU:{i}" for i in range(3)}
    data = np.linspace(-1, 1, rows).astype("float32")
    with session() as sess:
        sess.run(v1.global_variables_initializer())
        a, e = sess.run([actual, expected], {x: data, y: data})
    np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6)


def test_nested_outputs():
    x = v1.placeholder(tf.float32, [None, 2])
    outputs = make_parallel(lambda x: {"double": 2 * x, "pair": (x[:, 0], [tf.reduce_sum(x, 1)])}, 3, x=x)
    data = np.arange(14, dtype="float32").reshape(7, 2)
    with session() as sess:
        result = sess.run(outputs, {x: data})
    np.testing.assert_array_equal(result["double"], 2 * data)
    np.testing.assert_array_equal(result["pair"][0], data[:, 0])
    np.testing.assert_array_equal(result["pair"][1][0], data.sum(1))


def test_named_devices_and_constants():
    c = make_parallel(lambda a: a * 2, ["CPU:3", "/cpu:1"], a=np.arange(5.0))
    with session() as sess:
        np.testing.assert_array_equal(sess.run(c), np.arange(5.0) * 2)
    products = [op.device for op in c.graph.get_operations() if op.type == "Mul" and op.name.startswith("tower_")]
    assert products == ["/device:CPU:3", "/device:CPU:1"]


def test_what_cannot_be_split():
    assert message(
        gs.errors.ArgumentError, make_parallel, lambda a, b: a + b, 2, a=tf.zeros([4]), b=tf.constant(1.0)
    ) == (
        "make_parallel splits every input along its first axis; these have none:\n"
        "  - b has shape []\n"
        "Let the function capture them instead: functools.partial(fn, ...)."
    )
    assert message(gs.errors.ArgumentError, make_parallel, tf.identity, 0, input=tf.zeros([4])) == (
        "num_gpus=0: at least one device is needed."
    )


def test_variables_that_towers_do_not_share():
    """Each device would train a model of its own, and nobody would notice."""
    x = v1.placeholder(tf.float32, [None, 3])
    found = message(
        gs.errors.ArgumentError, make_parallel, lambda x: x @ tf.Variable(tf.ones([3, 1]), name="w"), 2, x=x
    )
    assert found == (
        "make_parallel runs the function once for each device, and each run made new variables, so devices would train "
        "different models.\n"
        "  - tower_1/w:0\n"
        "Make them with tf.compat.v1.get_variable or tf.compat.v1.layers, which share them by name, or before and "
        "outside of the function."
    )
    shared = tf.Variable(tf.ones([3, 1]))
    y = make_parallel(lambda x: x @ shared, 2, x=x)
    with session() as sess:
        sess.run(v1.global_variables_initializer())
        np.testing.assert_array_equal(sess.run(y, {x: np.ones([5, 3])}), np.full([5, 1], 3))


def test_outputs_without_rows():
    x = v1.placeholder(tf.float32, [None])
    found = message(gs.errors.ArgumentError, make_parallel, lambda x: (x, tf.reduce_sum(x)), 2, x=x)
    assert found == (
        "make_parallel joins outputs along their first axis; these have none:\n  - output 1, tower_0/Sum:0\nReturn a "
        "value for each row and reduce what make_parallel returns: tf.reduce_mean(make_parallel(...))."
    )
