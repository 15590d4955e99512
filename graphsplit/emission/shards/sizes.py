"""Sizes: shape and dtype of whatever an emitted graph makes, without importing it anywhere.

A shard's copy of an operation makes what the program says, with the rows of that shard. What moves tensors is made of
a few types of operations, whose results follow from what they read.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.layouts import Layout, Shard
from graphsplit.core.protos import (
    constant_value,
    inputs_of,
    output_names,
    output_type,
    source_of,
    split_reference,
)
from graphsplit.core.sizes import Shape
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.planning.costs.work import Described
from graphsplit.planning.plan import Plan
from graphsplit.program.program import Op, Program
from graphsplit.rules import Sharded

OutputTypes = Sequence[Described]


def sizes_of(plan: Plan, graph: EmittedGraph) -> Sizes:
    """Return what the nodes of an emitted graph make."""
    sizes = Sizes(plan, graph)
    for name in graph.by_name.order:
        sizes.infer(name)
    return sizes


class Sizes:
    """What the nodes of an emitted graph make. Made by `sizes_of`.

    Args:
      plan: what was emitted.
      graph: the result.
    """

    def __init__(self, plan: Plan, graph: EmittedGraph):
        self._plan = plan
        self._graph = graph
        self._found: dict[str, OutputTypes] = {}
        self._of_ops: dict[tuple[int, int | None], OutputTypes] = {}

    def __getitem__(self, name: str) -> OutputTypes:
        """Return what a node makes."""
        return self._found[name]

    def of(self, reference: str) -> Described:
        """Return the tensor that a reference names."""
        name, index = split_reference(reference)
        return self._found[name][index]

    def inputs_of(self, node: Any) -> list[Described]:
        """Return what a node reads."""
        return [self.of(reference) for reference in inputs_of(node)[0]]

    def infer(self, name: str) -> None:
        """Find out what a node makes; it is known of what it reads."""
        self._found[name] = self._outputs(self._graph.by_name[name])

    def _outputs(self, node: Any) -> OutputTypes:
        origin = self._graph.origins[node.name]
        if origin.op is not None and origin.role in ("op", "copy"):
            return self._of_op(origin.op, origin.shard)
        infer = _INFERRED.get(node.op)
        if infer is not None:
            return infer(node, self.inputs_of(node), lambda index: self.constant(node, index))
        count = len(output_names(node))
        return [(None, tf.as_dtype(output_type(node, k))) for k in range(count)]

    def constant(self, node: Any, index: int) -> Any:
        """Return the value of an operand that is a constant; None of others."""
        source = self._graph.by_name[source_of(node.input[index])]
        return constant_value(source) if source.op == "Const" else None

    def _of_op(self, position: int, shard: int | None) -> OutputTypes:
        if (position, shard) not in self._of_ops:
            self._of_ops[position, shard] = self._shapes_of_op(position, shard)
        return self._of_ops[position, shard]

    def _shapes_of_op(self, position: int, shard: int | None) -> OutputTypes:
        op, step = self._plan.program.ops[position], self._plan.steps[position]
        gives = step.shards.gives if step.shards and shard is not None else None
        return described(shapes_on(op.out_shapes, gives, self._plan.rows, shard or 0), op.out_dtypes)


def described(shapes: Sequence[Shape | None], dtypes: Sequence[tf.DType]) -> list[Described]:
    """Return shapes with their dtypes, as plain integers."""
    plain = [None if s is None else tuple([None if size is None else int(size) for size in s]) for s in shapes]
    return list(zip(plain, dtypes, strict=True))


def on_shard(shape: Shape | None, layout: Layout, rows: tuple[int, ...], d: int) -> Shape | None:
    """Return the shape of what shard `d` has of a tensor."""
    if shape is None or not isinstance(layout, Shard) or layout.axis >= len(shape):
        return shape
    return (*shape[: layout.axis], _own(layout, rows, d), *shape[layout.axis + 1 :])


@functools.lru_cache(100_000)
def _own(layout: Shard, rows: tuple[int, ...], d: int) -> int:
    return layout.own(rows, d)


def shapes_on(
    shapes: Sequence[Shape | None], layouts: Sequence[Layout] | None, rows: tuple[int, ...], d: int
) -> Sequence[Shape | None]:
    """Return the shapes of what shard `d` has of some tensors; whole, if there are no layouts."""
    if layouts is None:
        return shapes
    return [on_shard(shape, layout, rows, d) for shape, layout in zip(shapes, layouts, strict=True)]


def described_on(
    program: Program, op: Op, sharded: Sharded | None, rows: tuple[int, ...], d: int | None
) -> tuple[Sequence[Described], Sequence[Described]]:
    """Return what an operation reads and makes.

    Args:
      program: the operation's.
      op: which.
      sharded: how it runs on the shards; None if it does not.
      rows: of every shard.
      d: the shard that runs it; None for once, on whole tensors.
    """
    wants, gives = (sharded.wants, sharded.gives) if sharded and d is not None else (None, None)
    dtypes = [*map(program.dtype, op.inputs)]
    reads = described(shapes_on(op.in_shapes, wants, rows, d or 0), dtypes)
    return reads, described(shapes_on(op.out_shapes, gives, rows, d or 0), op.out_dtypes)


def _largest(inputs: OutputTypes) -> Shape | None:
    """Return the shape to which all are broadcast."""
    return max(inputs, key=lambda tensor: math.prod([size or 1 for size in tensor[0] or ()]))[0]


def _dtype(node: Any, name: str) -> tf.DType:
    return tf.as_dtype(node.attr[name].type)


def _split(node: Any, inputs: OutputTypes, constant: Callable[[int], Any]) -> OutputTypes:
    (shape, dtype), sizes, axis = inputs[0], constant(1), constant(2)
    count = node.attr["num_split"].i
    if shape is None or sizes is None or axis is None:
        return [(None, dtype)] * count
    at = int(axis) % len(shape)
    return [((*shape[:at], int(size), *shape[at + 1 :]), dtype) for size in sizes]


def _join(_: Any, inputs: OutputTypes, constant: Callable[[int], Any]) -> OutputTypes:
    parts, axis = inputs[:-1], constant(len(inputs) - 1)
    shape, dtype = parts[0]
    if axis is None or any(part is None for part, _ in parts) or shape is None:
        return [(None, dtype)]
    at = int(axis) % len(shape)
    sizes = [(part or ())[at] for part, _ in parts]
    size = None if None in sizes else sum([size or 0 for size in sizes])
    return [((*shape[:at], size, *shape[at + 1 :]), dtype)]


def _widened(_: Any, inputs: OutputTypes, constant: Callable[[int], Any]) -> OutputTypes:
    (shape, dtype), axis = inputs[0], constant(1)
    return [(None if shape is None or axis is None or int(axis) != -1 else (*shape, 1), dtype)]


def _gathered(node: Any, inputs: OutputTypes, constant: Callable[[int], Any]) -> OutputTypes:
    (shape, dtype), (indices, _), axis = inputs[0], inputs[1], constant(2)
    if shape is None or indices is None or axis is None:
        return [(None, dtype)]
    at, rows = int(axis) % len(shape), node.attr["batch_dims"].i if "batch_dims" in node.attr else 0
    return [((*shape[:at], *indices[rows:], *shape[at + 1 :]), dtype)]


def _slice(_: Any, inputs: OutputTypes, constant: Callable[[int], Any]) -> OutputTypes:
    (shape, dtype), begin, size = inputs[0], constant(1), constant(2)
    if shape is None or begin is None or size is None or None in shape:
        return [(None, dtype)]
    pairs = zip(shape, begin.tolist(), size.tolist(), strict=True)
    return [(tuple([(length or 0) - b if s < 0 else s for length, b, s in pairs]), dtype)]


def _mean(node: Any, inputs: OutputTypes, constant: Callable[[int], Any]) -> OutputTypes:
    (shape, dtype), axes = inputs[0], constant(1)
    if shape is None or axes is None:
        return [(None, dtype)]
    away = {int(axis) % len(shape) for axis in axes.reshape(-1)} if len(shape) else set()
    if node.attr["keep_dims"].b:
        return [(tuple([1 if i in away else size for i, size in enumerate(shape)]), dtype)]
    return [(tuple([size for i, size in enumerate(shape) if i not in away]), dtype)]


def _sizes(shape: Any) -> Shape | None:
    """Return the shape that a constant operand says; None for one that is none."""
    return None if shape is None else tuple([int(n) if n >= 0 else None for n in shape])


def _constant_shape(node: Any) -> Shape:
    return tuple([dim.size for dim in node.attr["value"].tensor.tensor_shape.dim])


def _pack(_node: Any, inputs: OutputTypes, _: Callable[[int], Any]) -> OutputTypes:
    shape, dtype = inputs[0]
    return [(None if shape is None else (len(inputs), *shape), dtype)]


def _unpack(node: Any, inputs: OutputTypes, _: Callable[[int], Any]) -> OutputTypes:
    (shape, dtype), axis = inputs[0], node.attr["axis"].i
    return [(None if shape is None else (*shape[:axis], *shape[axis + 1 :]), dtype)] * node.attr["num"].i


_BROADCAST = ("SquaredDifference", "Add", "AddV2", "Sub", "Mul", "Maximum", "Minimum", "LogicalAnd", "LogicalOr")
_DRAWN = ("RandomUniformV2", "RandomNormalV2", "TruncatedNormalV2", "RandomUniformFullIntV2", "RandomUniformIntV2")
_SAME = ("AddN", "Identity", "LogicalNot", "OnesLike", "RealDiv", "ZerosLike")
_INFERRED: dict[str, Callable[[Any, OutputTypes, Callable[[int], Any]], OutputTypes]] = {
    **dict.fromkeys(_SAME, lambda _, inputs, __: [inputs[0]]),
    **dict.fromkeys(_BROADCAST, lambda _, inputs, __: [(_largest(inputs), inputs[0][1])]),
    **dict.fromkeys(["GreaterEqual", "Less"], lambda _, inputs, __: [(_largest(inputs), tf.bool)]),
    **dict.fromkeys(["Mean", "Sum"], _mean),
    **{
        f"Stateless{kind}": lambda node, _, constant: [(_sizes(constant(0)), tf.as_dtype(output_type(node, 0)))]
        for kind in _DRAWN
    },
    "Cast": lambda node, inputs, _: [(inputs[0][0], _dtype(node, "DstT"))],
    "ConcatV2": _join,
    "Const": lambda node, _, __: [(_constant_shape(node), _dtype(node, "dtype"))],
    "ExpandDims": _widened,
    "GatherV2": _gathered,
    "Merge": lambda _, inputs, __: [inputs[0], ((), tf.int32)],
    "Placeholder": lambda node, _, __: [(None, _dtype(node, "dtype"))],
    "Reshape": lambda _, inputs, constant: [(_sizes(constant(1)), inputs[0][1])],
    "SelectV2": lambda _, inputs, __: [(_largest(inputs[1:]), inputs[1][1])],
    "Slice": _slice,
    "SplitV": _split,
    "Pack": _pack,
    "Unpack": _unpack,
    "Switch": lambda _, inputs, __: [inputs[0], inputs[0]],
}
