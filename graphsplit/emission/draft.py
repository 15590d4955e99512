"""Draft: an emitted graph while it is written."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from graphsplit.core.graphdefs import NodeDef
from graphsplit.planning.plan import Plan
from graphsplit.program.program import Op, Tensor


class Draft:
    """The nodes of a plan as they are written; of a body that shards run by themselves, those of one shard (`only`).

    Attributes:
      nodes: what has been written.
      shard_of: the shard of every node that belongs to one, by name.
      shards: the shards that are written.
      devices: the device of each shard; "" in a function that runs wherever it is called.
      prefixes: how the names of each shard's copies begin.
      scope: how the names of all other nodes begin that are no operation of the program.
    """

    def __init__(self, plan: Plan, only: int | None = None):
        self.program = plan.program
        self.nodes: list[Any] = []
        self.shard_of: dict[str, int] = {}
        self.shards = range(len(plan.devices)) if only is None else range(only, only + 1)
        self.devices = plan.devices if only is None else ("",) * len(plan.devices)
        self.prefixes = _shard_prefixes(plan)
        self.scope = _unused(plan, "graphsplit")

    def add(self, node: Any, d: int | None) -> None:
        """Write a node that belongs to shard `d` or (None) to none."""
        self.nodes.append(node)
        if d is not None:
            self.shard_of[node.name] = d

    def copy(self, op: Op, name: str, device: str, inputs: list[str], d: int | None) -> Any:
        """Write an operation under a name, and return its node."""
        node = NodeDef()
        node.CopyFrom(op.node)
        node.name = name
        node.device = device
        del node.input[:]
        node.input.extend(inputs)
        if "_class" in node.attr:  # colocation with nodes that have other names now
            del node.attr["_class"]
        self.add(node, d)
        return node

    def dtype(self, tensor: Tensor) -> tf.DType:
        """Return the dtype of a tensor of the program."""
        return self.program.ops[tensor.op].out_dtypes[tensor.index]


def _unused(plan: Plan, base: str) -> str:
    """Return a scope that no operation of the program is in."""
    while any(op.name.startswith(f"{base}/") for op in plan.program.ops):
        base += "_"
    return base


def _shard_prefixes(plan: Plan) -> list[str]:
    """Return a name prefix for each shard that no name of the program begins with."""
    base = "shard"
    while any(op.name.startswith(f"{base}_") for op in plan.program.ops):
        base += "_"
    if plan.local:  # the same name on every shard, so that shards of the same size have the same function
        return [f"{base}_/"] * len(plan.devices)
    return [f"{base}_{d}/" for d in range(len(plan.devices))]
