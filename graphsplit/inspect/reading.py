"""From a graph to operations and edges: sizes inferred, requests resolved, everything that a source says attached."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import canonical_name
from graphsplit.core.gpus.kernel_devices import kernel_devices
from graphsplit.core.protos.graphdefs import make_node, source_of, split_reference, with_inputs
from graphsplit.core.protos.marks import home_reason_of, role_of
from graphsplit.core.tensorflow_internals import import_operations
from graphsplit.errors import ArgumentError
from graphsplit.inspect.flattening import FlatNode
from graphsplit.inspect.records import NO_DATA, Edge, PlacedOp, Shape
from graphsplit.inspect.sources import PlacementSource, Value
from graphsplit.program.flops import count_flops
from graphsplit.program.reading.shape_inference import known_shape

Outputs = Mapping[str, Sequence[tuple[Shape | None, str, int]]]
_NO_KERNELS = frozenset({"Placeholder"})  # of an argument: the caller placed it
_NO_VALUE = tf.compat.v1.AttrValue()
_READS = frozenset({"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableV2", "VarHandleOp"})


def read_ops(source: PlacementSource, flat: Sequence[FlatNode]) -> tuple[list[PlacedOp], list[Edge]]:
    """Return the operations of a flattened graph and the edges between them."""
    outputs = _outputs(source, flat)
    stand_ins = {node.name: node.data[0] for node in flat if node.argument}
    resources = _resource_devices(source, flat)
    default = default_device()
    ops, edges = [], []
    for node in flat:
        if not node.argument:
            ops.append(_read_op(node, source, outputs, stand_ins, resources.get(node.name, default)))
            edges += _edges(node, outputs, stand_ins)
    return ops, list(dict.fromkeys(edges))


def _read_op(
    node: FlatNode, source: PlacementSource, outputs: Outputs, stand_ins: Mapping[str, str], default: str
) -> PlacedOp:
    reason, gathered = source.at_home.get(node.name, (home_reason_of(node.node), 0))
    shapes = tuple(shape for shape, _, _ in outputs[node.name])
    references = [split_reference(reference) for reference in node.data]
    requested = "" if node.name in source.resource_devices else full_name(node.device)

    def attribute(name: str) -> Any:
        return node.node.attr.get(name, _NO_VALUE)

    return PlacedOp(
        name=node.name,
        type=node.node.op,
        requested=requested,
        default=default,
        shard=source.shard_of.get(node.root, node.shard),
        role=source.role_of.get(node.root, role_of(node.node)),
        stage=source.stage_of.get(node.root, ""),
        shapes=shapes,
        dtypes=tuple(dtype for _, dtype, _ in outputs[node.name]),
        output_bytes=sum(size for _, _, size in outputs[node.name]),
        flops=count_flops(node.node.op, attribute, [outputs[n][k][0] for n, k in references], shapes),
        variable=source.variables.get(node.name, ""),
        parameter_bytes=_held_bytes(source.held.get(node.name) or _named(node)),
        argument=source.arguments.get(node.name, ""),
        prefix=node.prefix,
        written=source.written_of.get(node.root, ""),
        source=source.locate(node.name),
        home_reason=reason,
        gathered_bytes=gathered,
        backward=node.backward,
        body_of=node.body_of if node.body_of not in stand_ins else "",
        no_kernel="GPU" in requested and node.node.op not in _NO_KERNELS and "GPU" not in kernel_devices(node.node),
    )


def _outputs(source: PlacementSource, flat: Iterable[FlatNode]) -> Outputs:
    """Return shape, dtype and bytes of every output of every operation.

    TensorFlow infers the shapes: all nodes, bodies included, stand side by side in one graph for that.
    """
    graph_def = tf.compat.v1.GraphDef(versions=source.graph.versions, library=source.graph.library)
    for node in flat:
        made = _importable(node, source)
        reads_nothing = made.op == "Placeholder" or node.name in source.held
        copy = with_inputs(made, () if reads_nothing else (*node.data, *[f"^{control}" for control in node.controls]))
        copy.name = node.name
        graph_def.node.append(copy)
    known: dict[str, list[tuple[Shape | None, str, int]]] = {}
    for operation in import_operations(graph_def):
        described = [(known_shape(tensor.shape), tensor.dtype.name) for tensor in operation.outputs]
        known[operation.name] = [(shape, dtype, bytes_of(shape, dtype)) for shape, dtype in described]
    return known


def default_device() -> str:
    """Return the device that TensorFlow prefers for operations that ask for none: the first GPU, or the first CPU."""
    return "/device:GPU:0" if tf.config.list_logical_devices("GPU") else "/device:CPU:0"


@functools.cache
def full_name(device: str) -> str:
    """Return a device in the one spelling used here; a partial request (`/device:GPU:*`) is left as it is.

    One that only names this process (TensorFlow writes it on `EagerPyFunc`) asks for nothing.
    """
    if not device:
        return ""
    try:
        return canonical_name(device)
    except ArgumentError:
        spec = tf.DeviceSpec.from_string(device)
        return "" if spec.device_type is None and spec.job in (None, "localhost") else device


def bytes_of(shape: Shape | None, dtype: str) -> int:
    """Return the size of a tensor, 0 where it is not known; a string counts as 16 bytes."""
    if dtype in NO_DATA or shape is None or None in shape:
        return 0
    return math.prod(d or 0 for d in shape) * (16 if dtype == "string" else int(tf.as_dtype(dtype).size))


def _importable(node: FlatNode, source: PlacementSource) -> Any:
    """Return the node in a form from which shapes can be inferred."""
    if node.name in source.held:
        dtype, shape = source.held[node.name]
        value = tf.compat.v1.AttrValue(shape=shape.as_proto())
        return make_node(node.name, "VarHandleOp", [], dtype=dtype, shape=value)
    if node.argument:
        return _stand_in(node)
    return node.node


def _stand_in(node: FlatNode) -> Any:
    """Return what stands for an argument of a body: a loop's has the loop's shape, which may know less."""
    dtype = tf.as_dtype(node.node.attr["T"].type)
    shape = node.node.attr["shape"].shape if "shape" in node.node.attr else None
    known = shape is None or (not shape.unknown_rank and all(d.size >= 0 for d in shape.dim))
    if dtype.name in NO_DATA or known:
        return make_node(node.name, "Identity", [], T=dtype)
    return make_node(node.name, "Placeholder", [], dtype=dtype, shape=tf.compat.v1.AttrValue(shape=shape))


def _held_bytes(held: tuple[tf.DType, tf.TensorShape] | None) -> int:
    if held is None or not held[1].is_fully_defined():
        return 0
    return int(held[1].num_elements() or 0) * int(held[0].size)


def _edges(node: FlatNode, outputs: Outputs, stand_ins: Mapping[str, str]) -> list[Edge]:
    edges = []
    for operand, reference in enumerate((*node.data, *node.results)):
        while (name := source_of(reference)) in stand_ins:
            reference = stand_ins[name]
        name, index = split_reference(reference)
        _, dtype, size = outputs[name][index]
        operand = operand if operand < len(node.data) else -1
        edges.append(Edge(name, node.name, index, size, dtype, operand=operand))
    seen = {edge.source for edge in edges}
    return edges + [
        Edge(c, node.name, control=True, operand=-1) for c in node.controls if c not in seen and c not in stand_ins
    ]


def _resource_devices(source: PlacementSource, flat: Sequence[FlatNode]) -> dict[str, str]:
    """Return, for every node that reads a resource, where the resource is: there the node has to run."""
    named = {node.name: full_name(node.device) for node in flat if node.node.op == "VarHandleOp" and node.device}
    devices = {**named, **source.resource_devices}
    for node in flat:
        for reference in node.data:
            name = source_of(reference)
            if name in devices and (node.argument or node.node.op in _READS or _touches_resource(node)):
                devices.setdefault(node.name, devices[name])
    return devices


def _named(node: FlatNode) -> Value | None:
    """Return what a variable holds that the graph itself names: a copy of a weight, in a transpiled SavedModel."""
    if node.node.op != "VarHandleOp":
        return None
    return tf.as_dtype(node.node.attr["dtype"].type), tf.TensorShape(node.node.attr["shape"].shape)


def _touches_resource(node: FlatNode) -> bool:
    return str(node.node.op).startswith(("Assign", "Resource", "Lookup", "Stateful")) or node.node.op == "Identity"
