"""Between hosts each value passes once: sums are added up within each host first, copies are sent on within each."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.hosts import host_name
from graphsplit.emission import EmittedGraph, check_emitted, emit
from graphsplit.emission.clusters import graph_def_that_runs
from graphsplit.planning.communication.transfers import Collective, Relay, Slice, Sum, Value
from graphsplit.planning.device_bytes import traffic
from graphsplit.planning.passes import best_default_device
from graphsplit.planning.variables.in_parts import program_of
from tests.helpers.exchanges import trained
from tests.helpers.hosts import (
    assert_counted,
    assert_law_on_hosts,
    by_gateways,
    crossing_bytes,
    on_hosts,
    plan_on_hosts,
    straight,
    worker_device,
)
from tests.helpers.law import rows
from tests.helpers.layout_cases import Optimizer, adam, deep_step, numbers

LAYERS, WIDTH = 3, 40
SIZE = LAYERS * WIDTH * WIDTH * 4
X = numbers(10, WIDTH, seed=9)
EIGHT = [worker_device(task, number) for task in range(2) for number in range(4)]

Made = tuple[Callable[..., Any], Sequence[tf.Variable]]


def deep(layout: str, devices: int) -> Made:
    weights = [tf.Variable(0.1 * numbers(WIDTH, WIDTH, seed=k), name=f"weight_{k}") for k in range(LAYERS)]
    gs.set_variable_layout(weights, layout, devices)
    return deep_step(weights), weights


@pytest.mark.sampled(1)
@pytest.mark.parametrize("counts", [(2, 3), (2, 1, 2), (1, 3)])
def test_each_weight_and_each_gradient_passes_once_to_each_host(counts: tuple[int, ...]):
    """By every layout, with the same bits; what else passes are the rows of other hosts, and their sums of the loss."""
    rows_away, found = 10 - sum(rows_of_ten(sum(counts))[: counts[0]]), {}
    for layout in ("home", "replicated", "sharded"):
        made = [deep(layout, sum(counts)) for _ in range(2)]
        ways = iter(made)
        plan = assert_law_on_hosts(lambda ways=ways: next(ways), [(X,)], counts)
        hosts = len(counts) - 1
        assert assert_counted(plan) == hosts * (2 * SIZE + 4) + rows_away * WIDTH * 4
        assert f"  between {len(counts)} hosts: " in str(plan)
        assert f"sent, within each host, then between {len(counts)} hosts" in str(plan)
        # (an all-reduce of replicated variables adds up and sends)
        assert layout == "replicated" or f"sent, once to each of {len(counts)} hosts" in str(plan)
        found[layout] = [tf.convert_to_tensor(weight).numpy() for weight in made[1][1]]
    np.testing.assert_array_equal(found["home"], found["replicated"])
    np.testing.assert_array_equal(found["home"], found["sharded"])


def test_the_nearest_copy_is_on_the_same_host():
    """With one copy on each host weights are not sent; each part of a gradient is added up once, and sent once."""

    def make() -> Made:
        step, weights = deep("home", 1)
        gs.set_variable_layout(weights, "replicated", ["CPU:0", "CPU:2"])
        return step, weights

    plan = assert_law_on_hosts(make, [(X,)], (2, 3))
    assert assert_counted(plan) == 2 * SIZE + 4 + 6 * WIDTH * 4


def rows_of_ten(devices: int) -> list[int]:
    return [10 // devices + (d < 10 % devices) for d in range(devices)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["home", "replicated", "sharded"])
def test_an_optimizer_with_slots(layout: str):
    def make() -> Made:
        made = Optimizer(adam)
        gs.set_variable_layout(made.variables, layout, 5)
        return made.step, made.variables

    x, y = numbers(11, 7, seed=1), numbers(11, 5, seed=2)
    plan = assert_law_on_hosts(make, [(x, y), (x[:4], y[:4])], (2, 3))
    assert_counted(plan)


def reduced(x: tf.Tensor) -> Any:
    """Return every reduction of rows that shards have a part of."""
    h = tf.tanh(x)
    positive = h > 0
    ways = [tf.reduce_sum, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_prod]
    truth = [tf.reduce_any, tf.reduce_all]
    return [way(h, 0) for way in ways], [way(positive, 0) for way in truth], tf.reduce_mean(h), tf.reduce_max(x)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("is_known", [True, False])
def test_reductions(is_known: bool, micro_batches: int):
    x = rows(13, 6) + 0.5
    function = reduced if is_known else tf.function(reduced, input_signature=[tf.TensorSpec((None, 6), x.dtype)])
    sizes = (13, 4) if is_known else (13, 7, 4, 3, 2, 1)
    plan = assert_law_on_hosts(
        lambda: (function, []), [(x[:count],) for count in sizes], (2, 3), micro_batches=micro_batches
    )
    reductions = {
        value.reduction for c in plan.collectives for value in c.values if isinstance(value, Sum) and value.host
    }
    assert reductions == {"sum", "max", "min", "prod", "any", "all", *(["mean"] if is_known else [])}
    if is_known:
        assert_counted(plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["home", "replicated", "sharded"])
def test_shards_that_may_have_no_rows(layout: str):
    """One gradient of each host passes, and what stands in where one of its shards has none."""

    def make() -> Made:
        step, weights = deep(layout, 5)
        return tf.function(step, input_signature=[tf.TensorSpec((None, WIDTH))]), weights

    plan = assert_law_on_hosts(make, [(X[:count],) for count in (10, 4, 3, 2, 1)], (2, 3))
    assert by_gateways(plan)


def test_what_shards_without_rows_take_crosses_once():
    step, _ = deep("home", 5)
    spec = tf.TensorSpec((None, WIDTH))
    plan = plan_on_hosts(step, (2, 3), spec)
    graph = emit(plan)
    device = {node.name: node.device for node in graph.nodes}
    found = Counter(
        node.op
        for node in graph.nodes
        for reference in {r.partition(":")[0] for r in node.input if r[0] != "^"}
        if graph.origins[node.name].role == "reduce" and graph.origins[reference].op is not None
        if host_name(device[reference]) != host_name(node.device)
    )
    sums = len([move for move in plan.moves if move.kind == "reduce"])
    assert found == {"AddN": sums, "Identity": sums}  # (the latter is dead where all have rows)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [2, 3])
def test_shards_that_take_turns(micro_batches: int):
    plan = assert_law_on_hosts(lambda: deep("home", 5), [(X,)], (2, 3), micro_batches=micro_batches)
    rows_away = sum(
        [count for d, count in enumerate(plan.rows) if host_name(plan.devices[d]) != host_name(plan.default_device)]
    )
    assert assert_counted(plan) == 2 * SIZE + 4 + rows_away * WIDTH * 4


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_exchanges(micro_batches: int):
    """What a shard gives to all passes once to each host; what it gives to sums is added up within each."""
    plan = assert_law_on_hosts(lambda: (trained, []), [(rows(41, 64),)], (2, 3), micro_batches=micro_batches)
    kinds = {collective.kind for collective in by_gateways(plan)}
    assert {"all-gather", "reduce-scatter"} <= kinds
    sums = [plan.program.bytes(move.tensor) for move in plan.moves if move.kind == "reduce-scatter"]
    assert crossing_bytes(plan)["reduce-scatter"] == sum(sums)
    assert assert_counted(plan) < 0.6 * assert_counted(straight(plan))


def test_loops_at_home():
    """Each turn's sums are added up within each host, too."""
    w = tf.constant(numbers(6, 6))

    def step(x: tf.Tensor) -> tf.Tensor:
        total = tf.zeros(6)
        for _ in tf.range(tf.cast(tf.reduce_max(tf.abs(x[0])) * 0.0, tf.int32) + 3):
            total += tf.reduce_sum(tf.tanh(x @ w + total), 0)
        return total

    plan = assert_law_on_hosts(lambda: (tf.function(step), []), [(numbers(11, 6, seed=3),)], (2, 3))
    assert any(by_gateways(body) for found in plan.steps for body in found.bodies.values())


def test_stages_on_another_host():
    """Its weight, which is at home, goes there once. (Its update is planned beside what it is for: in the stage.)"""
    with tf.device("CPU:0"):
        weight = tf.Variable(numbers(WIDTH, WIDTH))
    layer = gs.on_device(lambda h: tf.tanh(h @ weight), EIGHT[4:])

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.tanh(x)))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    plan = gs.parallelize(step, devices=EIGHT[:4]).plan(X[:8])
    plan.check()
    check_emitted(plan, emit(plan))
    assert [collective.kind for collective in by_gateways(plan)] == ["broadcast"], str(plan)
    saved = crossing_bytes(straight(plan)).total() - crossing_bytes(plan).total()
    assert saved == 3 * WIDTH * WIDTH * 4


def test_compiled_parts_of_devices_of_the_same_number():
    step, _ = deep("sharded", 4)
    plan = plan_on_hosts(step, (2, 2), X, jit_compile=True)
    names = [node.name for node in graph_def_that_runs(emit(plan)).node]
    assert sorted(set(names)) == sorted(names)
    assert any("/compiled/home/" in name for name in names)


def test_work_is_spread_over_the_devices_of_a_host():
    step, _ = deep("home", 1)
    plan = gs.parallelize(step, devices=EIGHT).plan(X[:8])
    assert traffic(plan).between_hosts == 2 * SIZE + 4 + 8 * WIDTH * 4  # (this process has the rows)
    passed: Counter[str] = Counter()
    for collective in by_gateways(plan):
        away = {host: device for host, device in collective.gateways.items() if host != host_name(plan.default_device)}
        assert set(away) == {host_name(EIGHT[4])}
        passed.update({device: plan.program.bytes(collective.moves[0].tensor) for device in away.values()})
    assert set(passed) == set(EIGHT[4:])
    assert max(passed.values()) == 2 * WIDTH * WIDTH * 4  # of six of these, and the loss, on four devices


def test_one_host_has_no_gateways():
    step, _ = deep("home", 1)
    for devices in (EIGHT[:4], [f"CPU:{i}" for i in range(4)]):
        plan = gs.parallelize(step, devices=devices).plan(X)
        rows_away = len(X) * WIDTH * 4 * (devices == EIGHT[:4])  # from this process
        assert not by_gateways(plan)
        assert traffic(plan).between_hosts == rows_away
        assert ("host" in str(plan)) == bool(rows_away)


def biases(layout: str, devices: int, count: int = 12) -> Made:
    weight = tf.Variable(0.1 * numbers(WIDTH, WIDTH), name="weight")
    own = [tf.Variable(tf.zeros(WIDTH * 100), name=f"bias_{k}") for k in range(count)]
    gs.set_variable_layout([weight, *own], layout, devices)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            h = x @ weight
            for k, bias in enumerate(own):
                h = tf.nn.tanh(tf.nn.bias_add(tf.repeat(h[:, :WIDTH], 100, 1) / (k + 1), bias))
            loss = tf.reduce_sum(h)
        for variable, gradient in zip([weight, *own], tape.gradient(loss, [weight, *own]), strict=True):
            variable.assign_sub(0.1 * gradient)
        return loss

    return step, [weight, *own]


def test_buckets_between_hosts():
    """Of 12 biases of 16 kB all sums fit into one; the weights that are sent as one are sent once, too."""
    plan = assert_law_on_hosts(lambda: biases("home", 5), [(X[:5],)], (2, 3))
    assert [(bucket.kind, len(bucket.moves)) for bucket in plan.buckets] == [("broadcast", 12), ("reduce", 12)]
    assert assert_counted(plan) == 2 * sum([4 * WIDTH * WIDTH, 12 * 400 * WIDTH]) + 4 + 3 * WIDTH * 4
    step, _ = biases("home", 1)
    found = {}
    for name, devices in {"hosts": EIGHT, "one host": EIGHT[:4]}.items():
        for size in (None, 64_000):
            made = gs.parallelize(step, devices=devices, tuning={"bucket_bytes": size}).plan(X)
            found[name, size] = [len(bucket.moves) for bucket in made.buckets if bucket.kind == "reduce"]
    assert found == {
        ("hosts", None): [12], ("hosts", 64_000): [4, 4, 4],
        ("one host", None): [4, 4, 4], ("one host", 64_000): [4, 4, 4],
    }  # fmt: skip


def test_home_is_where_the_variables_are():
    """In this process, where the devices are of others; the first device where nothing speaks for another one."""
    step, _ = deep("home", 1)
    trace = gs.parallelize(step, devices=2)._planning((X,), {})[0].trace
    program, state = program_of(trace)
    assert best_default_device(program, state, EIGHT) == (
        "/device:CPU:0",
        ("default device: CPU:0, where the variables are (19.2 kB)",),
    )
    assert best_default_device(program, state, ["/device:CPU:3", "/device:CPU:0"]) == ("/device:CPU:3", ())

    def lying(*devices: str) -> tuple[str, tuple[str, ...]]:
        own = dataclasses.replace(state, devices=dict(zip(state.devices, devices, strict=True)))
        return best_default_device(program, own, EIGHT)

    assert lying(EIGHT[5], EIGHT[5], EIGHT[0]) == (EIGHT[0], ())  # which has half as much
    said = "default device: worker:1/CPU:1, where the variables are (12.8 kB)"
    assert lying(EIGHT[5], EIGHT[5], EIGHT[1]) == (EIGHT[5], (said,))
    assert lying(EIGHT[1], EIGHT[0], EIGHT[2]) == (EIGHT[0], ())
    plain = gs.parallelize(tf.tanh, devices=2)._planning((X,), {})[0].trace
    assert best_default_device(*program_of(plain), EIGHT) == (EIGHT[0], ())


@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_home_of_variables_on_all_devices(layout: str):
    step, _ = deep(layout, 5)
    plan, names = plan_on_hosts(step, (2, 3), X), on_hosts(2, 3)
    assert best_default_device(plan.program, plan.state, list(names.values())) == (worker_device(0, 0), ())


@pytest.fixture(scope="module")
def plan() -> gs.inspect.Plan:
    step, _ = deep("home", 1)
    return gs.parallelize(step, devices=EIGHT).plan(X)


HOST = host_name(EIGHT[4])


def with_gateway(plan: gs.inspect.Plan, kind: str, device: str) -> gs.inspect.Plan:
    """Let what passes through a device of another host pass through a given one."""

    def moved(value: Value) -> Value:
        is_gateway = isinstance(value, Relay) or (isinstance(value, Sum) and value.host == HOST)
        return dataclasses.replace(value, device=device) if is_gateway else value

    first = next(collective for collective in by_gateways(plan) if collective.kind == kind)
    return with_collective(plan, first, tuple(map(moved, first.values)))


def with_collective(plan: gs.inspect.Plan, collective: Collective, values: tuple[Value, ...]) -> gs.inspect.Plan:
    made = dataclasses.replace(collective, values=values)
    return dataclasses.replace(plan, collectives=tuple(made if c is collective else c for c in plan.collectives))


@pytest.mark.parametrize(
    ("kind", "device", "message"),
    [
        ("broadcast", EIGHT[1], f"passes through no device on host {HOST!r}."),
        ("broadcast", "/device:CPU:0", "passes through /device:CPU:0, which has no part in it."),
        ("reduce", EIGHT[0], f"passes through {EIGHT[0]} on host {HOST!r}."),
        ("reduce", "/device:CPU:0", "passes through /device:CPU:0, which has no part in it."),
    ],
)
def test_wrong_gateways(plan: gs.inspect.Plan, kind: str, device: str, message: str):
    plan.check()
    with pytest.raises(gs.errors.CheckError) as found:
        with_gateway(plan, kind, device).check()
    assert str(found.value).startswith(f"The {kind} of '")
    assert str(found.value).endswith(message)


def test_ways_past_gateways(plan: gs.inspect.Plan):
    with pytest.raises(gs.errors.CheckError, match=f"passes through no device on host {HOST!r}"):
        straight(plan).check()


def test_gateways_of_what_needs_none(plan: gs.inspect.Plan):
    scatter = next(collective for collective in plan.collectives if collective.kind == "scatter")
    piece = next(k for k, value in enumerate(scatter.values) if isinstance(value, Slice) and value.piece == 5)
    relay = Relay((piece,), EIGHT[4], scatter.values[piece].bytes)
    reads = [r._replace(value=len(scatter.values)) if r.value == piece else r for r in scatter.reads[0]]
    made = dataclasses.replace(scatter, values=(*scatter.values, relay), reads=(tuple(reads),))
    changed = tuple(made if c is scatter else c for c in plan.collectives)
    with pytest.raises(gs.errors.CheckError, match=f"^The scatter of 'x' passes through {EIGHT[4]} on host"):
        dataclasses.replace(plan, collectives=changed).check()


def is_sum_of_host(node: Any) -> bool:
    """Return whether a node adds up what the devices of the other host give."""
    return node.op == "AddN" and node.device in EIGHT[4:] and all(name.split("/")[0] in AWAY for name in node.input)


AWAY = {f"shard_{d}" for d in range(4, 8)}


def past_relay(graph: EmittedGraph) -> None:
    """Let a reader of what is sent on within a host read what is sent from home."""
    relay = next(n for n in graph.nodes if n.op == "Identity" and graph.origins[n.name].role == "broadcast")
    reader = next(n for n in graph.nodes if relay.name in n.input and n.device != relay.device)
    reader.input[list(reader.input).index(relay.name)] = relay.input[0]


def past_sum(graph: EmittedGraph) -> None:
    """Let a sum of a host take one part less, and the sum of all take it by itself."""
    inner = next(n for n in graph.nodes if is_sum_of_host(n))
    outer = next(n for n in graph.nodes if inner.name in n.input)
    outer.input.append(inner.input.pop())


def another_device(graph: EmittedGraph) -> None:
    inner = next(n for n in graph.nodes if is_sum_of_host(n))
    inner.device = EIGHT[0]


@pytest.mark.parametrize("change", [past_relay, past_sum, another_device])
def test_the_checker_sees_what_goes_past_a_gateway(plan: gs.inspect.Plan, change: Callable[[EmittedGraph], None]):
    graph = emit(plan)
    check_emitted(plan, graph)
    change(graph)
    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, graph)


def test_counts_of_straight_ways(plan: gs.inspect.Plan):
    """What gateways save, of P bytes of weights and as many of gradients, on two hosts of four devices."""
    found = {"straight": crossing_bytes(straight(plan)), "by gateways": crossing_bytes(plan)}
    rows_away = len(X) * WIDTH * 4  # all of them, from this process
    assert found["straight"].total() == 4 * (2 * SIZE + 4) + rows_away
    assert found["by gateways"].total() == 2 * SIZE + 4 + rows_away


@pytest.mark.long
def test_over_worker_processes():
    """The law over two processes of two devices each; and what TensorFlow's own partitions send is what was planned."""
    command = [sys.executable, "-m", "tests.helpers.hosts_on_workers"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    home = found["home"]
    assert home["home"] == "/device:CPU:0"
    assert home["notes"] == ["default device: CPU:0, where the variables are (19.2 kB)"]
    assert home["between"] == 2 * (2 * SIZE + 4) + 10 * WIDTH * 4
    sent = Counter(_kind(text) for text in home["sent"])
    assert sent == {"weights": 2 * LAYERS, "gradients": 2 * LAYERS, "loss": 2, "rows": 4}
    assert found["bits"]["alike"]
    differences = [home["difference"], *found["bits"]["differences"].values()]
    assert max([*differences, found["unknown"], found["outside"], found["mapped"]]) < 1e-5  # as in `assert_law`


def _kind(sent: str) -> str:
    kinds = {"ReadVariableOp": "weights", "/reduce_": "gradients", "/scatter_": "rows"}
    return "loss" if "/Sum/" in sent else next((kind for part, kind in kinds.items() if part in sent), sent)
