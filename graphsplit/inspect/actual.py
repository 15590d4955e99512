"""Actual placement: run the graph once, read the graphs that TensorFlow ran, and match them with the requests.

Where an operation runs elsewhere than asked for, or is not there any more, `explain_move` and `explain_absence` say
why.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import short_name
from graphsplit.core.gpus import kernel_devices
from graphsplit.core.protos import source_of
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.errors import ArgumentError, GraphsplitError
from graphsplit.inspect.reading import FlatNode, full_name
from graphsplit.inspect.records import PlacedOp
from graphsplit.inspect.sources import PlacementSource, StateKeeper
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.graph.graph import reached

_PLUMBING = frozenset({"_Send", "_Recv", "_HostSend", "_HostRecv", "_Retval", "_DeviceRetval"})
_ARGUMENTS = frozenset({"_Arg", "_DeviceArg"})
_SERIAL = re.compile(r"/(body|cond|then|else|branch\d+)/_\d+/")


def run_and_collect(source: PlacementSource, arguments: Sequence[Any]) -> list[Any]:
    """Run the graph once on the flat arguments, variables given back their values, and return what TensorFlow ran.

    Returns:
      One `GraphDef` for each device and function.

    Raises:
      ArgumentError: if an argument is a specification and not a tensor, or this is not eager code.
      GraphsplitError: if TensorFlow reported no graphs.
    """
    require_runnable(source, arguments)
    assert source.make_run is not None
    run = source.make_run()
    with StateKeeper(source.state()), partition_graphs() as graphs:
        run(arguments)
    return require_graphs(graphs, {node.name for node in source.graph.node})


def require_runnable(source: PlacementSource, arguments: Sequence[Any]) -> None:
    """Raise `ArgumentError` unless the graph can be run here and now on these arguments."""
    if source.make_run is None:
        raise ArgumentError("actual=True runs the function; a bare graph cannot be run. Give the function itself.")
    if not tf.executing_eagerly():
        raise ArgumentError("actual=True runs the function and reads the result: call it outside of tf.function.")
    missing = [str(argument) for argument in arguments if isinstance(argument, tf.TypeSpec)]
    if missing:
        raise ArgumentError(
            f"actual=True runs the function once, so it needs tensors, not specifications: {'; '.join(missing)}."
        )


def require_graphs(graphs: Sequence[Any], names: Collection[str]) -> list[Any]:
    """Return the partition graphs, or raise `GraphsplitError` if none of them has anything to do with the function."""
    if not any(node.name.split("/")[0] in {n.split("/")[0] for n in names} for g in graphs for node in g.node):
        raise GraphsplitError(
            "TensorFlow reported no graph for this function. It hands its graphs out when it first instantiates a "
            "function, so one that has been called before is not reported again. Take the placement of the function "
            "(gs.placement(fn, *args, actual=True) makes a fresh instance of it), or collect the graphs around its "
            "first call in this process."
        )
    return list(graphs)


def ran_nodes(graphs: Iterable[Any], inputs: Sequence[str] = ()) -> dict[str, RanNode]:
    """Return the nodes of partition graphs by the names that `flatten` gives; sends and receives are left out.

    Args:
      graphs: partition graphs.
      inputs: names of the placeholders that became the function's arguments, in their order.
    """
    node_by_name = {}
    for graph in graphs:
        copies = {n.name for n in graph.node if n.op in _PLUMBING}
        for node in graph.node:
            if node.op in _PLUMBING or (re.search(r"/_\d+$", node.name) and _is_plumbing(node, copies)):
                continue
            name = plain_name(node.name)
            if node.op in _ARGUMENTS and node.attr["index"].i < len(inputs):
                name = inputs[node.attr["index"].i]
            fused = (*(f.decode() for f in node.attr["fused_ops"].list.s), *fused_by_onednn(node.op))
            reads = tuple(plain_name(source_of(i)) for i in node.input)
            node_by_name[name] = RanNode(name, node.op, full_name(node.device), fused, reads)
    return node_by_name


def plain_name(name: str) -> str:
    """Return a node's name without the serial numbers that inlining puts in.

    >>> plain_name("while/body/_5/while/MatMul")
    'while/body/while/MatMul'
    """
    while (shorter := _SERIAL.sub(r"/\1/", name)) != name:
        name = shorter
    return name


def _is_plumbing(node: Any, copies: Collection[str]) -> bool:
    """Return whether a node with a serial number only carries a value or a signal between devices."""
    return node.op in ("Identity", "Const", "Switch", "Merge", "Enter", "Exit") or node.name in copies


def match(
    ops: Sequence[PlacedOp], flat: Sequence[FlatNode], source: PlacementSource, graphs: Sequence[Any]
) -> tuple[list[PlacedOp], list[str]]:
    """Return the operations with their actual devices and reasons, and names of nodes that ran and match no op."""
    facts = gather_facts(ops, flat, source, ran_nodes(graphs, source.inputs))
    matched = [match_op(op, facts) for op in ops]
    names = {op.name for op in ops}
    return matched, sorted(name for name, node in facts.ran.items() if name not in names and node.type[0] != "_")


def match_op(op: PlacedOp, facts: Facts) -> PlacedOp:
    """Return one operation with its actual device, or the reason why it has none."""
    node = facts.ran.get(op.name)
    if node is None:
        reason, instead = explain_absence(op, facts)
        placed = replace(op, actual=instead.device if instead else "", ran=instead is not None, reason=reason)
        return replace(placed, reason=f"{explain_move(op, placed.actual, facts)}; {reason}") if placed.moved else placed
    placed = replace(op, actual=node.device)
    if not placed.moved:
        renamed = node.type != op.type and node.type not in ("NoOp", *_ARGUMENTS)
        return replace(placed, reason=f"runs as {node.type}" if renamed else "")
    return replace(placed, reason=explain_move(op, node.device, facts))


def gather_facts(
    ops: Sequence[PlacedOp], flat: Sequence[FlatNode], source: PlacementSource, ran: Mapping[str, RanNode]
) -> Facts:
    """Return what the reasons are found from."""
    readers, producers = defaultdict(list), defaultdict(list)
    stand_ins = {node.name: source_of(node.data[0]) for node in flat if node.argument}
    twins: dict[Any, list[str]] = defaultdict(list)
    touching = _touching(flat, ops)
    for node in flat:
        for name in {source_of(reference) for reference in (*node.data, *node.results)}:
            while name in stand_ins:
                name = stand_ins[name]
            readers[name].append(node.name)
            producers[node.name].append(name)
        twins[_meaning(node)].append(node.name)
    return Facts(
        ran=ran,
        needed=_needed(flat, source),
        devices={full_name(device.name) for device in tf.config.list_logical_devices()},
        kernels={node.name: kernel_devices(node.node) for node in flat},
        resources={op.name: op.default for op in ops if op.name in touching},
        constant=_constant(flat, producers),
        readers=readers,
        producers=producers,
        compiled={**source.compiled, **{node.name: node.compiled for node in flat if node.compiled}},
        twins={name: [n for n in names if n != name] for names in twins.values() if len(names) > 1 for name in names},
    )


def _meaning(node: FlatNode) -> Any:
    attributes = tuple(sorted((k, v.SerializeToString()) for k, v in node.node.attr.items() if k[0] != "_"))
    return node.node.op, node.data, attributes, node.device


def _touching(flat: Sequence[FlatNode], ops: Sequence[PlacedOp]) -> set[str]:
    handles = {op.name for op in ops if "resource" in op.dtypes} | {node.name for node in flat if node.argument}
    return {node.name for node in flat if any(source_of(r) in handles for r in node.data)} | handles


def _needed(flat: Sequence[FlatNode], source: PlacementSource) -> set[str] | None:
    if source.outputs is None:
        return None
    following: dict[str, list[str]] = defaultdict(list)  # of a call that was inlined, what is in it
    for node in flat:
        following[node.root].append(node.name)
    for node in flat:
        following[node.name] = [*map(source_of, (*node.data, *node.results)), *node.controls]
    return set(reached(map(source_of, (*source.outputs, *source.effects)), lambda name: following.get(name, ())))


def _constant(flat: Sequence[FlatNode], producers: Mapping[str, Sequence[str]]) -> set[str]:
    """Return the names of operations all of whose inputs are constants, however many steps back."""
    constant: set[str] = set()
    for node in flat:
        input_names = producers.get(node.name, ())
        if node.node.op == "Const" or (input_names and not node.results and constant.issuperset(input_names)):
            constant.add(node.name)
    return constant


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
    wanted, got = short_name(op.requested), short_name(actual)
    if op.requested not in facts.devices and re.search(r":\d+$", op.requested):
        return f"{wanted} does not exist in this process; TensorFlow's soft placement chose {got}"
    where = facts.resources.get(op.name)
    if where == actual:
        return f"must run on the device of the variable or table that it uses: {got}"
    kind = op.requested.rpartition("device:")[2].split(":")[0]
    kinds = facts.kernels.get(op.name)
    if kinds is not None and kind not in kinds:
        return f"no {kind} kernel for {op.type} with these types; TensorFlow's soft placement chose {got}"
    if not re.search(r":\d+$", op.requested):
        return f"the request {wanted} leaves the device open"
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
    neighbors = list(facts.readers.get(op.name, ())) + list(facts.producers.get(op.name, ()))
    neighbors += [n for name in neighbors for n in facts.readers.get(name, ())]
    for name in neighbors:
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
