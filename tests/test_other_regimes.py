"""Programs that run TensorFlow in another way: TensorFlow 1 scripts, and what a strategy has split already."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.experimental import dtensor

import graphsplit as gs
from tests.helpers.law import rows
from tests.helpers.messages import message

ROOT = Path(__file__).parent.parent
SCRIPT = """
import numpy as np
import tensorflow as tf
tf.compat.v1.disable_v2_behavior()
import graphsplit as gs
v1 = tf.compat.v1
devices = v1.ConfigProto(device_count={"CPU": 2})

def weights():
    return v1.get_variable("w", initializer=np.full([4, 1], 0.5, "float32"), use_resource=True)

with tf.Graph().as_default() as graph:
    x = v1.placeholder(tf.float32, [None, 4], name="x")
    loss = tf.reduce_mean(tf.square(tf.matmul(x, weights())), name="loss")
    v1.train.GradientDescentOptimizer(0.1).minimize(loss, name="train")
    v1.global_variables_initializer()
result = gs.serving.transpile_graph_def(graph.as_graph_def(), "x", ["loss", "train"], 2)
for one in (graph.as_graph_def(), result):
    with tf.Graph().as_default(), v1.Session(config=devices) as session:
        tf.graph_util.import_graph_def(one, name="")
        session.run("init")
        print([round(float(session.run(["loss:0", "train"], {"x:0": np.ones([5, 4])})[0]), 5) for _ in range(2)])

for size in (5, None):
    with tf.Graph().as_default(), v1.Session(config=devices) as session:
        w, x = weights(), v1.placeholder(tf.float32, [size, 4])
        parallel = gs.parallelize(lambda x: tf.reduce_sum(tf.tanh(tf.matmul(x, w))), devices=["CPU:0", "CPU:1"])
        y = parallel(x)
        gradient = tf.gradients(y, x)[0] if size else x
        session.run(v1.global_variables_initializer())
        found = session.run([y, gradient], {x: np.full([5, 4], 0.1)})
        print(round(float(found[0]), 5), found[1].shape)
        print(str(parallel.plan(tf.TensorSpec([size, 4]))).splitlines()[0])

with tf.Graph().as_default(), v1.Session(config=devices) as session:
    a = v1.placeholder(tf.float32, [None])
    print(session.run(gs.make_parallel(lambda a: a + 1, 2, a=a), {a: [1, 2, 3]}).tolist())
"""


@pytest.mark.long
def test_tensorflow_1_scripts():
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=200, env=environment, check=False
    )
    plan = "Plan: 100 % of the FLOPs sharded on 2 devices"
    assert done.stdout.splitlines() == [
        "[4.0, 0.16]",
        "[4.0, 0.16]",
        "0.98688 (5, 4)",
        f"{plan}, 52 B sent a step; limited by launching operations",
        "0.98688 (5, 4)",
        f"{plan}, 20 B and 16 B a row to send a step",
        "[2.0, 3.0, 4.0]",
    ], done.stderr


@pytest.mark.long
def test_the_tests_of_tensorflow_1_after_disable_v2_behavior():
    files = ["tests/test_v1_graphs.py", "tests/test_graph_defs.py"]
    writes = "test_graph_defs.py::test_saved_models_on_the_command_line"  # a SavedModel, as TensorFlow 2 does
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *files]
    command += ["--deselect", f"tests/{writes}"]
    environment = {**os.environ, "GRAPHSPLIT_TEST_V1": "1"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:]


def named(x):
    return tf.reduce_sum(tf.tanh(x))


@pytest.fixture(scope="module")
def strategy():
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def test_inside_of_a_strategys_run(strategy):
    parallel, x = gs.parallelize(named, devices=2), rows(4, 3)
    with pytest.raises(gs.errors.UnsupportedError) as error:
        strategy.run(parallel, args=(x,))
    expected = (
        "named is called in MirroredStrategy.run by each of 2 replicas, which already have their rows; it would split "
        "them again. A parallelized function takes the strategy's place: call it outside of strategy.run and of "
        "strategy.scope(), once, on the whole batch."
    )
    assert str(error.value) == expected
    with pytest.raises(gs.errors.UnsupportedError, match=r"named is called in MirroredStrategy\.run"):
        tf.function(lambda x: strategy.run(parallel, args=(x,)))(x)
    with strategy.scope():
        assert parallel(x).shape == []
    with pytest.raises(
        gs.errors.UnsupportedError, match=r"named is called in MirroredStrategy\.run"
    ):  # compiled by now
        strategy.run(parallel, args=(x,))


def test_what_a_strategy_has_spread(strategy):
    dataset = tf.data.Dataset.from_tensor_slices(rows(8, 3)).batch(4)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.parallelize(lambda pair: named(pair["x"]), devices=2)({"x": batch})
    assert str(error.value) == (
        "<lambda> is called on values that a tf.distribute strategy has spread over its replicas:\n"
        "  - pair['x']: PerReplica\n"
        "It needs the whole batch, and splits it: iterate over the dataset, not over "
        "strategy.experimental_distribute_dataset(dataset)."
    )


def test_an_optimizer_in_a_strategys_scope(strategy):
    """What needs no replica runs there; what needs one says that the scope is in the way."""
    optimizer, weight, x = keras.optimizers.SGD(), tf.Variable(tf.ones((3, 2))), tf.cast(rows(5, 3), tf.float32)

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weight))
        optimizer.apply_gradients([(tape.gradient(loss, weight), weight)])
        return loss

    parallel = gs.parallelize(step, devices=2)
    said = (
        "step is called inside of `with strategy.scope():` of a MirroredStrategy, where an optimizer can only be "
        "applied by each replica. A parallelized function takes the strategy's place: make the model and the "
        "optimizer, and call step, outside of the scope."
    )
    with strategy.scope():
        for ask in (parallel, parallel.plan):
            with pytest.raises(gs.errors.UnsupportedError) as error:
                ask(x)
            assert str(error.value) == said
        with pytest.raises(TypeError, match="text"):
            gs.parallelize(lambda x: x + "text", devices=2)(x)
    expected = step(x)
    weight.assign(tf.ones((3, 2)))
    np.testing.assert_allclose(parallel(x), expected, rtol=1e-6)


def test_tensors_layouts_and_variables_of_dtensor():
    weight, x = tf.Variable(tf.ones((6, 2)), name="w"), tf.ones((4, 6))
    mesh = dtensor.create_mesh([("model", 2)], devices=["CPU:0", "CPU:1"])
    layout = dtensor.Layout([dtensor.UNSHARDED, "model"], mesh)
    divided = dtensor.call_with_layout(tf.ones, layout, shape=(4, 6))
    variable = dtensor.DVariable(divided, name="v")
    words, kind = "'home', 'replicated', 'sharded', 'host'", f"{type(layout).__module__}.Layout"
    write = "Write (None, 'model') and pass the mesh, mesh={'batch': 2, 'model': 4}. Without a mesh there are "
    said = f"A layout must be a word or a tuple, got a {kind}. {write}{words}."
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)])
    for call in (
        lambda: gs.set_variable_layout(weight, layout, devices=2),
        lambda: gs.set_variable_layout(weight, {"w": layout}, devices=2),
        lambda: gs.parallelize(lambda x: x @ weight, devices=2, variables=layout),
        lambda: gs.multi_gpu_model(model, gpus=2, variables=layout),
    ):
        assert message(gs.errors.ArgumentError, call) == said
    array = np.array([None, "model"])
    said = message(gs.errors.ArgumentError, gs.set_variable_layout, weight, array, mesh={"batch": 2})
    assert said == f"A layout must be a word or a tuple, got a numpy.ndarray. {write}{words}."
    gs.set_variable_layout(weight, (None, "model"), mesh={"batch": 1, "model": 2})  # what it says can be typed
    gs.set_variable_layout(weight, "home", devices=2)
    said = (
        "named is given tensors that DTensor has divided over a mesh of its own:\n  - {}\nPass a tf.Tensor, and make "
        'variables by tf.Variable: gs.set_variable_layout(variable, "sharded") divides them.'
    )

    def reads(x):
        return x @ tf.transpose(variable)

    reads.__name__ = "named"
    for function, argument, what in ((named, divided, "x"), (reads, x, "variable v")):
        parallel = gs.parallelize(function, devices=2)
        for ask in (parallel, parallel.plan, parallel.placement):
            assert message(gs.errors.UnsupportedError, ask, argument) == said.format(what)
    assert message(gs.errors.UnsupportedError, gs.set_variable_layout, variable, "sharded", devices=2) == (
        "v is a variable of DTensor, which has a layout on DTensor's mesh. Make it by tf.Variable; "
        "set_variable_layout then divides it."
    )
    parallel = gs.parallelize(named, devices=2)
    parallel(x)
    assert message(gs.errors.UnsupportedError, parallel, divided) == said.format("x")  # after one that is not divided
