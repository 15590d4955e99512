"""Shapes as TensorFlow infers them, for one choice of the sizes that are unknown.

How many rows an operation makes it does not always infer, and Python code may have told it. Rows of a sparse tensor,
none of them empty, are segments: so Keras multiplies a sparse matrix. Rows of a ragged tensor are one less than its row
splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.polynomials import Polynomial, SizesAt
from graphsplit.core.protos import constant_node, make_node, source_of, split_reference
from graphsplit.core.sizes import Shape, as_size, shape_at
from graphsplit.core.tensorflow_internals import import_operations
from graphsplit.program.graph.function_calls import CONTROL_FLOW

HELPER = "/graphsplit."
"""What the names of nodes contain that are there for inference only."""

ELEMENT_SHAPE = {
    "EmptyTensorList": 0,
    "TensorListFromTensor": 1,
    "TensorListGetItem": 2,
    "TensorListPopBack": 1,
    "TensorListReserve": 0,
    "TensorListStack": 1,
}
"""Ops that make or read lists, and the operand that says what shape the elements have."""


class InferenceError(ValueError):
    """Shapes that do not follow: TensorFlow refuses them."""


class Integers(NamedTuple):
    """Integers that follow from unknown sizes."""

    dtype: tf.DType
    shape: tuple[int, ...]
    entries: tuple[tuple[tuple[Any, int], ...], ...]  # the terms of each polynomial: comparable

    @classmethod
    def of(cls, dtype: tf.DType, value: np.ndarray) -> Integers:
        """Return an array of numbers, or polynomials."""
        return cls(dtype, value.shape, tuple([tuple(Polynomial.of(entry).terms.items()) for entry in value.flat]))

    def at(self, point: SizesAt) -> np.ndarray:
        """Return the integers for these sizes."""
        return np.reshape(np.array([Polynomial(dict(terms)).at(point) for terms in self.entries], np.int64), self.shape)


@dataclass(frozen=True)
class Findings:
    """What TensorFlow does not infer, because a loop was traced with an unknown batch, or does not fold.

    Attributes:
      outputs: of loops and branches, and of what else TensorFlow infers no shape, by name.
      elements: of lists, by the names of the ops that make or read them.
      counts: how many elements a list has that is stacked, by the names of the ops that do.
      values: of tensors, by the node that makes them and the number of its output.
      doubted: what is known of tensors of which TensorFlow knows more for each choice of sizes than is so for all:
        the dtype and shape, by the same.
      carried: elements of the lists that loops carry, by the loop and the number. (Nothing is inferred from these.)
    """

    outputs: dict[str, tuple[Shape | None, ...]] = field(default_factory=dict)
    elements: dict[str, Shape | None] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    values: dict[tuple[str, int], Integers] = field(default_factory=dict)
    doubted: dict[tuple[str, int], tuple[tf.DType, Shape | None]] = field(default_factory=dict)
    carried: dict[tuple[str, int], Shape | None] = field(default_factory=dict, compare=False)

    def joined(self, more: Findings) -> Findings:
        """Return this and more, which counts where both say something."""
        return Findings(
            *[
                {**entries, **more_entries}
                for entries, more_entries in zip(vars(self).values(), vars(more).values(), strict=True)
            ]
        )


def import_for_shapes(
    nodes: Sequence[Any],
    versions: Any,
    resources: Mapping[str, Any],
    given_shapes: Mapping[str, Shape | None],
    findings: Findings,
    point: SizesAt,
) -> list[tf.Operation]:
    """Return the nodes as operations of a fresh graph: TensorFlow infers all shapes again, now that calls are inlined.

    Placeholders of variables and lists are replaced by ops that say what these hold.

    Args:
      nodes, versions: the graph. (The functions it calls need not be there.)
      resources: for placeholders of variables and lists, the dtype and shape of what they hold.
      given_shapes: of other placeholders, where sizes follow from unknown ones.
      findings: what is known besides.
      point: what the unknown sizes are.

    Raises:
      InferenceError: if TensorFlow cannot infer shapes.
    """
    graph_def = tf.compat.v1.GraphDef(versions=versions)
    ensured = {node.name for node in nodes if node.name in findings.outputs and node.op not in CONTROL_FLOW}
    for node in nodes:
        if node.name in resources:
            dtype, shape = resources[node.name][0], shape_at(resources[node.name][1], point)
            if node.attr["dtype"].type == tf.variant.as_datatype_enum:
                most = constant_node(f"{node.name}{HELPER}most", np.array(-1, np.int32), tf.int32)
                graph_def.node.extend([_element_shape(node.name, shape), most])
                inputs = [f"{node.name}{HELPER}shape", most.name]
                node = make_node(node.name, "EmptyTensorList", inputs, element_dtype=dtype, shape_type=tf.int32)
            else:
                value = tf.compat.v1.AttrValue(shape=tf.TensorShape(shape).as_proto())
                node = make_node(node.name, "VarHandleOp", [], dtype=dtype, shape=value)
        if node.name in findings.elements:
            graph_def.node.append(_element_shape(node.name, shape_at(findings.elements[node.name], point)))
        copy = graph_def.node.add()
        copy.CopyFrom(node)
        if node.name in given_shapes and node.name not in resources:  # (that of a handle is not of what it holds)
            shape = tf.TensorShape(shape_at(given_shapes[node.name], point))
            copy.attr["shape"].CopyFrom(tf.compat.v1.AttrValue(shape=shape.as_proto()))
        if node.name in findings.elements:
            _replace_input(copy, ELEMENT_SHAPE[node.op], f"{node.name}{HELPER}shape")
            copy.attr["shape_type"].type = tf.int32.as_datatype_enum
        if node.name in findings.counts:
            copy.attr["num_elements"].i = Polynomial.of(findings.counts[node.name]).at(point)
        if node.name in findings.outputs:
            shapes = [tf.TensorShape(shape_at(shape, point)).as_proto() for shape in findings.outputs[node.name]]
        if node.name in ensured:
            shape_value = tf.compat.v1.AttrValue(shape=shapes[0])
            graph_def.node.append(
                make_node(_shape_name(node.name), "EnsureShape", [node.name], shape=shape_value, T=copy.attr["T"])
            )
        elif node.name in findings.outputs:
            del copy.attr["output_shapes"].list.shape[:]
            copy.attr["output_shapes"].list.shape.extend(shapes)
        for i, reference in enumerate(node.input):
            if (tensor := split_reference(reference)) in findings.values:
                _replace_input(copy, i, _value_name(*tensor))
            elif tensor in findings.doubted and reference[0] != "^":
                _replace_input(copy, i, _doubt_name(*tensor))
            elif tensor[0] in ensured and reference[0] != "^":
                _replace_input(copy, i, _shape_name(tensor[0]))
    for tensor, value in findings.values.items():
        graph_def.node.append(constant_node(_value_name(*tensor), value.at(point), value.dtype))
    for tensor, (dtype, shape) in findings.doubted.items():
        shape_value = tf.compat.v1.AttrValue(shape=tf.TensorShape(shape_at(shape, point)).as_proto())
        graph_def.node.append(make_node(_doubt_name(*tensor), "Placeholder", [], dtype=dtype, shape=shape_value))
    try:
        return import_operations(graph_def)
    except ValueError as error:
        raise InferenceError(str(error)) from None


def _replace_input(node: Any, i: int, reference: str) -> None:
    """Let a node read something else and wait for what it read: it comes after that when operations are read."""
    node.input.append(f"^{source_of(node.input[i])}")
    node.input[i] = reference


def _element_shape(name: str, shape: Shape | None) -> Any:
    """Return the constant that says what shape the elements of a list have."""
    sizes = np.array(-1 if shape is None else [-1 if s is None else s for s in shape], np.int32)
    return constant_node(f"{name}{HELPER}shape", sizes, tf.int32)


def _shape_name(name: str) -> str:
    return f"{name}{HELPER}with_shape"


def _value_name(name: str, index: int) -> str:
    return f"{name}{HELPER}value_{index}"


def _doubt_name(name: str, index: int) -> str:
    return f"{name}{HELPER}doubted_{index}"


def known_shape(shape: tf.TensorShape) -> Shape | None:
    """Return a shape as TensorFlow knows it, None for an unknown rank.

    (Its entries themselves are numbers only where `tf.disable_v2_behavior()` was not called.)
    """
    return None if shape.rank is None else tuple(shape.as_list())


_SEGMENTS = {
    **dict.fromkeys(("SegmentMax", "SegmentMean", "SegmentMin", "SegmentProd", "SegmentSum"), 1),
    **dict.fromkeys(("SparseSegmentMean", "SparseSegmentSqrtN", "SparseSegmentSum"), 2),
}
"""The operand that says to which segment each entry belongs."""


def rows_made(
    node: Any, inputs: Sequence[Any], ops: Sequence[Any], known: Callable[[Any], np.ndarray | None]
) -> int | None:
    """Return how many rows the first result of an operation has, if that follows from its operands' values.

    Args:
      node: the operation.
      inputs: what it reads.
      ops: the operations before it.
      known: returns the integers of a tensor, if they are known or follow from unknown sizes.
    """
    if node.op == "RaggedTensorToTensor" and node.attr["row_partition_types"].list.s[:1] == [b"ROW_SPLITS"]:
        shape = ops[inputs[3].op].out_shapes[inputs[3].index]
        return None if not shape or shape[0] is None else shape[0] - 1
    if node.op not in _SEGMENTS:
        return None
    column = ops[inputs[_SEGMENTS[node.op]].op]
    while column.type in ("Cast", "Identity"):
        column = ops[column.inputs[0].op]
    if column.type != "StridedSlice" or not _takes_first_column(column):
        return None
    filled = ops[column.inputs[0].op]
    if filled.type != "SparseFillEmptyRows" or column.inputs[0].index != 0:
        return None
    dense_shape = known(filled.inputs[2])
    return None if dense_shape is None else as_size(dense_shape.flat[0])


def _takes_first_column(op: Any) -> bool:
    """Return whether a slice is `x[:, 0]`."""
    masks = [op.attr(f"{name}_mask").i for name in ("begin", "end", "shrink_axis", "ellipsis", "new_axis")]
    begin, stride = op.constants.get(1), op.constants.get(3)
    if masks[0] & 1 and masks[1] & 1 and masks[2:] == [2, 0, 0] and begin is not None and stride is not None:
        return int(begin[1]) == 0 and bool(np.all(stride == 1))
    return False
