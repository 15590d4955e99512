"""The contract between graphsplit and a version of TensorFlow, in one process: what everything else is built on.

`python -W error::UserWarning ci/contract.py` prints one line for each check and ends with status 1 if one failed. With
`--write DIRECTORY` it leaves a transpiled SavedModel there, with what it computes; `--load DIRECTORY` loads such a one,
written by another version, without graphsplit.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import os
import sys
import tempfile
import time
import traceback
import types
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"(tensorflow|keras|tf_keras|google).*")
warnings.filterwarnings("ignore", ".*np.object.*", FutureWarning)  # TensorFlow's own, on import, before 2.20

import keras
import numpy as np
import tensorflow as tf

CHECKS: list[Callable[[], None]] = []
ROWS, DEVICES = 7, 3


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def relies_on(*names: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Say which private attributes of TensorFlow or Keras a check is about; a test compares them with all in use."""
    del names
    return lambda function: function


def numbers(*shape: int) -> tf.Tensor:
    return tf.constant(np.random.default_rng(0).normal(size=shape))


def assert_law(fn: Callable, *args: object, sharded: str = "", **options: object) -> None:
    """Compare a function on several devices with itself on one; `sharded` is a type that must be on the shards."""
    expected = tf.nest.flatten(tf.function(fn)(*args))
    parallel = gs.parallelize(fn, devices=DEVICES, **options)
    found = tf.nest.flatten(parallel(*args))
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12)
    if sharded:
        assert sharded in {op.type for op in parallel.plan(*args).sharded_ops}, str(parallel.plan(*args))


def dense_network() -> keras.Model:
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(1)])


@check
def inference() -> None:
    w = tf.Variable(numbers(4, 5))
    assert_law(lambda x: tf.nn.relu(x @ w), numbers(ROWS, 4), sharded="MatMul")


@check
def gradients_inside() -> None:
    w = tf.Variable(numbers(4, 5))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        return tape.gradient(loss, w)

    assert_law(step, numbers(ROWS, 4), sharded="MatMul")


@check
def gradients_outside() -> None:
    w = tf.Variable(numbers(4, 5))
    parallel = gs.parallelize(lambda x: tf.tanh(x @ w), devices=DEVICES)
    found = []
    for fn in (lambda x: tf.tanh(x @ w), parallel):
        with tf.GradientTape() as outer, tf.GradientTape() as tape:
            loss = tf.reduce_sum(fn(numbers(ROWS, 4)) ** 2)
        found.append(tape.gradient(loss, w))
        del outer
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


@check
def convolution_and_batch_normalization() -> None:
    keras.utils.set_random_seed(0)
    layers = keras.layers
    net = keras.Sequential(
        [keras.Input((8, 8, 3)), layers.Conv2D(4, 3), layers.BatchNormalization(), layers.GlobalAveragePooling2D()]
    )
    images = tf.cast(numbers(ROWS, 8, 8, 3), tf.float32)
    report = gs.verify(gs.parallelize(lambda x: net(x, training=True), devices=DEVICES), images)
    assert report.passed, str(report)


@check
def recurrent_loop() -> None:
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((5, 3)), keras.layers.LSTM(4)])
    sequences = tf.cast(numbers(ROWS, 5, 3), tf.float32)
    report = gs.verify(gs.parallelize(net, devices=DEVICES), sequences)
    assert report.passed, str(report)


@check
def loops_and_branches() -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = tf.cond(tf.constant(True), lambda: tf.tanh(x) + 1, lambda: x)  # noqa: B023
        return x

    assert_law(fn, numbers(ROWS, 4))


@check
def random_numbers() -> None:
    def fn(x: tf.Tensor) -> tf.Tensor:
        return x + tf.random.stateless_normal(tf.shape(x), (1, 2), dtype=tf.float64)

    assert_law(fn, numbers(ROWS, 4), sharded="StatelessRandomNormalV2")


@check
def dropout() -> None:
    keras.utils.set_random_seed(0)
    layer = keras.layers.Dropout(0.5, seed=3)
    report = gs.verify(gs.parallelize(lambda x: layer(x, training=True), devices=DEVICES), tf.ones((ROWS, 4)))
    assert report.largest == 0.0, str(report)


@check
def effects_happen_once() -> None:
    counter = tf.Variable(0)

    def fn(x: tf.Tensor) -> tf.Tensor:
        counter.assign_add(1)
        return 2 * x

    gs.parallelize(fn, devices=DEVICES)(numbers(ROWS, 4))
    assert int(counter) == 1


@check
def any_batch_size() -> None:
    parallel = gs.parallelize(lambda x: tf.reduce_mean(x**2, 0), devices=DEVICES, tuning={"reduce_retracing": True})
    for rows in (7, 5, 2, 1):
        np.testing.assert_allclose(parallel(numbers(rows, 4)), tf.reduce_mean(numbers(rows, 4) ** 2, 0))


@check
def specifications() -> None:
    parallel = gs.parallelize(lambda x: tf.tanh(x), devices=["GPU:0", "GPU:1"])
    assert parallel.plan(tf.TensorSpec([8, 4])).devices == ("/device:GPU:0", "/device:GPU:1")


@check
def inside_a_function() -> None:
    parallel = gs.parallelize(lambda x: tf.tanh(x), devices=DEVICES)
    np.testing.assert_allclose(tf.function(lambda x: 2 * parallel(x))(numbers(ROWS, 4)), 2 * tf.tanh(numbers(ROWS, 4)))


@check
def compiled_functions() -> None:
    inner = tf.function(lambda x: tf.tanh(x) * 2, jit_compile=True)
    assert_law(lambda x: inner(x) + 1, numbers(6, 4))


@check
def keras_fit_evaluate_predict() -> None:
    x, y = np.random.default_rng(0).normal(size=(20, 4)).astype("float32"), np.ones((20, 1), "float32")
    found = []
    for wrap in (lambda m: m, lambda m: gs.multi_gpu_model(m, DEVICES)):
        model = wrap(dense_network())
        model.compile("adam", "mse", metrics=["mae"])
        losses = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append([*losses, *model.evaluate(x, y, verbose=0), *model.predict(x, verbose=0)[:, 0]])
    np.testing.assert_allclose(found[1], found[0], rtol=1e-4, atol=1e-6)


@check
def keras_models_answer() -> None:
    model = gs.multi_gpu_model(dense_network(), DEVICES)
    model.compile("adam", "mse")
    x, y = np.ones((ROWS, 4), "float32"), np.ones((ROWS, 1), "float32")
    assert "MatMul" in {op.type for op in model.plan(x, y).sharded_ops}
    assert gs.verify(model, x, y).passed


@check
@relies_on("_shape", "_compile_config", "_layout_map")
def keras_distributions() -> None:
    """What of Keras is replaced for `keras.distribution` is there, does what is listed, and is Keras' own again."""
    from graphsplit.keras.distribution.replacements import REPLACEMENTS

    if tuple(int(part) for part in keras.__version__.split(".")[:2]) > (3, 15):
        try:
            gs.keras.enable_distribution()
        except gs.errors.UnsupportedError as error:
            if "it is newer" not in str(error):
                raise
            print(f"keras_distributions: refused, as it should be with Keras {keras.__version__}")
            return
        raise AssertionError("Keras is newer than what was tried, and was changed all the same")

    def names_of_keras() -> list[object]:
        return [vars(replacement.owner()).get(replacement.name) for replacement in REPLACEMENTS]

    api, x, y = keras.distribution, np.random.default_rng(0).normal(size=(20, 4)).astype("float32"), np.ones((20, 1))
    devices = [f"cpu:{d}" for d in range(DEVICES)]
    mesh = api.DeviceMesh((1, DEVICES), ["batch", "model"], devices)
    layout_map = api.LayoutMap(mesh)
    layout_map[".*kernel"] = (None, "model")
    layout_map[".*nothing"] = ("model",)
    before, found = names_of_keras(), []
    level = tf.get_logger().level
    tf.get_logger().setLevel("ERROR")  # (each of these models is traced, and TensorFlow warns of Keras' one function)
    with gs.keras.enable_distribution() as enabled, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "ModelParallel on 3 devices")
        assert all(during is not was for during, was in zip(names_of_keras(), before, strict=True))
        data_parallel = api.DataParallel(devices=devices)  # (which Keras 3.13 cannot make without)
        model_parallel = api.ModelParallel(device_mesh=mesh, layout_map=layout_map, batch_dim_name="batch")
        for distribution in (None, data_parallel, model_parallel):
            for inputs in ([keras.Input((4,))], []):
                api.set_distribution(distribution)
                keras.utils.set_random_seed(0)
                model = keras.Sequential([*inputs, keras.layers.Dense(40, "tanh"), keras.layers.Dense(1)])
                model.compile("sgd", "mse", metrics=["mae"])
                losses = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
                found.append([*losses, *model.evaluate(x, y, verbose=0), *model.predict(x, verbose=0)[:, 0]])
                if distribution is not None:
                    plan = enabled.plan(model, x, y)
                    assert plan.rows == ((20,) if distribution is model_parallel else (7, 7, 6))
                    assert "TanhGrad" in {op.type for op in plan.sharded_ops}
                if distribution is model_parallel:
                    assert model.layers[0].kernel.path in plan.state.in_place.values(), plan
                    assert not plan.state.gathered
                    assert any("'.*nothing'" in note for note in plan.notes), plan.notes
        assert api.list_devices() == devices
    tf.get_logger().setLevel(level)
    api.set_distribution(None)
    assert names_of_keras() == before
    for actual in found[1:]:
        np.testing.assert_allclose(actual, found[0], rtol=1e-4, atol=1e-6)


@check
def keras_files() -> None:
    model = gs.multi_gpu_model(dense_network(), DEVICES)
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras")
        loaded = keras.models.load_model(f"{folder}/model.keras")
    np.testing.assert_allclose(loaded(tf.ones((2, 4))), model.template(tf.ones((2, 4))))


@check
def keras_2() -> None:
    try:
        import tf_keras
    except ImportError:  # of a minor version for which there is none yet
        print("keras_2: no tf_keras is installed; left out")
        return
    net = tf_keras.Sequential([tf_keras.layers.Input((4,)), tf_keras.layers.Dense(1)])
    model = gs.multi_gpu_model(net, DEVICES)
    model.compile("sgd", "mse")
    assert np.isfinite(model.fit(np.ones((7, 4)), np.ones((7, 1)), verbose=0).history["loss"][0])


@check
@relies_on("_state", "_GRAPH_LEARNING_PHASES", "_DUMMY_EAGER_GRAPH", "_autocast_dtype")
def scopes_of_keras() -> None:
    """What is traced while Keras builds or trains serves there only; its scopes are read from its private state."""
    for kind in kinds_of_keras():
        model, x = noisy_model(kind), tf.ones((ROWS, 4))
        model(x)
        model.encoder.set_weights([np.full((4, 3), 2.0)])
        noisy, quiet = model(x, training=True).numpy(), model(x, training=False).numpy()
        assert np.all(quiet == 8.0), quiet
        assert np.any(noisy == 0.0), noisy
        seen = []

        class Looking(kind.layers.Layer):
            def call(self, x: tf.Tensor) -> tf.Tensor:
                seen.append(dict(keras_internals.open_scopes()))  # noqa: B023
                return x

        layer = Looking(dtype="mixed_bfloat16")
        layer(x, training=True)
        assert seen[-1]["cast to"] == "bfloat16", seen
        if kind is not keras:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # (that nobody should do so)
                kind.backend.set_learning_phase(1)
            layer(x)
            kind.backend.clear_session()
            assert "learning phase" in seen[-1], seen


def noisy_model(kind: types.ModuleType) -> tf.Module:
    class Noisy(kind.Model):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.drop = kind.layers.Dense(3, use_bias=False), kind.layers.Dropout(0.5)
            self.encode, self.noise = (gs.parallelize(part, devices=2) for part in (self.encoder, self.drop))

        def call(self, x: tf.Tensor, training: bool | None = None) -> tf.Tensor:  # noqa: ARG002  # its layers ask the scope
            return self.noise(self.encode(x))

    return Noisy()


@check
def actual_placement() -> None:
    w = tf.Variable(numbers(4, 5))
    placement = gs.parallelize(lambda x: x @ w, devices=DEVICES).placement(numbers(ROWS, 4), actual=True)
    placement.assert_on("shard_1/*", "CPU:1")
    assert not placement.moved, str(placement)


@check
def errors_say_where() -> None:
    parallel = gs.parallelize(lambda x: tf.gather(x, [100], axis=1), devices=DEVICES)
    said = ""
    try:
        parallel(numbers(ROWS, 4))
    except tf.errors.InvalidArgumentError as error:
        said = error.message
    assert "contract.py" in said, said


@check
def sharded_variables() -> None:
    with gs.variable_layout("sharded", devices=DEVICES):
        w = tf.Variable(numbers(300, 16))
    found = gs.parallelize(lambda x: x @ w, devices=DEVICES)(numbers(ROWS, 300))
    np.testing.assert_allclose(found, numbers(ROWS, 300) @ numbers(300, 16))


@check
def micro_batches_and_stages() -> None:
    first, second = tf.Variable(numbers(4, 5)), tf.Variable(numbers(5, 2))

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ first) @ second) ** 2)
        return tape.gradient(loss, [first, second])

    assert_law(step, numbers(ROWS, 4), micro_batches=2)


@check
def saved_models() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        load(Path(folder))


@check
def frozen_graphs() -> None:
    v1 = tf.compat.v1
    with tf.Graph().as_default() as graph:
        v1.square(v1.placeholder(tf.float32, [None, 2], name="x"), name="y")
    result = gs.serving.transpile_graph_def(graph.as_graph_def(), "x", "y", 2)
    with tf.Graph().as_default(), v1.Session(config=v1.ConfigProto(device_count={"CPU": 2})) as session:
        tf.graph_util.import_graph_def(result, name="")
        np.testing.assert_array_equal(
            session.run("y:0", {"x:0": [[1, 2], [3, 4], [5, 6]]}), [[1, 4], [9, 16], [25, 36]]
        )


@check
def children_of_saved_functions() -> None:
    """A function of a SavedModel that refers to an object in the file keeps it alive when it is loaded."""
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), replicate_weights=True)
        signature = tf.saved_model.load(f"{folder}/several").signatures["serving_default"]
        gc.collect()
        found = signature(x=tf.cast(numbers(ROWS, 4), tf.float32))["y"]
        np.testing.assert_allclose(found, np.load(f"{folder}/y.npy"), rtol=1e-5)


def write(folder: Path, **options: bool) -> None:
    """Write a SavedModel, its transpiled form, and what it computes."""
    module = tf.Module()
    module.w = tf.Variable(tf.cast(numbers(4, 3), tf.float32))
    spec = tf.TensorSpec([None, 4], tf.float32, "x")
    module.serve = tf.function(lambda x: {"y": tf.nn.softmax(x @ module.w)}, input_signature=[spec])
    tf.saved_model.save(module, str(folder / "one"), signatures=module.serve)
    gs.serving.transpile_saved_model(folder / "one", folder / "several", DEVICES, **options)
    x = tf.cast(numbers(ROWS, 4), tf.float32)
    np.save(folder / "y.npy", module.serve(x)["y"].numpy())


def load(folder: Path) -> None:
    """Load what `write` has written, and compare."""
    loaded = tf.saved_model.load(str(folder / "several"))
    found = loaded.signatures["serving_default"](x=tf.cast(numbers(ROWS, 4), tf.float32))["y"]
    np.testing.assert_allclose(found, np.load(folder / "y.npy"), rtol=1e-5)


@check
@relies_on("_handle", "_serialize_to_tensors", "_restore_from_tensors", "__class__", "_distributed_container")
def variables_without_values() -> None:
    """Whoever reads or saves a variable that has no value gets an error; it can be planned, restored and assigned."""
    for kind in kinds_of_keras():
        with gs.keras.without_values():
            layer = kind.layers.Dense(3)
            layer.build((None, 5))
            optimizer = kind.optimizers.Adam()
            keras_internals.make_slots(optimizer, layer.trainable_variables)
        parallel, x = gs.parallelize(lambda x: layer(x), devices=DEVICES), tf.ones((ROWS, 5))  # noqa: B023
        assert parallel.plan(x).sharded_ops
        with tempfile.TemporaryDirectory() as folder:
            save = partial(tf.train.Checkpoint(layer=layer).write, f"{folder}/weights")
            for read in (save, layer.get_weights, lambda: layer(x), lambda: tf.function(layer)(x), lambda: parallel(x)):  # noqa: B023
                said = ""
                try:
                    read()
                except gs.errors.ArgumentError as error:
                    said = str(error)
                assert "no values yet" in said, (kind, said)
            gs.keras.initialize([layer, optimizer])
            expected = layer.get_weights()
            save()
            layer.set_weights([np.zeros_like(value) for value in expected])
            tf.train.Checkpoint(layer=layer).read(f"{folder}/weights").assert_consumed()
        np.testing.assert_array_equal(layer.get_weights()[0], expected[0])
        np.testing.assert_allclose(parallel(x), layer(x), rtol=1e-5)


@check
@relies_on("_handle", "_read_variable_op", "_restore_from_tensors", "__class__")
def classes_of_laid_out_variables() -> None:
    """Whoever reads, restores or saves a laid out variable finds its parts; and it gets its own class back."""
    w = tf.Variable(numbers(300, 16), name="w")
    kind, module = type(w), tf.Module()
    spec = tf.TensorSpec([None, 300], w.dtype)
    module.w, module.serve = w, tf.function(lambda x: x @ module.w, input_signature=[spec])
    parallel = gs.parallelize(lambda x: x @ w, devices=DEVICES)
    x, expected = numbers(ROWS, 300), numbers(ROWS, 300) @ numbers(300, 16)
    with tempfile.TemporaryDirectory() as folder:
        path = tf.train.Checkpoint(w=w).write(f"{folder}/weights")
        gs.set_variable_layout(w, "sharded", devices=DEVICES)
        parts = parted_variables.parts_of_variable(w)
        assert type(w) is not kind
        np.testing.assert_allclose(parallel(x), expected)
        tf.train.Checkpoint(w=w).read(path).assert_consumed()
        assert parts.in_parts  # what is restored goes to them
        np.testing.assert_allclose(module.serve(x), expected)
        assert not parts.in_parts
        np.testing.assert_allclose(parallel(x), expected)
        np.testing.assert_allclose(w, numbers(300, 16))
        assert parts.in_parts  # the host gets the value without
        given = tf.function(lambda x, w: x @ w)
        np.testing.assert_allclose(tf.function(lambda x: given(x, w))(x), expected)
        parallel(x)
        tf.saved_model.save(module, f"{folder}/model")  # whole, while the parts keep the value
        assert parts.in_parts
        loaded = tf.saved_model.load(f"{folder}/model")
        np.testing.assert_allclose(loaded.serve(x), expected)
    gs.set_variable_layout(w, "home")
    assert type(w) is kind
    gs.set_variable_layout(w, "replicated", devices=DEVICES)
    np.testing.assert_allclose(parallel(x), expected)
    np.testing.assert_allclose(tf.function(lambda x: x @ w)(x), expected)
    assert parted_variables.parts_of_variable(w).in_parts  # whoever only reads leaves the copies alone


@check
@relies_on("_id")
def tapes_know_handles_by_their_numbers() -> None:
    """What was recorded in eager code is differentiated in a function, where another tensor stands for the handle."""
    w = tf.Variable(numbers(300, 16))
    gs.set_variable_layout(w, "replicated", devices=DEVICES)
    x, forward, found = numbers(ROWS, 300), lambda x: tf.reduce_sum(tf.tanh(x @ w) ** 2), []
    for fn in (forward, gs.parallelize(forward, devices=DEVICES)):
        with tf.GradientTape(persistent=True) as tape:
            total = fn(x)
        found.append(tape.gradient(total, w))
        found.append(tf.function(partial(tape.gradient, total, w), autograph=False)())
    for gradient in found[1:]:
        np.testing.assert_allclose(gradient, found[0], rtol=1e-9, atol=1e-9)


@check
@relies_on(
    "_handle", "_handle_data", "_jit_compile", "_reduce_retracing", "_rng", "_c_graph", "_from_c_op", "_initialized",
    "_server_def", "_variable_creator_stack", "_names_in_use",
)  # fmt: skip
def what_tensorflow_does_not_tell() -> None:
    internals = tensorflow_internals
    w, other = tf.Variable(numbers(4, 5)), tf.Variable(2 * numbers(4, 5))
    empty = internals.variable_without_value(shape=(4, 5), dtype=tf.float64, name="empty")
    assert (type(empty), vars(empty).keys()) == (type(w), vars(w).keys())
    assert not tf.raw_ops.VarIsInitializedOp(resource=empty.handle)
    empty.assign(w)
    np.testing.assert_array_equal(empty, w)
    with tf.variable_creator_scope(lambda make, **options: make(**options)):
        assert len(internals.variable_creators()) == 1
    lifted = []

    def make_twice() -> None:
        for name in () if lifted else ("a", "b"):
            with internals.lifting_variables(outside), tf.name_scope("own"):
                lifted.append(tf.Variable(lambda: tf.ones(2), name=name))

    outside = tf.compat.v1.get_default_graph()
    tf.function(make_twice, autograph=False).get_concrete_function()
    assert [variable.name for variable in lifted] == ["own/a:0", "own/b:0"]
    assert internals.has_handle(w)
    assert internals.resource_value(w.handle) == (tf.float64, tf.TensorShape([4, 5]))
    internals.give_handle(w, other.handle)
    np.testing.assert_array_equal(w, other)
    for compiled in (True, False):
        assert internals.is_compiled_function(tf.function(lambda x: x, jit_compile=compiled)) == compiled
        assert internals.is_retraced_less(tf.function(lambda x: x, reduce_retracing=compiled)) == compiled
    for _ in range(2):  # (of the same seed)
        seeding = internals.last_seeding()
        tf.random.set_seed(3)
        assert internals.last_seeding() is not seeding
        assert internals.last_seeding() is internals.last_seeding()
    with tf.Graph().as_default() as graph:
        tf.transpose(tf.compat.v1.placeholder(tf.float32, [None, 2]), name="y")
    [*_, last] = internals.import_operations(graph.as_graph_def())
    assert (last.name, last.outputs[0].shape.as_list()) == ("y", [2, None])
    assert internals.eager_context_started()
    assert internals.own_task() is None


@check
@relies_on("_gradient_function", "_add_function_recursive", "_set_attr")
def calls_in_graphs() -> None:
    """A call in somebody's graph has a gradient of its own there, and says which variables it only reads."""
    w = tf.Variable(numbers(4, 5))
    parallel, found = gs.parallelize(lambda x: tf.tanh(x @ w), devices=DEVICES), []
    for fn in (lambda x: tf.tanh(x @ w), parallel):
        outer = tf.function(lambda x, fn=fn: tf.gradients(tf.gradients(fn(x) ** 2, x)[0] ** 2, x)[0])
        found.append(outer(numbers(ROWS, 4)))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)
    graph = tf.function(lambda x: parallel(x) + parallel(x)).get_concrete_function(numbers(ROWS, 4)).graph
    calls = [op for op in graph.get_operations() if "_read_only_resource_inputs" in op.node_def.attr]
    assert [list(op.node_def.attr["_read_only_resource_inputs"].list.i) for op in calls] == [[1], [1]]


@check
@relies_on("_convert_partitioned_call", "_gradient_function", "_original_op")
def calls_that_are_vectorized() -> None:
    """A vectorized Jacobian writes calls anew, or copies them, and they keep their gradients."""
    w, found = tf.Variable(numbers(4, 5)), []

    @tf.custom_gradient
    def own(y: tf.Tensor) -> object:
        value = tf.tanh(y)
        return value, lambda dy: 1.5 * dy * (1 - value**2)

    def forward(x: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(own(x @ w) ** 2, 0)[:2]

    parallel = gs.parallelize(forward, devices=DEVICES)
    for fn in (forward, parallel, tf.function(parallel)):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                totals = fn(numbers(ROWS, 4))
            penalty = tf.reduce_sum(inner.jacobian(totals, w) ** 2)
        found.append(outer.gradient(penalty, w))
    for gradient in found[1:]:
        np.testing.assert_allclose(gradient, found[0], rtol=1e-9, atol=1e-9)


@check
@relies_on("_update_input")
def gradients_that_read() -> None:
    """What gradients read by themselves, as recomputed ones do, they read when they run."""
    w, found = tf.Variable(numbers(4, 5)), []
    block = tf.recompute_grad(lambda x: tf.tanh(x @ w))
    for fn in (block, gs.parallelize(block, devices=DEVICES)):
        w.assign(numbers(4, 5))
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(fn(numbers(ROWS, 4)) ** 2)
        w.assign(2 * w)
        found.append(tape.gradient(total, w))
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9, atol=1e-9)


@check
@relies_on("_captured_inputs")
def functions_of_before() -> None:
    """A function that was traced before a variable was laid out asks for it at each call."""
    w = tf.Variable(numbers(300, 5))
    add = tf.function(lambda: w.assign_add(tf.ones_like(w)))
    add()
    for layout in ("replicated", "sharded"):
        before = w.numpy()
        gs.set_variable_layout(w, layout, DEVICES)
        step = gs.parallelize(lambda x: x @ w, devices=DEVICES)
        step(numbers(ROWS, 300))
        add()
        np.testing.assert_allclose(step(numbers(ROWS, 300)), numbers(ROWS, 300) @ (before + 1), rtol=1e-9)


def kinds_of_keras() -> list[types.ModuleType]:
    """Return the modules that are installed."""
    return [importlib.import_module(name) for name in ("keras", "tf_keras") if importlib.util.find_spec(name)]


@check
@relies_on("_trainable_variables", "_index_dict", "_unique_id", "_create_all_weights", "_distributed_container")
def slots_of_optimizers() -> None:
    makers = [kind.optimizers.Adam for kind in kinds_of_keras()]
    makers += [kind.optimizers.legacy.Adam for kind in kinds_of_keras()[1:]]
    for make in makers:
        own = [tf.Variable(tf.ones(shape), name="same") for shape in ((3,), (3,), (2, 3))]
        optimizer = make()
        keras_internals.make_slots(optimizer, own)
        slots = list(keras_internals.slots_of(optimizer, own))
        assert [sum(v is variable for _, v in slots) for variable in own] == [2, 2, 2], (make, slots)
        assert all(slot.shape == v.shape for slot, v in slots), (make, slots)
        gs.set_variable_layout(own := tf.Variable(numbers(300, 16)), "sharded", devices=DEVICES)
        keras_internals.make_slots(make(), [own])
        assert parted_variables.parts_of_variable(own).in_parts  # no optimizer asks for all of it, to know it by
    for kind in kinds_of_keras():
        kind.utils.set_random_seed(3)
        expected = kind.layers.Dense(300, kernel_initializer=kind.initializers.GlorotUniform(seed=3))
        expected.build((None, 16))
        with gs.variable_layout("sharded", devices=DEVICES):
            found = kind.layers.Dense(300, kernel_initializer=kind.initializers.GlorotUniform(seed=3))
            found.build((None, 16))
        for a, b in zip(found.variables, expected.variables, strict=True):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
        own = [v if isinstance(v, tf.Variable) else v.value for v in found.variables]
        assert any(parted_variables.parts_of_variable(v) is not None for v in own)


@check
@relies_on("__dict__", "__class__", "_compile_config", "_*_counter", "_flatten_layers")
def models_seen_again() -> None:
    """A wrapped model has the template's state and class, makes its steps anew when needed, and counts its steps."""
    x, y = np.ones((ROWS, 4), "float32"), np.ones((ROWS, 1), "float32")
    for kind in kinds_of_keras():
        template = kind.Sequential([kind.layers.Input((4,)), kind.layers.Dense(1, kernel_initializer="zeros")])
        model = gs.multi_gpu_model(template, DEVICES)
        assert isinstance(model, kind.Sequential)
        assert vars(model) is vars(template)
        for loss, expected in {"mse": 1.0, "mean_squared_logarithmic_error": np.log(2) ** 2}.items():
            model.compile(kind.optimizers.SGD(0.0), loss)
            np.testing.assert_allclose(model.train_on_batch(x, y), expected, rtol=1e-6)
        if kind is not keras:
            assert int(keras_internals.step_counter(template, "train")) == 2
        assert keras_internals.quantization_of(template) == ()
        assert keras_internals.layers_not_built(template) == []
        if hasattr(template, "quantize"):
            with warnings.catch_warnings():  # older versions warn that an input layer cannot be quantized
                warnings.filterwarnings("ignore", "Layer InputLayer does not have a `quantize` method")
                template.quantize("int8")
            assert keras_internals.quantization_of(template) == ("int8",)


def run_all() -> int:
    failed = 0
    for function in CHECKS:
        start = time.perf_counter()
        try:
            function()
            verdict = "ok"
        except Exception:  # (each is reported, and counted)
            failed += 1
            verdict = f"FAILED\n{traceback.format_exc()}"
        print(f"{function.__name__:36} {time.perf_counter() - start:5.1f} s  {verdict}", flush=True)
    return failed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--load", type=Path)
    asked = parser.parse_args()
    tf.config.set_visible_devices([], "GPU")
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, Python {sys.version.split()[0]}")
    if asked.load:
        cpu = tf.config.list_physical_devices("CPU")[0]
        tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * DEVICES)
        load(asked.load)
        print("loaded")
        sys.exit()
    import graphsplit as gs
    from graphsplit.core import keras_internals, tensorflow_internals
    from graphsplit.core.variables import parted_variables

    gs.use_logical_devices(DEVICES)
    if asked.write:
        asked.write.mkdir(parents=True, exist_ok=True)
        write(asked.write)
    failures = run_all()
    print(f"{len(CHECKS) - failures} of {len(CHECKS)} checks hold")
    sys.exit(bool(failures))
