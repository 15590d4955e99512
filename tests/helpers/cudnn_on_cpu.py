"""cuDNN's LSTM kernels, which there are none of for CPUs, in ordinary operations, put in their place in emitted graphs.

What the forward kernel keeps for the backward one is, here, its sequences; the backward kernel fails on others.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import tensorflow as tf

from graphsplit.core.protos import make_node
from graphsplit.emission import EmittedGraph, emit
from graphsplit.planning.plan import Plan
from graphsplit.runtime import executable, feeding
from graphsplit.runtime.gradients import planned_functions

Function = Callable[..., Any]


@contextlib.contextmanager
def cudnn() -> Iterator[None]:
    """Let Keras take cuDNN's kernels, as where there is a GPU, and run what is emitted for them here."""
    recurrent = importlib.import_module("keras.src.backend.tensorflow.rnn")
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(recurrent, "_is_gpu_available", return_value=True))
        for module in (executable, planned_functions, feeding):
            stack.enter_context(mock.patch.object(module, "emit", emit_for_cpus))
        yield


def emit_for_cpus(plan: Plan) -> EmittedGraph:
    """Emit a plan, cuDNN's kernels as calls of what they do."""
    graph, nodes, library = emit(plan), [], {}
    for node in graph.nodes:
        made = _stand_in(node)
        if made is None:
            nodes.append(node)
            continue
        functions, call = made
        library.update({function.signature.name: function for function in functions})
        nodes.append(call)
    whole = tf.compat.v1.GraphDef().library
    whole.CopyFrom(graph.library)
    whole.function.extend(library.values())
    return replace(graph, nodes=tuple(nodes), library=whole)


def _stand_in(node: Any) -> tuple[list[Any], Any] | None:
    if node.op not in ("CudnnRNNV3", "CudnnRNNBackpropV3"):
        return None
    assert node.attr["rnn_mode"].s == b"lstm"
    assert node.attr["direction"].s == b"unidirectional"
    assert not node.attr["time_major"].b
    functions, taken, given = _functions(node.op, tf.as_dtype(node.attr["T"].type))
    call = make_node(node.name, "PartitionedCall", node.input, node.device)
    call.attr["f"].func.name = functions[0].signature.name
    call.attr["Tin"].list.type.extend(dtype.as_datatype_enum for dtype in taken)
    call.attr["Tout"].list.type.extend(dtype.as_datatype_enum for dtype in given)
    return functions, call


@functools.cache
def _functions(op_type: str, floats: tf.DType) -> tuple[list[Any], list[tf.DType], list[tf.DType]]:
    """Return the function that does what a kernel does, with those that it calls; what it takes and what it gives."""
    kernel, rest = (_forward, []) if op_type == "CudnnRNNV3" else (_backward, [*[floats] * 7, tf.int8])
    taken = [*[floats] * 4, tf.int32, *rest]
    specs = [tf.TensorSpec(None, dtype) for dtype in taken]
    with tf.init_scope():
        concrete = tf.function(kernel, autograph=False).get_concrete_function(*specs)
    called = concrete.graph.as_graph_def().library.function
    return [concrete.function_def, *called], taken, [tensor.dtype for tensor in concrete.outputs]


def _lstm(x: tf.Tensor, h: tf.Tensor, c: tf.Tensor, parameters: tf.Tensor) -> list[tf.Tensor]:
    """Run `x[rows, steps, features]` through one layer; states have one layer as their middle axis.

    Parameters as Keras packs them: the transposed kernels of the gates i, f, c, o; those of the states; two biases.
    """
    features, units = tf.shape(x)[2], tf.shape(h)[2]
    sizes = [4 * units * features, 4 * units * units, 4 * units, 4 * units]
    kernel, recurrent, first, second = tf.split(parameters, tf.stack(sizes), num=4)
    kernel, recurrent = tf.reshape(kernel, [4 * units, features]), tf.reshape(recurrent, [4 * units, units])
    hidden, cell, outputs = h[:, 0], c[:, 0], []
    for t in range(STEPS):
        gates = tf.matmul(x[:, t], kernel, transpose_b=True) + tf.matmul(hidden, recurrent, transpose_b=True)
        i, f, new, o = tf.split(gates + first + second, 4, 1)
        cell = tf.sigmoid(f) * cell + tf.sigmoid(i) * tf.tanh(new)
        hidden = tf.sigmoid(o) * tf.tanh(cell)
        outputs.append(hidden)
    return [tf.stack(outputs, 1), hidden[:, None], cell[:, None]]


STEPS = 3  # of every sequence


def _forward(x: tf.Tensor, h: tf.Tensor, c: tf.Tensor, parameters: tf.Tensor, lengths: tf.Tensor) -> list[tf.Tensor]:
    with tf.control_dependencies([tf.debugging.assert_equal(lengths, tf.fill([tf.shape(x)[0]], STEPS))]):
        return [*_lstm(x, h, c, parameters), tf.reshape(x, [-1]), tf.zeros([1], tf.int8)]


def _backward(x: tf.Tensor, h: tf.Tensor, c: tf.Tensor, parameters: tf.Tensor, *rest: tf.Tensor) -> list[tf.Tensor]:
    *_, by_output, by_h, by_c, kept, _host = rest
    given = [x, h, c, parameters]
    with tf.control_dependencies([tf.debugging.assert_equal(kept, tf.reshape(x, [-1]), "kept for other sequences")]):
        return tf.gradients(_lstm(*given), given, [by_output, by_h, by_c])
