"""What a plan asks of GPUs that have no kernel for it: TensorFlow runs it on their host, and copies there and back."""

from __future__ import annotations

from collections import Counter
from typing import Any

import tensorflow as tf

from graphsplit.core.graphdefs import make_node
from graphsplit.core.kernel_devices import kernel_devices
from graphsplit.core.layouts import Partial, SingleDevice
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.steps import Move
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
    for move in plan.moves if plan.mesh.shards > 1 else ():
        dtype = plan.program.ops[move.tensor.op].out_dtypes[move.tensor.index]
        if _moved_on_gpu(plan, move) and any("GPU" not in kernel_devices(node) for node in _nodes(move, dtype)):
            found[f"{move.kind} of {dtype.name}"] += 1
    return ", ".join(f"{count} {what}" for what, count in found.most_common())


def _on_gpu(plan: Decisions, op: Op) -> bool:
    step = plan.steps[op.index]
    devices = [plan.owners.of_ops[op.index] or plan.home] if step.home else []
    if step.shards:
        devices += [plan.shard_device(op, d) for d in range(plan.mesh.shards)]
    return any("GPU" in device for device in devices)


def _moved_on_gpu(plan: Decisions, move: Move) -> bool:
    """Return whether a GPU cuts, joins or adds up for a move: whoever has or gets the whole, or all that exchange."""
    whole = [layout for layout in (move.source, move.target) if isinstance(layout, SingleDevice)]
    return any("GPU" in (layout.device or plan.home) for layout in whole) if whole else "GPU" in "".join(plan.devices)


def _nodes(move: Move, dtype: tf.DType) -> list[Any]:
    """Return what carries out a move, in the form in which kernels are chosen; copies need no kernel."""
    cut = make_node("cut", "SplitV", [], T=dtype, Tlen=tf.int64)
    join = make_node("join", "ConcatV2", [], T=dtype, Tidx=tf.int32)
    if isinstance(move.source, Partial):
        return [make_node("reduce", _REDUCTIONS[move.source.reduction], [], T=dtype)]
    return {"scatter": [cut], "gather": [join], "all-to-all": [cut, join]}.get(move.kind, [])
