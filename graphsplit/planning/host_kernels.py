"""What a plan asks of GPUs that have no kernel for it: TensorFlow runs it on their host, and copies there and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from graphsplit.core.graphdefs import make_node
from graphsplit.core.kernel_devices import kernel_devices
from graphsplit.core.layouts import SingleDevice
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.steps import Move
from graphsplit.program.program import SIZES, Op


def host_kernels_text(plan: Decisions) -> str:
    """Return how many operations of which types that are, those that move tensors included; "" if there are none."""
    asked = [op for op in plan.program.ops if op.type not in ("Placeholder", SIZES) and _on_gpu(plan, op)]
    found = Counter(op.type for op in asked if "GPU" not in kernel_devices(op.node))
    for move in plan.moves:
        for node in _nodes(plan, move):
            if "GPU" not in kernel_devices(node):
                found[f"{move.kind} of {tf.as_dtype(node.attr['T'].type).name}"] += 1
    return ", ".join(f"{count} {what}" for what, count in found.most_common())


def _on_gpu(plan: Decisions, op: Op) -> bool:
    step = plan.steps[op.index]
    devices = [plan.owners.of_ops[op.index] or plan.home] if step.home else []
    if step.shards:
        devices += [plan.shard_device(op, d) for d in range(plan.mesh.shards)]
    return any("GPU" in device for device in devices)


def _nodes(plan: Decisions, move: Move) -> Iterator[Any]:
    """Yield what carries out a move on a GPU, in the form in which kernels are chosen."""
    ends = {"scatter": ("SplitV", move.source), "gather": ("ConcatV2", move.target), "reduce": ("AddN", move.target)}
    op_type, where = ends.get(move.kind, ("", None))
    if isinstance(where, SingleDevice) and "GPU" in (where.device or plan.home) and plan.mesh.shards > 1:
        dtype = plan.program.ops[move.tensor.op].out_dtypes[move.tensor.index]
        lengths = {"Tlen": tf.int64} if op_type == "SplitV" else {"Tidx": tf.int32} if op_type == "ConcatV2" else {}
        yield make_node("move", op_type, [], T=dtype, **lengths)
