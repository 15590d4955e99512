"""Ops that hide what they do from the rules are taken apart into ordinary ones while a program is read.

Batch normalisation in training is one fused kernel that needs all rows at once, though all that it shares between rows
is two sums; a gather from a variable is a read and a gather. Each is replaced by a call of a function that does the
same step by step, and the call is inlined as any other.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos import (
    GraphDef,
    constant_node,
    constant_value,
    make_node,
    mark_of_variable,
    prefixed,
    source_of,
    split_reference,
)
from graphsplit.program.graph.function_calls import inline_calls
from graphsplit.program.reading.shape_inference import known_shape
from graphsplit.tracing.draw_counters import counted_draw

_FORWARD = frozenset({"FusedBatchNorm", "FusedBatchNormV2", "FusedBatchNormV3"})
_BACKWARD = frozenset({"FusedBatchNormGrad", "FusedBatchNormGradV2", "FusedBatchNormGradV3"})
GATHERS = frozenset({"ResourceGather", "ResourceGatherNd"})
_PREFIX = "taken_apart_"


def decompose(
    nodes: Sequence[Any],
    results: Sequence[str],
    library: Iterable[Any],
    versions: Any,
    traced: tf.Graph,
    counter_of: Callable[[Any], str] | None = None,
) -> tuple[list[Any], list[str]]:
    """Return a graph's nodes and the references of its results, with fused and reading ops taken apart.

    Args:
      nodes: `NodeDef`s in graph spelling, calls inlined.
      results: references (`node:0`) and effects (`^node`).
      library: the functions that loops and branches call. They are left as they are.
      versions: of the graph.
      traced: the graph that the nodes were, before calls were inlined. It knows shapes.
      counter_of: returns the placeholder, added to the graph, of what counts the draws of a node; None if kernels do.
    """
    # What a fused forward op hands to a gradient in a branch is in the kernel's own form: then both stay fused.
    fused = any(node.op in _BACKWARD and node.attr["is_training"].b for f in library for node in f.node_def)
    graph = GraphDef(versions=versions)
    node_by_name = {node.name: node for node in nodes}
    for node in nodes:
        if node.op == "RaggedTensorToTensor" and (shape := _dense_shape(node, node_by_name, traced)) is not None:
            name = f"{node.name}/{_PREFIX}shape"
            graph.node.append(constant_node(name, shape, tf.as_dtype(node.attr["Tshape"].type)))
            graph.node.append(node)
            graph.node[-1].input[0] = name
            continue
        if node.op in GATHERS:
            graph.node.extend(_gather(node))
            continue
        draw = counted_draw(node) if counter_of is not None else None
        function = _function_for(node, fused) if draw is None else _definition(_same, (draw,), _drawn_from(node))
        if function is None:
            graph.node.append(node)
            continue
        graph.library.function.append(function)
        counters = [counter_of(node)] if counter_of is not None and draw is not None else []
        graph.node.extend(_placeholder(name) for name in counters if name not in node_by_name)
        call = make_node(
            node.name, "StatefulPartitionedCall" if counters else "PartitionedCall", [*counters, *node.input]
        )
        call.attr["f"].func.name = function.signature.name
        graph.node.append(call)
    inlined, references = inline_calls(graph, results)
    return inlined, references


def _placeholder(name: str) -> Any:
    return make_node(name, "Placeholder", [], dtype=tf.resource)


def _same(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _drawn_from(node: Any) -> tuple[Any, ...]:
    """Return the dtypes of what a counted draw reads: the counter, the shape, and the bounds of integers."""
    bounds = (node.attr["Tout"].type,) * 2 if node.op == "RandomUniformInt" else ()
    return (tf.resource, node.attr["T"].type, *bounds)


def _dense_shape(node: Any, node_by_name: Mapping[str, Any], traced: tf.Graph) -> np.ndarray | None:
    """Return the shape that a ragged tensor gets when it is made dense, with the number of its rows, if that is known.

    TensorFlow does not infer it, though the row splits of an argument say how many rows there are.
    """
    words = _shape_of_words(node, node_by_name, traced)
    kinds = list(node.attr["row_partition_types"].list.s)
    wanted, splits = node_by_name.get(node.input[0]), _origin(node_by_name, node.input[3])
    if words is not None or set(kinds) != {b"ROW_SPLITS"} or wanted is None or wanted.op != "Const" or splits is None:
        return words
    try:
        rows, values = (
            known_shape(traced.get_operation_by_name(n).outputs[0].shape)
            for n in (splits, _origin(node_by_name, node.input[1]))
        )
    except KeyError:  # inlined
        return None
    if rows is None or len(rows) != 1 or rows[0] is None or values is None or np.any(constant_value(wanted) != -1):
        return None
    return np.array([rows[0] - 1] + [-1] * (len(kinds) + len(values) - 1))


def _origin(node_by_name: Mapping[str, Any], reference: str) -> str | None:
    """Return the name of the placeholder that a tensor is, or None if it is none."""
    name = source_of(reference)
    while name in node_by_name and node_by_name[name].op == "Identity":
        name = source_of(node_by_name[name].input[0])
    return name if name in node_by_name and node_by_name[name].op == "Placeholder" else None


def _shape_of_words(node: Any, node_by_name: Mapping[str, Any], traced: tf.Graph) -> np.ndarray | None:
    """Return the shape that a ragged tensor of the words of so many texts gets when it is made dense.

    TensorFlow does not infer how many rows that is, though it knows how many texts are split, and so would lose the
    batch here: everything behind it would have an unknown size.
    """
    wanted, count = node_by_name.get(node.input[0]), node_by_name.get(node.input[3])
    if wanted is None or wanted.op != "Const" or count is None or count.op != "StridedSlice":
        return None
    name, index = split_reference(count.input[0])
    words, begin = node_by_name[name], node_by_name.get(count.input[1])
    if words.op != "StringSplitV2" or index != 2 or begin is None or begin.op != "Const" or constant_value(begin).any():
        return None
    name, index = split_reference(words.input[0])
    shape = np.array(constant_value(wanted))
    try:
        texts = traced.get_operation_by_name(name).outputs[index].shape
    except KeyError:  # inlined
        return None
    if shape.ndim != 1 or not texts.is_fully_defined() or shape[0] != -1:
        return None
    shape[0] = texts.as_list()[0]
    return shape


def _function_for(node: Any, keep_fused: bool) -> Any:
    """Return the `FunctionDef` that does what `node` does, or None."""
    attributes = node.attr
    if node.op in _FORWARD | _BACKWARD and attributes["is_training"].b and not keep_fused:
        x, statistics = attributes["T"].type, attributes["U"].type or attributes["T"].type
        layout, epsilon = attributes["data_format"].s.decode(), attributes["epsilon"].f
        spaces = 3 if node.op.endswith("V3") else 2
        if node.op in _BACKWARD:
            types = (x, x, tf.float32, *(statistics,) * spaces)
            return _definition(_normalise_gradient, (layout, epsilon), types)
        factor = attributes["exponential_avg_factor"].f if "exponential_avg_factor" in attributes else 1.0
        return _definition(_normalise, (layout, epsilon, factor, spaces), (x, *(statistics,) * 4))
    return None


@functools.lru_cache(maxsize=256)
def _definition(make: Callable[..., Any], options: tuple[Any, ...], dtypes: tuple[Any, ...]) -> Any:
    specs = [tf.TensorSpec(None, tf.as_dtype(dtype)) for dtype in dtypes]
    with tf.init_scope():
        function = tf.function(make(*options), autograph=False).get_concrete_function(*specs)
    return _with_names_of_its_own(function.function_def)


def _with_names_of_its_own(function: Any) -> Any:
    """Return `function` with other names for its nodes: inlined as `call/node`, they must not meet the program's.

    Nothing in it waits: whatever it changes, it reads the value of, too.
    """
    node_names = {node.name for node in function.node_def}
    for node in function.node_def:
        node.name = f"{_PREFIX}{node.name}"
        node.input[:] = [_renamed(reference, node_names) for reference in node.input if reference[0] != "^"]
    for name, reference in list(function.ret.items()):
        function.ret[name] = _renamed(reference, node_names)
    function.control_ret.clear()
    return function


def _renamed(reference: str, node_names: set[str]) -> str:
    return prefixed(_PREFIX, reference) if source_of(reference) in node_names else reference


def _gather(node: Any) -> list[Any]:
    """Return a read of the whole variable and, under the name of the `ResourceGather`, a gather from what was read."""
    name = f"{node.name}/{_PREFIX}read"
    read_node = make_node(
        name, "ReadVariableOp", [node.input[0], *node.input[2:]], dtype=tf.as_dtype(node.attr["dtype"].type)
    )
    *axis, gather = gather_from(node, name)
    return [read_node, *axis, mark_of_variable(gather)]


def gather_from(node: Any, value: str, spelling: str = "{}") -> list[Any]:
    """Return a gather from the value of a variable under the name of a `ResourceGather`, the last, and what it needs.

    Args:
      node: the `ResourceGather`.
      value: the reference of the variable's value.
      spelling: of references where the node is: `{}` in a graph, `{}:output:0` in a function.
    """
    dtypes = [tf.as_dtype(node.attr[name].type) for name in ("dtype", "Tindices")]
    types, indices = dict(zip(("Tparams", "Tindices"), dtypes, strict=True)), node.input[1]
    if node.op == "ResourceGatherNd":
        return [make_node(node.name, "GatherNd", [value, indices], **types)]
    dimensions = node.attr["batch_dims"].i
    axis = constant_node(f"{node.name}/{_PREFIX}axis", np.array(dimensions, np.int32), tf.int32)
    inputs = [value, indices, spelling.format(axis.name)]
    return [axis, make_node(node.name, "GatherV2", inputs, **types, Taxis=tf.int32, batch_dims=dimensions)]


def _axes(layout: str) -> tuple[list[int], list[int]]:
    """Return the axes over which statistics are taken, and the shape in which they meet the images."""
    reduced = [axis for axis, letter in enumerate(layout) if letter != "C"]
    return reduced, [-1] + [1] * (len(layout) - 1 - layout.index("C"))


def _normalise(layout: str, epsilon: float, factor: float, spaces: int) -> Callable[..., Any]:
    """Batch normalisation with the batch's own statistics: `(x, scale, offset, mean, variance)`.

    As the kernel does, it returns the normalised images, the statistics to keep (the variance unbiased, both averaged
    with those given if `factor` says so), and what the gradient needs: here the mean and the biased variance.
    """
    axes, spread = _axes(layout)

    def normalise(x: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor) -> Any:
        wide = tf.cast(x, scale.dtype)
        middle = tf.reduce_mean(wide, axes, keepdims=True)
        squares = tf.reduce_mean(tf.math.squared_difference(wide, middle), axes, keepdims=True)  # (see `moments`)
        own_mean, own_variance, centred = tf.reshape(middle, [-1]), tf.reshape(squares, [-1]), wide - middle
        y = centred * tf.reshape(tf.math.rsqrt(own_variance + epsilon) * scale, spread) + tf.reshape(offset, spread)
        count = tf.size(x) // tf.maximum(tf.size(own_mean), 1)  # (there may be no channels)
        unbiased = own_variance * tf.cast(count, scale.dtype) / tf.cast(tf.maximum(count - 1, 1), scale.dtype)
        statistics = own_mean, unbiased
        if factor != 1.0:
            statistics = (1 - factor) * mean + factor * own_mean, (1 - factor) * variance + factor * unbiased
        reserve_space = [tf.zeros([0], scale.dtype)] if spaces == 3 else []
        return [tf.cast(y, x.dtype), *statistics, own_mean, own_variance, *reserve_space]

    return normalise


def _normalise_gradient(layout: str, epsilon: float) -> Callable[..., Any]:
    """`(dy, x, scale, mean, variance, ...) -> dx, dscale, doffset` and two outputs that nobody reads.

    With `x' = (x - mean) / std` it is `dx = scale / std * (dy - mean(dy) - x' mean(dy x'))`: two sums over the batch
    (Ioffe and Szegedy, https://arxiv.org/abs/1502.03167, section 3).
    """
    axes, spread = _axes(layout)

    def gradient(dy: tf.Tensor, x: tf.Tensor, scale: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor, *_: Any) -> Any:
        wide = tf.cast(dy, mean.dtype)
        inverse = tf.math.rsqrt(variance + epsilon)
        normalised = (tf.cast(x, mean.dtype) - tf.reshape(mean, spread)) * tf.reshape(inverse, spread)
        by_offset = tf.reduce_sum(wide, axes)
        by_scale = tf.reduce_sum(wide * normalised, axes)
        count = tf.cast(tf.size(x) // tf.maximum(tf.size(mean), 1), mean.dtype)
        shared = tf.reshape(by_offset / count, spread) + normalised * tf.reshape(by_scale / count, spread)
        dx = tf.reshape(tf.cast(scale, mean.dtype) * inverse, spread) * (wide - shared)
        nothing = tf.zeros([0], mean.dtype)
        return [tf.cast(dx, x.dtype), by_scale, by_offset, nothing, nothing]

    return gradient
