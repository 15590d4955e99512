"""Plans of what is not here: specifications instead of tensors, devices of another machine, calls that have been."""

from __future__ import annotations

import re

import keras
import pytest
import tensorflow as tf
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import emitter
from graphsplit.planning.state import state_bytes
from tests.helpers.law import rows

EIGHT = [f"GPU:{i}" for i in range(8)]
CPUS = "".join(f"  - CPU:{i}\n" for i in range(5))
HERE = f"This process has:\n{CPUS}"
MORE = "To try several devices without GPUs, call graphsplit.use_logical_devices(n) before TensorFlow starts."


def mean(x, y):
    return tf.reduce_mean((tf.tanh(x) - y) ** 2)


def spec(*shape: int | None) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float64)


def test_specifications_stand_for_tensors():
    parallel = gs.parallelize(mean, devices=3)
    plan = parallel.plan(spec(7, 4), spec(7, 4))
    assert plan.rows == (3, 2, 2)
    assert parallel.plan(rows(7, 4), spec(7, 4)) is plan, "the same signature is traced once"
    assert parallel.placement(spec(7, 4), spec(7, 4)).rows == (3, 2, 2)
    assert gs.placement(parallel, spec(7, 4), y=spec(7, 4)).rows == (3, 2, 2)
    assert "Tanh" in {node.op for node in parallel.graph_def(spec(7, 4), spec(7, 4)).node}
    assert not parallel.variables(spec(7, 4), spec(7, 4))
    assert "Tanh" in {op.type for op in parallel.gradient_plan(spec(7, 4), spec(7, 4)).sharded_ops}


def test_specifications_with_unknown_sizes_and_of_composites():
    plan = gs.parallelize(mean, devices=2).plan(spec(None, 4), spec(None, 4))
    assert str(plan).splitlines()[0] == (
        "Plan: 100 % of the FLOPs sharded on 2 devices, balance 1.00, 8 B and 64 B a row to send a step"
    )
    dense = gs.parallelize(lambda x: tf.tanh(x.to_tensor()), devices=2)
    ragged = tf.RaggedTensorSpec([5, None], tf.float64, ragged_rank=1)
    assert "x is a RaggedTensor: it is kept whole, and split where it becomes dense" in dense.plan(ragged).notes


@pytest.mark.parametrize("options", [{"devices": 3}, {"devices": EIGHT}, {"devices": EIGHT, "jit_compile": True}])
def test_a_plan_is_made_without_writing_its_graph(monkeypatch: pytest.MonkeyPatch, options):
    def written(*_):
        raise AssertionError("a graph was written")

    monkeypatch.setattr(emitter, "Draft", written)
    parallel = gs.parallelize(mean, **options)
    assert "Tanh" in {op.type for op in parallel.plan(spec(8, 4), spec(8, 4)).sharded_ops}
    with pytest.raises(AssertionError, match="a graph was written"):
        parallel.graph_def(spec(8, 4), spec(8, 4))


def test_specifications_do_not_run():
    parallel = gs.parallelize(mean, devices=2)
    text = "TensorSpec(shape=(7, 4), dtype=tf.float64, name=None)"
    with pytest.raises(gs.errors.ArgumentError) as error:
        parallel.placement(spec(7, 4), rows(7, 4), actual=True)
    assert str(error.value) == (f"actual=True runs the function once, so it needs tensors, not specifications: {text}.")
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.verify(parallel, spec(7, 4), rows(7, 4))
    assert str(error.value) == f"verify runs the function, so it needs tensors, not specifications: {text}."


def test_without_arguments_the_calls_that_ran_most():
    parallel = gs.parallelize(mean, devices=2)
    parallel.plan(rows(9, 4), rows(9, 4))
    for count in (4, 6, 6, 5):
        parallel(rows(count, 4), rows(count, 4))
    assert parallel.plan().batch == 6
    assert parallel.placement().rows == (3, 3)
    for y in parallel.map([(rows(4, 4), rows(4, 4))] * 2):
        assert y.shape == []
    assert parallel.plan().batch == 4


def test_without_arguments_before_any_call():
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.parallelize(mean, devices=2).plan()
    assert str(error.value) == (
        "Without arguments, plan() and placement() describe the signature that was called most, and mean has not been "
        "called. Pass arguments or tf.TensorSpecs."
    )
    assert gs.parallelize(lambda: tf.constant(3.0), devices=2).plan().batch == 0


def test_devices_of_another_machine():
    weight = tf.Variable(rows(4, 3))
    parallel = gs.parallelize(lambda x: tf.tanh(x @ weight), devices=EIGHT)
    x = rows(9, 4)
    plan = parallel.plan(x)
    assert plan.devices == tuple(f"/device:{name}" for name in EIGHT)
    assert plan.notes[-1] == (
        f"this process does not have {', '.join(EIGHT)}: the plan is for a process that does, with variables on GPU:0"
    )
    placement = parallel.placement(x)
    placement.assert_on("shard_7/*", "GPU:7")
    placement.assert_on("ReadVariableOp", "GPU:0")
    assert set(placement.devices) == {f"/device:{name}" for name in (*EIGHT, "CPU:0")}  # (where the rows come from)
    expected = f"devices={EIGHT}: {', '.join(EIGHT)} do not exist. {HERE}{MORE}"
    for run in (lambda: parallel(x), lambda: list(parallel.map([x])), lambda: gs.verify(parallel, x)):
        with pytest.raises(gs.errors.DeviceError) as error:
            run()
        assert str(error.value) == expected


@pytest.mark.parametrize(
    ("writes", "said"),
    [(True, "the function writes is sharded, and gathered once a call"), (False, "it only reads is replicated")],
)
def test_layouts_that_are_chosen_for_another_machine(writes: bool, said: str):
    """Plan and placement have the parts on the same devices, and neither moves a variable."""
    weight = tf.Variable(tf.ones((500, 500)), name="weight")
    scale = tf.Variable(2.0, name="scale")

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.tanh(x @ weight)) * scale
        if writes:
            weight.assign_sub(tape.gradient(loss, weight))
        return loss

    parallel = gs.parallelize(step, devices=EIGHT, variables="auto")
    x = tf.TensorSpec((64, 500))
    plan = parallel.plan(x)
    expected = state_bytes(plan.program, plan.state, plan.default_device)
    assert len(expected) == 8
    assert sum(expected.values()) == 1_000_000 * (1 if writes else 8) + 4
    for placed in (parallel.placement(x), gs.placement(parallel, x)):
        assert {d: total.parameter_bytes for d, total in placed.devices.items() if total.parameter_bytes} == expected
    assert plan.notes[-2:] == (
        f"this process does not have {', '.join(EIGHT)}: the plan is for a process that does",
        f'variables="auto": what {said}',
    )
    with pytest.raises(gs.errors.DeviceError, match="step would run on GPU:0, "):
        gs.placement(parallel, tf.ones((64, 500)), actual=True)
    assert parts_of_variable(weight) is None


def test_the_placement_of_a_model_on_another_machine_moves_nothing():
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(1024), keras.layers.Dense(10)])
    model.compile("sgd", "mse")
    far = gs.multi_gpu_model(model, gpus=EIGHT)
    batch = tf.TensorSpec((64, 256)), tf.TensorSpec((64, 10))
    plan = far.plan(*batch)
    expected = state_bytes(plan.program, plan.state, plan.default_device)
    assert len(expected) == 8
    for placed in (far.placement(*batch), gs.placement(far, *batch)):
        assert {d: total.parameter_bytes for d, total in placed.devices.items() if total.parameter_bytes} == expected
    assert all(parts_of_variable(weight.value) is None for weight in model.weights)


def test_stages_on_devices_of_another_machine():
    stage = gs.on_device(tf.tanh, "GPU:1")
    parallel = gs.parallelize(lambda x: stage(x) + 1, devices=2)
    assert "stage tanh on GPU:1" in str(parallel.plan(rows(4, 3)))
    with pytest.raises(gs.errors.DeviceError) as error:
        parallel(rows(4, 3))
    assert str(error.value) == (f"<lambda> would run on GPU:1, which this process does not have. It has:\n{CPUS}{MORE}")


def test_inspect_for_another_machine():
    asked = ["inspect", "tests.test_plans_of_elsewhere:mean", "--spec", "float64[?,4]", "--spec", "float64[?,4]"]
    ran = CliRunner().invoke(app, [*asked, "--devices", "GPU:0,GPU:1"])
    assert ran.exit_code == 0, ran.output
    assert ran.output.startswith("Placement (requested) of mean: ")
    assert {line.split()[0] for line in ran.output.splitlines() if line.startswith("  GPU:")} == {"GPU:0", "GPU:1"}
    ran = CliRunner().invoke(app, [*asked, "--devices", "GPU:0,GPU:1", "--actual"])
    assert ran.exit_code == 2
    assert ran.output.startswith("Error: The argument float64[?,4] has a size that is not known")
    sized = [text.replace("?", "6") for text in asked]
    ran = CliRunner().invoke(app, [*sized, "--devices", "GPU:0,GPU:1", "--actual"])
    assert ran.exit_code == 2
    assert ran.output == (
        f"Error: mean would run on GPU:0, GPU:1, which this process does not have. It has:\n{CPUS}{MORE}\n"
    )


def test_layouts_are_compared_for_another_machine():
    """Each is planned as it says, though all variables are on this machine's CPU now."""
    weights = [tf.Variable(tf.zeros((512, 512))) for _ in range(2)]

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(tf.tanh(x @ weights[0]) @ weights[1]))
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(gradient)
        return loss

    devices = [f"GPU:{k}" for k in range(4)]
    parallel = gs.parallelize(step, devices=devices, memory="1GB", plan="8xA100-SXM4-80GB")
    said = parallel.plan(tf.TensorSpec((64, 512))).explain()
    found = re.findall(r"4 devices, variables (home|sharded|replicated): [\d.]+ ms, ([\d.]+ .B) a device", said)
    held = dict(found)
    assert len(held) == len(set(held.values())) == 3, said
