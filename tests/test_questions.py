"""A question moves nothing: a plan, a placement, a prediction says how variables will lie, and a call moves them.

Before and after each question, each variable has the same handle, device, parts and record of how it lies.
"""

from __future__ import annotations

import contextlib
import io
import pathlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api.layouts.variable_layouts import decide_target
from graphsplit.core.devices import canonical_name
from graphsplit.core.variables import copied_variables, parted_variables
from graphsplit.core.variables.arrangements import lying_now
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import layout_changes, parts_of_variable
from graphsplit.core.variables.records import Record, noted_of
from graphsplit.planning.amounts import format_bytes
from tests.helpers import staged_programs
from tests.helpers.emitted_programs import CORES
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import (
    Optimizer,
    X,
    Y,
    adam,
    deep_step,
    held_by_device,
    momentum,
    numbers,
    small_network,
    weights_and_slots,
)
from tests.helpers.mesh_cases import PERCEPTRON, perceptron
from tests.helpers.mesh_units import MERGED, by_name
from tests.helpers.mesh_units import trained as units

Case = tuple[Any, Sequence[Any], Sequence[tf.Variable]]  # what is asked, of which arguments, and its variables

GPUS = tuple(canonical_name(f"GPU:{k}") for k in range(4))
MACHINE = "8xA100-SXM4-40GB"
SQUARE, STAGES = {"batch": 2, "model": 2}, {"stage": 2, "batch": 2}

QUESTIONS: dict[str, Callable[..., Any]] = {
    "plan": lambda step, x: step.plan(*x),
    "placement": lambda step, x: step.placement(*x),
    "predict": lambda step, x: gs.predict(step, *x, machine=MACHINE),
    "scaling": lambda step, x: gs.scaling(step, *x, devices=(4, 8), machine=MACHINE),
    "print": lambda step, x: print(step, step.plan(*x), step.plan(*x).explain()),
    "gradient_plan": lambda step, x: step.gradient_plan(*x),
    "graph_def": lambda step, x: step.graph_def(*x),
    "variables": lambda step, x: step.variables(*x),
}
OF_FUNCTIONS = ("gradient_plan", "graph_def", "variables")  # which models do not answer
OF_WHAT_IS_HERE = ("gradient_plan", "graph_def")


def optimizer(layout: Any = None, laid: str = "variables", update: Any = adam, **options: Any) -> Callable[..., Case]:
    """A step of an optimizer by hand, some of whose variables have a layout."""

    def make(_: pathlib.Path) -> Case:
        own = Optimizer(update)
        if layout is not None:
            gs.set_variable_layout(getattr(own, laid), layout, 3)
        return gs.parallelize(own.step, **{"devices": 3, **options}), (X, Y), own.variables

    return make


def apart(_: pathlib.Path) -> Case:
    """Weights and slots that were laid out apart, whose names say nothing."""
    own, step = weights_and_slots("abc")
    gs.set_variable_layout([weight for weight, *_ in own], "sharded", 4)
    gs.set_variable_layout([slot for _, *slots in own for slot in slots], "sharded", 4)
    return gs.parallelize(step, devices=4), (tf.ones((5, 40)),), [variable for group in own for variable in group]


def groups(_: pathlib.Path) -> Case:
    """Weights of several layouts, one of which other code has read since: its parts are gathered."""
    weights = [tf.Variable(0.3 * numbers(70, 70), name=f"weight_{k}") for k in range(3)]
    gs.set_variable_layout(weights, {"weight_0": "sharded", "weight_1": "replicated", "*": "host"}, 4)
    step = gs.parallelize(deep_step(weights), devices=4)
    step(numbers(64, 70))
    assert float(tf.reduce_sum(weights[0])) != 0
    return step, (numbers(32, 70),), weights


def on_mesh(
    make_step: Callable[[], Any], mesh: dict[str, int], layout: Any, batch: Callable[[], Any], laid: str = "all"
) -> Callable[..., Case]:
    """A step on a mesh: `laid` are all of its variables, the weights, or, by an option, those of the first call."""

    def make(_: pathlib.Path) -> Case:
        variables, step = make_step()
        options = {"variables": layout} if laid == "later" else {}
        if laid != "later" and layout is not None:
            gs.set_variable_layout(variables if laid == "all" else variables[: len(variables) // 3], layout, mesh=mesh)
        return gs.parallelize(step, mesh=mesh, **options), tuple(batch()), variables

    return make


def staged(mesh: dict[str, int], layout: Any, laid: str = "all") -> Callable[..., Case]:
    return on_mesh(staged_programs.perceptron, mesh, layout, lambda: staged_programs.rows(7), laid)


def with_heads(layout: Any, laid: str = "all") -> Callable[..., Case]:
    """Attention, whose heads are found: layouts name the axis alone."""
    return on_mesh(lambda: units(3, fused=True), SQUARE, layout, lambda: (tf.ones((4, 5, 12), tf.float64),), laid)


def model(is_read: bool = False, **options: Any) -> Callable[..., Case]:
    """A Keras model; `is_read` from its file."""

    def make(folder: pathlib.Path) -> Case:
        keras.utils.set_random_seed(1)
        inner = keras.Sequential([keras.Input((6,)), keras.layers.Dense(64, "tanh"), keras.layers.Dense(5)])
        inner.compile("adam", "mse")
        inner.optimizer.build(inner.trainable_variables)
        if is_read:
            inner.save(folder / "model.keras")
            inner = keras.models.load_model(folder / "model.keras")
        wrapped = gs.multi_gpu_model(inner, **{"gpus": 3, **options})
        return (
            wrapped,
            (tf.ones((8, 6)), tf.ones((8, 5))),
            [v.value for v in (*inner.variables, *inner.optimizer.variables)],
        )

    return make


def slots_made_later(_: pathlib.Path) -> Case:
    """A Keras optimizer has no slots when its layout is set, and has made them by the time of the question."""
    network, _ = small_network()
    adam_of_keras = keras.optimizers.Adam(0.1)
    gs.set_variable_layout([network, adam_of_keras], "sharded", 3)
    adam_of_keras.build(network.trainable_variables)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(network(x, training=True) ** 2)
        adam_of_keras.apply(tape.gradient(loss, network.trainable_variables), network.trainable_variables)
        return loss

    variables = [variable.value for variable in (*network.variables, *adam_of_keras.variables)]
    return gs.parallelize(step, devices=3), (numbers(7, 31),), variables


def saved_model(folder: pathlib.Path) -> Case:
    """A function of a SavedModel, with its variables."""
    module = tf.Module()
    module.weight = tf.Variable(numbers(30, 70))
    module.run = tf.function(lambda x: tf.tanh(x @ module.weight), input_signature=[tf.TensorSpec((None, 30))])
    tf.saved_model.save(module, str(folder))
    loaded = tf.saved_model.load(str(folder))
    step = gs.parallelize(lambda x: loaded.run(x), devices=3, variables="sharded")
    return step, (numbers(11, 30),), [loaded.weight]


MOVES: dict[str, Callable[..., Case]] = {
    "variables=sharded": optimizer(variables="sharded"),
    "variables=replicated in micro-batches": optimizer(variables="replicated", micro_batches=2),
    "variables=auto": optimizer(variables="auto"),
    "stages, variables=sharded": optimizer(variables="sharded", devices=4, stages=2),
    "memory=": optimizer(devices=3, memory=25_000),
    "late slots, sharded": optimizer("sharded", "weights"),
    "slots that lie apart": apart,
    "late slots of Keras": slots_made_later,
    "mesh of stages": staged(STAGES, "sharded"),
    "mesh of stages, late slots": staged(STAGES, "replicated", "weights"),
    "mesh of stages, variables=": staged(STAGES, "sharded", "later"),
    "layers along an axis, variables=": on_mesh(
        perceptron, SQUARE, PERCEPTRON, lambda: (tf.ones((7, 12), tf.float64),), "later"
    ),
    "heads": with_heads(by_name(MERGED)),
    "heads, variables=": with_heads(by_name(MERGED), "later"),
    "Keras model, variables=sharded": model(variables="sharded"),
    "Keras model, variables=auto": model(variables="auto"),
    "Keras model from a file, variables=replicated": model(True, variables="replicated"),
    "SavedModel, variables=sharded": saved_model,
}
"""What a first call moves."""

STAYS: dict[str, Callable[..., Case]] = {
    "home": optimizer(),
    "laid out": optimizer("sharded"),
    "variables=host": optimizer(variables="host"),
    "late slots, host": optimizer("host", "weights"),
    "variables=auto, absent devices": optimizer(devices=GPUS, variables="auto"),
    "plan=, laid out": optimizer("replicated", update=momentum, plan=CORES),
    "parts that were gathered": groups,
    "Keras model, absent devices": model(gpus=GPUS),
}
"""What none moves, as all lies so already or is not here."""


def records(variables: Sequence[tf.Variable]) -> list[tuple[str, Any]]:
    """Return how variables lie: each one's handle, device, parts, what they hold, and what was noted of it."""
    with raw_handles():
        return [
            (variable.name, (id(variable.handle), variable.device, *parts_held(variable), notes_of(variable)))
            for variable in variables
        ]


def parts_held(variable: tf.Variable) -> tuple[Any, ...]:
    parts = parts_of_variable(variable)
    if parts is None:
        return type(variable), None
    return type(variable), id(parts), parts.division, parts.layout, parts.over, parts.in_parts, parts.bytes_on_devices()


def notes_of(variable: tf.Variable) -> tuple[Any, ...]:
    """Return what is noted of a variable beside its parts; not the name that users know, which a question finds."""
    record = noted_of(variable) or Record()
    return record.lying, record.waiting, record.resources


def ask_all(step: Any, batch: Sequence[Any], variables: Sequence[tf.Variable], first: int) -> None:
    """Ask each question, beginning with another one in each case, and compare."""
    left = OF_FUNCTIONS if isinstance(step, keras.Model) else OF_WHAT_IS_HERE if step.devices == GPUS else ()
    names = [name for name in QUESTIONS if name not in left and (name != "scaling" or first % 4 == 0)]  # (it is slow)
    before, changes = records(variables), layout_changes()
    for name in [*names[first % len(names) :], *names[: first % len(names)]]:
        with contextlib.redirect_stdout(io.StringIO()):
            QUESTIONS[name](step, batch)
        assert records(variables) == before, f"{name} changes variables"
        assert layout_changes() == changes, name


@pytest.mark.usefixtures("copies_take_time")
@pytest.mark.parametrize("case", MOVES)
def test_no_question_moves_what_the_first_call_moves(case: str, tmp_path: pathlib.Path):
    step, batch, variables = MOVES[case](tmp_path)
    ask_all(step, batch, variables, [*MOVES].index(case))
    changes = layout_changes()
    step.train_on_batch(*batch) if isinstance(step, keras.Model) else step(*batch)
    assert layout_changes() > changes


@pytest.mark.usefixtures("copies_take_time")
@pytest.mark.parametrize("case", STAYS)
def test_no_question_moves_what_no_call_moves(case: str, tmp_path: pathlib.Path):
    ask_all(*STAYS[case](tmp_path), [*STAYS].index(case))


@pytest.mark.parametrize("before", ["home", "sharded", "replicated"])
@pytest.mark.parametrize("layout", ["sharded", "replicated", "host"])
def test_what_the_first_call_moves_is_said_before(layout: str, before: str, monkeypatch: pytest.MonkeyPatch):
    """How much, and what the fullest device holds meanwhile: as it then is."""
    own, plain = Optimizer(adam), Optimizer(adam)
    if before != "home":
        gs.set_variable_layout(own.variables, before, 2)
    step = gs.parallelize(own.step, devices=3)
    step._asks = lambda lies: decide_target(lies, own.variables, layout, 3)
    lay, plan, assign = lying(own.variables), step.plan(X, Y), parted_variables.assign
    most = Counter(held_by_device(own.variables))

    def watched(*handle_and_value: Any) -> Any:
        assigned = assign(*handle_and_value)
        most.update(Counter(held_by_device(own.variables)) - most)
        return assigned

    for module in (parted_variables, copied_variables):
        monkeypatch.setattr(module, "assign", watched)
    assert_close(step(X, Y), plain.step(X, Y))
    moved = [v for v, old, new in zip(own.variables, lay, lying(own.variables), strict=True) if old != new]
    move = plan.first_move
    if not moved:
        assert move is None
        return
    assert (move.variables, move.bytes) == (len(moved), sum(4 * v.shape.num_elements() for v in moved))
    assert move.most_bytes == max(most.values())
    assert move.most_bytes in [held for device, held in most.items() if canonical_name(device) == move.device]
    said = (
        f"the first call moves {len(moved)} variables, {format_bytes(move.bytes)}; while it does, variables take up to"
    )
    assert said in str(plan)
    assert said in plan.explain()
    assert "moves" not in str(step.plan(X, Y)) + step.gradient_plan(X, Y).explain()  # (it is done)


def lying(variables: Sequence[tf.Variable]) -> list[Any]:
    found = map(lying_now, variables)
    return [(own.division, own.division and own.layout) for own in found]


def test_a_layout_that_is_set_after_a_question_is_the_same():
    """A prediction finds the heads of an attention for the layouts of which it was asked, and keeps them to itself."""
    found = []
    for is_asked in (False, True):
        variables, step = units(3, fused=True)
        if is_asked:
            parallel = gs.parallelize(step, mesh=SQUARE)
            gs.predict(parallel, tf.ones((4, 5, 12), tf.float64), variables=by_name(MERGED), machine=MACHINE)
        gs.set_variable_layout(variables, by_name(MERGED), mesh={"model": 2})
        found.append([(own.name, parts.division) for own in variables if (parts := parts_of_variable(own)) is not None])
    assert found[0]
    assert found[0] == found[1]
