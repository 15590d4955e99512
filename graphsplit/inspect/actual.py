"""Actual placement: run the graph once, read the graphs that TensorFlow ran, and match them with the requests."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.core.gpus.kernel_devices import kernel_devices
from graphsplit.core.protos.graphdefs import source_of
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.errors import ArgumentError, GraphsplitError
from graphsplit.inspect.flattening import FlatNode
from graphsplit.inspect.reading import full_name
from graphsplit.inspect.reasons import Facts, RanNode, explain_absence, explain_move, fused_by_onednn
from graphsplit.inspect.records import PlacedOp
from graphsplit.inspect.sources import PlacementSource, StateKeeper
from graphsplit.program.graph.walks import reached

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
    with StateKeeper(source.state), partition_graphs() as graphs:
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
    found = {}
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
            found[name] = RanNode(name, node.op, full_name(node.device), fused, reads)
    return found


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
        before = producers.get(node.name, ())
        if node.node.op == "Const" or (before and not node.results and constant.issuperset(before)):
            constant.add(node.name)
    return constant
