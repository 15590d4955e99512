"""From a graph to operations and edges: sizes inferred, requests resolved, everything that a source says attached.

The operations are one flat list, those of function bodies, loops and branches included, each once. Names are those that
TensorFlow gives them when it inlines the bodies at run time, but for the serial numbers that it puts in
(`while/body/_5/while/MatMul` is `while/body/while/MatMul` here): that is how a request and what became of it are
matched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import canonical_name
from graphsplit.core.gpus import kernel_devices
from graphsplit.core.protos import (
    inputs_of,
    is_marked,
    make_node,
    role_of,
    shard_of,
    source_of,
    split_reference,
    unsharded_reason_of,
    with_inputs,
)
from graphsplit.core.tensorflow_internals import import_operations
from graphsplit.errors import ArgumentError
from graphsplit.inspect.records import NO_DATA, Edge, PlacedOp, PlacedShape
from graphsplit.inspect.sources import HeldValue, PlacementSource
from graphsplit.program.flops import count_flops
from graphsplit.program.graph.function_calls import (
    CONTROL_FLOW,
    Body,
    Replaced,
    function_called,
    function_names,
    is_compiled,
)
from graphsplit.program.reading.shape_inference import known_shape

OutputsByName = Mapping[str, Sequence[tuple[PlacedShape | None, str, int]]]
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
    node: FlatNode, source: PlacementSource, outputs: OutputsByName, stand_ins: Mapping[str, str], default: str
) -> PlacedOp:
    reason, gathered = source.run_once.get(node.name, (unsharded_reason_of(node.node), 0))
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
        unsharded_reason=reason,
        gathered_bytes=gathered,
        backward=node.backward,
        body_of=node.body_of if node.body_of not in stand_ins else "",
        no_kernel="GPU" in requested and node.node.op not in _NO_KERNELS and "GPU" not in kernel_devices(node.node),
    )


def _outputs(source: PlacementSource, flat: Iterable[FlatNode]) -> OutputsByName:
    """Return shape, dtype and bytes of every output of every operation.

    TensorFlow infers the shapes: all nodes, bodies included, stand side by side in one graph for that.
    """
    graph_def = tf.compat.v1.GraphDef(versions=source.graph.versions, library=source.graph.library)
    for node in flat:
        importable = _importable(node, source)
        reads_nothing = importable.op == "Placeholder" or node.name in source.held
        copy = with_inputs(
            importable, () if reads_nothing else (*node.data, *[f"^{control}" for control in node.controls])
        )
        copy.name = node.name
        graph_def.node.append(copy)
    outputs_by_name: dict[str, list[tuple[PlacedShape | None, str, int]]] = {}
    for operation in import_operations(graph_def):
        described = [(known_shape(tensor.shape), tensor.dtype.name) for tensor in operation.outputs]
        outputs_by_name[operation.name] = [(shape, dtype, bytes_of(shape, dtype)) for shape, dtype in described]
    return outputs_by_name


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


def bytes_of(shape: PlacedShape | None, dtype: str) -> int:
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
    is_known = shape is None or (not shape.unknown_rank and all(d.size >= 0 for d in shape.dim))
    if dtype.name in NO_DATA or is_known:
        return make_node(node.name, "Identity", [], T=dtype)
    return make_node(node.name, "Placeholder", [], dtype=dtype, shape=tf.compat.v1.AttrValue(shape=shape))


def _held_bytes(held_value: tuple[tf.DType, tf.TensorShape] | None) -> int:
    if held_value is None or not held_value[1].is_fully_defined():
        return 0
    return int(held_value[1].num_elements() or 0) * int(held_value[0].size)


def _edges(node: FlatNode, outputs: OutputsByName, stand_ins: Mapping[str, str]) -> list[Edge]:
    edges = []
    for operand, reference in enumerate((*node.data, *node.results)):
        while (name := source_of(reference)) in stand_ins:
            reference = stand_ins[name]
        name, index = split_reference(reference)
        _, dtype, size = outputs[name][index]
        operand = operand if operand < len(node.data) else -1
        edges.append(Edge(name, node.name, index, size, dtype, operand=operand))
    sources = {edge.source for edge in edges}
    return edges + [
        Edge(c, node.name, control=True, operand=-1) for c in node.controls if c not in sources and c not in stand_ins
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


def _named(node: FlatNode) -> HeldValue | None:
    """Return what a variable holds that the graph itself names: a copy of a weight, in a transpiled SavedModel."""
    if node.node.op != "VarHandleOp":
        return None
    return tf.as_dtype(node.node.attr["dtype"].type), tf.TensorShape(node.node.attr["shape"].shape)


def _touches_resource(node: FlatNode) -> bool:
    return str(node.node.op).startswith(("Assign", "Resource", "Lookup", "Stateful")) or node.node.op == "Identity"


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a node has of its own, or from the calls that contain it.

    Attributes:
      device: the device asked for: its own, or that of the call that contains it.
      root: the node of the given graph that it is or is inside of.
      compiled: the call that XLA compiles as a whole, "" if none.
      backward: whether it belongs to a backward pass.
      body_of: the loop, branch or call in whose body it is.
      shard: the shard that a transpilation noted on it, or on the node of the graph that it is inside of.
      prefix: what comes before the name that graphsplit gave such a node: the call of a SavedModel's signature.
    """

    device: str = ""
    root: str = ""
    compiled: str = ""
    backward: bool = False
    body_of: str = ""
    shard: int | None = None
    prefix: str = ""


@dataclass(frozen=True, eq=False)
class FlatNode(Surroundings):
    """One node of the flat list.

    Attributes:
      node: the `NodeDef`, for its type and attributes; its inputs are replaced by `data` and `controls`.
      data: references (`node:1`) of the tensors that it reads.
      results: references of tensors that come out of its bodies (a loop's, a branch's).
      argument: whether it only stands for the argument of a body, and is not an operation.
    """

    name: str
    node: Any
    data: tuple[str, ...]
    controls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    argument: bool = False


@dataclass(frozen=True)
class _Scope:
    """A body that is being read: what its names begin with, and what it inherits from the call."""

    names: str = ""
    inherited: Surroundings = Surroundings()
    body: Body | None = None

    def inputs(self, node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the flat names of what a node of this body reads, and of what it waits for."""
        references, waits = inputs_of(node)
        if self.body is None:
            return tuple(["{}:{}".format(*split_reference(r)) for r in references]), tuple([r[1:] for r in waits])
        waits = [r for r in waits if source_of(r) not in self.body.arguments]
        return tuple(map(self.body.reference, references)), tuple([self.body.reference(r)[1:] for r in waits])

    def around(self, node: Any) -> Surroundings:
        """Return the surroundings of a node of this body."""
        inherited, name = self.inherited, self.names + node.name
        marked: dict[str, Any] = {"shard": shard_of(node), "prefix": self.names} if is_marked(node) else {}
        return replace(
            inherited,
            device=node.device or inherited.device,
            root=inherited.root or name,
            backward=inherited.backward or any(p in ("gradient_tape", "gradients") for p in name.split("/")),
            **marked,
        )


def flatten(graph: Any) -> list[FlatNode]:
    """Return all operations of a `GraphDef`.

    Calls are replaced by the operations of the called functions. Loops and branches stay, followed by theirs; a loop's
    body is read once, with the first iteration's inputs. Bodies of other operations (data sets) are not entered.
    """
    flattener = _Flattener({function.signature.name: function for function in graph.library.function})
    flattener.read(graph.node, _Scope())
    return flattener.finish()


class _Flattener:
    def __init__(self, library: Mapping[str, Any]):
        self._library = library
        self._found: list[FlatNode] = []
        self._replaced = Replaced()

    def read(self, nodes: Sequence[Any], scope: _Scope) -> None:
        """Append the nodes of one body and, after each, what is inside of it."""
        for node in nodes:
            name, surroundings = scope.names + node.name, scope.around(node)
            inputs, controls = scope.inputs(node)
            called = function_called(node, self._library)
            if called is not None:
                self._read_call(node, name, called, inputs, surroundings)
                continue
            results: list[str] = []
            for part, function, operands in self._bodies(node, inputs):
                arguments = self._add_arguments(f"{name}/{part}", node, function, operands, surroundings)
                inside = replace(surroundings, body_of=name)
                results += self._read_body(f"{name}/{part}/", function, arguments, inside).results
            self._found.append(FlatNode(name, node, inputs, controls, tuple(results), **vars(surroundings)))

    def finish(self) -> list[FlatNode]:
        """Return the nodes with references to calls replaced by references into the called bodies."""
        finished = []
        for flat in self._found:
            data, results = tuple(self._replaced.now(flat.data)), tuple(self._replaced.now(flat.results))
            waits = self._replaced.now([f"^{control}" for control in flat.controls])
            finished.append(replace(flat, data=data, results=results, controls=tuple([r[1:] for r in waits])))
        return finished

    def _read_call(self, node: Any, name: str, called: Any, inputs: Sequence[str], surroundings: Surroundings) -> None:
        compiled = surroundings.compiled or (name if is_compiled(node) else "")
        backward = surroundings.backward or "__backward_" in called.signature.name
        body = self._read_body(f"{name}/", called, inputs, replace(surroundings, compiled=compiled, backward=backward))
        self._replaced.add(name, body, map(source_of, body.results))

    def _read_body(self, names: str, function: Any, arguments: Sequence[str], inherited: Surroundings) -> Body:
        body = Body(function, names, arguments, self._library)
        self.read(body.nodes, _Scope(names, inherited, body))
        return body

    def _bodies(self, node: Any, inputs: Sequence[str]) -> Iterator[tuple[str, Any, Sequence[str]]]:
        """Yield the bodies of a loop or branch: what TensorFlow calls it, the function, its operands."""
        flow = CONTROL_FLOW.get(node.op)
        if flow is None or flow.compiled:
            return
        names = function_names(node)
        parts = [attribute.removesuffix("_branch") for attribute in flow.functions]
        if parts == ["branches"]:
            parts = [f"branch{k}" for k in range(len(names))]
        for part, name in zip(parts, names, strict=True):
            if name in self._library:
                yield part, self._library[name], inputs[1:] if flow.chooses else inputs

    def _add_arguments(
        self, prefix: str, node: Any, function: Any, operands: Sequence[str], surroundings: Surroundings
    ) -> list[str]:
        """Add a stand-in for each argument of a body, so that what is read inside has the loop's shapes."""
        has_shapes = CONTROL_FLOW[node.op].loops and "output_shapes" in node.attr  # (to read a missing one adds it)
        shapes = node.attr["output_shapes"].list.shape if has_shapes else []
        arguments = []
        for k, argument in enumerate(function.signature.input_arg):
            name = f"{prefix}/argument_{k}"
            stand_in = make_node(name, "Identity", [], T=tf.as_dtype(argument.type))
            if k < len(shapes):
                stand_in.attr["shape"].shape.CopyFrom(shapes[k])
            self._found.append(
                FlatNode(
                    name,
                    stand_in,
                    (operands[k],),
                    argument=True,
                    device=surroundings.device,
                    root=surroundings.root,
                    body_of=name,
                )
            )
            arguments.append(f"{name}:0")
        return arguments
