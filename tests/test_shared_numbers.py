"""Numbers that follow from several owners and serve several, norms of all gradients, are computed on each of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.communication.bucketing import check_buckets
from graphsplit.planning.communication.transfers import Packed
from graphsplit.program.program import Tensor
from tests.helpers.law import assert_law, rows

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "global_clipnorm": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.01),
    "lamb": lambda: keras.optimizers.Lamb(0.1),
}
AT_ONCE = {"exchange_bytes": 1 << 19}  # as between GPUs
LAYOUTS = ("sharded", "replicated", "home")


def training(optimizer: str) -> Any:
    """Return a step of training in float64, and all its variables."""
    keras.utils.set_random_seed(0)
    sizes = [keras.layers.Dense(units, "tanh", dtype="float64") for units in (80, 70, 60, 10)]
    model = keras.Sequential([keras.Input((40,), dtype="float64"), *sizes])
    updates = OPTIMIZERS[optimizer]()
    updates.build(model.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - 3.0) ** 2)
        updates.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        return loss

    return step, [*model.variables, *updates.variables]


@pytest.mark.parametrize(
    "options",
    [
        {},
        *[
            pytest.param(own, marks=pytest.mark.long)
            for own in ({"shares": [3, 1, 2]}, {"shares": [0, 1, 4], "micro_batches": 3}, {"jit_compile": True})
        ],
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("optimizer", ["global_clipnorm", "clipnorm", pytest.param("lamb", marks=pytest.mark.long)])
def test_what_is_clipped_equals_one_device(optimizer: str, layout: str, options: Any) -> None:
    calls = [(rows(13, 40),), (rows(2, 40),)]
    plan = assert_law(
        lambda: training(optimizer), calls, devices=3, at_home=None, variables=layout, tuning=AT_ONCE, **options
    )
    assert plan.sharded_ops


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_number_of_rows(layout: str) -> None:
    def make() -> Any:
        step, variables = training("global_clipnorm")
        return tf.function(step, input_signature=[tf.TensorSpec([None, 40], tf.float64)]), variables

    assert_law(
        make, [(rows(count, 40),) for count in (13, 2, 1)], devices=3, at_home=None, variables=layout, tuning=AT_ONCE
    )


def planned(optimizer: str, layout: str, devices: int = 8) -> gs.inspect.Plan:
    """Return the plan of a step for GPUs that are not there."""
    step, _ = training(optimizer)
    names = [f"GPU:{k}" for k in range(devices)]
    return gs.parallelize(step, devices=names, variables=layout).plan(tf.TensorSpec((64, 40), tf.float64))


def norm_of(plan: gs.inspect.Plan) -> Any:
    """Return the operation that makes the square of the norm of all gradients."""
    [stack] = [op for op in plan.program.ops if op.type == "Pack"]
    [found] = [op for op in plan.program.ops if op.type == "Sum" and op.inputs[0].op == stack.index]
    return found


@pytest.mark.parametrize("layout", ["sharded", "auto", "replicated"])
def test_each_owner_computes_the_norm(layout: str) -> None:
    """Where variables are cut each sends what it has to all; where they are replicated nothing is sent for it."""
    plan = planned("global_clipnorm", layout)
    assert set(plan.places.once(norm_of(plan))) == set(plan.devices), str(plan)
    [stack] = [op for op in plan.program.ops if op.type == "Pack"]
    sent = [move for move in plan.moves if move.tensor in stack.inputs]
    assert bool(sent) == (layout != "replicated")


def test_numbers_of_an_owner_travel_as_one() -> None:
    plan = planned("global_clipnorm", "sharded", devices=3)
    packed = [c for c in plan.collectives if any(isinstance(value, Packed) for value in c.values)]
    assert packed, str(plan)
    for collective in packed:
        assert len(list(collective.transfers())) == 2  # to each other device


def test_a_bucket_of_numbers_that_follow_from_each_other_is_found() -> None:
    plan = planned("global_clipnorm", "sharded", devices=3)
    bucket = next(c for c in plan.collectives if any(isinstance(value, Packed) for value in c.values))
    wrong = dataclasses.replace(bucket.moves[0], tensor=Tensor(norm_of(plan).index, 0))
    buckets = [dataclasses.replace(bucket, moves=(*bucket.moves, wrong))]
    check_buckets(plan.program, plan.steps, [bucket])
    with pytest.raises(gs.errors.CheckError, match="follow from each other"):
        check_buckets(plan.program, plan.steps, buckets)


def test_copies_keep_the_same_bits() -> None:
    """Each device has computed the norm by itself, in the same order."""
    step, variables = training("global_clipnorm")
    parallel = gs.parallelize(step, devices=3, variables="replicated", tuning=AT_ONCE)
    for count in (13, 8):
        parallel(rows(count, 40))
    compared = 0
    for variable in variables:
        parts = parts_of_variable(getattr(variable, "value", variable))
        if parts is not None and parts.layout == "replicated":
            handles = [part.handle for part in parts._parts]
            first, *others = [tf.raw_ops.ReadVariableOp(resource=h, dtype=variable.dtype).numpy() for h in handles]
            for other in others:
                np.testing.assert_array_equal(other, first)
                compared += 1
    assert compared >= 2 * 8


def test_a_learning_rate_is_computed_once() -> None:
    """Nobody waits for it."""
    plan = planned("global_clipnorm", "sharded")
    rates = [op for op in plan.program.ops if op.type == "Pow" and op.out_shapes == ((),) and plan.steps[op.index].once]
    assert rates
    assert not {op.index for op in rates} & {*plan.owners.groups}
