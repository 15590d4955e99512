"""The longest chain of exchanges of a plan: that of the emitted graph, and what a prediction charges."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks.chain_networks import NETWORKS as KNOWN
from benchmarks.chains import PAGE, measure, versions
from graphsplit.core.user_code import calling_class
from graphsplit.emission import emit
from graphsplit.planning.chains import ExchangeChain, longest_chain
from graphsplit.planning.costs.machine import Link, Machine
from tests.helpers.chains import chain_in_graph
from tests.helpers.emitted_graphs import plan_of
from tests.helpers.emitted_programs import PROGRAMS as RECORDED
from tests.helpers.predictions import boxed

layers = keras.layers
TAKEN_APART = "mesh, an lstm"
"""Its loop runs in columns: TensorFlow puts each value where its column is, so edges of the node tell nothing."""
MEETING_INSIDE = {"choice", "loop at home", "loop that writes, any rows"}
"""Devices meet in each iteration of a loop, or in a branch, and nowhere else."""
OFTEN = [
    *("one device", "sgd", "adam mirrored", "global norm sharded", "convolutions", "convolutions in micro-batches"),
    *("stages found", "1f1b", "interleaved", "mesh, a transformer", "mesh, parts in parts", "mesh, any rows", "choice"),
    *("columns in exchange for rows", "rows against rows", "buckets", "compiled", "two hosts", "two hosts, sharded"),
]
CALLED = [name for name, program in RECORDED.items() if program.way == "call" and name != TAKEN_APART]


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.long) for n in CALLED])
def test_the_chain_of_a_plan_is_that_of_the_emitted_graph(name: str):
    plan = plan_of(name)
    assert len(plan.longest_chain) == chain_in_graph(emit(plan))
    assert plan.longest_chain.exchanges or len(set(plan.devices)) < 2 or name in MEETING_INSIDE


# Networks, planned for eight GPUs


Made = tuple[Callable[..., Any], Sequence[tf.TensorSpec]]


def supervised(model: keras.Model, optimizer: Any = None) -> Made:
    """Return a training step for classes, and specifications of its arguments, eight rows for each device."""
    optimizer = optimizer or keras.optimizers.SGD(0.1, 0.9)
    optimizer.build(model.trainable_variables)
    entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = entropy(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    return train, [tf.TensorSpec((64, *model.input_shape[1:]), model.inputs[0].dtype), tf.TensorSpec((64,), tf.int32)]


def normalized(count: int = 3) -> Made:
    x = image = keras.Input((8, 8, 3))
    for _ in range(count):
        x = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(4, 3, padding="same")(x)))
    return supervised(keras.Model(image, layers.Dense(5)(layers.GlobalAveragePooling2D()(x))))


def masked() -> Made:
    tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(50, 16, mask_zero=True)(tokens)
    for _ in range(2):
        x = layers.BatchNormalization()(layers.Dense(16)(x))
    return supervised(keras.Model(tokens, layers.Dense(5)(layers.GlobalAveragePooling1D()(x))))


def attending(**options: Any) -> Made:
    x = tokens = keras.Input((6,), dtype="int32")
    x = layers.Embedding(50, 64)(x)
    a = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 32)(a, a)
    x = x + layers.Dense(64)(layers.Dense(256, "gelu")(layers.LayerNormalization()(x)))
    return supervised(keras.Model(tokens, layers.Dense(5)(layers.Flatten()(x))), keras.optimizers.Adam(**options))


def adversarial() -> Made:
    maker = keras.Sequential([keras.Input((4,)), layers.Dense(64), layers.BatchNormalization(), layers.Dense(16)])
    critic = keras.Sequential([keras.Input((16,)), layers.Dense(64), layers.BatchNormalization(), layers.Dense(1)])
    optimizers = [keras.optimizers.Adam(), keras.optimizers.Adam()]
    for optimizer, model in zip(optimizers, (maker, critic), strict=True):
        optimizer.build(model.trainable_variables)

    def train(x: tf.Tensor, noise: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as one, tf.GradientTape() as other:
            real, fake = critic(x, training=True), critic(maker(noise, training=True), training=True)
            losses = tf.reduce_mean(tf.nn.softplus(-fake)), tf.reduce_mean(tf.nn.softplus(-real) + tf.nn.softplus(fake))
        optimizers[0].apply(one.gradient(losses[0], maker.trainable_variables), maker.trainable_variables)
        optimizers[1].apply(other.gradient(losses[1], critic.trainable_variables), critic.trainable_variables)
        return losses

    return train, [tf.TensorSpec((64, 16)), tf.TensorSpec((64, 4))]


def mixed() -> Made:
    dense = [layers.Dense(256, "relu", dtype="mixed_float16") for _ in range(3)]
    model = keras.Sequential([keras.Input((256,)), *dense, layers.Dense(5, dtype="float32")])
    return supervised(model, keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam()))


NETWORKS: dict[str, Callable[[], Made]] = {
    "BatchNormalization": normalized,
    "BatchNormalization with a mask": masked,
    "clipnorm": lambda: attending(clipnorm=1.0),
    "global_clipnorm": lambda: attending(global_clipnorm=1.0),
    "GAN": adversarial,
    "loss scaling": mixed,
}


def slow_links(gpus: int) -> Machine:
    """Return a machine on which only exchanges take time: a second each, however many bytes are sent."""
    return dataclasses.replace(boxed(rate=1e30, memory=1e12, count=gpus), link=Link("slow", 1e30, 1.0))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long) if n == "global_clipnorm" else n for n in NETWORKS]
)
def test_the_graph_and_a_prediction_agree_on_the_chain_of_a_network(name: str):
    step, arguments = NETWORKS[name]()
    found = gs.predict(step, *arguments, machine=slow_links(8), devices=8, variables="auto")
    chain = found.plan.longest_chain
    assert 2 < len(chain) == chain_in_graph(emit(found.plan))
    assert found.step_s == pytest.approx(len(chain))
    assert found.exchanges == len(chain)
    assert found.latency_s == pytest.approx(len(chain))


def test_a_prediction_says_how_much_of_a_step_is_latency_of_exchanges():
    step, arguments = normalized()
    fast, slow = (
        gs.predict(
            step, *arguments, machine=dataclasses.replace(slow_links(8), link=Link("cable", 1e30, latency)), devices=8
        )
        for latency in (1e-3, 2e-3)
    )
    assert slow.step_s == pytest.approx(2 * fast.step_s)
    text = f"  latency of links: {1e3 * fast.latency_s:.2f} ms, 100 % of the step, in {fast.exchanges} exchanges"
    assert f"{text} on its critical path" in str(fast).splitlines()
    assert "latency of links" not in str(gs.predict(tf.tanh, tf.TensorSpec((8, 8)), machine=boxed(), devices=1))


# What makes it


class Centered(keras.layers.Layer):
    """Needs a mean over the batch, which its function computes."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        def without_mean(x: tf.Tensor) -> tf.Tensor:
            return x - tf.reduce_mean(x, 0)

        return without_mean(x)


def test_layers_that_make_a_chain_are_named_by_their_class():
    step, arguments = normalized(4)
    chain = gs.parallelize(step, devices=[f"GPU:{k}" for k in range(4)]).plan(*arguments).longest_chain
    count = chain.layers["BatchNormalization"]
    assert count >= 2 * 4, "one forward and one backward, at least"
    assert str(chain) == f"{len(chain)} exchanges, {count} of them of BatchNormalization"
    assert all(exchange.source != exchange.target for exchange in chain.exchanges)
    assert [e.source for e in chain.exchanges[1:]] == [e.target for e in chain.exchanges[:-1]]
    assert {"scatter"} < {exchange.kind for exchange in chain.exchanges}


def test_a_layer_of_the_user_is_named():
    model = keras.Sequential([keras.Input((6,)), Centered(), layers.Dense(6), Centered()])
    plan = gs.parallelize(lambda x: model(x), devices=3).plan(tf.ones((6, 6)))
    assert plan.longest_chain.layers["Centered"] >= 2
    assert f"  longest chain: {plan.longest_chain}" in str(plan).splitlines()


def test_several_moved_together_are_of_the_layer_of_most():
    plan = plan_of("buckets")
    assert plan.buckets
    assert len(longest_chain(plan)) > 0


def outer() -> Any:
    def call() -> Any:
        return frame_of("call")

    return call()


def frame_of(name: str) -> Any:
    import traceback

    return traceback.extract_stack()[:-1]


class Called:
    def call(self) -> Any:
        class Inner:
            def other(self) -> Any:
                return frame_of("other")

        return Inner().other()


def test_the_class_is_that_around_the_function():
    assert calling_class(Called().call()) == "Called"
    assert calling_class(outer()) == ""
    assert calling_class(()) == ""


# What a plan says


def test_a_plan_says_its_longest_chain_and_explains_a_long_one():
    step, arguments = normalized(12)
    plan = gs.parallelize(step, devices=2).plan(*arguments)
    assert f"  longest chain: {plan.longest_chain}" in str(plan).splitlines()
    assert len(plan.longest_chain) > 20
    assert f"devices wait for each other in a chain of {plan.longest_chain}: each takes" in plan.explain()
    few = gs.parallelize(tf.tanh, devices=2).plan(tf.ones((4, 3)))
    assert "  longest chain: 2 exchanges" in str(few).splitlines()
    assert "in a chain" not in few.explain()
    alone = gs.parallelize(tf.tanh, devices=1).plan(tf.ones((4, 3)))
    assert "longest chain" not in str(alone)
    assert alone.longest_chain == ExchangeChain()


# The page of networks

QUICKLY_COUNTED = ["CLIP", "U-Net, five BatchNormalizations"]


@pytest.mark.skipif(versions() not in PAGE.read_text(), reason="the page is of another version, or platform")
@pytest.mark.parametrize(
    "name", [n if n in QUICKLY_COUNTED else pytest.param(n, marks=pytest.mark.long) for n in KNOWN]
)
def test_the_page_has_what_is_counted(name: str):
    """If a change is meant to change this, `python -m benchmarks.chains --page` counts anew; review the difference."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith(f"| {name} |")]
    assert lines == [measure(name).row()]


def test_the_page_has_all_networks():
    assert [
        line.split(" | ")[0] for line in PAGE.read_text().splitlines() if "exchange" in line and line[0] == "|"
    ] == [f"| {name}" for name in KNOWN]


def test_the_first_device_does_little_more_than_others():
    """In all networks without a branch; what runs once runs there."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if "exchange" in line and line[0] == "|"]
    numbers = {row[0]: [int(number.replace(",", "")) for number in row[4].split(", ")] for row in rows}
    found = {name: first / median for name, (first, median, _) in numbers.items() if "loss scaling" not in name}
    assert len(found) > 10
    assert max(found.values()) < 1.1, found
