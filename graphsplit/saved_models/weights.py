"""Weights that every device holds a copy of, so that none travels per request.

A copy is a resource of its own that is made when the model is loaded, from the variable that the checkpoint restored:
on disk there is one. In the emitted graph a read of a variable at home that shards use becomes a read on each of them,
with whatever is computed from weights alone on the way (a cast, a transposition).
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core.errors import UnsupportedError, bullet_list
from graphsplit.core.graphdefs import make_node, split_reference
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.planning.plan import Plan
from graphsplit.program.program import is_stateful
from graphsplit.saved_models.parts import LARGE_BYTES

SHARED = "graphsplit/shared/constant_"


class Mirror(tf.saved_model.experimental.TrackableResource):  # type: ignore[misc]
    """A copy of a variable on a device, filled when the SavedModel that holds it is loaded."""

    def __init__(self, variable: tf.Variable, device: str):
        super().__init__()
        self._variable = variable
        self._device = device
        self._shared_name = f"graphsplit_{uuid.uuid4().hex}"

    def _create_resource(self) -> tf.Tensor:
        # Eagerly, while the model is written, the device need not exist; its name is for the written function.
        with tf.device(None if tf.executing_eagerly() else self._device):
            return tf.raw_ops.VarHandleOp(
                dtype=self._variable.dtype, shape=self._variable.shape, shared_name=self._shared_name
            )

    def _initialize(self) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.resource_handle, value=self._variable.read_value())

    def _destroy_resource(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.resource_handle, ignore_lookup_error=True)


class Mirrors:
    """All copies that the signatures of one model share."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], Mirror] = {}
        self._variables: dict[int, tf.Variable] = {}

    def get(self, variable: tf.Variable, device: str) -> Mirror:
        """Return the copy of a variable on a device."""
        key = (id(variable), device)
        if key not in self._made:
            self._variables[id(variable)] = variable
            self._made[key] = Mirror(variable, device)
        return self._made[key]

    @property
    def made(self) -> list[Mirror]:
        """All copies."""
        return list(self._made.values())

    @property
    def bytes(self) -> int:
        """The size of the copied variables, each counted once."""
        return sum(int(v.dtype.size) * int(v.shape.num_elements() or 0) for v in self._variables.values())


def check_only_read(name: str, plan: Plan, variables: Mapping[str, tf.Variable]) -> None:
    """Raise `UnsupportedError` if a signature may change variables: then copies of them would go stale.

    Args:
      name: of the signature.
      plan: of the signature.
      variables: the captured variables by the names of their placeholders.
    """
    ops = plan.program.ops
    changed = {
        variables[ops[tensor.op].name].name
        for op in ops
        for tensor in op.inputs
        if ops[tensor.op].name in variables and op.type not in ("ReadVariableOp", "VariableShape")
    }
    if changed:
        raise UnsupportedError(
            f"replicate_weights=True, but the signature {name!r} changes variables, of which copies would go stale:\n"
            f"{bullet_list(sorted(changed))}\n"
            "Leave it out (signatures=[...]), or keep one copy of the weights (replicate_weights=False)."
        )


def use_mirrors(
    graph: EmittedGraph, devices: Sequence[str], variables: Mapping[str, tf.Variable], mirrors: Mirrors
) -> tuple[EmittedGraph, list[tf.Tensor]]:
    """Return the graph with every weight read on the device that uses it.

    Args:
      graph: the emitted graph.
      devices: of the shards.
      variables: the captured variables by the names of their placeholders.
      mirrors: where copies come from.

    Returns:
      The graph with more captures, and the handles for those.
    """
    writer = _Writer(graph, devices, variables, mirrors)
    for node in graph.nodes:
        if node.name in graph.shard_of:
            writer.read_here(node, graph.shard_of[node.name])
    captures = (*graph.captures, *writer.handles)
    nodes = _without_unread((*graph.nodes, *writer.nodes), graph, captures)
    return dataclasses.replace(graph, nodes=nodes, captures=captures), list(writer.handles.values())


def share_constants(graph: EmittedGraph, plan: Plan) -> EmittedGraph:
    """Return the graph with large constants written once, at home, instead of once for every device that uses them."""
    found: dict[bytes, list[Any]] = {}
    for node in graph.nodes:
        if node.op == "Const" and node.name in graph.shard_of and node.attr["value"].ByteSize() > LARGE_BYTES:
            found.setdefault(node.attr["value"].SerializeToString(deterministic=True), []).append(node)
    replaced: dict[str, Any] = {}
    made = []
    for i, nodes in enumerate(copies for copies in found.values() if len(copies) > 1):
        made.append(type(nodes[0])())
        made[i].CopyFrom(nodes[0])
        made[i].name, made[i].device = f"{SHARED}{i}", plan.home
        dtype = tf.as_dtype(nodes[0].attr["dtype"].type)
        replaced |= {
            node.name: make_node(node.name, "Identity", [made[i].name], node.device, T=dtype) for node in nodes
        }
    kept = [replaced.get(node.name, node) for node in graph.nodes]
    return dataclasses.replace(graph, nodes=(*made, *kept))


def sent_bytes(graph: EmittedGraph, plan: Plan) -> int:
    """Return how many bytes of whole values, weights above all, go from home to other devices each time."""
    ops = {op.name: op for op in plan.program.ops}
    shared = {node.name: node.attr["value"].ByteSize() for node in graph.nodes if node.name.startswith(SHARED)}
    sent = set()
    for node in graph.nodes:
        if node.name in graph.shard_of and node.device not in ("", plan.home):
            for reference in node.input:
                name, index = split_reference(reference.lstrip("^"))
                if reference[0] != "^" and (name in ops or name in shared) and name not in graph.shard_of:
                    sent.add((name, index, node.device))
    together = [plan.program.bytes(t) for pack in plan.packs if pack.kind == "whole values" for t in pack.tensors]
    away = sum(device != plan.home for device in plan.devices)
    alone = sum(shared[name] if name in shared else ops[name].out_bytes[index] for name, index, _ in sent)
    return alone + sum(together) * away


def where_variables_live(devices: Sequence[str]) -> str:
    """Return where a loader puts variables without a device: the first GPU, or the CPU."""
    return "/device:GPU:0" if any("GPU" in name for name in devices) else "/device:CPU:0"


class _Writer:
    def __init__(
        self, graph: EmittedGraph, devices: Sequence[str], variables: Mapping[str, tf.Variable], mirrors: Mirrors
    ):
        self.nodes: list[Any] = []
        self.handles: dict[str, tf.Tensor] = {}
        self._by_name = {node.name: node for node in graph.nodes}
        self._shard_of = graph.shard_of
        self._devices = devices
        self._variables = variables
        self._mirrors = mirrors
        self._depends: dict[str, bool | None] = {}
        self._copied: dict[tuple[str, int], str] = {}
        self._original = where_variables_live(devices)

    def read_here(self, node: Any, d: int) -> None:
        """Let a node of shard `d` read what is made of weights from copies on its own device."""
        if self._devices[d] == self._original:
            return
        for i, reference in enumerate(node.input):
            name, index = split_reference(reference.lstrip("^"))
            if reference[0] != "^" and name not in self._shard_of and self._is_weight(name):
                own = self._copy(name, d)
                node.input[i] = f"{own}:{index}" if index else own

    def _is_weight(self, name: str) -> bool:
        """Return whether a node at home is computed of captured variables, and of nothing else but constants."""
        return bool(self._dependence(name))

    def _dependence(self, name: str) -> bool | None:
        """Return True if a node depends on variables alone, False if on nothing, None if on anything else."""
        if name not in self._depends:
            self._depends[name] = None
            node = self._by_name[name]
            if node.op == "ReadVariableOp":
                self._depends[name] = True if node.input[0] in self._variables else None
            elif node.op == "Const":
                self._depends[name] = False
            elif node.input and not is_stateful(node.op) and not any(r[0] == "^" for r in node.input):
                found = [self._dependence(split_reference(r)[0]) for r in node.input]
                self._depends[name] = None if None in found else any(found)
        return self._depends[name]

    def _copy(self, name: str, d: int) -> str:
        """Return the name of the copy of a home node on the device of shard `d`."""
        key = (name, d)
        if key in self._copied:
            return self._copied[key]
        own = self._copied[key] = f"graphsplit/weights_{d}/{name}"
        copy = type(self._by_name[name])()
        copy.CopyFrom(self._by_name[name])
        copy.name, copy.device = own, self._devices[d]
        del copy.input[:]
        for reference in self._by_name[name].input:
            source, index = split_reference(reference)
            if source in self._variables:
                copy.device = ""  # where the copy of the variable is, wherever that ends up
                copy.input.append(self._handle(source, d))
            else:
                made = self._copy(source, d)
                copy.input.append(f"{made}:{index}" if index else made)
        self.nodes.append(copy)
        return own

    def _handle(self, capture: str, d: int) -> str:
        name = f"graphsplit/weights_{d}/{capture}"
        if name not in self.handles:
            self.handles[name] = self._mirrors.get(self._variables[capture], self._devices[d]).resource_handle
            self.nodes.append(make_node(name, "Placeholder", [], self._devices[d], dtype=tf.resource))
        return name


def _without_unread(nodes: Sequence[Any], graph: EmittedGraph, captures: Sequence[str]) -> tuple[Any, ...]:
    """Return the nodes without the reads at home that nobody reads any more."""
    by_name = {node.name: node for node in nodes}
    wanted = [split_reference(r)[0] for r in (*graph.outputs, *graph.effects, *graph.inputs, *captures)]
    wanted += [node.name for node in nodes if is_stateful(node.op) and node.op != "ReadVariableOp"]
    live: set[str] = set()
    while wanted:
        name = wanted.pop()
        if name not in live:
            live.add(name)
            wanted += [split_reference(reference.lstrip("^"))[0] for reference in by_name[name].input]
    return tuple(node for node in nodes if node.name in live)
