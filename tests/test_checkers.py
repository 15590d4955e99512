"""Checkers of programs, plans and emitted graphs pass what is right and see what is broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import REPLICATE, Partial, Shard, SingleDevice
from graphsplit.emission import EmittedGraph, check_emitted, emit, emitter
from graphsplit.errors import CheckError
from graphsplit.planning.passes import carry_out_moves, owned_and_moved
from graphsplit.planning.steps import Move, Step
from graphsplit.planning.tasks import PlannedTask, Result
from graphsplit.planning.waits import TURN, OrderedTasks, ordered_tasks_of
from graphsplit.program.program import Program, Tensor
from graphsplit.rules import Sharded
from tests.helpers.broken_plans import (
    drop_input,
    edited,
    read_another_piece,
    sharded,
    swap_inputs,
    with_nodes,
    with_op,
    with_step,
)

pytestmark = pytest.mark.sampled(quick="all")


@pytest.fixture(scope="module")
def plan() -> gs.inspect.Plan:
    w = tf.Variable(tf.ones((3, 2)))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w) ** 2)
        w.assign_sub(tape.gradient(loss, w))
        return loss, tf.unique(x[:, 0]).y, tf.unique(x[:, 1]).y

    return gs.parallelize(step, devices=3).plan(tf.ones((7, 3)))


def with_mesh(plan: gs.inspect.Plan, **changes: Any) -> gs.inspect.Plan:
    return dataclasses.replace(plan, mesh=dataclasses.replace(plan.mesh, **changes))


def idle(plan: gs.inspect.Plan) -> Move:
    """A move that nobody needs: what is read in pieces only, sent whole."""
    return Move(scattered(plan).tensor, scattered(plan).source, SingleDevice("/device:CPU:4"))


def scattered(plan: gs.inspect.Plan) -> Move:
    return next(move for move in plan.moves if move.kind == "scatter")


def in_a_bucket(plan: gs.inspect.Plan, *kinds: str) -> gs.inspect.Plan:
    """Make a move of each kind as one."""
    of_kinds = [[m for m in plan.moves if m.kind == kind] for kind in kinds]
    moves = list(dict.fromkeys([moves[min(k, len(moves) - 1)] for k, moves in enumerate(of_kinds)]))
    first = next(c for c in plan.collectives if c.moves[0] == moves[0])
    others = tuple([c for c in plan.collectives if c.moves[0] not in moves])
    return dataclasses.replace(plan, collectives=(dataclasses.replace(first, moves=tuple(moves)), *others))


def test_what_is_right_passes(plan: gs.inspect.Plan):
    plan.program.check()
    plan.check()
    check_emitted(plan, emit(plan))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda p: with_op(p, "Tanh", index=0), "stands at"),
        (lambda p: with_op(p, "Tanh", inputs=(Tensor(len(p.ops) - 1, 0),)), "which does not come before it"),
        (lambda p: with_op(p, "Tanh", inputs=(Tensor(0, 5),)), "which has no such output"),
        (lambda p: with_op(p, "Tanh", controls=(len(p.ops) - 1,)), "waits for an operation that does not come before"),
        (lambda p: dataclasses.replace(p, outputs=(Tensor(len(p.ops), 0),)), "which does not exist"),
    ],
)
def test_broken_programs(plan: gs.inspect.Plan, broken: Callable[[Program], Program], message: str):
    with pytest.raises(gs.errors.CheckError, match=message):
        broken(plan.program).check()


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda p: with_mesh(p, rows=(7, 0, 0)), r"Shards of \(7, 0, 0\) rows on 3 devices"),
        (lambda p: with_mesh(p, rows=(4, 3)), r"Shards of \(4, 3\) rows on 3 devices"),
        (lambda p: with_mesh(p, weights=(1, 1)), "Shares of"),
        (lambda p: with_mesh(p, positions=(0,)), "3 shards at positions"),
        (lambda p: with_mesh(p, rows=(4, 3, 3)), "cannot be shard"),
        (lambda p: dataclasses.replace(p, moves=()), "is missing"),
        (lambda p: dataclasses.replace(p, moves=(*p.moves, p.moves[0])), "A move is made twice"),
        (lambda p: dataclasses.replace(p, moves=(*p.moves, idle(p))), "serves nobody"),
        (lambda p: dataclasses.replace(p, collectives=p.collectives[1:]), "is carried out by nobody"),
        (lambda p: dataclasses.replace(p, collectives=(*p.collectives, p.collectives[0])), "is carried out 2 times"),
        (lambda p: in_a_bucket(p, "broadcast", "gather"), "between different places"),
        (lambda p: in_a_bucket(p, "scatter", "gather"), "between different places"),
        (lambda p: in_a_bucket(p, "gather", "gather"), "cannot be made as one"),
        (lambda p: with_step(p, "Tanh", sharded(wants=(Shard(1),))), "cannot be shard"),
        (lambda p: with_step(p, "Tanh", sharded(wants=())), "wants"),
        (lambda p: with_step(p, "Tanh", sharded(wants=(Partial("sum"),))), "is missing"),
        (lambda p: with_step(p, "Tanh", lambda step: Step()), "which is not made"),
        (
            lambda p: with_step(
                p,
                "AssignSubVariableOp",
                lambda step: Step(shards=Sharded((REPLICATE, REPLICATE), ())),
            ),
            "has side effects and would run 3 times",
        ),
    ],
)
def test_broken_plans(plan: gs.inspect.Plan, broken: Callable[[gs.inspect.Plan], gs.inspect.Plan], message: str):
    with pytest.raises(gs.errors.CheckError, match=message):
        broken(plan).check()


def move_away(node: Any) -> None:
    node.device = "/device:CPU:4"


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (edited(swap_inputs, "reduce", "AddN"), "and the plan says"),
        (edited(drop_input, "reduce", "AddN"), "and the plan says"),
        (edited(move_away, "reduce", "AddN"), "and the plan says"),
        (edited(swap_inputs, "gather", "ConcatV2"), "and the plan says"),
        (edited(move_away, "scatter", "SplitV"), "and the plan says"),
        (edited(read_another_piece, "op", "MatMul"), "and the plan says"),
        (edited(move_away, "op", "Tanh"), "and planned on '/device:CPU:0'"),
        (edited(move_away, "op", "AssignSubVariableOp"), "and planned on '/device:CPU:0'"),
        (lambda g: dataclasses.replace(g, outputs=(g.outputs[1], g.outputs[0])), "The result reads"),
        (lambda g: dataclasses.replace(g, origins={}), "Nobody knows where"),
    ],
)
def test_graphs_that_move_something_else(
    plan: gs.inspect.Plan, broken: Callable[[EmittedGraph], EmittedGraph], message: str
):
    with pytest.raises(gs.errors.CheckError, match=message):
        check_emitted(plan, broken(emit(plan)))


def read_the_argument(node: Any) -> None:
    node.input[0] = "x"


@pytest.mark.parametrize("edit", [read_the_argument, move_away])
def test_zeros_of_unknown_shape_that_are_of_something_else(edit: Callable[[Any], None]):
    """They stand, in a sum over the shards, for what the first of them has."""

    def function(x: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
        def turn(i: tf.Tensor, total: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            return i + 1, total + tf.reduce_sum(tf.sin(x), 0)

        return tf.while_loop(lambda i, _: i < 3, turn, [0, tf.tanh(first)])[1]

    parallel = gs.parallelize(function, devices=3, split={"first": None})
    plan = parallel.plan(tf.TensorSpec((None, None)), tf.TensorSpec((None,)))
    check_emitted(plan, emit(plan))
    with pytest.raises(gs.errors.CheckError, match="and the plan says"):
        check_emitted(plan, edited(edit, "zero-fill", "ZerosLike")(emit(plan)))


def without_device(nodes: list[Any]) -> None:
    nodes[3].device = ""


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (lambda g: with_nodes(g, without_device), "has no device"),
        (lambda g: with_nodes(g, lambda nodes: nodes.append(nodes[0])), "Two nodes have the same name"),
        (
            lambda g: with_nodes(g, lambda nodes: nodes[-1].input.append("nobody")),
            "reads 'nobody', which does not exist",
        ),
        (lambda g: dataclasses.replace(g, outputs=("nobody:0",)), "names 'nobody:0', which does not exist"),
    ],
)
def test_broken_graphs(plan: gs.inspect.Plan, broken: Callable[[EmittedGraph], EmittedGraph], message: str):
    with pytest.raises(gs.errors.CheckError, match=message):
        broken(emit(plan)).check()


def with_reads(tasks: OrderedTasks, read: Callable[[PlannedTask, Result], Result]) -> OrderedTasks:
    changed = [task._replace(reads=tuple([r and read(task, r) for r in task.reads])) for task in tasks.tasks]
    return dataclasses.replace(tasks, tasks=tuple(changed))


def reading_shard_0(tasks: OrderedTasks) -> OrderedTasks:
    """Each shard reads what the first one has made."""
    first = {task.op: n for n, task in enumerate(tasks.tasks) if task.shard == 0 and task.is_made}

    def read(task: PlannedTask, result: Result) -> Result:
        made = tasks.tasks[result.task]
        same = task.is_made and made.is_made and None not in (task.shard, made.shard)
        return Result(first[made.op], result.index) if same else result

    return with_reads(tasks, read)


def reading_first_values(tasks: OrderedTasks) -> OrderedTasks:
    """Each shard reads of a move what that makes first."""
    moved = [(c, result) for (c, _), result in tasks.values.items() if result and not tasks.tasks[result.task].is_made]
    first = dict(reversed(moved))
    instead = {result: first[c] for c, result in moved}
    return with_reads(tasks, lambda task, result: instead.get(result, result) if task.shard is not None else result)


def waiting_for_nothing(tasks: OrderedTasks) -> OrderedTasks:
    """Turns begin before the turns that they follow have ended."""
    is_turn = [task.kind == TURN for task in tasks.tasks]
    return dataclasses.replace(tasks, waits=tuple([tuple([k for k in each if not is_turn[k]]) for each in tasks.waits]))


@pytest.mark.parametrize(
    ("change", "message"),
    {
        reading_shard_0: "reads",
        reading_first_values: "reads",
        waiting_for_nothing: "does not wait for .* of the shard before it",
    }.items(),
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_graphs_of_tasks_that_are_wrong(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[OrderedTasks], OrderedTasks], message: str
):
    """The checker of graphs does not look at the tasks of which these are written."""
    w = tf.Variable(tf.ones((3, 2)))
    plan = gs.parallelize(lambda x: tf.reduce_sum(tf.tanh(x @ w) ** 2), devices=2, micro_batches=2).plan(
        tf.ones((8, 3))
    )
    check_emitted(plan, emit(plan))
    monkeypatch.setattr(emitter, "ordered_tasks_of", lambda plan: change(ordered_tasks_of(plan)))
    with pytest.raises(CheckError, match=message):
        check_emitted(plan, emit(plan))


@pytest.fixture(scope="module")
def looping() -> gs.inspect.Plan:
    """A loop that each shard runs by itself."""

    def powers(x):
        return tf.while_loop(lambda i, y: i < 4, lambda i, y: (i + 1, tf.tanh(y) - x), [0, x])[1]

    return gs.parallelize(powers, devices=3).plan(tf.ones((7, 3)))


def with_body(change: Callable[[gs.inspect.Plan], gs.inspect.Plan]) -> Callable[[Step], Step]:
    """Return what changes the plan of a loop's body."""

    def changed(step: Step) -> Step:
        bodies = {name: change(body) if "body" in name else body for name, body in step.shards.bodies.items()}
        return sharded(bodies=bodies)(step)

    return changed


def gathering(body: gs.inspect.Plan) -> gs.inspect.Plan:
    """Let the body of a loop read all rows, which are gathered."""
    broken = with_step(body, "Tanh", sharded(wants=(REPLICATE,), gives=(REPLICATE,)))
    return carry_out_moves(owned_and_moved(broken, broken.steps))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda body: with_step(body, "Tanh", sharded(gives=(REPLICATE,))), "is missing"),
        (lambda body: with_step(body, "Tanh", lambda step: Step()), "which is not made"),
        (gathering, "runs 'while' by itself, and in its body 'while_placeholder_1' moves: all-gather"),
    ],
)
def test_broken_plans_of_what_each_shard_does_by_itself(
    looping: gs.inspect.Plan, change: Callable[[gs.inspect.Plan], gs.inspect.Plan], message: str
):
    looping.check()
    with pytest.raises(CheckError, match=message):
        with_step(looping, "StatelessWhile", with_body(change)).check()


@pytest.mark.parametrize(
    ("edit", "op_type", "message"),
    [(swap_inputs, "Sub", "and the plan says"), (move_away, "Tanh", "and planned on ''")],
)
def test_broken_functions_of_what_each_shard_does_by_itself(
    looping: gs.inspect.Plan, edit: Callable[[Any], None], op_type: str, message: str
):
    graph = emit(looping)
    name = next(name for name, (body, _) in graph.bodies.items() if op_type in {op.type for op in body.program.ops})
    body, emitted = graph.bodies[name]
    broken = dataclasses.replace(graph, bodies={**graph.bodies, name: (body, edited(edit, "op", op_type)(emitted))})
    check_emitted(looping, graph)
    with pytest.raises(CheckError, match=message):
        check_emitted(looping, broken)
