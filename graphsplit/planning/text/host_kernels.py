"""What a plan asks of GPUs that have no kernel for it: TensorFlow runs it on their host, and copies there and back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import tensorflow as tf

from graphsplit.core.gpus.kernel_devices import kernel_devices
from graphsplit.core.protos.graphdefs import make_node
from graphsplit.planning.communication.transfers import Concatenation, Slice, Sum, Value
from graphsplit.planning.decisions import Decisions
from graphsplit.program.program import COPIES, SIZES, Op

_REDUCTIONS = {
    "sum": "AddN",
    "mean": "AddN",
    "max": "Maximum",
    "min": "Minimum",
    "prod": "Mul",
    "all": "LogicalAnd",
    "any": "LogicalOr",
}


def host_kernels_text(plan: Decisions) -> str:
    """Return how many operations of which types that are, those that move tensors included; "" if there are none."""
    asked = [op for op in plan.program.ops if op.type not in ("Placeholder", SIZES, COPIES) and _on_gpu(plan, op)]
    found = Counter(op.type for op in asked if "GPU" not in kernel_devices(op.node))
    for collective in plan.collectives:
        tensor = collective.moves[0].tensor
        dtype = plan.program.ops[tensor.op].out_dtypes[tensor.index]
        nodes = [node for value in collective.values if "GPU" in value.device for node in _nodes(value, dtype)]
        if any("GPU" not in kernel_devices(node) for node in nodes):
            found[f"{collective.kind} of {dtype.name}"] += len(collective.moves)
    return ", ".join(f"{count} {what}" for what, count in found.most_common())


def _on_gpu(plan: Decisions, op: Op) -> bool:
    step = plan.steps[op.index]
    devices = [plan.owners.of_ops[op.index] or plan.home] if step.home else []
    if step.shards:
        devices += [plan.shard_device(op, d) for d in range(plan.mesh.shards)]
    return any("GPU" in device for device in devices)


def _nodes(value: Value, dtype: tf.DType) -> list[Any]:
    """Return what makes a value, in the form in which kernels are chosen; copies need no kernel."""
    if isinstance(value, Slice):
        return [make_node("split", "SplitV", [], T=dtype, Tlen=tf.int64)]
    if isinstance(value, Concatenation):
        return [make_node("join", "ConcatV2", [], T=dtype, Tidx=tf.int32)]
    return [make_node("reduce", _REDUCTIONS[value.reduction], [], T=dtype)] if isinstance(value, Sum) else []
