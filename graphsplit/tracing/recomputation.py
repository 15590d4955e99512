"""Recomputation: what `tf.recompute_grad` runs again waits for the shard's own gradient, not for that of all rows.

It runs a function forward once more when the gradient of its result is there. It says so with data: to what the
function reads it adds a zero, made from the first entry of the gradient. Of a gradient in pieces that is one shard's,
for which all others would wait. An operation that only waits orders the same, each shard by itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.protos.graphdefs import make_node, source_of, split_reference

_FROM_ZERO_TO_GRADIENT = ("Equal", "Cast", "Max", "StridedSlice", "Reshape")  # tf.recompute_grad of TensorFlow 2.21


def wait_instead_of_adding(nodes: Sequence[Any]) -> None:
    """Let what is run again wait for the gradient to which it adds nothing; edits the nodes.

    Args:
      nodes: `NodeDef`s in graph spelling, calls inlined.
    """
    by_name = {node.name: node for node in nodes}
    gradients: dict[str, str] = {}  # the name of a zero -> that of what made the gradient
    for node in nodes:
        if node.op == "SelectV2" and (gradient := _gradient(node, by_name)) is not None:
            gradients[node.name] = gradient
    for node in nodes if gradients else ():
        if node.op == "Cast" and source_of(node.input[0]) in gradients:
            gradients[node.name] = gradients[source_of(node.input[0])]
    for node in nodes if gradients else ():
        added = source_of(node.input[1]) if node.op == "AddV2" else ""
        if added in gradients:
            inputs = [node.input[0], f"^{gradients[added]}"]
            node.CopyFrom(make_node(node.name, "Identity", inputs, node.device, T=tf.as_dtype(node.attr["T"].type)))


def _gradient(select: Any, nodes: Mapping[str, Any]) -> str | None:
    """Return the node of the gradient from which a zero is made; None if it is something else that is selected."""
    reference = select.input[0]
    for kind in _FROM_ZERO_TO_GRADIENT:
        node = nodes.get(source_of(reference))
        if node is None or node.op != kind:
            return None
        if kind == "Equal" and not (node.input[0] == node.input[1] and node.attr["T"].type == tf.bool.as_datatype_enum):
            return None
        reference = node.input[0]
    return _origin(reference, nodes)


def _origin(reference: str, nodes: Mapping[str, Any]) -> str:
    """Return the node that made what is passed on, together with others that it does not depend on."""
    name, index = split_reference(reference)
    while name in nodes and nodes[name].op in ("Identity", "IdentityN"):
        name, index = split_reference(nodes[name].input[index])
    return name
