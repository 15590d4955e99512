"""Programs whose emitted graphs are recorded: small ones, which together meet all that is written into graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

import graphsplit as gs
from graphsplit.planning.costs.machine import Device, Host, Link, Machine
from tests.helpers.hosts import worker_device
from tests.helpers.law import squares_step
from tests.helpers.layout_cases import COUPLED, Optimizer, adam, deep_step, fused_adam, momentum, numbers, sgd
from tests.helpers.mesh_cases import LENGTH, PERCEPTRON, TRANSFORMER, WIDTH, perceptron, transformer
from tests.helpers.mesh_loops import DECODING, LSTM, decoding, recurrent
from tests.helpers.mesh_units import LENGTH as WORDS
from tests.helpers.mesh_units import MERGED, by_name
from tests.helpers.mesh_units import trained as units

v1 = tf.compat.v1
Made = tuple[Callable[..., Any], Sequence[Any]]


@dataclass(frozen=True)
class Program:
    """A function and how it is run on several devices.

    Attributes:
      make: returns the function and its variables.
      given: shapes of its arguments, or specifications, or values.
      devices, options: of `parallelize`.
      layout: of its variables, or of them and of what drops them after the forward pass.
      hosts: how many devices each of several hosts has, if the devices are on hosts.
      before: shapes of the calls before, for those who trace again.
      way: `"call"`; `"tape"`, for gradients from outside; `"gradients of gradients"`; `"map"`, with batches that are
        sent ahead.
    """

    make: Callable[[], Made]
    given: Sequence[Any]
    devices: Any = 3
    layout: str | Mapping[str, Any] | None = None
    reshard: bool = True
    hosts: tuple[int, ...] = ()
    before: Sequence[Any] = ()
    way: str = "call"
    options: Mapping[str, Any] = field(default_factory=dict)


AT_ONCE = {"exchange_bytes": 1 << 19}  # as between GPUs


def program(make: Callable[[], Made], *given: Any, **options: Any) -> Program:
    own = {name: options.pop(name) for name in Program.__dataclass_fields__ if name in options}
    return Program(make, given, options=options, **own)


def variable(*shape: int, name: str = "weight", dtype: tf.DType = tf.float32) -> tf.Variable:
    return tf.Variable(tf.cast(0.3 * numbers(*shape), dtype), name=name)


# Training steps


def step(update: Callable[..., None], **options: Any) -> Callable[[], Made]:
    def make() -> Made:
        made = Optimizer(update, **options)
        return made.step, made.variables

    return make


def deep() -> Made:
    """Return a training step of layers whose weights are large enough to be divided."""
    weights = [variable(70, 70, name=f"weight_{k}") for k in range(3)]
    return deep_step(weights), weights


def with_biases() -> Made:
    kernels = [variable(70, 70, name=f"kernel_{k}") for k in range(5)]
    biases = [variable(70, name=f"bias_{k}") for k in range(5)]

    def forward(x: tf.Tensor, *variables: tf.Variable) -> tf.Tensor:
        for kernel, bias in zip(variables[:5], variables[5:], strict=True):
            x = tf.nn.tanh(tf.nn.bias_add(x @ kernel, bias))
        return x

    return trained(forward, *kernels, *biases)


def two_layers(x: tf.Tensor, first: tf.Variable, second: tf.Variable) -> tf.Tensor:
    return tf.nn.relu(x @ first) @ second


def named_layers() -> Made:
    table, kernel, bias = variable(600, 70, name="table"), variable(70, 4, name="kernel"), variable(4, name="bias")

    def run(tokens: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = tf.reduce_mean(tf.nn.embedding_lookup(table, tokens), 1)
            loss = tf.reduce_mean((h @ kernel + bias - y) ** 2)
        by_table, by_kernel, by_bias = tape.gradient(loss, [table, kernel, bias])
        table.scatter_sub(tf.IndexedSlices(0.1 * by_table.values, by_table.indices))
        kernel.assign_sub(0.1 * by_kernel)
        bias.assign_sub(0.1 * by_bias)
        return loss

    return run, [table, kernel, bias]


def trained(forward: Callable[..., tf.Tensor], *variables: tf.Variable) -> Made:
    """Return a training step of a function of a batch and variables."""

    def run(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(forward(x, *variables) ** 2)
        for one, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            one.assign_sub(0.1 * gradient)
        return loss

    return run, variables


def dense() -> Made:
    return trained(two_layers, variable(6, 8), variable(8, 3))


def every_pair(views: int) -> Callable[[], Made]:
    """Return what makes a step in which each row meets all rows: all-gather, all-to-all and reduce-scatter.

    Args:
      views: how many batches, one after the other, these rows are of.
    """

    def forward(x: tf.Tensor, *weights: tf.Variable) -> tf.Tensor:
        z = tf.concat([tf.tanh(x @ weight) for weight in weights[:views]], 0)
        other = z if views > 1 else tf.nn.softmax(tf.tanh(x @ weights[-1]), 0)
        return tf.reduce_logsumexp(z @ tf.transpose(other), 1)

    return lambda: trained(forward, variable(64, 64), variable(64, 64))


def with_dropout(drop: Callable[..., tf.Tensor]) -> Callable[[], Made]:
    return lambda: trained(lambda x, a, b: drop(tf.nn.relu(x @ a)) @ b, variable(6, 8), variable(8, 3))


def generator() -> Made:
    draws = tf.random.Generator.from_seed(3)
    return lambda x: tf.tanh(x + draws.normal(tf.shape(x))), [draws.state]


def half_precision() -> Made:
    first, second = variable(6, 8), variable(8, 3)
    return trained(lambda x, a, b: two_layers(*[tf.cast(t, tf.bfloat16) for t in (x, a, b)]), first, second)


def accumulating() -> Made:
    """Return a step that adds up statistics of the batch, and a counter that something waits for."""
    mean, count = variable(6, name="mean"), tf.Variable(0, name="count")

    def run(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        count.assign_add(1)
        mean.assign(0.9 * mean + 0.1 * tf.reduce_mean(x, 0))
        return x - mean, tf.cast(count, tf.float32) * tf.reduce_max(x)

    return run, [mean, count]


# Keras


def convolutions() -> Made:
    layers = [keras.layers.Conv2D(4, 3, use_bias=False), keras.layers.BatchNormalization(), keras.layers.ReLU()]
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(2)]
    return squares_step(keras.Sequential([keras.Input((6, 6, 3)), *layers]))


def keras_adam() -> Made:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(90, "gelu"), keras.layers.Dropout(0.2)])
    optimizer = keras.optimizers.Adam(0.01, global_clipnorm=1.0)
    optimizer.build(model.trainable_variables)

    def run(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return run, [*model.variables, *optimizer.variables]


def lstm() -> Made:
    model = keras.Sequential([keras.Input((3, 4)), keras.layers.LSTM(5), keras.layers.Dense(2)])
    return squares_step(model)


def inference() -> Made:
    layers = [keras.layers.Dense(8, "relu"), keras.layers.LayerNormalization(), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    return model, model.variables


# Loops and branches


def arrays() -> Made:
    weight = variable(3, 3)

    def forward(x: tf.Tensor, weight: tf.Variable) -> tf.Tensor:
        state, given = tf.zeros_like(x[:, 0]), tf.TensorArray(tf.float32, 4).unstack(tf.transpose(x, [1, 0, 2]))
        made = tf.TensorArray(tf.float32, 4)
        for t in tf.range(4):
            state = tf.tanh((state + given.read(t)) @ weight)
            made = made.write(t, state)
        return tf.transpose(made.stack(), [1, 0, 2])

    return trained(tf.function(forward), weight)


def branch_that_writes() -> Made:
    weight, count = variable(3, 3), tf.Variable(0.0)

    def run(x: tf.Tensor) -> tf.Tensor:
        if tf.reduce_sum(x) > 0.0:
            count.assign_add(tf.reduce_mean(x))
            y = tf.tanh(x @ weight)
        else:
            y = x * 2.0
        return y + count

    return run, [weight, count]


def update_in_a_branch() -> Made:
    """Return a step that adds gradients up, and updates its weight by two of them in every second call."""
    weight, total, count = variable(13, 8), variable(13, 8, name="total"), tf.Variable(0)

    def run(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ weight) ** 2)
        gradient = tape.gradient(loss, weight)

        def update() -> tf.Tensor:
            weight.assign_sub(0.05 * (total + gradient))
            total.assign(tf.zeros_like(total))
            return loss

        def add() -> tf.Tensor:
            total.assign_add(gradient)
            return loss

        result = tf.cond(count % 2 == 1, update, add)
        count.assign_add(1)
        return result

    return run, [weight, total, count]


def loop_that_writes() -> Made:
    count = tf.Variable(0.0)

    def run(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        for _ in tf.range(3):
            count.assign_add(tf.reduce_sum(x))
            x = tf.tanh(x)
        return tf.reduce_sum(x), x + count

    return run, [count]


def loop_at_home() -> Made:
    """Return a loop that goes on until all of the batch is small, which needs a sum in every iteration."""

    def run(x: tf.Tensor) -> tf.Tensor:
        while tf.reduce_sum(tf.abs(x)) > 1.0:
            x = x / 2.0 - tf.reduce_mean(x, 0)
        return x

    return run, []


def choice() -> Made:
    weight = variable(3, 3)

    def run(x: tf.Tensor, k: tf.Tensor) -> tf.Tensor:
        def rows() -> tf.Tensor:
            return tf.tanh(x @ weight)

        def statistics() -> tf.Tensor:
            return x - tf.reduce_mean(x, 0)

        def backwards() -> tf.Tensor:
            return x[::-1]

        return tf.switch_case(k, [rows, statistics, backwards])

    return run, [weight]


def each_row() -> Made:
    weight = variable(3, 3)
    return lambda x: tf.map_fn(lambda row: tf.tanh(row[None] @ weight)[0], x), [weight]


def scan() -> Made:
    return lambda x: tf.scan(lambda a, b: tf.tanh(a + b), tf.transpose(x, [1, 0, 2]))[-1], []


# What is computed


def compiled_inside() -> Made:
    return trained(tf.function(two_layers, jit_compile=True), variable(6, 8), variable(8, 3))


def attention() -> Made:
    def forward(x: tf.Tensor, query: tf.Variable, key: tf.Variable, value: tf.Variable) -> tf.Tensor:
        q, k, v = (tf.einsum("btd,dhk->bhtk", x, weight) for weight in (query, key, value))
        scores = tf.nn.softmax(tf.einsum("bhtk,bhsk->bhts", q, k) / 2.0)
        return tf.einsum("bhts,bhsk->bthk", scores, v)

    return trained(forward, *[variable(4, 2, 3, name=name) for name in ("query", "key", "value")])


def rows_against_rows(x: tf.Tensor) -> tf.Tensor:
    x = tf.math.l2_normalize(x, 1)
    return tf.reduce_mean(tf.nn.log_softmax(tf.matmul(x, x, transpose_b=True)))


def reductions(x: tf.Tensor) -> Any:
    found = {
        "sum": tf.reduce_sum(x, 0),
        "mean": tf.reduce_mean(x),
        "max": tf.reduce_max(x, 0),
        "any": tf.reduce_any(x > 1),
    }
    return found | {"product": tf.reduce_prod(x, 0), "variance": tf.math.reduce_variance(x, 0), "best": tf.argmax(x, 1)}


def joins(x: tf.Tensor, y: tf.Tensor) -> Any:
    return tf.concat([x, y], 0), tf.stack([x, y], 1), tf.concat([x, y], 1), tf.split(x, 2, 1), tf.tile(x, [1, 2])


def blocks(x: tf.Tensor) -> tf.Tensor:
    """Compute with all rows of each step, one step behind the other, and what is sorted by one device."""
    rows = tf.tanh(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, 4]))
    return rows * tf.sort(rows, 0)


def square(x: tf.Tensor) -> tf.Tensor:
    """Compute what all shards have, and of which each has rows."""
    total = tf.reduce_sum(tf.tanh(x), 0)
    return tf.nn.softmax(x - total) * total[:, None]


def whole_rows(x: tf.Tensor) -> Any:
    """Compute what needs all rows, on one device."""
    return tf.sort(x, 0), tf.cumsum(x, 0), x[::-1][:3], tf.nn.top_k(tf.transpose(x), 2).values, tf.unique(x[:, 0]).y


def segments(x: tf.Tensor) -> tf.Tensor:
    return tf.math.unsorted_segment_sum(x, tf.range(tf.shape(x)[0]) % 4, 4) + tf.gather(x, [0, 2, 1, 3])


def words() -> Made:
    keys, values = tf.constant(["a", "b", "c"]), tf.constant([1, 2, 3], tf.int64)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), 0)
    return lambda x: tf.one_hot(table.lookup(tf.strings.lower(x)), 4), []


def on_mesh(make: Callable[[], tuple[list[tf.Variable], Callable[..., Any]]]) -> Callable[[], Made]:
    """Return what makes a program of the tests of meshes."""

    def made() -> Made:
        variables, function = make()
        return function, variables

    return made


def of(function: Callable[..., Any]) -> Callable[[], Made]:
    return lambda: (function, [])


def with_signature() -> Made:
    weight = variable(6, 3)
    return tf.function(lambda x: tf.tanh(x @ weight), input_signature=[tf.TensorSpec([None, 6])]), [weight]


# Stages


def staged(*devices: Any, forward_only: bool = False) -> Callable[[], Made]:
    def make() -> Made:
        weights = [variable(6, 6, name=f"weight_{k}") for k in range(2 * len(devices))]

        def part(k: int) -> Callable[[tf.Tensor], tf.Tensor]:
            def stage(h: tf.Tensor) -> tf.Tensor:
                return tf.tanh(tf.tanh(h @ weights[2 * k]) @ weights[2 * k + 1])

            placed = gs.on_device(stage, devices[k])
            placed.__name__ = f"stage{k}"
            return placed

        parts = [part(k) for k in range(len(devices))]

        def forward(x: tf.Tensor, *_: tf.Variable) -> tf.Tensor:
            for one in parts:
                x = one(x)
            return x

        return (forward, weights) if forward_only else trained(forward, *weights)

    return make


# Graphs and SavedModels


def training_graph() -> Any:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [None, 4], name="x")
        weight = v1.get_variable("weight", initializer=tf.fill([4, 3], 0.5), use_resource=True)
        loss = tf.reduce_mean(tf.square(tf.tanh(tf.matmul(x, weight))), name="loss")
        v1.train.MomentumOptimizer(0.1, 0.9).minimize(loss, name="train")
        return gs.serving.transpile_graph_def(graph.as_graph_def(), "x", ["loss", "train"], 3)


def frozen_graph() -> Any:
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, [7, 4], name="x")
        kept = v1.placeholder(tf.float32, [4, 2], name="kept")
        tf.nn.top_k(tf.matmul(tf.nn.relu(x), kept), name="top")
        return gs.serving.transpile_graph_def(graph.as_graph_def(), ["x", "kept"], ["top:0"], 3, split={"kept": None})


def saved_model(counts: bool, **options: Any) -> Callable[[str], None]:
    """Return what writes a SavedModel, transpiled, into `several` in a folder."""

    def write(folder: str) -> None:
        model = tf.Module()
        model.weight, model.count = variable(6, 3), tf.Variable(0)

        def scores(x: tf.Tensor) -> dict[str, tf.Tensor]:
            if counts:
                model.count.assign_add(1)
            return {"scores": tf.nn.softmax(tf.tanh(x) @ model.weight), "largest": tf.reduce_max(x)}

        model.scores = tf.function(scores, input_signature=[tf.TensorSpec([None, 6])])
        tf.saved_model.save(model, f"{folder}/single", model.scores)
        gs.serving.transpile_saved_model(f"{folder}/single", f"{folder}/several", 3, **options)

    return write


GRAPHS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "graph_def frozen": (frozen_graph, ["top"]),
    "graph_def training": (training_graph, ["loss", "train"]),
}
SAVED_MODELS: dict[str, Callable[[str], None]] = {
    "saved model": saved_model(counts=True),
    "saved model with a weight on each device": saved_model(counts=False, replicate_weights=True),
}

XY = (11, 7), (11, 5)
CORES = Machine(
    "cores",
    Device("core", "CPU", {"float32": 1e9}, {"float32": 1e9}, 1e12, 1e9),
    64,
    Link("memory", 1e9, 0.0, shared=True),
    host=Host(threads=64),
)
ELSEWHERE = [worker_device(task, number) for task in range(2) for number in range(2)]
GPUS = [f"GPU:{number}" for number in range(4)]
TOKENS = tf.TensorSpec([9, 3], tf.int32), tf.TensorSpec([9, 4])
PATTERNS = {"table": "sharded", "kernel": "replicated", "*": "home"}
TWO = [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]]
SQUARE = {"batch": 2, "model": 2}

PROGRAMS: dict[str, Program] = {
    # optimizers
    "sgd": program(step(sgd), *XY),
    "momentum": program(step(momentum), *XY),
    "adam": program(step(adam), *XY),
    "adam fused": program(step(fused_adam), *XY),
    "global norm": program(step(**COUPLED["global_norm"]), *XY, devices=2),
    "lamb": program(step(**COUPLED["lamb"]), *XY),
    "one device": program(dense, (7, 6), devices=1),
    "half precision": program(half_precision, (7, 6)),
    "statistics and a counter": program(accumulating, (7, 6)),
    # Keras
    "convolutions": program(convolutions, (7, 6, 6, 3)),
    "convolutions, any rows": program(convolutions, (None, 6, 6, 3), devices=2),
    "convolutions in micro-batches": program(convolutions, (11, 6, 6, 3), devices=2, micro_batches=2),
    "convolutions compiled": program(convolutions, (7, 6, 6, 3), devices=2, jit_compile=True),
    "convolutions at once": program(convolutions, (7, 6, 6, 3), tuning=AT_ONCE),
    "convolutions at once, any rows": program(convolutions, (None, 6, 6, 3), tuning=AT_ONCE),
    "convolutions at once in micro-batches": program(
        convolutions, (11, 6, 6, 3), devices=2, micro_batches=2, tuning=AT_ONCE
    ),
    "convolutions at once compiled": program(convolutions, (7, 6, 6, 3), jit_compile=True, tuning=AT_ONCE),
    "keras adam": program(keras_adam, (9, 6)),
    "keras adam sharded": program(keras_adam, (9, 6), layout="sharded"),
    "inference": program(inference, (7, 6)),
    "inference mirrored": program(inference, (7, 6), layout="replicated"),
    "lstm": program(lstm, (7, 3, 4)),
    "lstm, any rows": program(lstm, (None, 3, 4), devices=2),
    # layouts
    "adam sharded": program(step(adam), *XY, layout="sharded"),
    "adam mirrored": program(step(adam), *XY, layout="replicated"),
    "global norm sharded": program(step(**COUPLED["global_norm"]), *XY, layout="sharded"),
    "lamb mirrored": program(step(**COUPLED["lamb"]), *XY, layout="replicated", devices=2),
    "orthogonal sharded": program(step(**COUPLED["orthogonal"]), *XY, layout="sharded"),
    "branch that updates, sharded": program(update_in_a_branch, (7, 13), layout="sharded"),
    "branch that updates, mirrored, any rows": program(update_in_a_branch, (None, 13), layout="replicated"),
    "branch that updates, compiled": program(update_in_a_branch, (7, 13), layout="sharded", jit_compile=True),
    "layers sharded": program(deep, (10, 70), layout="sharded"),
    "layers sharded, kept": program(deep, (10, 70), layout="sharded", reshard=False),
    "layout chosen": program(deep, (64, 70), devices=4, plan=CORES),
    "layout chosen on a mesh": program(deep, (1, 70), devices=4, plan=CORES),
    "patterns": program(named_layers, *TOKENS, layout=PATTERNS),
    "patterns, any rows": program(
        named_layers, tf.TensorSpec([None, 3], tf.int32), (None, 4), layout=PATTERNS, devices=2
    ),
    "rows of a table": program(named_layers, *TOKENS, devices=2),
    "rows of a mirrored table": program(named_layers, *TOKENS, layout={"table": "replicated", "*": "home"}, devices=2),
    "layers sharded in micro-batches": program(deep, (10, 70), layout="sharded", micro_batches=2),
    "layers sharded in many micro-batches": program(deep, (2000, 70), layout="sharded", micro_batches=4),
    "sharded in micro-batches": program(step(momentum), *XY, layout="sharded", micro_batches=2),
    "mirrored in micro-batches": program(step(sgd), *XY, layout="replicated", micro_batches=3, devices=2),
    "sharded, compiled": program(step(sgd), *XY, layout="sharded", devices=2, jit_compile=True),
    # rows
    "seven rows on three": program(dense, (7, 6)),
    "two rows on three": program(dense, (2, 6)),
    "any rows": program(dense, (None, 6)),
    "any rows in micro-batches": program(dense, (None, 6), devices=2, micro_batches=2),
    "any rows and lengths": program(attention, (None, None, 4), devices=2),
    "rows of a signature": program(with_signature, (7, 6)),
    "traced again": program(dense, (8, 6), before=[(7, 6)], tuning={"reduce_retracing": True}),
    "weights": program(dense, (11, 6), shares=[3, 1, 2]),
    "a weight of none": program(dense, (None, 6), shares=[3, 0, 2]),
    "split along the second axis": program(of(reductions), (5, 7), split=1),
    "split by name": program(of(lambda x, y: tf.tanh(x) @ y), (7, 7), (7, 4), split={"x": 0, "y": None}),
    "at home elsewhere": program(dense, (7, 6), tuning={"default_device": "CPU:4"}),
    "strict": program(dense, (7, 6), strict=True),
    "micro-batches": program(dense, (11, 6), devices=2, micro_batches=3),
    "exchanges in micro-batches": program(every_pair(1), (97, 64), micro_batches=2, shares=[3, 1, 2]),
    "exchanges of two views in micro-batches": program(every_pair(2), (97, 64), devices=2, micro_batches=2),
    "buckets": program(with_biases, (10, 70)),
    "small buckets": program(with_biases, (10, 70), tuning={"bucket_bytes": 600}),
    "no buckets": program(with_biases, (10, 70), tuning={"bucket_bytes": 0}),
    # random numbers
    "dropout": program(with_dropout(lambda h: tf.nn.dropout(h, 0.5)), (7, 6)),
    "dropout without state": program(
        with_dropout(lambda h: tf.nn.experimental.stateless_dropout(h, 0.5, [1, 2])), (7, 6)
    ),
    "generator, any rows": program(generator, (None, 6)),
    # loops and branches
    "arrays": program(arrays, (7, 4, 3)),
    "arrays, any rows": program(arrays, (None, 4, 3), devices=2),
    "branch that writes": program(branch_that_writes, (7, 3)),
    "loop that writes, any rows": program(loop_that_writes, (None, 3)),
    "loop at home": program(loop_at_home, (7, 3)),
    "choice": program(choice, (7, 3), tf.TensorSpec([], tf.int32)),
    "each row": program(each_row, (7, 3)),
    "each row, any rows": program(each_row, (None, 3)),
    "scan": program(scan, (7, 4, 3)),
    "loop compiled": program(scan, (7, 4, 3), devices=2, jit_compile=True),
    # what is computed
    "attention": program(attention, (5, 4, 4)),
    "rows against rows": program(of(rows_against_rows), (7, 4)),
    "reductions": program(of(reductions), (7, 4)),
    "reductions, any rows": program(of(reductions), (None, 4)),
    "joins": program(of(joins), (7, 4), (7, 4)),
    "joins, any rows": program(of(joins), (None, 4), (None, 4)),
    "blocks of rows": program(of(blocks), (7, 3, 4)),
    "blocks of rows, any rows": program(of(blocks), (None, 3, 4)),
    "rows and columns": program(of(square), (7, 7)),
    "columns in exchange for rows": program(of(lambda x: tf.cumsum(tf.tanh(x), 0) * 2.0), (64, 5000)),
    "whole rows": program(of(whole_rows), (7, 4)),
    "segments": program(of(segments), (7, 4)),
    "words": program(words, tf.TensorSpec([7], tf.string)),
    # stages
    "a stage": program(staged("CPU:2"), (7, 6), devices=2),
    "stages with devices of their own": program(staged(*TWO), (7, 6), devices=TWO[0]),
    "stages found": program(deep, (10, 70), devices=4, stages=2, micro_batches=2),
    "gpipe": program(staged("CPU:0", "CPU:1"), (8, 6), devices=["CPU:0"], micro_batches=3, schedule="gpipe"),
    "1f1b": program(staged("CPU:0", "CPU:1"), (8, 6), devices=["CPU:0"], micro_batches=3, schedule="1f1b"),
    "interleaved": program(
        staged("CPU:1", "CPU:2", "CPU:1", "CPU:2"), (8, 6), devices=["CPU:0"], micro_batches=4, schedule="interleaved"
    ),
    "zero-bubble": program(deep, (10, 70), devices=2, stages=2, micro_batches=3, schedule="zero-bubble"),
    "pipelines, any rows": program(deep, (None, 70), devices=4, stages=2, micro_batches=2, schedule="1f1b"),
    # hosts
    "gpus elsewhere": program(dense, (9, 6), devices=GPUS),
    "hosts elsewhere": program(dense, (9, 6), devices=ELSEWHERE),
    "hosts elsewhere, any rows": program(dense, (None, 6), devices=ELSEWHERE),
    "two hosts": program(deep, (10, 70), hosts=(2, 3)),
    "two hosts, sharded": program(step(adam), *XY, layout="sharded", hosts=(2, 2)),
    "two hosts, mirrored": program(step(momentum), *XY, layout="replicated", hosts=(1, 3)),
    "two hosts in micro-batches": program(step(sgd), *XY, hosts=(2, 2), micro_batches=2),
    "two hosts at once": program(convolutions, (7, 6, 6, 3), hosts=(2, 3), tuning=AT_ONCE),
    "two hosts at once, any rows": program(convolutions, (None, 6, 6, 3), hosts=(2, 3), tuning=AT_ONCE),
    # a second axis of the mesh: one that is planned first, and rows
    "mesh, a transformer": program(
        on_mesh(lambda: transformer(3)),
        tf.TensorSpec([5, LENGTH], tf.int64),
        layout=TRANSFORMER,
        devices=4,
        mesh=SQUARE,
    ),
    "mesh, one row, units that are found": program(
        on_mesh(lambda: units(3, fused=True)),
        tf.TensorSpec([5, WORDS, WIDTH], tf.float64),
        layout=by_name(MERGED),
        devices=2,
        mesh={"batch": 1, "model": 2},
    ),
    "mesh, decoding": program(
        on_mesh(lambda: decoding("scatter")),
        tf.TensorSpec([5], tf.int64),
        layout={**DECODING, "*": "home"},
        devices=4,
        mesh=SQUARE,
    ),
    "mesh, an lstm": program(
        on_mesh(recurrent),
        tf.TensorSpec([5, 3, WIDTH], tf.float64),
        layout={**LSTM, "*": "home"},
        devices=4,
        mesh=SQUARE,
    ),
    "mesh, parts in parts": program(
        on_mesh(perceptron),
        tf.TensorSpec([5, WIDTH], tf.float64),
        layout={name: own if name == "*" else (own, "sharded") for name, own in PERCEPTRON.items()} | {"*": "sharded"},
        devices=4,
        mesh=SQUARE,
    ),
    "mesh, any rows": program(
        on_mesh(perceptron), tf.TensorSpec([None, WIDTH], tf.float64), layout=PERCEPTRON, devices=4, mesh=SQUARE
    ),
    # compiled
    "compiled": program(step(sgd), *XY, jit_compile=True),
    "compiled, any rows": program(dense, (None, 6), devices=2, jit_compile=True),
    "compiled inside": program(compiled_inside, (7, 6)),
    "compiled in micro-batches": program(dense, (8, 6), devices=2, micro_batches=2, jit_compile=True),
    # gradients from outside, and batches that travel ahead: these run
    "tape": program(inference, (7, 6), way="tape"),
    "tape, any rows": program(with_signature, (7, 6), way="tape"),
    "tape over loops": program(arrays, (7, 4, 3), way="tape", devices=2),
    "tape over mirrored variables": program(inference, (7, 6), way="tape", layout="replicated"),
    "tape in micro-batches": program(inference, (7, 6), way="tape", devices=2, micro_batches=2),
    "tape over stages": program(staged("CPU:0", "CPU:1", forward_only=True), (7, 6), way="tape", devices=["CPU:0"]),
    "gradients of gradients": program(inference, (7, 6), way="gradients of gradients", devices=2),
    "map": program(dense, (7, 6), way="map"),
}
