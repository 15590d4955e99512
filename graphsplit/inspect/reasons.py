"""Why an operation runs elsewhere than asked for, or is not there any more when TensorFlow runs the graph."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from graphsplit.core.devices import short_name
from graphsplit.inspect.records import PlacedOp
from graphsplit.program.graph.function_calls import CONTROL_FLOW

_LOWERED = {op_type for op_type, flow in CONTROL_FLOW.items() if not flow.compiled}
_TRIVIAL = {"Identity", "IdentityN", "NoOp", "StopGradient", "PreventGradient", "Snapshot", "EnsureShape"}
_FUSED_BY_ONEDNN = re.compile(r"_Mkl(?:Native)?(\w+)With(?:Fused)?(\w+)$")
_SHAPE_ONLY = {"Reshape", "Squeeze", "ExpandDims", "Transpose", "Cast", "BroadcastTo", "Bitcast"}


@dataclass(frozen=True)
class RanNode:
    """A node of the graphs that ran: what it was when it ran, and what TensorFlow fused into it."""

    name: str
    type: str
    device: str
    fused: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()


@dataclass(frozen=True)
class Facts:
    """What the reasons are found from.

    Attributes:
      ran: the nodes that ran, by name.
      needed: names of the operations on which a result or an effect depends; None if nobody knows.
      devices: the devices that exist.
      kernels: operation -> the kinds of device (`"CPU"`, `"GPU"`) that have a kernel for it and its types.
      resources: operations that read or write a variable or table -> the device where that is.
      constant: operations whose value is known before the graph runs.
      readers, producers: names of the operations after and before each operation.
      compiled: operations inside calls that XLA compiles -> the call.
    """

    ran: Mapping[str, RanNode]
    needed: Collection[str] | None = None
    devices: Collection[str] = ()
    kernels: Mapping[str, Collection[str]] = field(default_factory=dict)
    resources: Mapping[str, str] = field(default_factory=dict)
    constant: Collection[str] = ()
    readers: Mapping[str, Collection[str]] = field(default_factory=dict)
    producers: Mapping[str, Collection[str]] = field(default_factory=dict)
    compiled: Mapping[str, str] = field(default_factory=dict)
    twins: Mapping[str, Collection[str]] = field(default_factory=dict)


def fused_by_onednn(op_type: str) -> tuple[str, ...]:
    """Return the types of operations that a type of oneDNN's does together, which only its name tells.

    >>> fused_by_onednn("_MklNativeConv2DBackpropFilterWithBias")
    ('Conv2DBackpropFilter', 'BiasAddGrad')
    """
    match = _FUSED_BY_ONEDNN.match(op_type)
    if match is None:
        return ()
    first, second = match.groups()
    return first, (second if second != "Bias" else "BiasAddGrad" if "Backprop" in first else "BiasAdd")


def plain_type(op_type: str) -> str:
    """Return the type that an operation had before TensorFlow chose oneDNN's, or fused smaller ones into it.

    >>> [plain_type(name) for name in ("_MklMatMul", "_FusedConv2D", "_MklNativePadWithConv2D", "MatMul")]
    ['MatMul', 'Conv2D', 'Conv2D', 'MatMul']
    """
    if op_type[0] != "_":
        return op_type
    return re.sub(r"^_(Mkl)?(Native)?(PadWith)?(Fused)?|WithBias$", "", op_type)


def explain_move(op: PlacedOp, actual: str, facts: Facts) -> str:
    """Return why `op` ran on `actual` and not where it was asked to run."""
    asked, got = short_name(op.requested), short_name(actual)
    if op.requested not in facts.devices and re.search(r":\d+$", op.requested):
        return f"{asked} does not exist in this process; TensorFlow's soft placement chose {got}"
    where = facts.resources.get(op.name)
    if where == actual:
        return f"must run on the device of the variable or table that it uses: {got}"
    kind = op.requested.rpartition("device:")[2].split(":")[0]
    kinds = facts.kernels.get(op.name)
    if kinds is not None and kind not in kinds:
        return f"no {kind} kernel for {op.type} with these types; TensorFlow's soft placement chose {got}"
    if not re.search(r":\d+$", op.requested):
        return f"the request {asked} leaves the device open"
    node = facts.ran.get(op.name)
    if node is not None and node.type == "Const" and op.type != "Const":
        return f"folded into a constant, which TensorFlow made on {got}"
    if op.type in _LOWERED:
        return "lowered to smaller operations, which run where asked"
    kernels = f"kernels exist for {', '.join(sorted(kinds))}" if kinds else "its kernels are not known"
    return f"TensorFlow placed it on {got}, with the operations that it is tied to ({kernels})"


def explain_absence(op: PlacedOp, facts: Facts) -> tuple[str, RanNode | None]:
    """Return why `op` is not among the nodes that ran, and the node that does its work instead, if there is one."""
    if facts.needed is not None and op.name not in facts.needed:
        return "pruned: no result and no effect depends on it", None
    if op.name in facts.compiled:
        call = facts.compiled[op.name]
        return f"compiled by XLA as part of {call}", facts.ran.get(call)
    if op.type == "Placeholder":
        return "an argument: the caller placed it", None
    if op.type in _LOWERED:
        return "lowered to Switch and Merge operations around its bodies", None
    fused = _fused_into(op, facts)
    if fused is not None:
        return f"fused into {fused.name} ({fused.type}: {', '.join(fused.fused)})", fused
    rewritten = _rewritten_as(op, facts)
    if rewritten is not None:
        return f"rewritten by TensorFlow's graph optimizer as {rewritten.name}", rewritten
    if op.name in facts.constant:
        return "folded away: its value is known before the graph runs", None
    if op.type in _TRIVIAL:
        return "removed: it passes its input on unchanged", None
    twin = next((facts.ran[name] for name in facts.twins.get(op.name, ()) if name in facts.ran), None)
    if twin is not None:
        return f"merged with {twin.name}, which computes the same", twin
    if op.type in _SHAPE_ONLY:
        return "removed by TensorFlow's graph optimizer: it changes no values here", None
    readers = facts.readers.get(op.name, ())
    if readers and not any(name in facts.ran for name in readers):
        return "removed by TensorFlow's graph optimizer, with the operations that read it", None
    return "removed by TensorFlow's graph optimizer, which computes the same in another way", None


def _fused_into(op: PlacedOp, facts: Facts) -> RanNode | None:
    """Return the fused node, a step or two before or after `op`, that names its type."""
    near = list(facts.readers.get(op.name, ())) + list(facts.producers.get(op.name, ()))
    near += [n for name in near for n in facts.readers.get(name, ())]
    for name in near:
        node = facts.ran.get(name)
        if node is not None and node.fused:
            parts = {*node.fused, plain_type(node.type)}
            if op.type in parts or any(op.type in part or part in op.type for part in parts if len(part) > 3):
                return node
    return None


def _rewritten_as(op: PlacedOp, facts: Facts) -> RanNode | None:
    head, _, tail = op.name.rpartition("/")
    for prefix in ("ConstantFolding", "ArithmeticOptimizer", "ArithmeticOptimizer/AddOpsRewrite", "LayoutOptimizer"):
        for name in (f"{prefix}/{op.name}", f"{prefix}_{op.name}", f"{head}/{prefix}_{tail}"):
            if name in facts.ran:
                return facts.ran[name]
    return None
