"""Counts of rows, zeros and signals go to each host once; the law holds, and the checkers follow them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks.chains import sends_in
from graphsplit.core.hosts import host_name
from graphsplit.core.protos import make_node, split_reference
from graphsplit.emission import EmittedGraph, Origin, emit, emitter
from graphsplit.emission.communication import relay_within_hosts
from graphsplit.emission.emitted_graph import Draft
from tests.helpers.hosts import assert_law_on_hosts, plan_on_hosts, worker_device
from tests.helpers.law import assert_law
from tests.helpers.layout_cases import deep_step, numbers

WIDTH = 6
OPEN = tf.TensorSpec((None, WIDTH), tf.float64)


def exact(*shape: int, seed: int) -> tf.Tensor:
    """Return numbers whose sums, in whatever order, are equal to more digits than are compared, if they cancel too."""
    return tf.cast(numbers(*shape, seed=seed), tf.float64)


def crossing(graph: EmittedGraph) -> Counter[str]:
    """Return how many messages pass between hosts for what is no value of the program: one for each reading device."""
    device = {node.name: node.device for node in graph.nodes}
    found = set()
    for node in graph.nodes:
        for reference in node.input:
            source = split_reference(reference.lstrip("^"))[0]
            role = "signal" if reference[0] == "^" else graph.origins[source].role
            if role in ("signal", "sizes", "relay") and host_name(device[source]) != host_name(node.device):
                found.add((role, reference, node.device))
    return Counter(role for role, _, _ in found)


def deep() -> tuple[Callable[..., Any], list[tf.Variable]]:
    weights = [tf.Variable(0.1 * exact(WIDTH, WIDTH, seed=k), name=f"weight_{k}") for k in range(3)]
    return tf.function(deep_step(weights), input_signature=[OPEN]), weights


def with_effects() -> tuple[Callable[..., Any], list[tf.Variable]]:
    total, count = tf.Variable(0.0, dtype=tf.float64, name="total"), tf.Variable(0, name="count")

    def step(x: tf.Tensor) -> Any:
        total.assign_add(tf.reduce_sum(x))
        y = tf.tanh(x) * total
        tf.debugging.assert_less(tf.reduce_sum(y), tf.constant(1e9, x.dtype))
        count.assign_add(tf.shape(x)[0])
        total.assign_add(tf.reduce_sum(y))
        return y * total

    return tf.function(step), [total, count]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("make", "before", "after"), [
    (deep, {"sizes": 12}, {"sizes": 6}),
    (with_effects, {"signal": 9}, {"signal": 3}),
])  # fmt: skip
def test_once_to_each_host(
    make: Callable[[], Any], before: dict[str, int], after: dict[str, int], monkeypatch: pytest.MonkeyPatch
):
    x = exact(13, WIDTH, seed=9)
    plan = assert_law_on_hosts(make, [(x[:count],) for count in (13, 5, 4, 2, 1)], (2, 3))
    function, _ = make()
    spec = OPEN if make is deep else x
    plan = plan_on_hosts(function, (2, 3), spec)
    assert crossing(emit(plan)) == after
    monkeypatch.setattr(emitter, "relay_within_hosts", lambda draft: None)
    assert crossing(emit(plan)) == before


def test_what_a_device_waits_for_of_another_is_one_signal(monkeypatch: pytest.MonkeyPatch):
    """A step's end waits for each update of each part, wherever that is: a message from each device, not from each."""

    def make() -> tuple[Callable[..., Any], list[tf.Variable]]:
        weights = [tf.Variable(0.1 * exact(WIDTH, WIDTH, seed=k), name=f"weight_{k}") for k in range(4)]
        for weight in weights:
            gs.set_variable_layout(weight, "sharded", 3)
        return tf.function(deep_step(weights)), weights

    batches = [(exact(rows, WIDTH, seed=rows),) for rows in (7, 4, 1)]
    plan = assert_law(make, batches, sharded=["MatMul"])
    graph = emit(plan)
    device_of = {node.name: node.device for node in graph.nodes}
    for node in graph.nodes:
        sources = [device_of[r[1:]] for r in node.input if r[0] == "^"]
        away = [device for device in sources if device != node.device]
        assert len(away) == len(set(away)), node.name
    monkeypatch.setattr(emitter, "relay_within_hosts", lambda draft: None)
    assert sends_in(graph) < sends_in(emit(plan))


def test_one_host_has_no_relays():
    graph = emit(gs.parallelize(deep()[0], devices=5).plan(OPEN))
    assert not graph.relayed()
    assert "relay" not in {origin.role for origin in graph.origins.values()}


def test_zeros_and_signals():
    """Of three devices of another host one gets the zeros, and one signal says that both nodes have run."""
    home, there = worker_device(0, 0), [worker_device(1, number) for number in range(3)]
    program = gs.parallelize(tf.tanh, devices=2).plan(tf.ones(4)).program
    draft = Draft(program, 2)
    draft.add(make_node("zeros", "ZerosLike", ["x"], home, T=tf.float32), Origin(0, None, "zero-fill"))
    draft.add(make_node("value", "Tanh", ["x"], home, T=tf.float32), Origin(0, None, "op"))
    for device in there:
        inputs = ["zeros", "value", "^zeros", "^value"]
        draft.add(make_node(f"reader_{device[-1]}", "AddN", inputs, device, N=2, T=tf.float32), Origin(0, None, "op"))
    draft.nodes[0].input[:] = []  # (what it is made of is not there)
    draft.nodes[1].input[:] = []
    relay_within_hosts(draft)
    made = {node.name: (node.op, node.device, list(node.input)) for node in draft.nodes[5:]}
    assert sorted(made.values()) == [
        ("Identity", there[0], ["zeros"]),
        ("NoOp", home, ["^value", "^zeros"]),
        ("NoOp", there[0], [next(f"^{name}" for name, own in made.items() if own[1] == home)]),
    ]
    names = {(op, device): name for name, (op, device, _) in made.items()}
    for node in draft.nodes[2:5]:
        assert list(node.input) == [names["Identity", there[0]], "value", f"^{names['NoOp', there[0]]}"]
