"""What is emitted for GPUs has kernels there, and what has none is reported: known on any machine, from TensorFlow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks.steps import make_parts, single_device_step
from benchmarks.workloads import WORKLOADS, data, workload
from graphsplit.core.gpus import kernel_devices
from graphsplit.core.protos import make_node
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.costs.machine import Device, Link, Machine
from graphsplit.planning.costs.seconds import Costs
from graphsplit.simulate.prediction.task_writing import machine_tasks
from tests.helpers.gpu_plans import plan_for_gpus, without_gpu_kernel
from tests.helpers.policies import policy

__all__ = ["policy"]

pytestmark = pytest.mark.skipif(
    not tf.sysconfig.get_build_info().get("is_cuda_build"), reason="this TensorFlow is built without kernels for GPUs"
)


@pytest.mark.parametrize(
    ("op_type", "types", "expected"),
    [
        ("MatMul", {"T": tf.float32}, {"CPU", "GPU"}),
        ("MatMul", {"T": tf.int32}, {"CPU"}),
        ("StringUpper", {}, {"CPU"}),
        ("CudnnRNNV3", {"T": tf.float32}, {"GPU"}),
        ("ReadVariableOp", {"dtype": tf.float32}, {"CPU", "GPU"}),  # by a kernel for all kinds of devices
        ("AddN", {"T": tf.int32}, {"CPU", "GPU"}),  # the same, on the host's memory
        ("SplitV", {"T": tf.float32}, {"CPU", "GPU"}),  # Tlen as by default
        ("SplitV", {"T": tf.bool}, {"CPU"}),
        ("NoSuchOp", {}, set()),
    ],
)
def test_kernels(op_type: str, types: dict[str, Any], expected: set[str]):
    assert kernel_devices(make_node("n", op_type, [], **types)) == expected


def test_a_label_asks_for_a_kernel_of_its_own():
    node = make_node("n", "MatMul", [], T=tf.float32)
    node.attr["_kernel"].s = b"mine"
    assert kernel_devices(node) == set()


def network_cases() -> Iterator[Any]:
    for name, found in WORKLOADS.items():
        for mode in found.modes:
            for types in ("float32", "mixed_float16"):
                if (name, types) == ("polyfit", "mixed_float16"):
                    continue  # its labels are float32
                quick = (name, types) in {("mlp_bn", "mixed_float16"), ("lstm", "float32")}
                marks = () if quick and mode == "training" else (pytest.mark.long,)
                yield pytest.param(name, mode, types, marks=marks, id=f"{name}, {mode}, {types}")


@pytest.mark.parametrize(("name", "mode", "policy"), list(network_cases()), indirect=["policy"])
def test_networks_run_on_gpus_throughout(name: str, mode: str, policy: str):
    found = workload(name, small=True)
    arguments = [tf.constant(array) for array in data(found, 9)][: 2 if mode == "training" else 1]
    plan = plan_for_gpus(single_device_step(make_parts(found), mode), arguments)
    plan.check()
    graph = emit(plan)
    check_emitted(plan, graph)
    assert sum("GPU" in node.device for node in graph.nodes) > 50
    assert without_gpu_kernel(graph) == {}
    assert "no GPU kernel" not in str(plan)


HERE = [f"CPU:{d}" for d in range(1, 5)]  # they stand for the GPUs, and CPU:0 is their host
ALONG = {"table": ("model", None), "up": (None, "model"), "bias": ("model",), "down": ("model", None)}
ON_MESH: dict[str, Any] = {"mesh": {"batch": 2, "model": 2}}
PROGRAMS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "a mesh, a vocabulary in parts": (ALONG, ON_MESH, "table: [model, -], 32 + 32, computed in place"),
    "a mesh, recomputed": (ALONG, {**ON_MESH, "recompute": 0.9}, "recomputing: "),
    "a mesh, the rest divided": ({**ALONG, "*": "sharded"}, ON_MESH, "variables sharded: "),
    "slots on the host": ({"slot*": "host"}, {}, "variables in the memory of CPU:0: "),
    "slots on the host, weights divided": ({"slot*": "host", "*": "sharded"}, {}, "once, on CPU:0: "),
    "all on the host": ("host", {}, "variables in the memory of CPU:0: "),
    "divided, recomputed": ("sharded", {"recompute": 0.9}, "recomputing: "),
    "micro-batches, mirrored": ("replicated", {"micro_batches": 2}, "variables replicated: "),
}
QUICK = {"a mesh, a vocabulary in parts", "slots on the host, weights divided", "divided, recomputed"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", [tf.float32, tf.float16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long]) for name in PROGRAMS]
)
def test_layouts_run_on_gpus_throughout(name: str, dtype: tf.DType):
    layout, options, said = PROGRAMS[name]
    step, variables = language_model(dtype)
    mesh = options.get("mesh")
    gs.set_variable_layout(variables, layout, devices=HERE if mesh else HERE[:3], mesh=mesh)
    words = tf.constant(np.arange(9 * 6).reshape(9, 6), tf.int32)
    plan = plan_for_gpus(step, [words, words], **options)
    plan.check()
    graph = emit(plan)
    check_emitted(plan, graph)
    assert {node.device for node in graph.nodes if "GPU" in node.device} == {
        f"/device:GPU:{d}" for d in range(4 if mesh else 3)
    }
    assert said in str(plan)
    assert not plan.state.whole
    assert without_gpu_kernel(graph) == {}
    assert "no GPU kernel" not in str(plan)


def test_no_gpu_is_asked_to_cut_what_it_has_no_kernel_for():
    """Several layers that drop out have a seed each: vectors of uint64, which are known before the shards run."""

    def drop(x: tf.Tensor) -> Any:
        seeds = [generator.make_seeds(1)[:, 0] for _ in range(4)]
        return [tf.random.stateless_uniform(tf.shape(x), seed) * x for seed in seeds]

    with tf.device(HERE[0]):
        generator = tf.random.Generator.from_seed(1)
    plan = plan_for_gpus(drop, [tf.ones((7, 3))])
    assert without_gpu_kernel(emit(plan)) == {}
    assert [move.kind for move in plan.moves].count("broadcast") >= 4
    assert not plan.buckets
    assert gs.parallelize(drop, devices=HERE).plan(tf.ones((7, 3))).buckets  # CPU devices join and cut them


def language_model(dtype: tf.DType) -> tuple[Any, list[tf.Variable]]:
    """Return a training step of a small model of words, Adam written out, and its variables."""
    with tf.device(HERE[0]):
        shapes = {"table": (64, 16), "up": (16, 160), "bias": (160,), "down": (160, 16)}
        weights = [tf.Variable(tf.ones(shape, dtype), name=name) for name, shape in shapes.items()]
        slots = [[tf.Variable(tf.zeros_like(v), name=f"slot_{k}_{v.name[:-2]}") for k in (0, 1)] for v in weights]
        generator = tf.random.Generator.from_seed(1)

    def step(words: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        table, up, bias, down = weights
        with tf.GradientTape() as tape:
            x = tf.gather(table, words)
            for seed in (generator.make_seeds(1)[:, 0], tf.constant([1, 2])):
                h = tf.nn.gelu(tf.tensordot(x, up, 1) + bias)
                kept = tf.cast(tf.random.stateless_uniform(tf.shape(h), tf.cast(seed, tf.int32)) > 0.1, h.dtype)
                x = x + tf.tensordot(h * kept, down, 1)
            logits = tf.tensordot(x, tf.transpose(table), 1)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        gradients = tape.gradient(loss, weights)
        for v, gradient, (m, s) in zip(weights, gradients, slots, strict=True):
            g = tf.convert_to_tensor(gradient)
            m.assign_add(0.1 * (g - m))
            s.assign_add(0.1 * (g * g - s))
            v.assign_sub(m / (tf.sqrt(s) + 0.1))
        return loss

    return step, [*weights, *[slot for own in slots for slot in own]]


@pytest.mark.parametrize("counter_last", [False, True])
def test_a_branch_runs_beside_most_of_its_variables(counter_last: bool):
    """A step counter of int32 is on the host, and what the same branch does to weights is not."""
    w, count = tf.Variable(tf.ones((3, 4))), tf.Variable(0)

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((x @ w) ** 2)
        gradient = tape.gradient(loss, w)

        def apply() -> tf.Tensor:
            for change in (lambda: w.assign_sub(0.1 * gradient), lambda: count.assign_add(1))[
                :: 1 if counter_last else -1
            ]:
                change()
            return loss

        return tf.cond(tf.reduce_all(tf.math.is_finite(gradient)), apply, lambda: loss)

    plan = plan_for_gpus(step, [tf.ones((7, 3))])
    plan.check()
    graph = emit(plan)
    check_emitted(plan, graph)
    assert set(plan.state.devices.values()) == {"/device:GPU:0", "/device:CPU:0"}
    assert [node.device for node in graph.nodes if node.op == "If"] == ["/device:GPU:0"]


def strings_and_integers(words: tf.Tensor, labels: tf.Tensor) -> Any:
    """Hashing has no kernel on GPUs; int64 has one for sums, and none for cutting."""
    table = tf.ones((20, 6))
    vectors = tf.gather(table, tf.strings.to_hash_bucket_fast(words, 20))
    return tf.reduce_sum(labels * 2), tf.tanh(vectors), tf.strings.upper(words)


WORDS, LABELS = tf.constant([f"word {i}" for i in range(9)]), tf.constant(np.arange(9), tf.int64)


def test_a_plan_says_what_runs_on_the_host():
    plan = plan_for_gpus(strings_and_integers, (WORDS, LABELS))
    [line] = [line for line in str(plan).splitlines() if "GPU kernel" in line]
    assert line == (
        "  on the host, as they have no GPU kernel: 1 StringToHashBucketFast, 1 StringUpper, 1 gather of string"
    )  # (the arguments are cut on the host, where they are)
    expected = {"StringToHashBucketFast": 3, "StringUpper": 3, "ConcatV2": 1}
    assert without_gpu_kernel(emit(plan)) == Counter(expected)
    cpus = gs.parallelize(strings_and_integers, devices=3).plan(WORDS, LABELS)
    assert "GPU" not in str(cpus)


def test_moves_of_every_kind():
    def fn(x: tf.Tensor) -> Any:
        flags = tf.reshape(x > 0, [-1])
        return (
            flags,
            tf.reduce_max(tf.cast(x, tf.uint8), 0),
            tf.reduce_any(x > 0),
            tf.reduce_sum(tf.cast(x, tf.int16), 0),
        )

    plan = plan_for_gpus(fn, [tf.ones((7, 3))])
    [line] = [line for line in str(plan).splitlines() if "GPU kernel" in line]
    found = without_gpu_kernel(emit(plan))
    assert line.partition(": ")[2] == "1 Max, 1 Sum, 1 reduce of int16"
    assert found == {"Max": 3, "Sum": 3, "AddN": 1}


@pytest.mark.parametrize(
    ("dtype", "resource"), [(tf.int64, "threads of host 0"), (tf.int32, "stream of /device:GPU:0")]
)
def test_predicted_moves_run_where_a_kernel_is(dtype: tf.DType, resource: str):
    """GPUs cut tensors of 32 bits; those of 64-bit integers are cut by the host's threads."""
    plan = plan_for_gpus(lambda x: x * tf.random.shuffle(x), [tf.ones((7, 3), dtype)])
    box = Machine(
        "box", Device("GPU", "GPU", {"float32": 1e12}, {"float32": 1e12}, 1e12, 1e12), 3, Link("PCIe", 1e9, 0.0)
    )
    tasks = machine_tasks(plan, box, Costs(box.device)).tasks
    cut, rows = [task for task in tasks if task.name.startswith("scatter/")]
    if "RandomShuffle" not in cut.name:
        cut, rows = rows, cut
    products = {task.uses for task in tasks if task.name.startswith("shard_") and task.seconds}
    assert cut.uses == (resource,)
    assert rows.uses == ("memory of host 0",)  # the argument, which is there
    assert ("stream of /device:GPU:0",) in products


def test_a_placement_says_what_will_run_on_the_host():
    def fn(words: tf.Tensor, x: tf.Tensor) -> Any:
        with tf.device("GPU:1"):
            return tf.strings.upper(words), tf.strings.lower(words), tf.strings.upper(words + "!"), tf.sin(x)

    placement = gs.placement(fn, WORDS, tf.ones(3))
    [warning] = [text for text in placement.warnings if "GPU kernel" in text]
    assert warning == (
        "no GPU kernel for 5 operations on GPUs, which will run on the host: 2 StringUpper, 1 StringLower, 1 Const, "
        "1 Add"
    )
    assert {op.type for op in placement.ops.values() if op.no_kernel} == {"StringUpper", "StringLower", "Const", "Add"}
