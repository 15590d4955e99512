"""What a plan, and a warning, say of a device that does more than the others because the variables are there."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls import outer_graphs
from graphsplit.planning import burdens
from graphsplit.planning.burdens import burden_of_variables, operations_on
from graphsplit.planning.tasks import OPERATION, SEND, tasks_of

GPUS = [f"GPU:{k}" for k in range(4)]
X = tf.TensorSpec((64, 500))


def training(width: int = 500, layout: str = "", devices: Any = GPUS, **options: Any) -> gs.ParallelFunction[Any, Any]:
    weight = tf.Variable(tf.ones((500, width)))
    if layout:
        gs.set_variable_layout(weight, layout, devices)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weight))
        weight.assign_sub(tape.gradient(loss, weight))
        return loss

    return gs.parallelize(step, devices=devices, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"width": 30},  # 60 kB of weights
        {"variables": "auto"},
        {"devices": 3, "layout": "sharded"},
        {"devices": 3, "layout": "replicated"},
        {"devices": 1},
        {"stages": 2, "micro_batches": 2},
    ],
    ids=str,
)
def test_a_plan_says_nothing_where_there_is_nothing_to_say(options):
    assert "the variables are on" not in str(training(**options).plan(X))


def test_rows_are_not_taken_for_variables():
    """A large batch passes through the first device, and a few weights are there, too."""
    weight = tf.Variable(tf.ones((500, 40)))
    step = gs.parallelize(lambda x: tf.tanh(x @ weight), devices=2)
    assert burden_of_variables(step.plan(tf.TensorSpec((100_000, 500)))) is None


def test_the_table_has_the_operations_of_each_device():
    plan = training(devices=4).plan(tf.TensorSpec((66, 500)))
    tasks = tasks_of(plan)  # of each shard
    counts = operations_on(plan, tasks)
    all_tasks = [task for task in tasks.tasks if task.kind != SEND]
    idle = [t for t in all_tasks if t.kind == OPERATION and plan.program.ops[t.op].type in ("Const", "Placeholder")]
    assert sum(counts.values()) == len(all_tasks) - len(idle)
    head, home, *_ = str(plan).partition("peak memory")[2].splitlines()
    assert head.split("  ")[-2].strip() == "operations"
    assert f"  {counts['/device:CPU:0']}  " in home


def test_a_warning_is_given_once_where_much_is_sent(monkeypatch):
    x = tf.ones((64, 500))
    step = training(devices=3)
    step(x)  # logical CPU devices of one process share their memory: nothing is said
    for module in (outer_graphs, burdens):
        monkeypatch.setattr(module, "copies_take_time", lambda _: True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        training(devices=3)(x)  # of few bytes neither
    monkeypatch.setattr(outer_graphs, "_MANY_BYTES", 2_000_000)
    step = training(devices=3)
    said = (
        r'^step sends much through one device: the variables are on CPU:0, which sends .* variables="auto" stores them'
    )
    with pytest.warns(UserWarning, match=said):
        step(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x[:5])
