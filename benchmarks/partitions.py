"""What TensorFlow's own partitions send from device to device: bytes, read off the graphs that ran."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import canonical_name
from graphsplit.core.protos import GraphDef, make_node, split_reference
from graphsplit.core.sizes import without_sizes
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.emission import EmittedGraph, emit
from graphsplit.planning.plan import Plan

SENDS = ("_Send", "_HostSend")


def busiest(parallel: Any, *arguments: Any) -> tuple[int, int]:
    """Return the bytes that the busiest device sends, and that the busiest receives, in the first call."""
    plan = parallel.plan(*arguments)
    with partition_graphs() as graphs:
        parallel(*arguments)
    between = bytes_between(graphs, plan)
    ends = [Counter[str](), Counter[str]()]
    for pair, size in between.items():
        for end, device in zip(ends, pair, strict=True):
            end[device] += size
    return max(ends[0].values(), default=0), max(ends[1].values(), default=0)


def bytes_between(graphs: Sequence[Any], plan: Plan) -> Counter[tuple[str, str]]:
    """Return the bytes sent by pairs of devices.

    Args:
      graphs: TensorFlow's partitions.
      plan: for which they were emitted; all sizes are known.
    """
    emitted = emit(plan)
    size_of, ours, found = _sizes(plan, emitted), {node.name for node in emitted.nodes}, Counter[tuple[str, str]]()
    for node in (node for graph in graphs for node in graph.node if node.op in SENDS):
        ends = [canonical_name(node.attr[f"{end}_device"].s.decode()) for end in ("send", "recv")]
        if split_reference(node.input[0])[0] in ours:  # (others are mere signals, for what waits)
            found[ends[0], ends[1]] += size_of(node.input[0])
    return found


def _sizes(plan: Plan, graph: EmittedGraph) -> Callable[[str], int]:
    """Return a function from references to bytes: what TensorFlow infers, given the shapes of variables."""
    imported, known = tf.Graph(), GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.nodes:
        origin = graph.origins[node.name]
        if origin.role == "op" and origin.op is not None and node.op in ("Placeholder", "ReadVariableOp"):
            op = plan.program.ops[origin.op]
            shape = tf.compat.v1.AttrValue(shape=tf.TensorShape(without_sizes(op.out_shapes[0])).as_proto())
            known.node.append(make_node(node.name, "Placeholder", [], dtype=op.out_dtypes[0], shape=shape))
        else:
            known.node.append(node)
    with imported.as_default():
        tf.graph_util.import_graph_def(known, name="")

    def size(reference: str) -> int:
        name, index = split_reference(reference)
        tensor = imported.get_tensor_by_name(f"{name}:{index}")
        if not tensor.shape.is_fully_defined():
            raise ValueError(f"{reference} is sent, and its shape is {tensor.shape}.")
        return math.prod(tensor.shape.as_list()) * tensor.dtype.size

    return size
