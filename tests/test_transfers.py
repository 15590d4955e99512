"""Transfers: what carries out each kind of move; every change of one is found, and bytes are those of the graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import MOVES
from graphsplit.planning.communication.transfers import Collective, Concatenation, Own, Read, Slice, Sum, Value, Zeros
from tests.helpers.exchanges import U, W, trained
from tests.helpers.law import rows
from tests.helpers.layout_cases import deep_step, numbers


def planned(function: Callable[..., Any], *arguments: Any, **options: Any) -> gs.inspect.Plan:
    return gs.parallelize(function, **{"devices": 3, **options}).plan(*arguments)


def trains() -> gs.inspect.Plan:
    weight, biases = tf.Variable(numbers(6, 6)), [tf.Variable(numbers(6)) for _ in range(8)]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x
            for bias in biases:
                h = tf.tanh(h @ weight + bias)
            loss = tf.reduce_mean(h**2)
        variables = [weight, *biases]
        for variable, gradient in zip(variables, tape.gradient(loss, variables), strict=True):
            variable.assign_sub(gradient)
        return loss

    return planned(step, numbers(7, 6))


def in_turns() -> gs.inspect.Plan:
    return planned(lambda x: (tf.reduce_sum(tf.tanh(x), 0), tf.reduce_max(tf.tanh(x))), rows(13, 6), micro_batches=2)


def blocks() -> gs.inspect.Plan:
    def function(x: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        both = tf.concat([tf.tanh(x), tf.sin(x)], 0)
        return both, tf.concat([x, x], 0)[:, ::-1] * both

    return planned(function, numbers(7, 4))


def filled() -> gs.inspect.Plan:
    w = tf.Variable(numbers(4))

    def function(x: tf.Tensor) -> tf.Tensor:
        def body(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, total + tf.reduce_sum(tf.tanh(x), 0)

        return tf.while_loop(lambda i, total: i < 3, body, (0, tf.sin(w.read_value())))[1]

    return planned(function, numbers(7, 4))


def exchanged() -> gs.inspect.Plan:
    return planned(trained, rows(41, 64))


def exchanged_in_turns() -> gs.inspect.Plan:
    return planned(trained, rows(41, 64), micro_batches=2, shares=[3, 1, 2])


def exchanged_blocks_in_turns() -> gs.inspect.Plan:
    def function(x: tf.Tensor) -> tf.Tensor:
        both = tf.tanh(tf.concat([x @ W, x @ U], 0))
        return tf.reduce_logsumexp(both @ tf.transpose(both), 1)

    return planned(function, rows(41, 64), devices=2, micro_batches=2)


def mirrored() -> gs.inspect.Plan:
    weights = [tf.Variable(numbers(16, 16, seed=k)) for k in range(2)]
    gs.set_variable_layout(weights, "replicated", 3)
    return planned(deep_step(weights), numbers(7, 16))


def sent() -> gs.inspect.Plan:
    here = tf.Variable(numbers(4))
    with tf.device("CPU:1"):
        there = tf.Variable(numbers(4))

    def function(x: tf.Tensor) -> tf.Tensor:
        there.assign(tf.sin(here.read_value()))
        return tf.tanh(x)

    return planned(function, numbers(7, 4))


IN_TURNS = (in_turns, exchanged_in_turns, exchanged_blocks_in_turns)
PLANS = {made.__name__: made for made in (trains, *IN_TURNS, blocks, filled, exchanged, mirrored, sent)}


@pytest.fixture(scope="module")
def plans() -> dict[str, gs.inspect.Plan]:
    return {name: made() for name, made in PLANS.items()}


def test_all_kinds_of_moves_and_primitives_are_here(plans: dict[str, gs.inspect.Plan]):
    """So each of them is changed below."""
    collectives = [collective for plan in plans.values() for collective in plan.collectives]
    kinds = {collective.kind for collective in collectives}
    assert {type(value) for c in collectives for value in c.values} >= {Own, Slice, Concatenation, Sum, Zeros}
    assert kinds >= {
        "zero-fill",
        "send",
        "broadcast",
        "scatter",
        "gather",
        "reduce",
        "all-reduce",
        "all-to-all",
        "all-gather",
        "reduce-scatter",
    }
    assert kinds <= {*MOVES.values()}
    assert any(collective.is_bucket for collective in collectives)
    assert any(isinstance(value, Sum) and value.turn is not None for c in collectives for value in c.values)
    splits = {value.split.shards for c in collectives for value in c.values if isinstance(value, Slice)}
    assert splits >= {
        ((0,),),
        ((0, 1), (2, 3), (4, 5)),
        ((0,), (1,)),
    }  # blocks; what devices get; what shards get


def changes(value: Value, before: int) -> Iterator[Value]:
    """Yield other values than a given one, none of which would do."""
    yield dataclasses.replace(value, device="/device:CPU:4")
    if not isinstance(value, Zeros | Slice):
        yield dataclasses.replace(value, bytes=value.bytes + 4)
    if len(value.of) > 1:
        yield dataclasses.replace(value, of=value.of[1:])
        yield dataclasses.replace(value, of=(*value.of[1:], value.of[0]))
        yield dataclasses.replace(value, of=(*value.of, value.of[0]))
    if value.of:
        yield dataclasses.replace(value, of=(before, *value.of[1:]))
    if isinstance(value, Own):
        yield dataclasses.replace(value, tensor=value.tensor._replace(index=value.tensor.index + 1))
        if value.by is not None:
            yield dataclasses.replace(value, by=(value.by + 1) % 3)
    if isinstance(value, Slice):
        yield dataclasses.replace(value, piece=value.piece + (-1 if value.piece else 1))
        yield dataclasses.replace(value, split=value.split._replace(axis=value.split.axis + 1, sizes=(1,)))
        if value.split.shards:
            yield dataclasses.replace(value, split=value.split._replace(shards=value.split.shards[1:]))
            yield dataclasses.replace(value, split=value.split._replace(shards=(*value.split.shards, (0,))))
    if isinstance(value, Concatenation) and len({*value.of}) > 1:
        yield dataclasses.replace(value, axis=value.axis + 1)
    if isinstance(value, Sum):
        yield dataclasses.replace(value, reduction="prod")
        yield dataclasses.replace(value, entries=value.entries + 1)
        yield dataclasses.replace(value, turn=1 if value.turn is None else None)
        yield dataclasses.replace(value, host="elsewhere")


def changed(plan: gs.inspect.Plan, k: int, collective: Collective) -> gs.inspect.Plan:
    collectives = list(plan.collectives)
    collectives[k] = collective
    return dataclasses.replace(plan, collectives=tuple(collectives))


def is_refused(plan: gs.inspect.Plan) -> bool:
    try:
        plan.check()
    except gs.errors.CheckError:
        return True
    return False


def with_value(collective: Collective, i: int, value: Value) -> Collective:
    values = list(collective.values)
    values[i] = value
    return dataclasses.replace(collective, values=tuple(values))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", PLANS)
def test_every_change_of_any_value_is_found(plans: dict[str, gs.inspect.Plan], name: str):
    plan, found = plans[name], 0
    plan.check()
    for k, collective in enumerate(plan.collectives):
        for i, value in enumerate(collective.values):
            for other in changes(value, i):
                broken = changed(plan, k, with_value(collective, i, other))
                assert is_refused(broken), f"{collective.kind}: {value} became {other}"
                found += 1
    assert found > 20


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PLANS)
def test_every_other_reader_is_found(plans: dict[str, gs.inspect.Plan], name: str):
    plan = plans[name]
    for c, collective in enumerate(plan.collectives):
        for m, reads in enumerate(collective.reads):
            others = [reads[1:], (reads[0]._replace(device="/device:CPU:4"), *reads[1:])]
            k = next((k for k, read in enumerate(reads) if read.value != reads[0].value), 0)
            if k:
                swapped = list(reads)
                swapped[0], swapped[k] = Read(reads[k].value, reads[0].device), Read(reads[0].value, reads[k].device)
                others.append(tuple(swapped))
            for other in others:
                made = list(collective.reads)
                made[m] = other
                broken = changed(plan, c, dataclasses.replace(collective, reads=tuple(made)))
                assert is_refused(broken), f"{collective.kind}: {reads} became {other}"


def test_zeros_stand_for_parts_of_a_sum():
    """A whole value that is added to sums of the shards is added once: the first shard has it, the others zeros."""
    plan = filled()
    found = [c for c in plan.collectives if any(isinstance(value, Zeros) for value in c.values)]
    assert found
    for collective in found:
        [own, *zeros] = collective.values
        assert isinstance(own, Own)
        assert len(zeros) == 2
