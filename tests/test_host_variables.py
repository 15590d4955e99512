"""Variables in the host's memory: the law, where the bytes are, and which of them travel."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.devices import canonical_name
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.device_bytes import traffic
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import (
    COUPLED,
    ELEMENTWISE,
    Optimizer,
    X,
    Y,
    adam,
    assert_law_under_tapes_outside,
    bytes_sent,
    fused_adam,
    keras_model,
    momentum,
    numbers,
)

ROOT = Path(__file__).parent.parent
HOST, ONE, THREE = "/device:CPU:0", ["CPU:1"], ["CPU:1", "CPU:2", "CPU:3"]  # no device of a call is the host itself


def optimizer(update: Callable[..., None], **options: Any) -> Optimizer:
    """Return an optimizer whose variables were made on the first device of a call."""
    with tf.device(ONE[0]):
        return Optimizer(update, **options)


def slots_of(made: Optimizer) -> list[tf.Variable]:
    return [slot for slots in made.slots for slot in slots]


def size_of(variables: Sequence[tf.Variable]) -> int:
    return sum([v.dtype.size * v.shape.num_elements() for v in variables])


def held(variables: Sequence[tf.Variable]) -> dict[str, int]:
    """Return the bytes of variables on each device."""
    found: dict[str, int] = {}
    for variable in variables:
        parts = parts_of_variable(variable)
        on = {variable.device: size_of([variable])} if parts is None else parts.bytes_on_devices()
        for device, size in on.items():
            if size:
                found[canonical_name(device)] = found.get(canonical_name(device), 0) + size
    return found


def assert_equal(made: Sequence[tf.Variable], others: Sequence[tf.Variable]) -> None:
    for a, b in zip(made, others, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def apart(update: Callable[..., None], devices: Sequence[str], weights: str, **options: Any) -> tuple[Any, Any, Any]:
    """Train at home and with slots in the host's memory; return both and the latter's step."""
    home, made = optimizer(update, **options), optimizer(update, **options)
    gs.set_variable_layout(made.weights, weights, devices=devices)
    gs.set_variable_layout(slots_of(made), "host", devices=devices)
    plain, step = (gs.parallelize(one.step, devices=devices) for one in (home, made))
    for rows in (11, 2):  # uneven ones, and fewer than devices
        assert_close(step(X[:rows], Y[:rows]), plain(X[:rows], Y[:rows]))
    return home, made, step


WORDS = ("home", "sharded", "host", "replicated")
CASES = [("adam", devices, weights) for devices in (ONE, THREE) for weights in WORDS]
LONG = [*CASES[2:5], *CASES[6:], ("momentum", ONE, "home"), ("momentum", THREE, "sharded")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "devices", "weights"), [*CASES[:1], *CASES[5:6], *[pytest.param(*c, marks=pytest.mark.long) for c in LONG]]
)
def test_slots_in_the_hosts_memory_give_the_same_bits(name: str, devices: list[str], weights: str):
    home, made, step = apart(ELEMENTWISE[name], devices, weights, slots=1 + (name == "adam"))
    assert_equal(made.variables, home.variables)
    assert held(slots_of(made)) == {HOST: size_of(slots_of(made))}
    plan = step.plan(X, Y)
    plan.check()
    plan.program.check()
    check_emitted(plan, emit(plan))
    assert not plan.state.whole
    there = [*slots_of(made), *(made.weights if weights == "host" else ())]
    assert f"variables in the memory of CPU:0: {len(there)}, {size_of(there) / 1000:.1f} kB; it" in str(plan)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("devices", "weights"), [(ONE, "home"), (THREE, "home"), (THREE, "sharded")])
def test_no_slot_travels_but_the_gradients_and_the_update_do(devices: list[str], weights: str):
    made = optimizer(adam)
    gs.set_variable_layout(made.weights, weights, devices=devices)
    gs.set_variable_layout(slots_of(made), "host", devices=devices)
    step = gs.parallelize(made.step, devices=devices)
    with partition_graphs() as graphs:
        step(X, Y)
    plan = step.plan(X, Y)
    sent, size = bytes_sent(graphs, plan), size_of(made.weights)
    from_host = sum([own for (source, _), own in sent.items() if source == HOST])
    to_host = sum([own for (_, target), own in sent.items() if target == HOST])
    assert from_host == size  # the update
    assert to_host >= size  # the gradient, or each device's addend
    rows = sum([plan.program.ops[i].out_bytes[0] for i in plan.program.inputs])
    assert traffic(plan).sent[HOST] == size + rows
    assert traffic(plan).received[HOST] <= len(devices) * size + 4  # and the rate
    optimizers = {plan.owners.of_ops[op.index] for op in plan.ops_once if op.type in ("Sqrt", "Square")}
    assert HOST in optimizers


@pytest.mark.long
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_the_parts_of_a_variable_is_exact(name: str):
    home, made, _ = apart(devices=THREE, weights="home", **COUPLED[name])
    for a, b in zip(made.variables, home.variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-4)  # 3 steps of Adam amplify


@pytest.mark.long
def test_a_fused_update_takes_slots_whole_and_the_plan_says_so():
    """TensorFlow's kernel takes handles of one device only."""
    home, made, step = apart(fused_adam, ONE, "home")
    assert_equal(made.variables, home.variables)
    text = str(step.plan(X, Y))
    assert "is gathered for each call: ResourceApplyAdam" in text
    assert "takes it together with variables on other devices" in text
    home, made, step = apart(fused_adam, THREE, "host")  # all of them there
    assert_equal(made.variables, home.variables)
    assert not step.plan(X, Y).state.whole


def test_unknown_numbers_of_rows():
    home, made = optimizer(adam), optimizer(adam)
    gs.set_variable_layout(slots_of(made), "host", devices=THREE)
    signature = [tf.TensorSpec((None, 7)), tf.TensorSpec((None, 5))]
    plain, step = (
        gs.parallelize(tf.function(one.step, input_signature=signature), devices=THREE) for one in (home, made)
    )
    for rows in (11, 2, 6):
        assert_close(step(X[:rows], Y[:rows]), plain(X[:rows], Y[:rows]))
    assert_equal(made.variables, home.variables)
    assert "variables in the memory of CPU:0: 6, 15.6 kB\n" in str(step.plan(X, Y))


@pytest.mark.long
def test_layouts_follow_each_other():
    made = optimizer(momentum)
    step = gs.parallelize(made.step, devices=THREE)
    other = optimizer(momentum)
    plain = gs.parallelize(other.step, devices=THREE)
    for layout in ("host", "sharded", "host", "replicated", "host", "home", "host", "host"):
        gs.set_variable_layout(slots_of(made), layout, devices=THREE)
        step(X, Y)
        plain(X, Y)
        assert (held(slots_of(made)) == {HOST: size_of(slots_of(made))}) == (layout == "host")
    assert_equal(made.variables, other.variables)


def test_a_variable_that_lives_on_its_host_stays():
    with tf.device(HOST):
        variable = tf.Variable(tf.ones((100, 3)))
    gs.set_variable_layout(variable, "host", devices=THREE)
    assert parts_of_variable(variable) is None
    with gs.variable_layout("host", devices=1):
        made = tf.Variable(tf.ones((100, 3)))
    assert parts_of_variable(made) is None


def test_small_ones_and_counters_stay():
    with tf.device(ONE[0]):
        made = [tf.Variable(tf.ones(shape)) for shape in ((), (64,), (65,))]
    gs.set_variable_layout(made, "host", devices=ONE)
    assert [parts_of_variable(variable) is None for variable in made] == [True, True, False]


def test_a_tape_outside():
    with tf.device(ONE[0]):
        weight = tf.Variable(numbers(40, 50, seed=7))
    gs.set_variable_layout(weight, "host", devices=THREE)
    assert_law_under_tapes_outside(weight, THREE)


@pytest.mark.parametrize("gpus", [ONE, pytest.param(THREE, marks=pytest.mark.long)], ids=["one", "three"])
def test_a_keras_model_makes_its_slots_on_the_host_one_after_the_other(gpus: list[str]):
    x, y = numbers(14, 6, 6, 3, seed=5).numpy(), np.random.default_rng(0).integers(0, 5, 14)
    made: list[Any] = []
    largest: list[int] = []

    def record(make: Any, **options: Any) -> Any:
        largest.append(held(made).get("/device:CPU:1", 0))
        variable = make(**options)
        if variable.shape.is_fully_defined():  # (parts of variables have any)
            made.append(variable)
        return variable

    with tf.device(ONE[0]):
        templates = [compiled(keras_model) for _ in range(2)]
        plain = gs.multi_gpu_model(templates[0], gpus=gpus)
        model = gs.multi_gpu_model(templates[1], gpus=gpus, variables={"adam*": "host"})
        plain.fit(x, y, batch_size=7, epochs=2, verbose=0, shuffle=False)
        with tf.variable_creator_scope(record):
            model.make_train_function()
        model.fit(x, y, batch_size=7, epochs=2, verbose=0, shuffle=False)
    assert made
    slots = [v.value for v in model.optimizer.variables]
    large = [v for v in slots if size_of([v]) > 256]
    assert held(large) == {HOST: size_of(large)}
    assert len(large) >= 6
    most = max([size_of([v]) for v in slots]) + size_of(slots) - size_of(large)
    assert max(largest) <= most < size_of(large)
    for a, b in zip(model.variables, plain.variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-5)


def compiled(make: Callable[[], Any]) -> Any:
    """Return a model whose optimizer has no slots yet."""
    model = make()
    model.compile(keras.optimizers.Adam(1e-2, global_clipnorm=1.0), model.loss, metrics=["accuracy"])
    return model


def test_files_are_written_and_read_where_the_slots_are(tmp_path: Path):
    home, made, step = apart(adam, THREE, "home")
    checkpoint = tf.train.Checkpoint(variables=made.variables)
    path = checkpoint.save(str(tmp_path / "step"))
    restored = tf.train.Checkpoint(variables=home.variables)
    home.weights[0].assign(tf.zeros_like(home.weights[0]))
    restored.restore(path).assert_consumed()
    assert_equal(home.variables, made.variables)
    step(X, Y)
    checkpoint.restore(path).assert_consumed()
    assert held(slots_of(made)) == {HOST: size_of(slots_of(made))}
    assert_equal(made.variables, home.variables)


def test_tables_in_the_hosts_memory_are_looked_up_there():
    with tf.device(ONE[0]):
        table = tf.Variable(numbers(1000, 8, seed=3))
    gs.set_variable_layout(table, "host", devices=THREE)
    step = gs.parallelize(lambda ids: 2 * tf.nn.embedding_lookup(table, ids), devices=THREE)
    ids = tf.constant([3, 999, 3, 0, 17])
    np.testing.assert_array_equal(step(ids).numpy(), 2 * tf.gather(tf.convert_to_tensor(table), ids).numpy())


@pytest.mark.long
@pytest.mark.parametrize(
    "options",
    [
        {"micro_batches": 3},
        {"recompute": 0.9},
        {"stages": 2, "micro_batches": 2},
        {"jit_compile": True},
        {"tuning": {"reduce_retracing": True}},
        {"mesh": {"batch": 2, "model": 2}},
        {"shares": [4, 2, 1, 1]},
        {"tuning": {"default_device": "CPU:0"}},
        {"split": None},
    ],
    ids=str,
)
def test_beside_every_option(options: dict[str, Any]):
    devices = [*THREE, "CPU:4"]
    plain, made = optimizer(adam), optimizer(adam)
    gs.set_variable_layout(made.weights, "sharded", devices=devices)
    gs.set_variable_layout(slots_of(made), "host", devices=devices)
    single, step = tf.function(plain.step), gs.parallelize(made.step, devices=devices, **options)
    for rows in (11, 3):
        assert_close(step(X[:rows], Y[:rows]), single(X[:rows], Y[:rows]))
    assert held(slots_of(made)) == {HOST: size_of(slots_of(made))}
    for a, b in zip(made.variables, plain.variables, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-4)  # Adam amplifies
    plan = step.plan(X, Y)
    plan.check()
    check_emitted(plan, emit(plan))
    assert not plan.state.whole


TWO_HOSTS = """
import json
import tensorflow as tf
import graphsplit as gs

if __name__ == "__main__":
    with gs.workers.LocalWorkers(2, devices=2) as workers:
        gs.connect(workers)
        from tests.test_host_variables import X, Y, adam, assert_equal, held, slots_of
        from tests.helpers.layout_cases import Optimizer

        devices = ["worker:0/CPU:1", "worker:1/CPU:1"]
        with tf.device("/job:worker/task:0/device:CPU:1"):
            home, made = Optimizer(adam), Optimizer(adam)
        gs.set_variable_layout(made.weights, "sharded", devices=devices)
        gs.set_variable_layout(slots_of(made), "host", devices=devices)
        plain, step = (gs.parallelize(one.step, devices=devices) for one in (home, made))
        for _ in range(2):
            plain(X, Y), step(X, Y)
        assert_equal(made.variables, home.variables)
        print(json.dumps(held(slots_of(made))))
"""


@pytest.mark.long
def test_each_of_two_hosts_has_its_share():
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TWO_HOSTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {f"/job:worker/replica:0/task:{k}/device:CPU:0" for k in (0, 1)}
    assert sum(found.values()) == size_of(slots_of(Optimizer(adam)))
    assert max(found.values()) < 0.7 * sum(found.values())


def test_errors():
    with tf.device(ONE[0]):
        weight = tf.Variable(tf.ones((80, 8)))
    mesh = {"batch": 1, "model": 3}
    with pytest.raises(
        gs.errors.ArgumentError, match=r"'host' has a variable whole, and an axis of mesh \(batch=1, model=3\) divides"
    ):
        gs.set_variable_layout(weight, ((None, "model"), "host"), devices=THREE, mesh=mesh)
    with pytest.raises(gs.errors.ArgumentError, match="Layouts: 'home', 'replicated', 'sharded', 'host'"):
        gs.set_variable_layout(weight, "hosts", devices=THREE)
