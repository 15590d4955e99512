"""What `parallelize` takes, gives back and keeps."""

from __future__ import annotations

import collections
import inspect
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.autograph.impl.api import PyToTF  # to count what is rewritten

import graphsplit as gs
from tests.helpers.law import assert_close, check, rows, sharded_types

pytestmark = pytest.mark.sampled(quick=21)

Point = collections.namedtuple("Point", "x y")


@dataclass
class Batch:
    image: Any
    label: Any
    scale: float = 2.0


# Forms of functions


def test_decorator_forms():
    @gs.parallelize
    def plain(x):
        return x + 1

    @gs.parallelize(devices=2)
    def optioned(x):
        return x + 1

    for function, count in ((plain, 5), (optioned, 2), (gs.parallelize(lambda x: x + 1, devices=2), 2)):
        assert len(function.devices) == count
        assert_close(function(rows(7)), rows(7) + 1)


def test_keeps_name_doc_and_signature():
    def original(x: tf.Tensor, scale: float = 2.0) -> tf.Tensor:
        """Scale x."""
        return x * scale

    parallel = gs.parallelize(original, devices=2)
    assert parallel.__name__ == "original"
    assert parallel.__doc__ == "Scale x."
    assert parallel.function is original
    assert list(inspect.signature(parallel).parameters) == ["x", "scale"]
    assert repr(parallel) == ("<ParallelFunction test_keeps_name_doc_and_signature.<locals>.original on 2>")


def test_methods_are_bound_once_for_each_instance():
    class Model:
        def __init__(self, factor):
            self.factor = factor

        @gs.parallelize(devices=2)
        def scale(self, x):
            """Scale."""
            return x * self.factor

    two, three = Model(2.0), Model(3.0)
    assert_close(two.scale(rows(5)), rows(5) * 2)
    assert_close(three.scale(rows(5)), rows(5) * 3)
    bound = two.scale
    assert bound is two.scale, "another one, with traces of its own, each time"
    assert "Mul" in sharded_types(two.scale, rows(5))


def test_tf_function_and_keras_layer_and_model():
    def body(x):
        return tf.nn.relu(x) * 2

    check(tf.function(body), rows(7, 2), sharded="Relu")
    signature = [tf.TensorSpec([None, 2], tf.float64)]
    check(tf.function(body, input_signature=signature), rows(7, 2), sharded="Relu")
    layer = keras.layers.Dense(3, activation="tanh", dtype="float64")
    check(layer, rows(7, 4), sharded="MatMul")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, dtype="float64")])
    check(model, rows(7, 4), sharded="MatMul")


def test_nested_functions_are_inlined():
    @tf.function
    def inner(x):
        return tf.tanh(x), tf.reduce_sum(x)

    @tf.function
    def middle(x):
        y, total = inner(x)
        return inner(y)[0] + total

    parallel = check(lambda x: middle(x) * 3, rows(7), sharded="Tanh")
    assert not {op.type for op in parallel.plan(rows(7)).program.ops} & {"PartitionedCall", "StatefulPartitionedCall"}


def test_inside_a_tf_function_and_traced_once():
    traces = []

    @gs.parallelize(devices=3)
    def inner(x):
        traces.append(x.shape)
        return tf.reduce_sum(x**2)

    @tf.function(autograph=False)
    def outer(x):
        return inner(x) + inner(x + 1)

    assert_close(outer(rows(8)), tf.reduce_sum(rows(8) ** 2) + tf.reduce_sum((rows(8) + 1) ** 2))
    inner(rows(8))
    inner(rows(8))
    inner(rows(9))
    assert traces == [(8,), (9,)]


def test_inside_another_parallelized_function():
    inner = gs.parallelize(lambda x: tf.tanh(x) if tf.reduce_sum(x) > 0 else x, devices=2)
    inner.__name__ = "inner"
    square = gs.parallelize(tf.square, devices=2)
    outer = gs.parallelize(tf.function(lambda x: inner(x) + square(x)), devices=3)
    assert_close(outer(rows(7)), outer.function(rows(7)))
    assert "Square" in sharded_types(outer, rows(7))
    assert "inner is parallelized as well; it is planned with the rest" in str(outer.plan(rows(7)))


def test_as_an_argument_of_a_tf_function():
    parallel = gs.parallelize(lambda x: 2 * x, devices=2)
    outer = tf.function(lambda function, x: function(x), autograph=False)
    operations = outer.get_concrete_function(parallel, rows(4)).graph.get_operations()
    assert any(op.type in ("PartitionedCall", "StatefulPartitionedCall") for op in operations)
    assert_close(outer(parallel, rows(4)), rows(4) * 2)


def test_reads_tensors_of_the_surrounding_graph():
    @tf.function(autograph=False)
    def outer(x):
        shift = tf.reduce_mean(x)
        return gs.parallelize(lambda y: y - shift, devices=2)(x)

    assert_close(outer(rows(7)), rows(7) - tf.reduce_mean(rows(7)))
    assert_close(outer(rows(6)), rows(6) - tf.reduce_mean(rows(6)))


# Arguments and results


def test_nested_arguments_and_results():
    def nested(batch, points, options, *more, key=None, **rest):
        assert options == {"k": [1, "a", None]}
        scaled = tf.cast(batch.image, tf.float64) * batch.scale
        mapping = defaultdict(list, total=tf.reduce_sum(points.x))
        return (
            Batch(scaled, batch.label + more[0]),
            [Point(points.y, None), OrderedDict(b=key, a=rest["extra"] * 2)],
            mapping,
            {"number": 3, "text": "constant", "array": np.arange(3)},
        )

    arguments = (Batch(np.ones((7, 2)), np.arange(7)), Point(rows(7), rows(2)), {"k": [1, "a", None]}, np.int64(5))
    keywords = {"key": rows(7), "extra": rows(7)}
    parallel = gs.parallelize(nested, devices=3)
    expected, actual = nested(*arguments, **keywords), parallel(*arguments, **keywords)
    assert_close(actual[:3], expected[:3])
    assert actual[3]["number"] == 3
    assert actual[3]["text"] == "constant"
    assert isinstance(actual[0], Batch)
    assert type(actual[1]) is list
    assert [type(entry) for entry in actual[1]] == [Point, OrderedDict]
    assert list(actual[1][1]) == ["b", "a"]
    assert actual[2].default_factory is list
    names = parallel.plan(*arguments, **keywords).program.input_names
    assert names == ("batch.image", "batch.label", "points.x", "points.y", "more[0]", "key", "extra")


def test_python_values_select_traces():
    parallel = gs.parallelize(lambda x, training: x * 2 if training else x, devices=2)
    assert_close(parallel(rows(4), True), rows(4) * 2)
    assert_close(parallel(rows(4), False), rows(4))
    assert_close(parallel(rows(4), training=1), rows(4) * 2)


def test_composite_tensors_run_whole():
    ragged = tf.ragged.constant([[1.0], [2.0, 3.0], []])
    sparse = tf.sparse.from_dense([[0.0, 1.0], [2.0, 0.0]])

    def uses(r, s, x):
        return r * 2, tf.sparse.to_dense(s), x + 1

    parallel = gs.parallelize(uses, devices=2)
    doubled, dense, x = parallel(ragged, sparse, rows(5))
    assert doubled.to_list() == [[2.0], [4.0, 6.0], []]
    assert_close(dense, tf.sparse.to_dense(sparse))
    assert_close(x, rows(5) + 1)


@pytest.mark.parametrize("dtype", [tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.complex64, tf.bool, tf.string])
def test_dtypes(dtype: tf.DType):
    values = tf.cast([0, 1, 2, 3, 1], tf.int32)
    x = tf.strings.as_string(values) if dtype == tf.string else tf.cast(values, dtype)
    check(lambda x: (x, tf.reverse(x, [0]), tf.equal(x, x[0])), x, sharded="Equal")


@pytest.mark.sampled(5)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 33])
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_any_number_of_rows(count: int, devices: int):
    def f(x, y):
        centred = x - tf.reduce_mean(x, 0)
        return centred, tf.reduce_max(x, 1), tf.reduce_sum(y), tf.concat([x, x], 0), tf.shape(x)

    parallel = gs.parallelize(f, devices=devices)
    assert_close(parallel(rows(count, 3), rows(count)), f(rows(count, 3), rows(count)))
    plan = parallel.plan(rows(count, 3), rows(count))
    assert len(plan.devices) == min(count, devices)
    assert sum(plan.rows) == count
    if count:
        assert "Max" in {op.type for op in plan.sharded_ops}


# Options


def received(x: np.ndarray, **options: Any) -> dict[str, list[float]]:
    """Return the first column of what each device got: the emitted graph is run, each shard's negation is fetched."""
    parallel = gs.parallelize(lambda x: tf.negative(x), **options)
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(parallel.graph_def(x), name="")
    negatives = [op for op in graph.get_operations() if op.type == "Neg"]
    placeholder = next(op for op in graph.get_operations() if op.type == "Placeholder")
    config = tf.compat.v1.ConfigProto(device_count={"CPU": 5})
    with tf.compat.v1.Session(graph=graph, config=config) as session:
        pieces = session.run([op.outputs[0] for op in negatives], {placeholder.outputs[0]: x})
    assert len({op.device for op in negatives}) == len(negatives)
    return {op.device[-5:]: (-piece[:, 0]).tolist() for op, piece in zip(negatives, pieces, strict=True)}


def test_every_shard_receives_its_rows_in_order():
    x = np.arange(12.0).reshape(6, 2)
    assert received(x, devices=3, shares=[1, 3, 2]) == {"CPU:0": [0.0], "CPU:1": [2.0, 4.0, 6.0], "CPU:2": [8.0, 10.0]}


def test_weights_and_zero_weights():
    x = np.arange(8.0).reshape(8, 1)
    found = received(x, devices=3, shares=[3, 0, 1])
    assert found == {"CPU:0": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "CPU:2": [6.0, 7.0]}
    check(lambda x: x * 2, x, shares=[3, 0, 1])


def test_split_by_name_axis_and_prefix():
    def f(x, y, mask):
        return tf.matmul(x["a"], y, transpose_a=True), tf.reduce_sum(mask), x["b"] * 2

    x, y, mask = {"a": rows(7, 2), "b": rows(2, 7)}, rows(7, 4), rows(7)
    parallel = gs.parallelize(f, devices=3, split={"x": {"a": 0, "b": 1}, "mask": None})
    assert_close(parallel(x, y, mask), f(x, y, mask))
    layouts = [str(layout) for layout in parallel.plan(x, y, mask).input_layouts]
    assert layouts == ["shard(0)", "shard(1)", "shard(0)", "whole"]


@pytest.mark.parametrize("split", [0, 1, -1, None, {"x": None}, {"y": 0}, (1, None)])
def test_results_never_depend_on_split(split: Any):
    def f(x, y):
        return tf.nn.softmax(x) @ y, tf.reduce_mean(x, 0)

    check(f, rows(6, 6), rows(6, 6), split=split)


def test_home():
    w = tf.Variable(tf.ones(3, tf.float64))

    def f(x):
        return tf.reduce_sum(x * w)

    parallel = check(f, rows(6, 3), devices=["CPU:1", "CPU:2"], tuning={"default_device": "CPU:3"}, sharded="Mul")
    assert parallel.default_device == "/device:CPU:3"
    reduces = [n.device for n in parallel.graph_def(rows(6, 3)).node if n.op == "AddN"]
    assert reduces == ["/device:CPU:3"]


def test_every_emitted_node_has_a_device_and_the_graph_checks():
    w = tf.Variable(tf.ones((3, 3), tf.float64))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    parallel = gs.parallelize(step, devices=3)
    graph = parallel.graph_def(rows(8, 3))
    assert all(node.device for node in graph.node)
    products = {n.name.split("/", 1)[0]: n.device for n in graph.node if n.op == "MatMul"}
    assert products == {f"shard_{d}": f"/device:CPU:{d}" for d in range(3)}


def test_a_warning_names_what_makes_it_trace_again_and_again():
    parallel = gs.parallelize(lambda x, factor: x * factor, devices=2)
    for count in range(2, 9):
        parallel(rows(count), 2)
    with pytest.warns(gs.errors.RetracingWarning) as caught:
        parallel(rows(9), 2)
    assert str(caught[0].message).splitlines()[:2] == [
        "<lambda> has been called with 8 signatures, and has a plan for each:",
        "  - x: float64[2], float64[3], float64[4], float64[5], ... (8 in all)",
    ]
    parallel(rows(10), 2)  # said once


def test_an_outer_function_calls_the_step_and_does_not_take_it_in():
    v, read = tf.Variable(1.0, dtype=tf.float64), tf.Variable(2.0, dtype=tf.float64)

    def f(x):
        v.assign_add(tf.reduce_sum(x) * read)
        return tf.square(x) * v

    parallel, x = gs.parallelize(f, devices=3), rows(7)

    @tf.function
    def outer(x):
        before = v.read_value()
        first, second = parallel(x), parallel(x)
        return before, first, second, v.read_value()

    results = outer(x)
    assert_close(v.read_value(), 1.0 + 4.0 * tf.reduce_sum(x))
    v.assign(1.0)
    assert_close(results, (tf.constant(1.0, tf.float64), f(x), f(x), v.read_value()))
    graph = outer.get_concrete_function(x).graph
    calls = [op for op in graph.get_operations() if "PartitionedCall" in op.type]
    assert len(calls) == 2
    inner = {id(handle): placeholder.name for handle, placeholder in graph.captures}
    only_read = {call.inputs[i].name for call in calls for i in call.get_attr("_read_only_resource_inputs")}
    assert only_read == {inner[id(read.handle)]}
    bodies = [f for f in graph.as_graph_def().library.function if "graphsplit" in f.signature.name]
    assert [body.attr["_noinline"].b for body in bodies] == [True]
    assert len({node.device for node in bodies[0].node_def if node.op == "Square"}) == 3


class Centred:
    """Stands for what TensorFlow converts to a tensor when it has to: a distribution, by its mean."""

    def __init__(self, mean):
        self.mean = mean


def test_what_converts_to_a_tensor_is_returned_as_one():
    tf.register_tensor_conversion_function(Centred, lambda value, dtype=None, name=None, as_ref=False: value.mean)
    parallel = gs.parallelize(lambda x: {"found": Centred(tf.tanh(x)), "n": 3}, devices=3)
    check_x = rows(7)
    assert_close(parallel(check_x), {"found": tf.tanh(check_x), "n": 3})
    assert "Tanh" in sharded_types(parallel, check_x)


def test_no_variables_are_nothing_to_lay_out():
    gs.set_variable_layout([], "sharded", devices=2)


NARROW = {
    "qint8": lambda x: tf.quantization.quantize(x, 0.0, 8.0, tf.qint8).output,
    "int4": lambda x: tf.cast(tf.cast(x, tf.int32), tf.dtypes.experimental.int4),
    "uint4": lambda x: tf.cast(tf.cast(x, tf.int32), tf.dtypes.experimental.uint4),
}


@pytest.mark.parametrize("name", NARROW)
def test_types_that_tensorflow_cannot_cut_stay_whole(name: str):
    x = tf.reshape(tf.range(14.0) % 7, (7, 2))
    narrow = NARROW[name](x)

    def plain(q):
        return tf.cast(tf.bitcast(q, tf.int8) if name == "qint8" else tf.cast(q, tf.int32), tf.float32)

    def f(x, q):
        return plain(NARROW[name](x)), plain(q) * tf.tanh(x), tf.identity(q)

    parallel = gs.parallelize(f, devices=3)
    found, expected = parallel(x, narrow), tf.function(f)(x, narrow)
    assert_close(found[:2], expected[:2])
    assert found[2].dtype == narrow.dtype
    assert_close(plain(found[2]), plain(narrow))
    assert "Tanh" in sharded_types(parallel, x, narrow)


def test_a_function_is_rewritten_once_for_one_device_and_for_several(monkeypatch: pytest.MonkeyPatch):
    """AutoGraph takes a twentieth of a second for a function of ten lines."""
    rewritten, transform = [], PyToTF.transform_ast
    monkeypatch.setattr(PyToTF, "transform_ast", lambda *own: rewritten.append(own[1].name) or transform(*own))

    def step(x):
        return tf.tanh(x) if tf.reduce_sum(x) > 0 else x

    x = rows(7, 3)
    assert_close(gs.parallelize(step, devices=2)(x), tf.function(step)(x))
    assert rewritten == ["step"]
