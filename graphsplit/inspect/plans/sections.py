"""Sections that some plans have: stages that were cut automatically, sums that each device holds whole, XLA, hosts.

Of stages it is told where each begins and why, and what it needs from others. What has no kernel for GPUs TensorFlow
runs on the host, and copies there and back.
"""

from __future__ import annotations

from collections import Counter

import tensorflow as tf

from graphsplit.core.devices import short_name
from graphsplit.core.gpus import has_moving_kernel, kernel_devices
from graphsplit.core.layouts import Partial, Shard
from graphsplit.planning.amounts import size_text
from graphsplit.planning.communication.transfers import Concatenation, Slice, Sum, Value
from graphsplit.planning.costs.work import SMALL_BYTES
from graphsplit.planning.decisions import Decisions
from graphsplit.program.graph.compilability import why_not_compiled
from graphsplit.program.graph.function_calls import is_compiled
from graphsplit.program.program import SIZES, Op, Tensor
from graphsplit.program.stages import Stage


def stages_text(plan: Decisions) -> list[str]:
    """Return lines for the printed plan; none if no stages were asked for."""
    cuts = plan.stage_starts
    if cuts is None:
        return []
    if not cuts.stages:
        return ["  no stages: nothing runs on the shards"]
    sent = size_text(plan.program, [tensor for stage in cuts.stages for tensor in stage.received])
    slowest = f"the slowest takes {cuts.balance:.2f} times the mean"
    wanted_stages = len(cuts.asked.devices)
    fewer = f" instead of {wanted_stages}, as too little runs on the shards" if len(cuts.stages) < wanted_stages else ""
    count = "1 stage" if len(cuts.stages) == 1 else f"{len(cuts.stages)} stages"
    lines = [f"  cut into {count}{fewer}, {slowest}; {sent} sent between them"]
    for cut in cuts.stages:
        begin = f"from {_place(plan, plan.program.ops[cut.first])}"
        begin += f", named by {cut.asked!r}" if cut.asked else ""
        time = f"{100 * cut.share:.1f} % of the time"
        got = f", receives {size_text(plan.program, cut.received)}" if cut.received else ""
        lines.append(f"    stage {cut.stage}: {begin}; {time}{got}{_reads(plan, cut.stage)}")
    return lines


def _place(plan: Decisions, op: Op) -> str:
    where = plan.program.line_of(op)
    return op.label + (f" ({where})" if where else "")


def _reads(plan: Decisions, stage: Stage) -> str:
    """Say how many bytes of variables a stage reads from other devices."""
    program = plan.program
    tensors_by_device: dict[str, dict[Tensor, None]] = {}
    for op in plan.sharded_ops:
        if op.stage == stage:
            for tensor in op.inputs:
                device, *_ = plan.places.once(program.ops[tensor.op])
                if program.ops[tensor.op].type == "ReadVariableOp" and device not in stage.devices:
                    tensors_by_device.setdefault(device, {})[tensor] = None
    texts = [
        f"{size_text(program, tensors)} of variables from {short_name(d)}"
        for d, tensors in sorted(tensors_by_device.items())
    ]
    return f", reads {' and '.join(texts)}" if texts else ""


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
    """Return how many operations of which types these are, moves included; "" if there are none."""
    devices = plan.places.computing(plan.program) | plan.places.all_once
    if not any("GPU" in device for device in devices):
        return ""
    ops_on_gpus = [op for op in plan.program.ops if op.type not in ("Placeholder", SIZES) and _on_gpu(plan, op)]
    count_by_kind = Counter(op.type for op in ops_on_gpus if "GPU" not in kernel_devices(op.node))
    for collective in plan.collectives:
        tensor = collective.moves[0].tensor
        dtype = plan.program.ops[tensor.op].out_dtypes[tensor.index]
        types = {_made_by(value) for value in collective.values if "GPU" in value.device}
        if not all(has_moving_kernel(op_type, dtype, "GPU") for op_type in types if op_type):
            count_by_kind[f"{collective.kind} of {dtype.name}"] += len(collective.moves)
    return ", ".join(f"{count} {what}" for what, count in count_by_kind.most_common())


def _on_gpu(plan: Decisions, op: Op) -> bool:
    return any("GPU" in device for device in plan.places.running(op, plan.steps[op.index]))


def _made_by(value: Value) -> str:
    """Return the type of the operation that makes a value; copies need none."""
    if isinstance(value, Slice):
        return "SplitV"
    if isinstance(value, Concatenation):
        return "ConcatV2"
    return _REDUCTIONS[value.reduction] if isinstance(value, Sum) else ""


_MOST_NAMED = 4
_LOOKUPS = ("Gather", "ResourceGather")
_WRITES = ("ResourceScatter",)


def rows_in_place_text(plan: Decisions) -> list[str]:
    """Return which lookups and writes take rows of a sharded variable where these are, each part its own."""
    lines = []
    for types, what in ((_LOOKUPS, "looked up"), (_WRITES, "written")):
        ops_by_name: dict[str, list[Op]] = {}
        for op in plan.ops_once:
            if op.device and op.type.startswith(types) and _is_of_variable(plan, op.inputs[0]):
                ops_by_name.setdefault(op.provenance.origin or op.name, []).append(op)
        named = {name: ops for name, ops in ops_by_name.items() if len({op.device for op in ops}) > 1}
        for name, ops in list(named.items())[:_MOST_NAMED]:
            where = plan.program.line_of(ops[0])
            lines.append(
                f"  rows are {what} where they are, on {len({op.device for op in ops})} devices: {ops[0].type} {name!r}"
                + (f" ({where})" if where else "")
            )
        more = len(named) - _MOST_NAMED
        lines += [f"  ... and {more} more whose rows are {what} where they are"] if more > 0 else []
    return lines


def _is_of_variable(plan: Decisions, tensor: Tensor) -> bool:
    """Return whether a tensor is a variable's handle, or its value."""
    op = plan.program.ops[tensor.op]
    return op.type == "ReadVariableOp" or op.out_dtypes[tensor.index] == tf.resource


_PUTS = ("ScatterNd", "TensorScatter", "UnsortedSegment")  # types begin so that put rows at places in a whole tensor


def whole_sums_text(plan: Decisions) -> list[str]:
    """Return what each device puts its rows into that is larger than they are, and has all rows' places."""
    whole_sums = [op for op in plan.sharded_ops if op.type.startswith(_PUTS) and _is_larger_than_rows(plan, op)]
    lines = [f"  sums of rows for which each device holds a whole tensor: {len(whole_sums)}"] if whole_sums else []
    for op in whole_sums[:_MOST_NAMED]:
        lines.append(f"    {_place(plan, op)}: {size_text(plan.program, [Tensor(op.index, 0)])} on each device")
    return lines + ([f"    ... and {len(whole_sums) - _MOST_NAMED} more"] if len(whole_sums) > _MOST_NAMED else [])


def _is_larger_than_rows(plan: Decisions, op: Op) -> bool:
    shards, size = plan.steps[op.index].shards, plan.program.bytes(Tensor(op.index, 0))
    if shards is None or not isinstance(shards.gives[0], Partial) or size <= SMALL_BYTES:
        return False
    tensors_read = [t for t, want in zip(op.inputs, shards.wants, strict=True) if isinstance(want, Shard)]
    return size > sum(map(plan.program.bytes, tensors_read))


_NO_WORK = frozenset({"Placeholder", "Const", "NoOp", "ReadVariableOp", "Identity", SIZES})


def compiled_text(plan: Decisions) -> list[str]:
    """Return what is compiled, what is not and why, and what unknown sizes cost; nothing unless XLA was asked for."""
    if not plan.jit_compile:
        return []
    kind = "GPU" if "GPU" in "".join((*plan.devices, plan.default_device)) else "CPU"
    functions = {function.signature.name: function for function in plan.program.library.function}
    ops = [op for op in (*plan.sharded_ops, *plan.ops_once) if op.type not in _NO_WORK and not is_compiled(op.node)]
    split = plan.loops_split
    uncompiled: Counter[tuple[str, str]] = Counter()
    for op in ops:
        if why := why_not_compiled(op.node, functions, kind):
            uncompiled[op.type, why] += 1
        elif op.index in split:
            uncompiled[op.type, "the devices exchange data in each of its iterations"] += 1
    lines = [f"  compiled by XLA between moves: {len(ops) - uncompiled.total()} of {len(ops)} operations that compute"]
    lines += [f"    not compiled: {count} x {name}: {why}" for (name, why), count in uncompiled.most_common()]
    if plan.program.symbols:
        lines.append("    compiled again for each new size of a shard")
    return lines
