"""`memory=`: layout, micro-batches and recomputing are chosen together, so that a step fits; the law holds for all."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.planning.device_bytes import live_bytes
from graphsplit.simulate.search import chosen_plans
from graphsplit.simulate.search.plan_search import Search
from tests.helpers.automatic_plans import Deep, Momentum, machine_of
from tests.helpers.layout_cases import held_by_device
from tests.helpers.recomputation import network, training

ROWS = 35  # on 4 devices: 9, 9, 9, 8
MACHINE = machine_of(rate=1e11, link=1e10)


def batch(rows: int = ROWS, width: int = 256) -> tf.Tensor:
    return tf.random.stateless_normal((rows, width), [4, rows])


def peak(model: Momentum | Deep, x: tf.Tensor) -> int:
    """Return what the fullest of 4 devices holds, as it is predicted."""
    return max(gs.predict(model.step, x, machine=MACHINE, devices=4).memory_bytes.values())


def chosen(plan: gs.inspect.Plan) -> str:
    [note] = [note for note in plan.notes if note.startswith("chosen automatically: ")]
    return note.removeprefix("chosen automatically: ")


def assert_same_numbers(step: gs.ParallelFunction, model: Momentum | Deep, x: tf.Tensor) -> None:
    """Compare three steps with those of the function itself, and the variables that they leave."""
    alone = type(model)()
    for _ in range(3):  # (a first loss of 8e-4 is a mean of numbers of either sign about .05, of which 2e-7 is 4e-6)
        np.testing.assert_allclose(step(x), alone.step(x), rtol=1e-5, atol=2e-7)
    for name in vars(model):
        for own, expected in zip(getattr(model, name), getattr(alone, name), strict=True):
            np.testing.assert_allclose(own, expected, rtol=1e-5, atol=1e-6)


@pytest.fixture(autouse=True)
def devices_at_hand(monkeypatch: pytest.MonkeyPatch):
    """The devices that are here are like those of the machine."""
    monkeypatch.setattr(chosen_plans, "machine_like", lambda *_: MACHINE)


def test_all_devices_are_used_where_everything_fits(monkeypatch):
    monkeypatch.setattr(chosen_plans, "machine_like", lambda *_: machine_of(link=1e3))
    model = Momentum()
    plan = gs.parallelize(model.step, devices=4, memory="1GiB").plan(batch())
    assert len({device for own in plan.mesh.columns for device in own}) == 4, "plan='auto' would take fewer"
    assert chosen(plan).startswith("4 devices, mesh (batch=2, model=2), variables home but kernel_")
    assert "the fastest of 7 that fit" in chosen(plan)
    compared = [note for note in plan.notes if note.startswith("compared with ")]
    assert [note.split(":")[0].split(" but ")[0] for note in compared] == [
        "compared with 4 devices, mesh (batch=2, model=2), variables replicated",
        "compared with 4 devices, mesh (batch=2, model=2), variables home",
        "compared with 4 devices, mesh (batch=2, model=2), variables sharded",
        "compared with 4 devices, variables home",
        "compared with 4 devices, variables replicated",
        "compared with 4 devices, variables sharded",
    ]
    assert all(note in str(plan) and "kernel_" not in note for note in compared), "the chosen one alone names variables"


def test_state_is_divided_where_only_that_fits():
    model = Momentum()
    state = sum(v.shape.num_elements() * 4 for v in model.kernels + model.slots)
    step = gs.parallelize(model.step, devices=4, memory=state)
    assert_same_numbers(step, model, batch())
    held = held_by_device(model.kernels + model.slots)
    assert len(held) == 4
    assert max(held.values()) <= state / 3
    assert chosen(step.plan(batch())).startswith("4 devices, mesh (model=4), variables home but kernel_0, ")
    assert step.plan(batch()).devices == tuple(dict.fromkeys(step.plan(batch()).devices)), "no micro-batches"


def test_variables_that_are_laid_out_stay_so():
    model, x = Deep(), batch(1999, 64)
    gs.set_variable_layout(model.kernels, "replicated", devices=4)
    step = gs.parallelize(model.step, devices=4, memory=int(0.7 * peak(model, x)))
    plan = step.plan(x)
    assert "variables as they are" in chosen(plan)
    assert plan.mesh.shards > 4 or plan.asked.recompute is not None
    assert_same_numbers(step, model, x)
    assert parts_of_variable(model.kernels[0]).layout == "replicated"


def test_a_plan_is_chosen_once_for_what_is_looked_at_and_runs(monkeypatch):
    searches, run = [], Search.run
    monkeypatch.setattr(Search, "run", lambda self: searches.append(self) or run(self))
    model, x = Deep(), batch(247, 64)
    limit = int(0.8 * peak(model, batch(1999, 64)))
    step = gs.parallelize(model.step, devices=4, memory=limit)
    assert str(step.plan(x)) == str(step.plan(x))
    step(x)
    step(x)
    assert len(searches) == 1
    step(x[:80])
    assert len(searches) == 1, "it fits, so nothing is searched"
    assert "it was chosen for an earlier call, and fits this one as well" in step.plan(x[:80]).notes
    large = step.plan(batch(1999, 64))
    assert len(searches) == 2, "it does not fit"
    assert large.mesh.shards > 4 or large.asked.recompute is not None


def test_what_is_given_stays():
    model, x = Deep(), batch(1999, 64)
    options = {"memory": int(0.7 * peak(model, x)), "devices": 4}
    plan = gs.parallelize(model.step, micro_batches=4, **options).plan(x)
    assert plan.mesh.shards == 4 * 4
    assert "4 micro-batches" in chosen(plan)
    plan = gs.parallelize(model.step, recompute="blocks", **options).plan(x)
    assert plan.asked.recompute == "blocks"
    assert "recompute='blocks'" in chosen(plan)


def test_nothing_fits():
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.parallelize(Momentum().step, devices=4, memory="1.5MB", micro_batches=2).plan(batch())
    first, *lines = str(error.value).splitlines()
    assert first.startswith("The function does not fit: each device may hold 1.5 MB. Of ")
    assert "for up to 4 devices the smallest, 4 devices, mesh (model=4), variables home but kernel_0, " in first
    assert lines[0].startswith("  - ")
    parts = lines[: lines.index("What would help most:")]
    assert {line.split(maxsplit=3)[3].split(":")[0] for line in parts} >= {
        "activations and received tensors",
        "variables",
    }
    sizes = [float(line.split()[1]) * {"kB": 1e3, "MB": 1e6}[line.split()[2]] for line in parts]
    assert sizes == sorted(sizes, reverse=True), "the largest part comes first"
    assert lines[len(parts) + 1 :]


def test_a_function_without_variables():
    step = gs.parallelize(lambda x: tf.reduce_sum(tf.tanh(x) ** 2, 0), devices=4, memory="1MB")
    np.testing.assert_allclose(step(batch()), tf.reduce_sum(tf.tanh(batch()) ** 2, 0), rtol=1e-5)
    assert chosen(step.plan(batch())).startswith("4 devices, variables as they are: ")


@pytest.mark.long
def test_twelve_layers_under_half_of_the_plain_peak():
    model = network(12)
    step = training(model)
    x, y = (tf.random.stateless_normal((18, 6, width), [1, width]) for width in (8, 3))
    plain = gs.predict(step, x, y, machine="cpu", devices=4, variables="home")
    half = max(plain.memory_bytes.values()) // 2
    parallel = gs.parallelize(step, devices=4, memory=half)
    before = [v.numpy() for v in step.variables]
    expected = [tf.function(step)(x, y).numpy(), *[v.numpy() for v in step.variables]]
    for variable, value in zip(step.variables, before, strict=True):
        variable.assign(value)
    found = [parallel(x, y).numpy(), *[v.numpy() for v in step.variables]]
    for own, other in zip(found, expected, strict=True):
        # (a key's bias does not matter to softmax: what it becomes is rounding errors of sums of about 1e-2)
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-5 * max(np.max(np.abs(other)), 1e-2))
    plan = parallel.plan(x, y)
    assert plan.asked.recompute is not None
    most = max(live_bytes(plan).values())
    assert most < max(live_bytes(plain.plan).values()) / 2
    same = gs.parallelize(step, devices=4, micro_batches=plan.mesh.shards // 4, recompute=plan.asked.recompute)
    assert max(gs.predict(same, x, y, machine="cpu").memory_bytes.values()) <= half


@pytest.mark.parametrize("asked", [{"memory": "1GB"}, {"plan": "auto"}])
def test_a_prediction_says_that_it_chooses_nothing(asked: dict[str, str]):
    step = gs.parallelize(Momentum().step, devices=2, **asked)
    [note] = gs.predict(step, batch(), machine=MACHINE).notes
    assert note == f"{next(iter(asked))}= is not used here; the function is predicted with its other options"
    assert note in str(gs.predict(step, batch(), machine=MACHINE))
