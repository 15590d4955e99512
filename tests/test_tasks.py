"""Tasks of a plan: what is emitted for it computes and sends the same, by device; and the table of what is held."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import inputs_of, source_of
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.kernels import Kernels
from graphsplit.emission.shards.sizes import sizes_of
from graphsplit.planning.alike_shards import kinds_of_shards
from graphsplit.planning.costs.families import FREE, family_of
from graphsplit.planning.costs.work import bytes_of
from graphsplit.planning.device_bytes import alive_on, live_bytes, traffic
from graphsplit.planning.state import state_bytes
from graphsplit.planning.tasks import OPERATION, SEND, few_tasks_of, tasks_of
from tests.helpers import emitted_graphs
from tests.helpers.emitted_programs import PROGRAMS as RECORDED
from tests.helpers.experts import FOUR, IN_PLACE, Layer, rows_of

UNKNOWN = {"traced again", "rows of a signature", "a weight of none"}
"""Programs of any number of rows, as those that are called so: what a task holds is known once the rows are."""
TAKEN_APART = {"mesh, decoding", "mesh, an lstm"}
"""Loops in columns: TensorFlow puts each value where its column is, so edges of the node that is emitted tell nothing.
`test_mesh_loops.py` checks what they move in each turn."""
MEETING_INSIDE = {"loop at home", "choice"}
"""Devices meet in each iteration of a loop, or in a branch, and nowhere else."""
OFTEN = [
    *("sgd", "adam sharded", "adam mirrored", "statistics and a counter", "reductions", "lstm", "joins", "dropout"),
    *("convolutions in micro-batches", "layers sharded in many micro-batches", "buckets", "each row", "patterns"),
    *("stages with devices of their own", "1f1b", "interleaved", "two hosts, mirrored", "compiled"),
]
PROGRAMS = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.long)
    for name, one in RECORDED.items()
    if one.way == "call" and "any rows" not in name and name not in UNKNOWN | TAKEN_APART
]
AROUND = {"constant", "sizes", "order", "relay"}  # what nodes have besides: rows counted, turns kept


def emitted(plan: gs.inspect.Plan, graph: EmittedGraph) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Return how many nodes of each type each device computes, and the bytes that each sends to each."""
    sizes, devices = sizes_of(plan, graph), {node.name: node.device for node in graph.nodes}
    nodes, sent, seen = Counter(), Counter(), set()
    for node in graph.nodes:
        if family_of(node.op) != FREE and graph.origins[node.name].role not in AROUND:
            nodes[node.device, node.op] += 1
        for reference in inputs_of(node)[0]:
            source, size = source_of(reference), bytes_of(sizes.of(reference))
            key = reference.removesuffix(":0"), node.device
            if devices[source] != node.device and size and key not in seen and graph.origins[source].role != "sizes":
                seen.add(key)
                sent[devices[source], node.device] += size
    return nodes, sent


@pytest.fixture
def plans_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Sequence[tuple[gs.inspect.Plan, EmittedGraph]]]:
    """Return what makes a recorded program, and returns its plans and emitted graphs."""
    found, emit = [], emitted_graphs.emit
    monkeypatch.setattr(emitted_graphs, "plan_of", emitted_graphs.plan_of.__wrapped__)  # (kept by name, not by devices)
    monkeypatch.setattr(emitted_graphs, "emit", lambda plan: found.append((plan, emit(plan))) or found[-1][1])
    return lambda name: emitted_graphs.functions_of(name) and found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_emitted_computes_and_sends_the_same(name: str, plans_of: Callable):
    """What is sent is counted apart from emission; kernels are told by what writes them, which `Kernels` calls."""
    [(plan, graph)] = plans_of(name)
    found = tasks_of(plan).tasks
    nodes, sent, kernels = Counter(), Counter(), Kernels(plan, found)
    for task in found:
        if task.kind == SEND:
            sent[found[task.reads[0].task].device, task.device] += task.bytes[0]
        else:
            made = [kernel.type for kernel in kernels.of(task)]
            nodes.update([(task.device, kind) for kind in made if family_of(kind) != FREE])
    computed, passed = emitted(plan, graph)
    assert nodes == computed
    assert +sent == passed
    assert sum(sent.values()) == sum(traffic(plan).sent.values())
    assert len(set(plan.devices)) < 2 or sent or name in MEETING_INSIDE


def test_what_is_cut_evenly_counts_with_its_entries_and_not_as_rows():
    layer = Layer(experts=6)
    gs.set_variable_layout(layer.variables, IN_PLACE, mesh=FOUR)
    plan = gs.parallelize(lambda x: layer(x), mesh=FOUR).plan(rows_of(5))  # rows: 2, 1, 1, 1; experts: 2, 2, 1, 1
    held = dict.fromkeys(plan.devices, 0)
    for task in tasks_of(plan).tasks:
        if task.kind == OPERATION and plan.program.ops[task.op].type == "ReadVariableOp" and task.shard is not None:
            held[task.device] += sum(task.bytes)
    expert = sum(v.shape[1:].num_elements() * v.dtype.size for v in layer.variables if "experts" in v.name)
    assert [*held.values()] == [2 * expert, 2 * expert, expert, expert]
    assert len(set(kinds_of_shards(plan))) == 3


ALIKE = {  # and how many shards of five devices need not be looked at: neither home's, nor the first and last alike
    **dict.fromkeys(["sgd", "joins, any rows", "buckets"], 2),
    **dict.fromkeys(["one device", "statistics and a counter", "choice"], 1),
    **dict.fromkeys(["convolutions in micro-batches", "any rows in micro-batches"], 4),
    **dict.fromkeys(["rows against rows", "columns in exchange for rows", "adam sharded", "gpipe", "two hosts"], 0),
}
OTHERS = sorted({name for name, own in RECORDED.items() if own.way == "call"} - {*ALIKE})


def on_five_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = RECORDED[name]
    several = isinstance(own.devices, int) and not own.hosts and not {"stages", "mesh", "shares"} & {*own.options}
    monkeypatch.setitem(RECORDED, name, replace(own, devices=5) if several else own)


def check_alike(plan: gs.inspect.Plan) -> int:
    """Check that few shards tell of all; return of how many others do."""
    every, few = tasks_of(plan), few_tasks_of(plan)
    assert traffic(plan, few) == traffic(plan, every)
    live, expected = alive_on(plan, few), alive_on(plan, every)
    assert {d: own.bytes for d, own in live.items()} == {d: own.bytes for d, own in expected.items()}
    assert {d: own.activations for d, own in live.items()} == {d: own.activations for d, own in expected.items()}
    assert not {plan.mesh.devices[d] for d in few.alike.told_by} & {task.device for task in few.tasks}
    return len(few.alike.told_by)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", ALIKE)
def test_few_shards_tell_what_all_hold_and_send(name: str, plans_of: Callable, monkeypatch: pytest.MonkeyPatch):
    on_five_devices(name, monkeypatch)
    assert [check_alike(plan) for plan, _ in plans_of(name)][-1] == ALIKE[name]


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_few_shards_of_any_program_tell_of_all(name: str, plans_of: Callable, monkeypatch: pytest.MonkeyPatch):
    on_five_devices(name, monkeypatch)
    plans = plans_of(name)
    assert plans
    for plan, _ in plans:
        check_alike(plan)


def test_each_is_behind_what_it_reads():
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        w.assign_sub(tape.gradient(loss, w))
        return loss

    w = tf.Variable(tf.ones([4, 4]))
    found = tasks_of(gs.parallelize(step, devices=3, micro_batches=2).plan(tf.ones([13, 4])))
    assert all(read.task < n for n, task in enumerate(found.tasks) for read in task.reads if read)
    assert all(found.tasks[read.task].device == task.device for task in found.tasks for read in task.reads
               if read and task.kind not in (SEND, OPERATION))  # fmt: skip
    assert len(found.returned) == 1


def test_a_plan_says_what_each_device_holds():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(1000, name="wide"),
            keras.layers.Dropout(0.5, name="sparse"),
            keras.layers.Dense(1, name="narrow"),
        ]
    )
    plan = gs.parallelize(lambda x: model(x, training=True), devices=2).plan(tf.ones([31, 8]))
    lines = str(plan).splitlines()
    first = next(k for k, line in enumerate(lines) if line.split()[:2] == ["peak", "memory"])
    head, home, other = (line.strip() for line in lines[first : first + 3])
    assert head.endswith("variables  arguments  activations  moved  operations  most of it")
    live, held = live_bytes(plan), state_bytes(plan.program, plan.state, plan.default_device)
    assert held == {plan.default_device: 4 * (8 * 1000 + 1000 + 1000 + 1) + 16}  # and the seed of dropout
    for device, line in zip(plan.devices, (home, other), strict=True):
        cells = line.split("  ")
        written = [cell.split() for cell in cells[1:] if cell][:5]
        amounts = [float(number) * {"B": 1, "kB": 1e3}[unit] for number, unit in written]
        variables, arguments = held.get(device, 0), 31 * 8 * 4 if device == plan.default_device else 0
        expected = [variables + arguments + live[device], variables, arguments]
        assert amounts[:3] == pytest.approx(expected, rel=0.01)
        assert sum(amounts[3:]) == pytest.approx(live[device], rel=0.01)
    layers = [part.split()[0].rpartition("/")[2] for line in (home, other) for part in line.split("  ")[-1].split(", ")]
    assert {"wide", "sparse"} <= set(layers), (home, other)


@pytest.mark.parametrize(("devices", "name"), [(3, "each of CPU:1 and CPU:2"), (5, "each of CPU:1 and 3 others")])
def test_a_line_of_several_devices_tells_what_each_of_them_holds(devices: int, name: str):
    plan = gs.parallelize(tf.tanh, devices=devices).plan(tf.ones((devices, 8)))
    lines = [line.split("  ") for line in str(plan).partition("peak memory")[2].splitlines()]
    assert [line[2] for line in lines[1:]] == ["CPU:0", name]


def turning(turns: int | tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function whose loop keeps in each turn what its gradient reads."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.while_loop(lambda k, _: k < turns, lambda k, y: (k + 1, tf.tanh(y)), (0, x))[1]
            loss = tf.reduce_sum(y**2)
        return tape.gradient(loss, x)

    return step


@pytest.mark.sampled(1)
@pytest.mark.parametrize("devices", [1, 2])
def test_what_a_loop_keeps_for_its_gradient_counts_in_every_turn(devices: int):
    x = tf.ones((6, 1000))
    few, many = (gs.parallelize(turning(turns), devices=devices).plan(x) for turns in (10, 110))
    more = {device: size - live_bytes(few)[device] for device, size in live_bytes(many).items()}
    assert more == dict.fromkeys(many.devices, 100 * 6 * 1000 * 4 // devices)
    assert "each turn" not in str(many)
