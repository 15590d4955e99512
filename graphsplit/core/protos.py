"""Protos of graphs: read, written and marked. Nothing here knows about devices or layouts.

References to tensors come in two spellings. A graph says `node:2` for the third output of a node, a function body
says `node:output_name:0`. Everything in graphsplit uses the first; this file translates.

On the nodes that graphsplit writes into graphs of others it notes that it did, for which shard, or why on the default
device. Names of nodes are their users', and who loads a model prefixes them. Attributes that begin with `_` are kept by
TensorFlow wherever a graph goes, and mean nothing to it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.errors import UnsupportedError

NodeDef = tf.compat.v1.NodeDef
GraphDef = tf.compat.v1.GraphDef
MetaGraphDef = tf.compat.v1.MetaGraphDef


def output_names(node: Any, library: Mapping[str, Any] | None = None) -> list[str]:
    """Return the names of a node's outputs as function bodies spell them: `["output:0", "output:1"]`.

    With a library (functions by name), also of a node that calls one of its functions as if it were an op.
    """
    if library and node.op in library:
        return [f"{argument.name}:0" for argument in library[node.op].signature.output_arg]
    definition = op_definition(node.op)
    if definition is None:
        raise UnsupportedError(f"The operation type {node.op!r} of node {node.name!r} is not registered here.")
    names = []
    for argument in definition.output_arg:
        if argument.number_attr:
            count = node.attr[argument.number_attr].i
        elif argument.type_list_attr:
            count = len(node.attr[argument.type_list_attr].list.type)
        else:
            count = 1
        names += [f"{argument.name}:{i}" for i in range(count)]
    return names


def fill_defaults(graph: Any) -> None:
    """Let all nodes of a graph, and of its functions, say what SavedModels leave out: attributes of default value.

    (An attribute that is absent reads as 0, False or ""; and to index the proto's map adds an entry without a value.)
    """
    for nodes in (graph.node, *[function.node_def for function in graph.library.function]):
        for node in nodes:
            for name, value in _defaults(node.op):
                if name not in node.attr:
                    node.attr[name].CopyFrom(value)


@functools.cache
def _defaults(op_type: str) -> list[tuple[str, Any]]:
    attributes = [] if (definition := op_definition(op_type)) is None else definition.attr
    return [(a.name, a.default_value) for a in attributes if a.HasField("default_value")]


@functools.lru_cache(100_000)
def split_reference(reference: str) -> tuple[str, int]:
    """Split `node:2` into `("node", 2)`; a bare `node` is its first output.

    >>> split_reference("dense/MatMul:1")
    ('dense/MatMul', 1)
    """
    name, _, index = reference.partition(":")
    return name, int(index or 0)


def source_of(reference: str) -> str:
    """Return the name of the node that is read or waited for, in either spelling.

    >>> source_of("dense/MatMul:1"), source_of("^init"), source_of("dense/MatMul:product:0")
    ('dense/MatMul', 'init', 'dense/MatMul')
    """
    return reference.lstrip("^").partition(":")[0]


def prefixed(prefix: str, reference: str) -> str:
    """Return a reference to a node whose name got a prefix.

    >>> prefixed("copy/", "^init")
    '^copy/init'
    """
    return f"^{prefix}{reference[1:]}" if reference[0] == "^" else prefix + reference


def inputs_of(node: Any) -> tuple[list[str], list[str]]:
    """Return what a node reads, and what it waits for (`^node`)."""
    inputs = list(node.input)
    return [r for r in inputs if r[0] != "^"], [r for r in inputs if r[0] == "^"]


def functions_named(nodes: Iterable[Any], library: Mapping[str, Any]) -> list[str]:
    """Return the functions of a library that nodes name, by any attribute or as their type."""
    names: dict[str, None] = {}
    for node in nodes:
        names[node.op] = None
        for value in node.attr.values():
            names.update(dict.fromkeys([f.name for f in (value.func, *value.list.func)]))
    return [name for name in names if name in library]


def set_inputs(node: Any, inputs: Iterable[str]) -> None:
    """Let a node read something else: tensors first, and each wait once."""
    ordered_inputs = in_order_of_inputs(inputs)
    if ordered_inputs != node.input:  # (to write costs more than to look)
        del node.input[:]
        node.input.extend(ordered_inputs)


def in_order_of_inputs(inputs: Iterable[str]) -> list[str]:
    """Return what a node reads and, behind it, what it waits for, each once.

    >>> in_order_of_inputs(["^init", "x", "x:1", "^init"])
    ['x', 'x:1', '^init']
    """
    references = list(inputs)
    waits = [reference for reference in references if reference[0] == "^"]
    if not waits:
        return references
    return [*[reference for reference in references if reference[0] != "^"], *dict.fromkeys(waits)]


def with_inputs(node: Any, inputs: Iterable[str]) -> Any:
    """Return a copy of a node that reads something else; see `set_inputs`."""
    copy = NodeDef()
    copy.CopyFrom(node)  # (three times as quick as `copy.deepcopy`)
    set_inputs(copy, inputs)
    return copy


def copied(node: Any, name: str, inputs: Iterable[str]) -> Any:
    """Return a copy of a node under another name, which reads something else and need not be beside another node."""
    copy = with_inputs(node, inputs)
    copy.name = name
    if "_class" in copy.attr:  # of nodes that have other names now
        del copy.attr["_class"]
    return copy


def with_prefix(node: Any, prefix: str) -> Any:
    """Return a copy of a node with a prefix before its name and before the names of those that it reads."""
    copy = with_inputs(node, [prefixed(prefix, reference) for reference in node.input])
    copy.name = prefixed(prefix, node.name)
    return copy


def make_node(name: str, op_type: str, inputs: Iterable[str], device: str = "", **attributes: Any) -> Any:
    """Return a `NodeDef`. Attribute values are `AttrValue`s, DTypes, ints, bools or lists of ints."""
    node = NodeDef(name=name, op=op_type, device=device)
    node.input.extend(inputs)
    for key, value in attributes.items():
        if isinstance(value, tf.compat.v1.AttrValue):
            node.attr[key].CopyFrom(value)
        elif isinstance(value, tf.DType):
            node.attr[key].type = value.as_datatype_enum
        elif isinstance(value, bool):
            node.attr[key].b = value
        elif isinstance(value, int):
            node.attr[key].i = value
        else:
            node.attr[key].list.i.extend(value)
    return node


def constant_node(name: str, value: np.ndarray, dtype: tf.DType, device: str = "", control: str = "") -> Any:
    """Return a `Const` node of `value`; an array that repeats one number is stored as that number."""
    node = NodeDef(name=name, op="Const", device=device, input=[control] if control else [])
    node.attr["dtype"].type = dtype.as_datatype_enum
    proto = node.attr["value"].tensor
    if value.size > 1 and value.dtype != object and not any(value.strides):
        proto.CopyFrom(tf.make_tensor_proto(value.reshape(-1)[:1].reshape(()), dtype))
        del proto.tensor_shape.dim[:]
        for size in value.shape:
            proto.tensor_shape.dim.add().size = size
    else:
        proto.CopyFrom(tf.make_tensor_proto(value, dtype, value.shape))
    return node


def constant_value(node: Any) -> np.ndarray:
    """Return the array of a `Const` node; a stored single number comes back with zero strides, not copied out."""
    proto = node.attr["value"].tensor
    shape = tuple(d.size for d in proto.tensor_shape.dim)
    if shape and not proto.tensor_content and int(np.prod(shape)) > 1:
        value = _single_value(proto)
        if value is not None:
            return np.broadcast_to(value, shape)
    return np.asarray(tf.make_ndarray(proto))


def _single_value(proto: Any) -> np.ndarray | None:
    fields = [field for field, _ in proto.ListFields() if field.name.endswith("_val")]
    if len(fields) != 1 or len(getattr(proto, fields[0].name)) != 1:
        return None
    scalar = tf.compat.v1.AttrValue().tensor
    scalar.CopyFrom(proto)
    del scalar.tensor_shape.dim[:]
    return np.asarray(tf.make_ndarray(scalar))


def function_definition(
    name: str, nodes: Sequence[Any], inputs: Sequence[str], outputs: Sequence[str], effects: Sequence[str]
) -> Any:
    """Return `nodes` as a `FunctionDef`.

    Args:
      name: the function's name in the runtime.
      nodes: all nodes, the inputs' placeholders included.
      inputs: names of the placeholder nodes that become the arguments.
      outputs: references of the tensors that it returns.
      effects: names of the nodes that must run though nothing returned depends on them.
    """
    definition = tf.compat.v1.GraphDef().library.function.add()
    definition.signature.name = name
    definition.signature.is_stateful = bool(effects)
    arguments = {placeholder: f"a{i}" for i, placeholder in enumerate(inputs)}
    by_name = {node.name: node for node in nodes}
    names = {n.name: _fixed_output_names(n.op) or output_names(n) for n in nodes if n.name not in arguments}

    def translate(reference: str) -> str:
        if reference[0] == "^":
            return reference
        node, index = split_reference(reference)
        return arguments[node] if node in arguments else f"{node}:{names[node][index]}"

    for placeholder, argument in arguments.items():
        definition.signature.input_arg.add(name=argument, type=output_type(by_name[placeholder], 0))
    for node in nodes:
        if node.name in arguments:
            continue
        inputs = [translate(i) for i in node.input if i[0] != "^" or i[1:] not in arguments]
        definition.node_def.append(with_inputs(node, inputs))
    for i, reference in enumerate(outputs):
        node, index = split_reference(reference)
        definition.signature.output_arg.add(name=f"r{i}", type=output_type(by_name[node], index))
        definition.ret[f"r{i}"] = translate(reference)
    for effect in effects:
        definition.signature.control_output.append(effect)
        definition.control_ret[effect] = effect
    return definition


@functools.cache
def _fixed_output_names(op_type: str) -> list[str] | None:
    """Return what `output_names` does, if it is the same for all nodes of a type; else None."""
    outputs = [] if (definition := op_definition(op_type)) is None else definition.output_arg
    return None if any(a.number_attr or a.type_list_attr for a in outputs) else [f"{a.name}:0" for a in outputs]


def output_type(node: Any, index: int) -> int:
    """Return the dtype (its enum) of output `index` of a node."""
    if node.op == "Placeholder":
        return int(node.attr["dtype"].type)
    types: list[int] = []
    for argument in op_definition(node.op).output_arg:
        if argument.type_list_attr:
            types += node.attr[argument.type_list_attr].list.type
            continue
        kind = node.attr[argument.type_attr].type if argument.type_attr else argument.type
        types += [kind] * (node.attr[argument.number_attr].i if argument.number_attr else 1)
    return types[index]


AddNode = Callable[[Any], None]


class NodeWriter:
    """Writes nodes of one scope on one device, named by their type and a number; equal constants once."""

    def __init__(self, scope: str, device: str, add: AddNode, control: str = ""):
        self.device = device
        self.control = control
        self.scope = scope
        self._add = add
        self._serial = itertools.count()
        self._constants: dict[tuple[bytes, tuple[int, ...], tf.DType], str] = {}

    def __call__(self, op_type: str, *inputs: str, device: str = "", **attributes: Any) -> str:
        """Write a node, on another device if one is named, and return the reference of its first output."""
        name = f"{self.scope}/{op_type}_{next(self._serial)}"
        return self.write(name, op_type, *inputs, device=device, **attributes)

    def write(self, name: str, op_type: str, *inputs: str, device: str = "", **attributes: Any) -> str:
        """Write a node under a name of its own."""
        self._add(make_node(name, op_type, inputs, device or self.device, **attributes))
        return name

    def constant(self, value: Any, dtype: tf.DType = tf.int64) -> str:
        """Write a constant, or find the one that is there."""
        array = np.asarray(value, dtype.as_numpy_dtype)
        key = array.tobytes(), array.shape, dtype
        if key not in self._constants:
            name = self._constants[key] = f"{self.scope}/Const_{next(self._serial)}"
            self._add(constant_node(name, array, dtype, self.device, self.control))
        return self._constants[key]

    def cast(self, source: str, dtype: tf.DType, target: tf.DType) -> str:
        """Write a conversion, if one is needed."""
        return source if dtype == target else self("Cast", source, SrcT=dtype, DstT=target)


def host_of(device: str) -> str:
    """Return the device on which sizes are computed for another: itself if it is a CPU, else its machine's.

    >>> host_of("/job:localhost/replica:0/task:0/device:GPU:3")
    '/job:localhost/replica:0/task:0/device:CPU:0'
    """
    prefix, _, kind = device.rpartition("device:")
    return device if not prefix or kind.startswith("CPU") else f"{prefix}device:CPU:0"


_WRITTEN = "_graphsplit"  # the number of the shard, or that it belongs to none
_UNSHARDED = "_graphsplit_at_home"
_ROLE = "_graphsplit_role"
_OF_VARIABLE = "_graphsplit_of_variable"


def mark(node: Any, shard: int | None = None, unsharded_reason: str = "", role: str = "") -> Any:
    """Note on a node that a transpilation wrote it, and return it.

    Args:
      node: a `NodeDef`.
      shard: the one that it belongs to, if it does.
      unsharded_reason: why it runs once, if it carries rows of the batch and does.
      role: what it is there for, if it is no operation of the model: the kind of a move, `"scatter"`, or `"sizes"`.

    >>> from graphsplit.core.protos import NodeDef
    >>> shard_of(mark(NodeDef(name="AddV2"), 0)), shard_of(mark(NodeDef(name="AddN")))
    (0, None)
    """
    if shard is None:
        node.attr[_WRITTEN].b = True
    else:
        node.attr[_WRITTEN].i = shard
    if unsharded_reason:
        node.attr[_UNSHARDED].s = unsharded_reason.encode()
    if role:
        node.attr[_ROLE].s = role.encode()
    return node


def is_marked(node: Any) -> bool:
    """Return whether a transpilation wrote a node."""
    return _WRITTEN in node.attr


def shard_of(node: Any) -> int | None:
    """Return the shard that is noted on a node, or None."""
    return int(node.attr[_WRITTEN].i) if is_marked(node) and node.attr[_WRITTEN].HasField("i") else None


def unsharded_reason_of(node: Any) -> str:
    """Return why a node that carries rows of the batch runs once, as it is noted on it; "" for others."""
    return str(node.attr[_UNSHARDED].s.decode()) if _UNSHARDED in node.attr else ""


def role_of(node: Any) -> str:
    """Return what a node that is no operation of the model is there for, as it is noted on it; "" for others."""
    return str(node.attr[_ROLE].s.decode()) if _ROLE in node.attr else ""


def mark_of_variable(node: Any) -> Any:
    """Note on a gather that it is part of a lookup that reads its rows from a variable itself, and return it."""
    node.attr[_OF_VARIABLE].b = True
    return node


def is_of_variable(node: Any) -> bool:
    """Return whether a gather is part of a lookup that reads its rows from a variable itself."""
    return _OF_VARIABLE in node.attr
