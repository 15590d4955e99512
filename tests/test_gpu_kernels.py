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
from graphsplit.core.gpus.kernel_devices import kernel_devices
from graphsplit.core.protos.graphdefs import make_node
from graphsplit.emission import check_emitted, emit
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
    assert "for want of a GPU kernel" not in str(plan)


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
        "  on the host, for want of a GPU kernel: 1 StringToHashBucketFast, 1 StringUpper, 1 scatter of string, "
        "1 scatter of int64, 1 gather of string"
    )
    expected = {"StringToHashBucketFast": 3, "StringUpper": 3, "SplitV": 2, "ConcatV2": 1}
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


def test_a_placement_says_what_will_run_on_the_host():
    def fn(words: tf.Tensor, x: tf.Tensor) -> Any:
        with tf.device("GPU:1"):
            return tf.strings.upper(words), tf.strings.lower(words), tf.strings.upper(words + "!"), tf.sin(x)

    placement = gs.placement_of(fn, WORDS, tf.ones(3))
    [warning] = [text for text in placement.warnings if "GPU kernel" in text]
    assert warning == (
        "no GPU kernel for 5 operations on GPUs, which will run on the host: 2 StringUpper, 1 StringLower, 1 Const, "
        "1 Add"
    )
    assert {op.type for op in placement.ops.values() if op.no_kernel} == {"StringUpper", "StringLower", "Const", "Add"}
