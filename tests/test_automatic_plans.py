"""`plan="auto"`: the law holds for whatever is chosen, and the plan says what was compared and why it won."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.device_bytes import live_bytes
from graphsplit.planning.holdings import most_held
from graphsplit.simulate.calls import PredictedCall, predicted_call
from graphsplit.simulate.search import chosen_plans
from graphsplit.simulate.search.candidates import Candidate
from graphsplit.simulate.search.chosen_plans import choose, table_for
from graphsplit.simulate.search.plan_search import Question, Search
from tests.helpers.automatic_plans import Deep, Momentum, machine_of
from tests.helpers.layout_cases import Optimizer, adam, numbers
from tests.helpers.messages import raises


class Model:
    """Two layers, and a step of training."""

    def __init__(self, width: int = 64):
        self.kernels = [tf.Variable(tf.fill([width, width], 1 / width), name=f"kernel_{k}") for k in range(2)]

    def step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(tf.nn.tanh(x @ self.kernels[0]) @ self.kernels[1] - 1))
        for gradient, kernel in zip(tape.gradient(loss, self.kernels), self.kernels, strict=True):
            kernel.assign_sub(0.1 * gradient)
        return loss


X = tf.reshape(tf.range(512 * 64, dtype=tf.float32), [512, 64]) / 1e4


@pytest.mark.parametrize(
    "link", [1e3, pytest.param(1e7, marks=pytest.mark.long), 1e12], ids=["slow", "middling", "fast"]
)
def test_the_law_holds_for_what_is_chosen(link: float):
    alone, model = Model(), Model()
    step = gs.parallelize(model.step, devices=4, plan=machine_of(link=link))
    for _ in range(3):
        np.testing.assert_allclose(step(X), alone.step(X), rtol=1e-5)
    for kernel, expected in zip(model.kernels, alone.kernels, strict=True):
        np.testing.assert_allclose(kernel, expected, rtol=1e-5)


def test_what_was_chosen_before_a_layout_changed_is_not_kept():
    step, other = gs.parallelize(Model().step, devices=2, plan=machine_of(link=1e3)), tf.Variable([1.0])
    for layout in ("replicated", "home", "replicated"):
        gs.set_variable_layout([other], layout, devices=2)
        step.plan(X)
        step.plan(X[:8])
    assert len(step._traces.choices.made) == 2


def test_few_devices_where_sending_is_slow():
    slow, fast = (gs.parallelize(Model().step, devices=4, plan=machine_of(link=link)).plan(X) for link in (1e3, 1e12))
    assert len(slow.devices) == 1
    assert len(fast.devices) == 4
    assert slow.notes[-1] == "predicted for cores, figures from data sheets and assumptions, not validated"
    assert any(note.startswith("chosen automatically: 1 device, variables home: ") for note in slow.notes)
    compared = [note for note in slow.notes if note.startswith("compared with ")]
    assert len(compared) == 8  # 4 and 2 devices by three layouts, 4 and 2 stages; 1 by one won
    assert slow.explain().splitlines()[-1] == slow.notes[-1]
    plain = gs.parallelize(tf.tanh, devices=2).plan(X).explain()
    assert re.search(r'no other plan was compared: .*plan="auto" to compare some$', plain)
    assert "no other plan" not in slow.explain()
    assert "  devices: CPU:0, against CPU:0, CPU:1, CPU:2, CPU:3" in slow.compare(fast).splitlines()


def test_variables_are_laid_out_as_chosen():
    model = Model()
    home = gs.predict(model.step, X, machine=machine_of(link=1e12), devices=4, variables="home")
    limit = 0.95 * home.memory_bytes["CPU:0"]  # (links are so fast that all layouts take as long)
    step = gs.parallelize(model.step, devices=4, plan=machine_of(link=1e12), memory=limit)
    plan = step.plan(X)
    chosen = next(note for note in plan.notes if note.startswith("chosen automatically: "))
    step(X)
    layouts = {None if parts is None else parts.layout for parts in map(parts_of_variable, model.kernels)}
    assert layouts < {"replicated", "sharded"}
    assert f"devices, variables {layouts.pop()}: " in chosen
    again = step.plan(X[:128])  # another signature finds the variables as they are
    assert any("variables as they are" in note for note in again.notes)


def test_micro_batches_where_nothing_else_fits():
    whole = gs.predict(Deep().step, X, machine=machine_of(), devices=1)
    limit = 0.6 * whole.memory_bytes["CPU:0"]
    step = gs.parallelize(Deep().step, devices=1, plan=machine_of(), memory=limit)
    assert step.plan(X).mesh.shards > 1
    alone = Deep()
    np.testing.assert_allclose(step(X), alone.step(X), rtol=1e-5)


def test_sharded_where_only_that_fits():
    """(No mesh is chosen for what XLA compiles.)"""
    model = Momentum()
    step = gs.parallelize(model.step, devices=4, plan=machine_of(), memory="4.5MB", jit_compile=True)
    [chosen] = [note for note in step.plan(tf.ones([64, 256])).notes if note.startswith("chosen automatically: ")]
    assert chosen.startswith("chosen automatically: 4 devices, variables sharded: ")
    assert re.search(r"; the only one of \d+ that fits into 4.5 MB$", chosen)
    assert all(parts_of_variable(kernel) is None for kernel in model.kernels), "nothing ran"
    step(tf.ones([64, 256]))
    lying = [parts for kernel in model.kernels if (parts := parts_of_variable(kernel)) is not None]
    assert {parts.layout for parts in lying} == {"sharded"}  # (the first device owns what is left, whole)


@pytest.mark.long
def test_along_an_axis_where_that_fits():
    """Where a mesh is compared as well, weights are cut along its axis, and each device holds less than the limit."""
    model = Momentum()
    step = gs.parallelize(model.step, devices=4, plan=machine_of(), memory="4.5MB")
    [chosen] = [note for note in step.plan(tf.ones([64, 256])).notes if note.startswith("chosen automatically: ")]
    assert re.match(
        r"chosen automatically: 4 devices, mesh \((batch=2, )?model=[24]\), variables \w+ but kernel_", chosen
    )
    step(tf.ones([64, 256]))
    held = dict.fromkeys(range(4), 0)
    for own in [*model.kernels, *model.slots]:
        for device, size in parts_of_variable(own).bytes_on_devices().items():
            held[int(device[-1])] += size
    whole = sum([4 * own.shape.num_elements() for own in [*model.kernels, *model.slots]])
    assert 0 < max(held.values()) <= min(4_500_000, 0.75 * whole), (held, whole)


def test_does_not_fit_is_an_answer():
    step = gs.parallelize(Momentum().step, devices=1, plan=machine_of(), memory="4.5MB")
    with pytest.raises(gs.errors.ArgumentError) as error:
        step.plan(tf.ones([64, 256]))
    message = str(error.value)
    assert message.startswith("The function does not fit: each device may hold 4.5 MB. Of 9 plans for up to 1 device")
    assert " MB variables" in message
    assert " devices: " in message.partition("What would help most:")[2]
    assert "variables sharded" in message


def asked(call: PredictedCall, devices: int, machine: Machine, memory: float | None = None) -> Question:
    """Return the question of `plan="auto"`."""
    sizes = {v.name.partition(":")[0]: int(v.shape.num_elements() * v.dtype.size) for v in call.trace.variables}
    table = table_for(replace(call.options, plan="auto"), len(X), devices, 1, sizes)

    def make_plan(names, candidate):
        return call.plan(names, candidate.layouts, **candidate.options)

    limit = memory or machine.device.memory_bytes
    return Question("The step", len(X), list(sizes.values()), machine, limit, table, make_plan)


def test_the_smallest_number_of_devices_that_would_do():
    """Twice as many at a time, and then back: three hold what two do not, and four do as well."""
    call = predicted_call(Momentum().step, [tf.ones([60, 256])], {})
    machine = machine_of(link=1e12)
    question = asked(call, 2, machine)
    question = replace(question, table=replace(question.table, savings={"recompute": (None,), "micro_batches": (1,)}))
    three = Search(question).look_at(Candidate(3, "sharded")).peak_bytes
    with pytest.raises(gs.errors.ArgumentError) as error:
        choose(replace(question, limit=three))
    message = str(error.value)
    assert "3 devices: 3 devices, variables sharded" in message, message


def test_large_variables_are_looked_at_one_by_one():
    call = predicted_call(Model().step, [X], {})
    choice = choose(asked(call, 2, machine_of(link=5e7)))
    apart = [candidate for candidate in choice.looked if candidate.exceptions]
    assert apart
    assert {name for candidate in apart for name, _ in candidate.exceptions} == {"kernel_0", "kernel_1"}
    mixed = Candidate(2, "home", exceptions=(("kernel[0]", "sharded"),))
    assert mixed.layouts == {"/kernel[[]0]": "sharded", "*": "home"}
    assert str(mixed) == "2 devices, variables home but kernel[0] sharded"
    assert mixed.text(0) == "2 devices, variables home but 1 variable sharded"


def test_less_memory_than_the_largest_tensor():
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.parallelize(Model().step, devices=2, plan=machine_of(), memory="1kB").plan(X)
    assert str(error.value).startswith("The function does not fit: each device may hold 1.0 kB. Of 14 plans")


def test_what_was_compared_is_explained():
    call = predicted_call(Model().step, [X], {})
    machine = machine_of(link=1e12)
    choice = choose(asked(call, 2, machine))
    assert set(choice.looked) >= {
        Candidate(1, "home"),
        *[Candidate(2, own) for own in ("home", "replicated", "sharded")],
        Candidate(2, "home", 8, stages=2),  # a pipeline of two stages
    }
    assert choice.looked[choice.chosen].step_s == min(choice.seconds.values())
    assert f"the fastest of {len(choice.seconds)} that fit; " in choice.explain()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"plan": "dgx-a10"},
            "plan='dgx-a10' is neither 'auto' nor a machine. Nearest are 'dgx-a100-40gb', 'dgx-a100'; "
            "`graphsplit machines` lists all. A file of your own ends in .toml; "
            "`graphsplit calibrate -o here.toml` writes one for the one at hand.",
        ),
        ({"plan": 3}, "plan takes 'auto', the name of a machine or the path of a file, got 3."),
        *[
            (
                {"memory": memory, **more},
                "memory must be the bytes that each device may hold, a number above 0, '40GB' or '40GiB', got "
                f"{memory!r}.",
            )
            for more in ({}, {"plan": "auto"})
            for memory in ("much", "lots", "40", "-2GB", "40 G", -1, 0, True, float("inf"), [1])
        ],
        ({"memory": 24}, "memory=24 is a number of bytes. Write memory='24GB'."),
        (
            {"plan": "auto", "schedule": "1f1b"},
            "plan='auto' with schedule='1f1b': it compares plans with equal shares, with the first device as default "
            "device, and with stages that it cuts. Leave out one or the other.",
        ),
        (
            {"memory": "2kB", "shares": [1, 2], "tuning": {"default_device": "CPU:1"}},
            "memory=2000 with shares=(1, 2), tuning={'default_device': 'CPU:1'}: it compares plans with equal shares, "
            "with the first device as default device, and with stages that it cuts. Leave out one or the other.",
        ),
    ],
)
def test_bad_options(options, message: str):
    with raises(gs.errors.ArgumentError, message):
        gs.parallelize(Model().step, devices=2, **options)


def test_nothing_moves_while_a_graph_is_built():
    """A plan that lays variables out is chosen outside of a tf.function; one that leaves them also in it."""
    weight = tf.Variable(tf.ones((400, 400)), name="weight")
    step = gs.parallelize(lambda x: tf.reduce_sum(x @ weight), devices=2, memory="500kB")
    x = tf.ones((4, 400))
    with pytest.raises(
        gs.errors.UnsupportedError, match=r"memory=500000 lays variables out .*, and this one is in a tf\.fu"
    ):
        tf.function(step)(x)
    outside = step(x)
    assert parts_of_variable(weight) is not None
    np.testing.assert_allclose(tf.function(step)(x), outside)


def test_a_machine_of_another_kind():
    with raises(
        gs.errors.ArgumentError,
        "plan='dgx-a100': the machine has GPU devices, but the function runs on '/device:CPU:0'. Name a machine "
        "of that kind, or other devices.",
    ):
        gs.parallelize(Model().step, devices=2, plan="dgx-a100").plan(X)


def test_what_xla_compiles_is_compared_too():
    model, alone = Model(), Model()
    step = gs.parallelize(model.step, devices=2, jit_compile=True, plan=machine_of(link=1e12))
    plan = step.plan(X)
    assert plan.jit_compile
    assert any(note.startswith("chosen automatically: ") for note in plan.notes)
    np.testing.assert_allclose(step(X), alone.step(X), rtol=1e-5)


def test_a_batch_of_unknown_size():
    step = tf.function(Model().step, input_signature=[tf.TensorSpec([None, 64])])
    with raises(
        gs.errors.UnsupportedError,
        "plan='auto' predicts the time of a step, and the size of the batch is not known. Call it with tensors of "
        "known shapes, without an input_signature or reduce_retracing.",
    ):
        gs.parallelize(step, devices=2, plan="auto").plan(X)


def large_step():
    """Return a training step whose weights are worth laying out, and what it takes."""
    weights = [tf.Variable(tf.random.stateless_normal((256, 256), [1, k]) / 16) for k in range(3)]

    def step(x):
        with tf.GradientTape() as tape:
            y = x
            for weight in weights:
                y = tf.tanh(y @ weight)
            loss = tf.reduce_mean(y**2)
        for weight, gradient in zip(weights, tape.gradient(loss, weights), strict=True):
            weight.assign_sub(0.1 * gradient)
        return loss

    return step, weights, tf.random.stateless_normal((70, 256), [7, 7])


def test_a_plan_that_is_looked_at_moves_nothing():
    step, weights, x = large_step()
    parallel = gs.parallelize(step, devices=4, plan="auto", memory=1_200_000)
    looked_at = str(parallel.plan(x)).splitlines()[0]
    assert parallel.placement(x).select("MatMul")
    assert len(parallel.variables(x)) == 3
    assert all(parts_of_variable(weight) is None for weight in weights)
    expected = tf.function(step)(x)
    for weight, before in zip(weights, large_step()[1], strict=True):
        weight.assign(before)
    np.testing.assert_allclose(parallel(x), expected, rtol=1e-5)
    assert any(parts_of_variable(weight) is not None for weight in weights)
    assert str(parallel.plan(x)).splitlines()[0] == looked_at


def test_devices_that_are_not_here_are_planned_for():
    step, _, x = large_step()
    gpus = [f"GPU:{d}" for d in range(8)]
    parallel = gs.parallelize(step, devices=gpus, plan="8xA100-SXM4-80GB")
    assert "8xA100-SXM4-80GB" in parallel.plan(x).explain()
    unnamed = gs.parallelize(step, devices=gpus, plan="auto")
    with pytest.raises(gs.errors.ArgumentError, match=r"has none of the GPUs .* Name the machine .* plan='"):
        unnamed.plan(x)


def test_the_layout_that_is_chosen_for_devices_that_are_not_here_is_in_the_plan():
    gpus = [f"GPU:{d}" for d in range(4)]
    step = gs.parallelize(Optimizer(adam).step, devices=gpus, plan="4xA100-SXM4-40GB", memory=30_000)
    plan = step.plan(numbers(11, 7), numbers(11, 5))
    assert "2 devices, variables sharded" in plan.explain()
    assert "variables sharded: 6, on GPU:0, GPU:1\n" in str(plan)
    assert most_held(plan) <= 30_000


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["replicated", "sharded"])
def test_variables_that_are_laid_out_stay_and_others_are_laid_out(layout: str):
    alone, model = Model(256), Model(256)
    gs.set_variable_layout(model.kernels[0], layout, devices=4)
    first = parts_of_variable(model.kernels[0])
    x = tf.reshape(X[:28], [-1, 256])
    whole = gs.parallelize(model.step, devices=4).plan(x)
    limit = 0.95 * max(live_bytes(whole).values())
    step = gs.parallelize(model.step, devices=4, memory=limit, plan=machine_of())
    for _ in range(3):
        np.testing.assert_allclose(step(x), alone.step(x), rtol=1e-5)
    assert parts_of_variable(model.kernels[0]) is first
    assert parts_of_variable(model.kernels[1]).layout == "sharded"
    for kernel, expected in zip(model.kernels, alone.kernels, strict=True):
        np.testing.assert_allclose(kernel, expected, rtol=1e-5)


@pytest.mark.parametrize("tried", [False, True])
def test_what_was_tried_is_no_advice(tried: bool):
    """Variables that are most of what does not fit may be sharded, unless no plan with sharded ones fits either."""
    memory = SimpleNamespace(live_bytes=10, argument_bytes=10, state_bytes=900)
    least, other = Candidate(1, "home"), Candidate(4, "sharded")
    looked = {least: None, **({other: None} if tried else {})}
    search = SimpleNamespace(looked=looked, question=SimpleNamespace(limit=100, rows=8))
    advice = chosen_plans._of_largest_part(search, SimpleNamespace(fullest=memory))
    assert advice.startswith("smaller variables: of lower precision")
    assert ("set_variable_layout(..., 'sharded')" in advice) != tried
