"""Stages on a mesh: pipelines beside the axes of the batch and of the layers, with one device's numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks.partitions import bytes_between
from graphsplit.core.devices import canonical_name
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.tasks import HANDED_ON, tasks_of
from graphsplit.program.graph.function_calls import function_names
from tests.helpers.float64 import float64
from tests.helpers.staged_programs import HIDDEN, Made, numbers, perceptron, rows, trained

__all__ = ["float64"]

WIDTH, LENGTH, VOCABULARY, HEADS = 8, 5, 11, 2

Law = tuple[gs.inspect.Plan, list[tf.Variable], Mapping[tuple[str, str], int]]


def transformer() -> Made:
    sizes = {"table": (VOCABULARY, WIDTH)}
    for k in "01":
        sizes |= {f"{k}/{name}": (WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"}
        sizes |= {f"{k}/o": (HEADS, WIDTH // HEADS, WIDTH), f"{k}/up": (WIDTH, HIDDEN), f"{k}/down": (HIDDEN, WIDTH)}
    sizes["last"] = (WIDTH, VOCABULARY)

    def loss(own: Mapping[str, tf.Variable], ids: tf.Tensor) -> tf.Tensor:
        x = tf.gather(own["table"], ids)
        for k in "01":
            q, h, v = (tf.einsum("btd,dhe->bhte", x, own[f"{k}/{name}"]) for name in "qkv")
            x += tf.einsum("bhts,bhse,hed->btd", tf.nn.softmax(tf.einsum("bhte,bhse->bhts", q, h)), v, own[f"{k}/o"])
            x += tf.nn.gelu(x @ own[f"{k}/up"]) @ own[f"{k}/down"]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(ids, x @ own["last"]))

    return trained({name: numbers(*size, seed=len(name)) for name, size in sizes.items()}, loss)


def looped() -> Made:
    """Layers, and others that are repeated in a loop: the second stage's."""
    sizes = {f"{k}/{name}": size for k in "01" for name, size in (("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)))}

    def loss(own: Mapping[str, tf.Variable], x: tf.Tensor) -> tf.Tensor:
        x = tf.tanh(x @ own["0/up"]) @ own["0/down"]
        again = lambda i, y: (i + 1, tf.nn.relu(y @ own["1/up"]) @ own["1/down"] + x)  # noqa: E731
        return tf.reduce_mean(tf.while_loop(lambda i, _: i < 2, again, (0, x))[1] ** 2)

    return trained({name: numbers(*size, seed=len(name)) for name, size in sizes.items()}, loss)


MODEL = {"*/up*": (None, "model"), "*/down*": ("model",), "*": "home"}
HEADED = {**{f"*/{name}*": (None, "model") for name in "qkv"}, "*/o*": ("model",), **MODEL}
FSDP = {
    **{f"*/{name}*": ("batch", "model") for name in (*"qkv", "up")},
    "*/o*": ("model", None, "batch"),
    "*/down*": ("model", "batch"),
    "table*": ("batch",),
    "last*": ("batch",),
    "*": "home",
}


def ids(count: int) -> list[tf.Tensor]:
    return [tf.constant(np.random.default_rng(count).integers(0, VOCABULARY, (count, LENGTH)))]


def assert_law(
    make: Callable[[], Made], mesh: dict[str, int], layout: Any, *batches: Sequence[tf.Tensor], **options: Any
) -> Law:
    """Run steps on one device and in stages on a mesh; compare what they return and leave, and check the plans.

    Returned are the plan of the last batch, the variables, and the bytes that TensorFlow's own partitions sent for it.
    """
    variables, step = make()
    laid, other = make()
    if layout is not None:
        gs.set_variable_layout(laid, layout, mesh=mesh)
    parallel = gs.parallelize(other, mesh=mesh, **options)
    for batch in batches:
        with partition_graphs() as graphs:
            results = [parallel(*batch), parallel(*batch)]
        for many in results:
            for one, own in zip(step(*batch), many, strict=True):
                np.testing.assert_allclose(one, own, 1e-9, 1e-10)
        plan = parallel.plan(*batch)
        plan.check()
        plan.program.check()
        check_emitted(plan, emit(plan))
    for one, own in zip(variables, laid, strict=True):
        np.testing.assert_allclose(one.numpy(), own.numpy(), 1e-9, 1e-10)
    return plan, laid, bytes_between(graphs, plan)


def stages_of(plan: gs.inspect.Plan) -> list[set[str]]:
    """Return the devices of each stage, all of which compute on the rows."""
    found = [set(stage.devices) for stage in plan.program.stages]
    for stage, devices in zip(plan.program.stages, found, strict=True):
        ops = [op for op in plan.sharded_ops if op.stage == stage]
        assert {plan.places.on(op, d) for op in ops for d in range(plan.mesh.shards)} == devices
    return found


def devices_of(own: tf.Variable) -> set[str]:
    parts = parts_of_variable(own)
    return {canonical_name(own.device)} if parts is None else set(parts.devices)


def assert_in_stages(
    plan: gs.inspect.Plan, laid: Sequence[tf.Variable], between: Mapping[tuple[str, str], int]
) -> None:
    """Assert that variables and slots lie in their stage, and that the stages send each other activations only."""
    first, second = stages_of(plan)
    assert not first & second
    for own in laid:
        name = own.name.partition(":")[0]
        assert devices_of(own) <= (first if name[0] in "0t" else second), name
    sent = sum(size for (a, b), size in between.items() if (a in first) != (b in first))
    activations = sum(sum(plan.program.bytes(tensor) for tensor in cut.received) for cut in plan.stage_starts.stages)
    arguments = sum(sum(plan.program.ops[i].out_bytes) for i in plan.program.inputs)
    columns = max(len(plan.mesh.columns), 1)
    norms = 8 * 4 * len(laid)
    assert activations <= sent <= activations + columns * arguments + norms, (sent, activations, arguments, between)


CASES: dict[str, tuple[dict[str, int], Any, dict[str, Any]]] = {
    "pipeline": ({"stage": 2}, None, {"micro_batches": 3, "schedule": "gpipe"}),
    "rows": ({"stage": 2, "batch": 2}, None, {"micro_batches": 2, "schedule": "1f1b"}),
    "rows, sharded": ({"stage": 2, "batch": 2}, "sharded", {"micro_batches": 2, "schedule": "zero-bubble"}),
    "rows, replicated": ({"batch": 2, "stage": 2}, "replicated", {"micro_batches": 3}),
    "layers": ({"stage": 2, "model": 2}, MODEL, {"micro_batches": 2, "schedule": "1f1b"}),
    "layers first": ({"model": 2, "stage": 2}, MODEL, {}),
}


@pytest.mark.parametrize("case", CASES)
def test_perceptron(case: str):
    mesh, layout, options = CASES[case]
    batches = [rows(7), rows(6)] if case in ("rows, sharded", "layers") else [rows(7)]
    assert_in_stages(*assert_law(perceptron, mesh, layout, *batches, **options))


@pytest.mark.parametrize("given", [{"memory": "20kB"}, pytest.param({"plan": "auto"}, marks=pytest.mark.long)], ids=str)
def test_what_is_chosen_for_given_stages(given: dict[str, Any]):
    """The layout of variables and what saves memory; the stages, and where variables lie, are the mesh's."""
    mesh: dict[str, int] = {"stage": 2, "batch": 2}
    plan, laid, _ = assert_law(perceptron, mesh, None, rows(8), schedule="1f1b", micro_batches=2, **given)
    [chosen] = [note for note in plan.notes if note.startswith("chosen automatically: ")]
    assert chosen.startswith("chosen automatically: 4 devices, mesh (stage=2, batch=2), variables ")
    first, second = stages_of(plan)
    for own in laid:
        assert devices_of(own) <= (first if own.name[0] in "0t" else second), own.name
    with pytest.raises(gs.errors.ArgumentError, match="does not fit: each device may hold"):
        gs.parallelize(perceptron()[1], mesh=mesh, memory="2kB", micro_batches=2, recompute=0.5)(*rows(8))


SCHEDULES = [pytest.param(own, marks=pytest.mark.long) for own in (None, "gpipe", "zero-bubble")]


@pytest.mark.many
@pytest.mark.parametrize("schedule", ["1f1b", *SCHEDULES])
def test_rows_layers_and_stages(schedule: str | None):
    mesh = {"stage": 2, "batch": 2, "model": 2}
    assert_in_stages(*assert_law(perceptron, mesh, MODEL, rows(9), micro_batches=3, schedule=schedule))


WIDE = {"*/up*": (None, ("model", "expert")), "*/down*": (("model", "expert"),), "*": "home"}


@pytest.mark.many
@pytest.mark.long
def test_layers_along_two_axes_and_stages():
    mesh = {"stage": 2, "model": 2, "expert": 2}
    assert_in_stages(*assert_law(perceptron, mesh, WIDE, rows(5), micro_batches=2, schedule="gpipe"))


@pytest.mark.long
@pytest.mark.many
def test_compiled_by_xla():
    mesh = {"stage": 2, "batch": 2, "model": 2}
    plan, laid, _ = assert_law(perceptron, mesh, MODEL, rows(9), jit_compile=True)
    first, second = stages_of(plan)
    assert all(devices_of(own) <= (first if own.name[0] == "0" else second) for own in laid)
    assert "compiled by XLA" in str(plan)


@pytest.mark.usefixtures("float64", "plain_oracle")
@pytest.mark.parametrize("variables", ["replicated", pytest.param("sharded", marks=pytest.mark.long)])
def test_a_keras_model(variables: str):
    """Weights, and slots that are made at the first batch, are copied, or divided, over the devices of their stage."""
    found, models = [], []
    x, y = numbers(5, 7), numbers(5, 5)
    for is_split in (False, True):
        keras.utils.set_random_seed(1)
        layers = [keras.layers.Dense(size, "tanh") for size in (HIDDEN, HIDDEN, 5)]
        template = model = keras.Sequential([keras.layers.Input((7,)), *layers])
        if is_split:
            model = gs.multi_gpu_model(template, mesh={"stage": 2, "batch": 2}, variables=variables)
        model.compile(keras.optimizers.Adam(1e-2, epsilon=1e-3, global_clipnorm=0.5), "mse")
        history = model.fit(x, y, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append([history, *template.get_weights(), *[own.numpy() for own in template.optimizer.variables]])
        models.append(template)
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, 1e-9, 1e-10)
    laid = [own.value for own in (*models[1].variables, *models[1].optimizer.variables) if len(own.shape) > 1]
    stages = [{canonical_name(f"CPU:{k}") for k in own} for own in ((0, 1), (2, 3))]
    assert [any(devices_of(own) == stage for own in laid) for stage in stages] == [True, True]
    assert all(devices_of(own) in stages for own in laid)


@pytest.mark.parametrize("batch", [1, pytest.param(2, marks=[pytest.mark.many, pytest.mark.long])])
def test_a_loop_runs_on_the_devices_of_its_stage(batch: int):
    """So do the operations of its turns, each in its column, and what they return is there."""
    plan, *_ = assert_law(looped, {"stage": 2, "batch": batch, "model": 2}, MODEL, [tf.constant(numbers(5, WIDTH))])
    _, second = stages_of(plan)
    loops = [op.index for op in plan.program.ops if op.has_columns]
    assert len(loops) == 2, "forward and backward"
    assert {task.device for task in tasks_of(plan).tasks if task.kind == HANDED_ON and task.op in loops} <= second
    graph = emit(plan)
    nodes = [graph.by_name[graph.names_of_operations[i, d]] for i in loops for d in range(batch)]
    called = {name for node in nodes for name in function_names(node)}
    functions = [function for function in graph.library.function if function.signature.name in called]
    assert {node.device for function in functions for node in function.node_def} - {""} == second


@pytest.mark.many
@pytest.mark.parametrize(
    "layout",
    [pytest.param(HEADED, id="DP x TP x PP", marks=pytest.mark.long), pytest.param(FSDP, id="FSDP x TP x PP")],
)
def test_transformer(layout: Any):
    mesh = {"stage": 2, "batch": 2, "model": 2}
    assert_in_stages(*assert_law(transformer, mesh, layout, ids(5), micro_batches=2, schedule="1f1b"))
