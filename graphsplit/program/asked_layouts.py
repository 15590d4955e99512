"""Layouts that are asked for of single tensors along the axes of a mesh: `with_layout` leaves a mark in the graph.

The mark is the name of a function that returns what it is given, and is called. So it is differentiated as any call is,
and TensorFlow derives the name of its gradient from its own. Before calls are inlined, each such call becomes an
`Identity` with an attribute; whoever plans an axis reads that.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from graphsplit.core.layouts import REPLICATE, Replicate, Shard, evenly
from graphsplit.core.protos import make_node
from graphsplit.program.graph.function_calls import CALL_TYPES
from graphsplit.program.program import Op

AskedAxes = tuple[str | None, ...]
"""For each dimension the axis of the mesh along which it is cut, or None."""

_MARK = "graphsplit_with_layout_{}_axes"
_MARKED = re.compile(r"graphsplit_with_layout_((?:[0-9a-f]{2})+)_axes_\d+")
_PASSING_ON = frozenset({"Identity", "NoOp"})
_BACKWARD = "__backward_"  # how TensorFlow names backward functions
_ATTRIBUTE, _OF_GRADIENT = "_graphsplit_layout", "_graphsplit_of_gradient"


@functools.lru_cache(maxsize=1024)
def marked(axes: AskedAxes) -> Callable[[tf.Tensor], tf.Tensor]:
    """Return a function that returns a tensor as it is and, where a graph is built, leaves the mark."""

    def call(x: tf.Tensor) -> tf.Tensor:
        return tf.identity(x)

    call.__name__ = _MARK.format(_spelled(axes).encode().hex())
    return tf.function(call, autograph=False)  # type: ignore[no-any-return]  # without type stubs


def _spelled(axes: AskedAxes) -> str:
    return ",".join([axis or "" for axis in axes])


def write_marks(graph: Any) -> None:
    """Let the marked calls of a `GraphDef`, in its functions too, be operations that say what is asked; edits it."""
    library = {function.signature.name: function for function in graph.library.function}
    marks = {name for name, function in library.items() if _MARKED.search(name) and _passes_on(function)}
    if not marks:
        return
    for nodes in (graph.node, *[function.node_def for function in graph.library.function]):
        for node in nodes:
            name = node.attr["f"].func.name if node.op in CALL_TYPES else ""
            if name in marks:
                dtype = tf.as_dtype(node.attr["Tin"].list.type[0])
                mark_node = make_node(node.name, "Identity", node.input, node.device, T=dtype)
                mark_node.attr[_ATTRIBUTE].s = bytes.fromhex(_MARKED.findall(name)[0])
                mark_node.attr[_OF_GRADIENT].b = _BACKWARD in name
                node.CopyFrom(mark_node)


def _passes_on(function: Any) -> bool:
    """Return whether a function returns the one thing that it is given: a name alone says nothing."""
    is_one = len(function.signature.input_arg) == len(function.signature.output_arg) == 1
    return is_one and all(node.op in _PASSING_ON for node in function.node_def)


def asked_of(op: Op) -> AskedAxes | None:
    """Return the layout that is asked for of what an operation makes; None if none is."""
    if op.type != "Identity" or _ATTRIBUTE not in op.node.attr:
        return None
    return tuple([name or None for name in op.node.attr[_ATTRIBUTE].s.decode().split(",")])


def is_of_gradient(op: Op) -> bool:
    """Return whether the layout is asked for of the gradient of a tensor of which it was asked for."""
    return bool(op.attr(_OF_GRADIENT).b)


def along(op: Op, axis: str, parts: int) -> Shard | Replicate | None:
    """Return how what an operation makes is to lie along an axis of so many devices; None if nothing is asked of it.

    A gradient is asked to be cut, not to be whole: what is put together for many readers has a gradient that is a sum
    over them, and whoever reads that in parts has it reduced in parts.
    """
    axes = asked_of(op)
    if axes is None or (axis not in axes and is_of_gradient(op)):
        return None
    if axis not in axes:
        return REPLICATE
    dimension, shape = axes.index(axis), op.out_shapes[0]
    length = shape[dimension] if shape is not None else None
    assert length is not None  # (who asks has checked it)
    return evenly(dimension, int(length), parts)
