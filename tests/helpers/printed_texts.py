"""What graphsplit prints for programs: plans, predictions, pictures of layouts. `tests/golden/` has each as reviewed.

`python ci/printed_texts.py` records all of them anew; the diff is reviewed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

import graphsplit as gs
from graphsplit.inspect.views.layout_views import picture
from tests.helpers.emitted_graphs import plan_of
from tests.helpers.law import rows

FOLDER = Path(__file__).parent.parent / "golden"

# Programs whose plans say, together, all that a plan of `emitted_programs.py` says.
PLANS = [
    *("sgd", "one device", "keras adam sharded", "statistics and a counter", "convolutions", "lstm, any rows"),
    *("inference mirrored", "buckets", "half precision", "patterns", "any rows and lengths", "split by name"),
    *("split along the second axis", "reductions", "joins", "words", "segments", "choice", "scan", "each row"),
    *("rows of a table", "rows of a mirrored table", "rows against rows", "columns in exchange for rows"),
    *("whole rows", "blocks of rows, any rows", "loop at home", "loop that writes, any rows", "branch that writes"),
    *("micro-batches", "convolutions in micro-batches", "layers sharded in micro-batches", "stages found"),
    *("gpipe", "interleaved", "zero-bubble", "pipelines, any rows", "stages with devices of their own"),
    *("gpus elsewhere", "hosts elsewhere", "two hosts, mirrored", "two hosts in micro-batches"),
    *("layout chosen", "layout chosen on a mesh", "mesh, a transformer", "mesh, one row, units that are found"),
    *("mesh, decoding", "mesh, an lstm", "mesh, parts in parts", "mesh, any rows", "compiled, any rows"),
]

TEXTS: dict[str, Callable[[], Any]] = {f"plan of {name}": lambda name=name: plan_of(name) for name in PLANS}


def printed(make: Callable[[], Any]) -> Callable[[], Any]:
    TEXTS[make.__name__.replace("_", " ")] = make
    return make


def text_of(name: str) -> str:
    """Return what is printed; numbers of lines in files are left out."""
    keras.utils.set_random_seed(0)
    return f"{re.sub(r'[.]py:[0-9]+', '.py:N', str(TEXTS[name]()))}\n"


def file_of(name: str) -> Path:
    return FOLDER / f"{name.replace(' ', '_').replace(',', '')}.txt"


# Plans of what runs on one device, and why


@printed
def plan_of_an_operation_on_one_device() -> gs.inspect.Plan:
    return gs.parallelize(lambda x: (tf.unique(x).y, tf.tanh(x)), devices=2).plan(tf.TensorSpec((3,)))


@printed
def plan_of_rows_made_inside() -> gs.inspect.Plan:
    def sums(x: tf.Tensor) -> tf.Tensor:
        made = tf.random.stateless_normal((tf.shape(x)[0], 64), (1, 2), dtype=tf.float64)
        return tf.reduce_sum(tf.cumsum(tf.cumsum(made) ** 2)) + tf.reduce_sum(x)

    return gs.parallelize(sums, devices=3).plan(rows(13, 3))


@printed
def plan_of_bytes_that_follow_from_data() -> gs.inspect.Plan:
    table, more = tf.Variable(tf.ones((500, 32)), name="table"), tf.ones((32, 8))

    def embedded(ids: tf.Tensor) -> tf.Tensor:
        unique, places = tf.unique(tf.reshape(ids, [-1]))
        found = tf.reshape(tf.gather(tf.gather(table, unique), places), [-1, 6, 32])
        return tf.reduce_mean(found, 1) @ more

    return gs.parallelize(embedded, devices=2).plan(tf.TensorSpec((64, 6), tf.int64))


@printed
def plan_of_requests_for_devices() -> gs.inspect.Plan:
    """They are replaced, which a note says."""
    inner = tf.function(lambda x: tf.tanh(x))

    def requesting(x: tf.Tensor) -> tf.Tensor:
        with tf.device("CPU:1"):
            return inner(x)

    return gs.parallelize(requesting, devices=2).plan(rows(4))


@printed
def plan_of_unequal_shares_of_any_rows() -> gs.inspect.Plan:
    relu = tf.function(lambda x: tf.nn.relu(x), input_signature=[tf.TensorSpec((None, 2))])
    return gs.parallelize(relu, devices=3, shares=[1, 0, 3]).plan(tf.ones((4, 2)))


# Variables


@printed
def plan_of_variables_on_one_gpu() -> gs.inspect.Plan:
    weight = tf.Variable(tf.ones((500, 500)), name="weight")

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weight))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    return gs.parallelize(step, devices=[f"GPU:{k}" for k in range(4)]).plan(tf.TensorSpec((64, 500)))


@printed
def plan_of_a_stage_that_reads_variables_elsewhere() -> gs.inspect.Plan:
    first, second = tf.Variable(tf.ones((6, 8)), name="first"), tf.Variable(tf.ones((8, 3)), name="second")
    encode = gs.on_device(lambda x: tf.tanh(x @ first), ["CPU:2", "CPU:3"])
    return gs.parallelize(lambda x: tf.nn.relu(encode(x) @ second), devices=2).plan(tf.ones((5, 6)))


@printed
def plan_of_a_part_that_is_gathered() -> gs.inspect.Plan:
    """A decomposition needs all entries of what lies in parts along an axis."""
    table, mesh = tf.Variable(rows(11, 6), name="table"), {"batch": 2, "model": 2}
    gs.set_variable_layout(table, ("model", None), mesh=mesh)
    return gs.parallelize(lambda x: x @ tf.linalg.qr(table)[0], mesh=mesh).plan(rows(3, 11))


# Loops, and what is kept for gradients


@printed
def plan_of_a_loop_of_unknown_turns() -> gs.inspect.Plan:
    def step(x: tf.Tensor, turns: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda k, _: k < turns, lambda k, y: (k + 1, tf.tanh(y)), (0, x))[1]
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, x)

    return gs.parallelize(step, devices=2).plan(tf.ones((6, 1000)), tf.constant(3))


@printed
def plan_of_lists_of_unknown_sizes() -> gs.inspect.Plan:
    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            entries = tf.reshape(x, [-1])
            for _ in tf.range(3):
                tf.autograph.experimental.set_loop_options(shape_invariants=[(entries, tf.TensorShape([None]))])
                entries = tf.tanh(tf.boolean_mask(entries, entries > 0.0))
            loss = tf.reduce_sum(entries)
        return tape.gradient(loss, x)

    return gs.parallelize(step, devices=2).plan(tf.ones((6, 10)))


@printed
def plan_of_lists_of_lists() -> gs.inspect.Plan:
    """A loop keeps what a loop inside of it keeps."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = x
            for _ in tf.range(3):
                for _ in tf.range(4):
                    y = tf.tanh(y)
            loss = tf.reduce_sum(y)
        return tape.gradient(loss, x)

    return gs.parallelize(step, devices=2).plan(tf.ones((6, 10)))


@printed
def plan_of_nothing_to_recompute() -> gs.inspect.Plan:
    return gs.parallelize(lambda x: tf.tanh(x), devices=2, recompute="blocks").plan(rows(4, 3))


# Plans beside each other, and predictions


@printed
def comparison_of_plans() -> str:
    one, two = (plan_of(name) for name in ("inference", "inference mirrored"))
    return one.compare(two)


@printed
def prediction_of_a_product() -> gs.simulate.Prediction:
    weights = tf.Variable(tf.ones((64, 64)), name="weights")
    return gs.predict(
        lambda x: x @ weights, tf.TensorSpec((128, 64)), machine="2xH100-SXM5", devices=2, variables="replicated"
    )


@printed
def scaling_of_a_product() -> gs.simulate.Scaling:
    weights = tf.Variable(tf.ones((512, 4096)), name="weights")
    given = tf.TensorSpec((4096, 512))
    return gs.scaling(lambda x: x @ weights, given, machine="8xA100-SXM4-80GB", devices=[1, 2, 4])


# Pictures


@printed
def pictures_of_layouts() -> str:
    return "\n".join(_pictures())


def _pictures() -> Iterator[str]:
    table, scale = tf.Variable(tf.ones((1000, 64)), name="table"), tf.Variable(1.0, name="scale")
    gs.set_variable_layout(table, "sharded", devices=4)
    gs.set_variable_layout(scale, "replicated", devices=2)
    cut, mesh = tf.Variable(rows(3, 5), name="w"), {"batch": 2, "model": 2}
    gs.set_variable_layout(cut, ("batch", "model"), mesh=mesh)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="one")], name="model")
    for shown in (table, scale, cut, tf.Variable([1.0]), tf.ones((2, 2)), model):
        yield gs.visualize_layout(shown)
    step = gs.parallelize(lambda x, y, w: (x * w, y), devices=["GPU:0", "GPU:1"], split={"x": 0, "y": 1, "w": None})
    yield gs.visualize_layout(step, tf.TensorSpec([5, 3]), tf.TensorSpec([2, 5]), tf.TensorSpec([3]))
    for count in (3, 64):
        yield picture("t", [f"GPU:{d}\n{3 * d}:{3 * d + 3}" for d in range(count)], stacked=False)
