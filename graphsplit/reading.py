"""Reading a graph into a Program: shapes inferred, shape arithmetic folded, bodies of loops and branches included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.collecting import collection_paused
from graphsplit.folding import FOLDABLE, fold
from graphsplit.graphdefs import (
    constant_node,
    constant_value,
    function_graph,
    inline_calls,
    make_node,
    split_reference,
)
from graphsplit.hoisting import CONTROL_FLOW, function_names
from graphsplit.programs import Op, Program, Shape, Tensor, is_stateful
from graphsplit.tensorflow_internals import resource_value
from graphsplit.untiling import untile

_NO_BODIES: dict[str, Any] = {}


@collection_paused()
def build_program(
    nodes: Sequence[Any],
    *,
    inputs: Sequence[str],
    input_names: Sequence[str],
    captures: Sequence[str],
    outputs: Sequence[str],
    effects: Sequence[str],
    library: Any,
    versions: Any,
    resources: Mapping[str, tuple[tf.DType, tf.TensorShape]],
    inlined_from: tf.Graph | None = None,
    notes: Sequence[str] = (),
    locate: Callable[[str], str] = lambda _: "",
) -> Program:
    """Return the program of a flat graph: shapes inferred, integer arithmetic on shapes folded to constants.

    Args:
      nodes: the `NodeDef`s, calls inlined, in any order.
      inputs, captures: names of placeholder nodes.
      outputs: references (`node:0`) of the returned tensors.
      effects: names of nodes that must run.
      resources: for captured variables, what they hold, without which no shape behind a read is known.
      inlined_from: the graph that the nodes were, before calls were inlined. It knows shapes that were set by hand.
    """
    reader = _Reader({node.name: node for node in nodes}, _known_outputs(inlined_from), library, versions, resources)
    for operation in _import_for_shapes(nodes, library, versions, resources).get_operations():
        reader.read(operation)
    return Program(
        ops=tuple(reader.ops),
        inputs=tuple(reader.positions[name] for name in inputs),
        input_names=tuple(input_names),
        captures=tuple(reader.positions[name] for name in captures),
        outputs=tuple(reader.tensor(reference) for reference in outputs),
        effects=tuple(dict.fromkeys(reader.positions[name] for name in effects)),
        library=library,
        versions=versions,
        notes=tuple(notes),
        locate=locate,
    )


def _import_for_shapes(nodes: Sequence[Any], library: Any, versions: Any, resources: Mapping[str, Any]) -> tf.Graph:
    """Import the nodes into a fresh graph, where TensorFlow infers all shapes again, now that calls are inlined.

    Placeholders of variables and lists are replaced by ops that say what these hold.
    """
    graph_def = tf.compat.v1.GraphDef(versions=versions, library=library)
    for node in nodes:
        if node.name in resources:
            dtype, shape = resources[node.name]
            if node.attr["dtype"].type == tf.variant.as_datatype_enum:
                sizes = np.array(-1 if shape.rank is None else [-1 if s is None else s for s in shape], np.int32)
                graph_def.node.append(constant_node(f"{node.name}{_HELPER}shape", sizes, tf.int32))
                graph_def.node.append(constant_node(f"{node.name}{_HELPER}most", np.array(-1, np.int32), tf.int32))
                inputs = [f"{node.name}{_HELPER}shape", f"{node.name}{_HELPER}most"]
                node = make_node(node.name, "EmptyTensorList", inputs, element_dtype=dtype, shape_type=tf.int32)
            else:
                value = tf.compat.v1.AttrValue(shape=shape.as_proto())
                node = make_node(node.name, "VarHandleOp", [], dtype=dtype, shape=value)
        copy = graph_def.node.add()
        copy.CopyFrom(node)
        copy.device = ""
        if "_class" in copy.attr:
            del copy.attr["_class"]
    graph = tf.Graph()
    with graph.as_default():
        tf.graph_util.import_graph_def(graph_def, name="")
    return graph


_HELPER = "/graphsplit_"
_ITEM_BYTES: dict[tf.DType, int] = {}


def _item_bytes(dtype: tf.DType) -> int:
    if dtype not in _ITEM_BYTES:
        sized = dtype not in (tf.string, tf.resource, tf.variant)
        _ITEM_BYTES[dtype] = int(dtype.size) if sized else (0 if dtype != tf.string else 16)
    return _ITEM_BYTES[dtype]


def _known_outputs(graph: tf.Graph | None) -> dict[str, list[tf.Tensor]]:
    operations = graph.get_operations() if graph is not None else []
    return {operation.name: list(operation.outputs) for operation in operations}


class _Reader:
    """Reads operations one by one, in order, and replaces those whose integer values are known by constants."""

    def __init__(
        self,
        nodes: Mapping[str, Any],
        known_outputs: Mapping[str, Sequence[tf.Tensor]],
        library: Any,
        versions: Any,
        resources: Mapping[str, tuple[tf.DType, tf.TensorShape]],
    ):
        self._known_outputs = known_outputs
        self._library = {function.signature.name: function for function in library.function}
        self._versions = versions
        self._resources = resources
        self._elements: dict[Tensor, tuple[tf.DType, tf.TensorShape]] = {}  # of lists: what they hold
        self.ops: list[Op] = []
        self.positions: dict[str, int] = {}
        self._nodes = nodes
        self._known: dict[Tensor, np.ndarray] = {}
        self._constants: dict[tuple[tf.DType, Shape, bytes], int] = {}
        self._replaced: dict[Tensor, Tensor] = {}  # outputs of an op with several, each now a constant of its own

    def tensor(self, reference: str) -> Tensor:
        """Return the tensor that a reference of the original graph means."""
        name, index = split_reference(reference)
        tensor = Tensor(self.positions[name], index)
        return self._replaced.get(tensor, tensor)

    def read(self, operation: tf.Operation) -> None:
        """Append an operation to the program."""
        if _HELPER in operation.name:
            return
        node = self._nodes[operation.name]
        inputs = tuple([self.tensor(reference) for reference in node.input if reference[0] != "^"])
        shapes, dtypes, sizes = [], [], []
        hints = self._known_outputs.get(operation.name, ())
        for k, output in enumerate(operation.outputs):
            known = output.shape
            if k < len(hints) and hints[k].dtype == output.dtype:  # (hoisting turns handles into values)
                known = known.merge_with(hints[k].shape)
            if output.dtype == tf.variant:
                self._read_elements(Tensor(len(self.ops), k), output, hints[k] if k < len(hints) else None)
            dims = known.dims
            shape = None if dims is None else tuple([dim if isinstance(dim, int) else dim.value for dim in dims])
            shapes.append(shape)
            dtypes.append(output.dtype)
            sizes.append(_bytes(output.dtype, shape))
        if node.op == "Squeeze" and not node.attr["squeeze_dims"].list.i and inputs:
            node = _with_squeezed_axes(node, self.ops[inputs[0].op].out_shapes[inputs[0].index])
        if node.op == "EnsureShape" and _is_known(self.ops[inputs[0].op].out_shapes[inputs[0].index], shapes[0]):
            node = make_node(node.name, "Identity", node.input, T=dtypes[0])  # which names no size of the whole
        op = Op(
            index=len(self.ops),
            name=operation.name,
            type=node.op,
            inputs=inputs,
            controls=tuple([self.positions[reference[1:]] for reference in node.input if reference[0] == "^"]),
            node=node,
            in_shapes=tuple([self.ops[t.op].out_shapes[t.index] for t in inputs]),
            out_shapes=tuple(shapes),
            out_dtypes=tuple(dtypes),
            out_bytes=tuple(sizes),
            constants={i: self._known[t] for i, t in enumerate(inputs) if t in self._known},
            stateful=is_stateful(node.op),
            bodies=self._bodies(node, inputs, shapes) if node.op in CONTROL_FLOW else _NO_BODIES,
        )
        *before, op = untile(op, self.ops)
        self.ops += before
        self.positions[op.name] = op.index
        values = fold(op) if op.type in FOLDABLE and not op.controls else None
        if op.type == "VariableShape":
            values = self._shape_of_variable(op)
        elif op.type == "TensorListElementShape":
            values = self._shape_of_elements(op)
        if values is None:
            self.ops.append(op)
            if op.type == "IdentityN" and not op.controls:  # keeps all its inputs in memory until the last one is there
                self._replaced.update({Tensor(op.index, k): tensor for k, tensor in enumerate(inputs)})
            if op.type == "Reshape" and not op.controls and _is_known(op.in_shapes[0], op.out_shapes[0]):
                self._replaced[Tensor(op.index, 0)] = inputs[0]  # it changes nothing
            if op.type == "Const" and op.out_dtypes[0].is_integer and op.out_bytes[0] <= 8192:
                self._known[Tensor(op.index, 0)] = constant_value(op.node)
        elif len(values) == 1:
            self.positions[op.name] = self._constant(op.name, values[0], op, 0).op
        else:
            self.ops.append(op)  # keeps its place for whoever waits for it; nobody reads it
            for index, value in enumerate(values):
                self._replaced[Tensor(op.index, index)] = self._constant(f"{op.name}/value_{index}", value, op, index)

    def _shape_of_variable(self, op: Op) -> list[np.ndarray] | None:
        held = self._resources.get(self.ops[op.inputs[0].op].name)
        if held is None or not held[1].is_fully_defined():
            return None
        return [np.array(held[1].as_list(), op.out_dtypes[0].as_numpy_dtype)]

    def _shape_of_elements(self, op: Op) -> list[np.ndarray] | None:
        held = self._elements.get(op.inputs[0])
        if held is None or held[1].rank is None:
            return None
        return [np.array([-1 if size is None else size for size in held[1]], op.out_dtypes[0].as_numpy_dtype)]

    def _bodies(self, node: Any, inputs: Sequence[Tensor], out_shapes: Sequence[Shape | None]) -> dict[str, Program]:
        """Return the programs of the functions that a loop or branch calls."""
        before = CONTROL_FLOW[node.op][2]
        given = [self.ops[t.op].out_shapes[t.index] for t in inputs[before:]]
        shapes = out_shapes if "While" in node.op else given
        elements = {i: self._elements[t] for i, t in enumerate(inputs[before:]) if t in self._elements}
        return {name: self._body(self._library[name], shapes, elements) for name in function_names(node)}

    def _read_elements(self, tensor: Tensor, output: tf.Tensor, original: tf.Tensor | None) -> None:
        held = resource_value(output) or (resource_value(original) if original is not None else None)
        if held is not None and held[0] != tf.variant:
            self._elements[tensor] = held

    def _body(
        self, function: Any, shapes: Sequence[Shape | None], elements: Mapping[int, tuple[tf.DType, tf.TensorShape]]
    ) -> Program:
        graph, outputs = function_graph(function, self._library.values(), self._versions, shapes)
        effects = [f"^{name}" for name in function.control_ret.values()]
        nodes, references = inline_calls(graph, [*outputs, *effects])
        names = [argument.name for argument in function.signature.input_arg]
        return build_program(
            nodes,
            inputs=names,
            input_names=names,
            captures=(),
            outputs=references[: len(outputs)],
            effects=[reference[1:] for reference in references[len(outputs) :]],
            library=graph.library,
            versions=self._versions,
            resources={names[i]: held for i, held in elements.items()},
        )

    def _constant(self, name: str, value: np.ndarray, op: Op, output: int) -> Tensor:
        """Return a constant of what an op's output is worth; equal ones are one."""
        dtype, size = op.out_dtypes[output], op.out_bytes[output]
        position = self._constants.setdefault((dtype, value.shape, value.tobytes()), len(self.ops))
        if position < len(self.ops):
            return Tensor(position, 0)
        node = constant_node(name, value, dtype)
        self.ops.append(
            Op(position, name, "Const", (), (), node, (), (value.shape,), (dtype,), (size,), {}, stateful=False)
        )
        self._known[Tensor(position, 0)] = value
        return Tensor(position, 0)


def _is_known(before: Shape | None, ensured: Shape | None) -> bool:
    return before is not None and None not in before and before == ensured


def _with_squeezed_axes(node: Any, shape: Shape | None) -> Any:
    """Return a `Squeeze` that names its axes: on a device with one row, the batch is not among them."""
    if shape is None or None in shape:
        return node
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    copy.attr["squeeze_dims"].list.i.extend(i for i, size in enumerate(shape) if size == 1)
    return copy


def _bytes(dtype: tf.DType, shape: Shape | None) -> int:
    if shape is None or None in shape:
        return 0
    size = _item_bytes(dtype)
    for dim in shape:
        size *= dim or 0
    return size
