"""Sums that all devices wait for, in two levels: hosts, or groups of many devices, add up first, then exchange."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import MOMENTS, REPLICATE, Partial
from graphsplit.core.protos import source_of
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.communication.transfers import Collective, Merged, Packed, Read, Relay, Sum, Value, is_total
from graphsplit.planning.costs import exchanges
from graphsplit.planning.costs.exchanges import EXCHANGE_BYTES, groups_of
from tests.helpers import hosts
from tests.helpers.hosts import assert_counted, assert_law_on_hosts, worker_device
from tests.helpers.law import assert_close, assert_law, rows

AT_ONCE = {"exchange_bytes": EXCHANGE_BYTES}
Made = tuple[Callable[..., Any], Sequence[tf.Variable]]


def network() -> Made:
    """Two dense layers, each normalized over the batch, with running statistics, clipping by all norms, momentum."""
    shapes = {"w": (4, 5), "v": (5, 3), "s": (5,), "o": (5,), "t": (3,), "p": (3,), "kept": (5,), "spread": (3,)}
    weights = {name: tf.Variable(0.5 * rows(*shape) + 0.1, name=name) for name, shape in shapes.items()}
    trained = [weights[name] for name in "wvsotp"]
    slots = [tf.Variable(tf.zeros_like(weight)) for weight in trained]

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            first = x @ weights["w"]
            mean, variance = tf.nn.moments(first, [0])
            h = tf.tanh((first - mean) * tf.math.rsqrt(variance + 1e-3) * weights["s"] + weights["o"])
            second = h @ weights["v"]
            middle, around = tf.nn.moments(second, [0])
            y = (second - middle) * tf.math.rsqrt(around + 1e-3) * weights["t"] + weights["p"]
            loss = tf.reduce_mean(tf.sin(3 * y) ** 2)
        gradients, _ = tf.clip_by_global_norm(tape.gradient(loss, trained), 0.05)
        for weight, slot, gradient in zip(trained, slots, gradients, strict=True):
            slot.assign(0.9 * slot + gradient)
            weight.assign_sub(0.1 * slot)
        weights["kept"].assign(0.9 * weights["kept"] + 0.1 * mean)
        weights["spread"].assign(0.9 * weights["spread"] + 0.1 * around)
        return loss

    return step, [*weights.values(), *slots]


def any_rows() -> Made:
    step, variables = network()
    return tf.function(step, input_signature=[tf.TensorSpec((None, 4), tf.float64)]), variables


def exchanged(plan: gs.inspect.Plan) -> list[Collective]:
    """Return what carries out sums, or moments, that all shards read."""
    firsts = [(collective, collective.moves[0]) for collective in plan.collectives]
    return [c for c, move in firsts if move.target == REPLICATE and isinstance(move.source, Partial)]


def assert_levels(plan: gs.inspect.Plan, merged: int = 2) -> None:
    """Assert that as many moments are merged, and that what is exchanged passes once from each host to each other."""
    found = exchanged(plan)
    assert len([c for c in found if c.moves[0].source in MOMENTS]) == merged, str(plan)
    for collective in found:
        passed = Counter((host_name(a), host_name(b)) for _, (a, b, _) in collective.transfers())
        names = {host_name(value.device) for value in collective.values}
        assert {pair: count for pair, count in passed.items() if len(set(pair)) > 1} == {
            (a, b): 1 for a in names for b in names if a != b
        }, str(collective)


@pytest.mark.parametrize("counts", [(2, 3), (1, 3), (3, 1), (2, 1, 2)])
def test_uneven_rows_and_fewer_than_devices(counts: tuple[int, ...]) -> None:
    calls = [(rows(count, 4),) for count in (2, 11)]
    plan = assert_law_on_hosts(network, calls, counts, tuning=AT_ONCE)
    assert_levels(plan)
    assert_counted(plan)


LAID = {
    "micro-batches": {"micro_batches": 2},
    "compiled": {"jit_compile": True},
    "mesh": {"mesh": {"batch": 2, "model": 2}},
    "recomputed": {"recompute": 0.5},
}
OPTIONS = [pytest.param(own, id=name, marks=[pytest.mark.long] * ("jit" in str(own))) for name, own in LAID.items()]


@pytest.mark.parametrize("options", OPTIONS)
def test_every_kind_of_plan(options: dict[str, Any]) -> None:
    plan = assert_law_on_hosts(network, [(rows(7, 4),)], (2, 2), tuning=AT_ONCE, **options)
    assert_levels(plan, 2 + ("recompute" in options))


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_every_layout(layout: str) -> None:
    def make() -> Made:
        step, variables = network()
        gs.set_variable_layout(variables, layout, 5)
        return step, variables

    assert_levels(assert_law_on_hosts(make, [(rows(7, 4),)], (2, 3), tuning=AT_ONCE))


def test_hosts_whose_devices_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"/device:CPU:{i}": worker_device(i % 2, i // 2) for i in range(5)}
    monkeypatch.setattr(hosts, "on_hosts", lambda *_: names)
    assert_levels(assert_law_on_hosts(network, [(rows(11, 4),)], (3, 2), tuning=AT_ONCE))
    assert_law_on_hosts(network, [(rows(11, 4),)], (3, 2))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_stages(micro_batches: int) -> None:
    plan = assert_law_on_hosts(network, [(rows(9, 4),)], (3, 1), tuning=AT_ONCE, stages=2, micro_batches=micro_batches)
    assert exchanged(plan)


@pytest.mark.parametrize("counts", [(2, 3), (3, 1, 1), (1, 3), (1, 1)])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_an_unknown_batch_and_hosts_without_rows(micro_batches: int, counts: tuple[int, ...]) -> None:
    calls = [(rows(count, 4),) for count in (11, 3, 1)]
    plan = assert_law_on_hosts(any_rows, calls, counts, tuning=AT_ONCE, micro_batches=micro_batches)
    assert not plan.rows
    assert len([c for c in exchanged(plan) if c.moves[0].source in MOMENTS]) == 2


def extremes(x: tf.Tensor) -> Any:
    """Every reduction that goes on to the rows."""
    h = tf.tanh(x)
    ways = [tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod, tf.math.reduce_std]
    return [h * way(h + 0.1 * k, 0) for k, way in enumerate(ways)], (h > 0) & tf.reduce_all(h > 0, 0)


@pytest.mark.parametrize("counts", [(2, 3), (3, 1)])
@pytest.mark.parametrize("is_known", [True, False])
def test_reductions(is_known: bool, counts: tuple[int, ...]) -> None:
    x = rows(13, 6) + 0.5
    function = extremes if is_known else tf.function(extremes, input_signature=[tf.TensorSpec((None, 6), x.dtype)])
    sizes = (13, 6) if is_known else (13, 7, 3, 2, 1)
    plan = assert_law_on_hosts(lambda: (function, []), [(x[:count],) for count in sizes], counts, tuning=AT_ONCE)
    sums = [value for c in exchanged(plan) for value in c.values if isinstance(value, Sum) and value.host]
    assert {"sum", "max", "min", "prod", "all"} <= {value.reduction for value in sums}


def test_a_loop_whose_turns_exchange() -> None:
    def step(x: tf.Tensor) -> tf.Tensor:
        h = x
        for _ in tf.range(tf.cast(x[0, 0] * 0.0, tf.int32) + 3):
            h = tf.tanh(h - tf.reduce_mean(h, 0))
        return h

    plan = assert_law_on_hosts(lambda: (tf.function(step), []), [(rows(11, 6),)], (2, 3), tuning=AT_ONCE)
    assert any(exchanged(body) for found in plan.steps for body in found.bodies.values())


EIGHT = [worker_device(task, number) for task in range(2) for number in range(4)]


@pytest.fixture(scope="module")
def plan() -> gs.inspect.Plan:
    return gs.parallelize(network()[0], devices=EIGHT).plan(rows(17, 4))


def test_two_hosts_of_four_by_default(plan: gs.inspect.Plan) -> None:
    """Each exchange is a way to a device of the host, one to the other host, and one to all devices there."""
    graph = emit(plan)
    check_emitted(plan, graph)
    assert_levels(plan)
    device = {node.name: node.device for node in graph.nodes}
    passed = {
        (reference, node.device)
        for node in graph.nodes
        for reference in node.input
        if graph.origins[source_of(reference)].role == "all-reduce"
        if host_name(device[source_of(reference)]) != host_name(node.device)
    }
    assert len(passed) == 2 * len(exchanged(plan))
    kinds = [e for e in plan.longest_chain.exchanges if e.kind == "all-reduce"]
    between = [e for e in kinds if host_name(e.source) != host_name(e.target)]
    assert (len(exchanged(plan)), len(kinds), len(between)) == (4, 12, 4), str(plan)
    through_one = gs.parallelize(network()[0], devices=EIGHT, tuning={"exchange_bytes": 0}).plan(rows(17, 4))
    assert len(plan.longest_chain) < 0.7 * len(through_one.longest_chain)


def test_the_devices_of_a_host_take_turns_as_its_gateway(plan: gs.inspect.Plan) -> None:
    adding = Counter(v.device for c in exchanged(plan) for v in c.values if is_total(v) and v.host)
    assert len(adding) > 4, adding


def changed(plan: gs.inspect.Plan, collective: Collective, **others: Any) -> gs.inspect.Plan:
    made = dataclasses.replace(collective, **others)
    return dataclasses.replace(plan, collectives=tuple(made if c is collective else c for c in plan.collectives))


def of_kind(plan: gs.inspect.Plan, *, moments: bool) -> Collective:
    return next(c for c in exchanged(plan) if (c.moves[0].source in MOMENTS) == moments)


@pytest.mark.parametrize("moments", [True, False])
def test_the_checker_sees_what_a_host_adds_up_twice(plan: gs.inspect.Plan, moments: bool) -> None:
    collective = of_kind(plan, moments=moments)
    values = list(collective.values)
    own = next(k for k, v in enumerate(values) if is_total(v) and v.host)
    near = next(d for d in EIGHT if host_name(d) == host_name(values[own].device) and d != values[own].device)
    again = (*values, dataclasses.replace(values[own], device=near))
    with pytest.raises(gs.errors.CheckError, match=r"is added up twice on a host\.$"):
        changed(plan, collective, values=again).check()


@pytest.mark.parametrize("moments", [True, False])
def test_the_checker_sees_what_passes_twice(plan: gs.inspect.Plan, moments: bool) -> None:
    """All devices of a host take what another host has from there, and not from the one that got it."""
    collective = of_kind(plan, moments=moments)

    def straight(value: Value) -> Value:
        relays = {k: v.of[0] for k, v in enumerate(collective.values) if isinstance(v, Relay)}
        return dataclasses.replace(value, of=tuple([relays.get(k, k) for k in value.of]))

    with pytest.raises(gs.errors.CheckError, match=r"passes through no device on host '/job:worker/replica:0/task:"):
        changed(plan, collective, values=tuple(map(straight, collective.values))).check()


@pytest.mark.parametrize("moments", [True, False])
def test_the_checker_sees_another_order_on_one_device(moments: bool) -> None:
    """Of three values, one device adds up the last two first."""
    devices, tuning = [f"GPU:{k}" for k in range(3)], {"bucket_bytes": 0}
    straight = gs.parallelize(network()[0], devices=devices, tuning=tuning).plan(rows(7, 4))
    collective = of_kind(straight, moments=moments)
    values = list(collective.values)
    total = next(k for k, v in enumerate(values) if is_total(v))
    first, *others = values[total].of
    if moments:
        parts = [dataclasses.replace(values[total], of=tuple(others), which=k) for k in range(2)]
        device, size = values[total].device, values[total].bytes
        before: list[Value] = [*parts, Packed((len(values), len(values) + 1), device, 2 * size)]
    else:
        before = [dataclasses.replace(values[total], of=tuple(others))]
    values += [*before, dataclasses.replace(values[total], of=(first, len(values) + len(before) - 1))]
    [[own, *_], *_] = reads = list(map(list, collective.reads))
    reads[0][0] = Read(len(values) - 1, own.device)
    with pytest.raises(gs.errors.CheckError, match=r"is added up in another order on some devices than on others\.$"):
        changed(straight, collective, values=tuple(values), reads=tuple(map(tuple, reads))).check()


def test_the_checker_sees_moments_that_are_packed_elsewhere(plan: gs.inspect.Plan) -> None:
    collective = of_kind(plan, moments=True)
    packed = next(
        v for v in collective.values if isinstance(v, Packed) and isinstance(collective.values[v.of[0]], Merged)
    )
    away = next(d for d in EIGHT if d != packed.device)
    values = [dataclasses.replace(v, device=away) if v is packed else v for v in collective.values]
    with pytest.raises(gs.errors.CheckError, match="is packed on"):
        changed(plan, collective, values=tuple(values)).check()


def test_the_checker_sees_moments_of_a_shard_twice_or_not_at_all(plan: gs.inspect.Plan) -> None:
    collective = of_kind(plan, moments=True)
    for change in (lambda of: (of[0], *of), lambda of: of[1:]):
        values = [
            dataclasses.replace(v, of=change(v.of)) if isinstance(v, Merged) and v.host else v
            for v in collective.values
        ]
        with pytest.raises(gs.errors.CheckError, match=r"merges other moments|gives .* something else"):
            changed(plan, collective, values=tuple(values)).check()


def test_the_checker_of_graphs_sees_what_a_host_leaves_out(plan: gs.inspect.Plan) -> None:
    graph = emit(plan)
    node = next(
        n for n in graph.nodes if n.op == "Pack" and graph.origins[n.name].role == "all-reduce" and len(n.input) == 4
    )
    node.input[3] = node.input[2]
    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, graph)


@pytest.fixture
def in_small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let four devices of a host exchange in groups, as 16 do."""
    monkeypatch.setattr(exchanges, "FEWEST_IN_GROUPS", 4)


@pytest.mark.usefixtures("in_small_groups")
@pytest.mark.parametrize("options", [{}, {"variables": "replicated"}, {"variables": "sharded"}, *OPTIONS], ids=str)
def test_groups_on_one_host(options: dict[str, Any]) -> None:
    """Of 2 and 3 devices: each gets at most two values in its group, and one of the other."""
    calls = [(rows(3, 4),), (rows(13, 4),)]
    if "mesh" in options:
        options = {"mesh": {"batch": 5}}
    plan = assert_law(network, calls, devices=5, tuning=AT_ONCE, at_home=None, **options)
    for collective in exchanged(plan):
        received = Counter(target for _, (_, target, _) in collective.transfers())
        assert max(received.values()) <= 3 * options.get("micro_batches", 1)


@pytest.mark.usefixtures("in_small_groups")
def test_groups_and_a_tape_outside() -> None:
    scale, x = tf.Variable(rows(6)), rows(9, 6)

    def normalized(x: tf.Tensor) -> tf.Tensor:
        mean, variance = tf.nn.moments(x, [0])
        return tf.sin((x - mean) * tf.math.rsqrt(variance + 1e-3) * scale)

    results = []
    for function in (gs.parallelize(normalized, devices=4, tuning=AT_ONCE), normalized):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(function(x) ** 3)
        results.append((loss, tape.gradient(loss, [x, scale])))
    assert_close(*results)


@pytest.mark.usefixtures("in_small_groups")
def test_of_an_unknown_batch_all_exchange_at_once() -> None:
    """What stands in for devices without rows need not be sent then."""
    plan = gs.parallelize(any_rows()[0], devices=4, tuning=AT_ONCE).plan(tf.TensorSpec((None, 4), tf.float64))
    assert plan.mesh.few_bytes == EXCHANGE_BYTES // 3
    assert all(len(v.of) == 4 for c in exchanged(plan) for v in c.values if is_total(v))


@pytest.mark.parametrize(("count", "messages", "ways"), [(15, 14, 1), (16, 6, 2), (20, 7, 2)])
def test_sixteen_devices_exchange_in_groups(count: int, messages: int, ways: int) -> None:
    plan = gs.parallelize(network()[0], devices=[f"GPU:{k}" for k in range(count)]).plan(rows(2 * count + 1, 4))
    plan.check()
    check_emitted(plan, emit(plan))
    assert plan.mesh.few_bytes == EXCHANGE_BYTES // messages
    found = exchanged(plan)
    for collective in found:
        sent = Counter(source for _, (source, _, _) in collective.transfers())
        assert max(sent.values()) <= messages + 1, sent
    chain = [e for e in plan.longest_chain.exchanges if e.kind == "all-reduce"]
    assert (len(found), len(chain)) == (4, 4 * ways)


def test_the_groups() -> None:
    gpus = [f"/device:GPU:{k}" for k in range(64)]
    assert [len(group) for group in groups_of(gpus, has_rows=True)] == [8] * 8
    assert groups_of(gpus, has_rows=False) == [gpus]
    assert groups_of(gpus[:15] * 2, has_rows=True) == [gpus[:15]]
    assert groups_of(EIGHT, has_rows=False) == [EIGHT[:4], EIGHT[4:]]
