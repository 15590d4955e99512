"""What is dead in a run in which a shard has no rows, where an emitted graph is cut into functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.protos.graphdefs import (
    constant_node,
    inputs_of,
    make_node,
    output_type,
    split_reference,
    with_inputs,
)
from graphsplit.emission.emitted_graph import EmittedGraph


@dataclass(frozen=True, eq=False)
class DeadTensors:
    """Tensors of an emitted graph that are dead if a shard has no rows, where they cross from forward to backward.

    A function cannot return what is dead: something stands in its place, and in the backward part it is dead again.

    Attributes:
      graph: the emitted graph.
      without: by the name of a node that may be dead, the truth value without which it is.
      relayed: truth values that were sent on, each with the one that it is a copy of.
    """

    graph: EmittedGraph
    without: Mapping[str, str]
    relayed: Mapping[str, str]

    def present(self, reference: str) -> str | None:
        """Return the truth value without which a tensor is dead, or None if it never is."""
        name, index = split_reference(reference)
        switch = self.graph.by_name[name]
        if switch.op == "Switch" and index == 1:
            return self.relayed.get(switch.input[1], str(switch.input[1]))
        return self.without.get(name)

    def _place(self, reference: str) -> tuple[tf.DType, str]:
        name, index = split_reference(reference)
        node = self.graph.by_name[name]
        return tf.as_dtype(output_type(node, index)), node.device

    def replaced(self, residuals: Sequence[str]) -> tuple[list[Any], list[str]]:
        """Return the nodes that put something in place of what is dead, and the references to return."""
        nodes: list[Any] = []
        returned = list(residuals)
        for i, reference in enumerate(residuals):
            present = self.present(reference)
            if present is not None:
                dtype, device = self._place(reference)
                returned[i] = own = f"{self.graph.scope}/returned_{i}"
                nodes += _nothing(f"{own}/nothing", dtype, device)
                nodes.append(make_node(f"{own}/instead", "Switch", [f"{own}/nothing", present], device, T=dtype))
                nodes.append(make_node(own, "Merge", [reference, f"{own}/instead"], device, N=2, T=dtype))
        return nodes, returned

    def again(self, inputs: Mapping[str, str]) -> tuple[list[Any], dict[str, str], dict[str, str]]:
        """Return the nodes that make dead again what was returned.

        With them, what stands in for each residual; and for each truth value what to wait for so as to be dead too.
        """
        nodes: list[Any] = []
        stand_ins, tokens = dict(inputs), {}
        for reference, stand_in in inputs.items():
            present = self.present(reference)
            if present is not None:
                dtype, device = self._place(reference)
                nodes.append(make_node(f"{stand_in}_taken", "Switch", [stand_in, inputs[present]], device, T=dtype))
                stand_ins[reference] = f"{stand_in}_taken:1"
        for present in self.graph.present:
            token, device = f"{inputs[present]}_token", self._place(present)[1]
            nodes.append(make_node(f"{token}/taken", "Switch", [inputs[present]] * 2, device, T=tf.bool))
            nodes.append(make_node(token, "Identity", [f"{token}/taken:1"], device, T=tf.bool))
            tokens[present] = token
        return nodes, stand_ins, tokens


def dead_tensors(graph: EmittedGraph) -> DeadTensors:
    """Return the tensors of a graph that may be dead."""
    return DeadTensors(graph, graph.dead_without(), graph.relayed())


def _nothing(name: str, dtype: tf.DType, device: str) -> list[Any]:
    """Return the nodes that make a tensor of the type of another, whatever it holds."""
    if dtype != tf.variant:
        return [constant_node(name, np.zeros(0, dtype.as_numpy_dtype), dtype, device)]
    scalar = np.array(-1, np.int32)
    nodes = [constant_node(f"{name}/{part}", scalar, tf.int32, device) for part in ("shape", "most")]
    types = {"element_dtype": tf.float32, "shape_type": tf.int32}  # in place of a list or optional of anything
    return [*nodes, make_node(name, "EmptyTensorList", [node.name for node in nodes], device, **types)]


def waiting_for(node: Any, token: str | None) -> Any:
    """Return what follows from constants, waiting for `token`, if any, instead of what it waits for in forward."""
    if not any(reference[0] == "^" for reference in node.input):
        return node
    return with_inputs(node, [*inputs_of(node)[0], *([f"^{token}"] if token else [])])
