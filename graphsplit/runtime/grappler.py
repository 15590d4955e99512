"""How much TensorFlow's graph optimizer works on an emitted graph: all of it, what loops need, or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from graphsplit.program.graph.function_calls import CONTROL_FLOW

_LOOPS = frozenset(op_type for op_type, flow in CONTROL_FLOW.items() if flow.loops)
_FOR_LOOPS = frozenset({"function_optimization", "dependency_optimization"})


def optimizer_config(nodes: Sequence[Any], library: Any) -> bytes | None:
    """Return the serialized `ConfigProto` under which a graph is called; None stands for TensorFlow's own choice.

    On GPUs the optimizer chooses the layout of convolutions: all of it runs. On CPUs it takes most of the time to the
    first step, growing with the number of devices, and does not make steps faster. Loops are the exception:
    TensorFlow puts their bodies in place with an `Identity` for each argument and result, and only the optimizer takes
    them out again.
    """
    if any("GPU" in node.device for node in nodes):
        return None
    inside = (node for function in library.function for node in function.node_def)
    has_loops = any(node.op in _LOOPS for node in itertools.chain(nodes, inside))
    config = tf.compat.v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    if not has_loops:
        rewrites.disable_meta_optimizer = True
        return bytes(config.SerializeToString())
    for option in rewrites.DESCRIPTOR.fields:
        if option.enum_type and option.enum_type.name == "Toggle" and option.name not in _FOR_LOOPS:
            setattr(rewrites, option.name, rewrites.OFF)
    rewrites.memory_optimization = rewrites.NO_MEM_OPT
    rewrites.meta_optimizer_iterations = rewrites.ONE
    rewrites.min_graph_nodes = -1  # loops of small graphs turn as often
    return bytes(config.SerializeToString())
