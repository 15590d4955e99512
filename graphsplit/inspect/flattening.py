"""One flat list of operations out of a graph: those of function bodies, loops and branches included, each once.

Names are those that TensorFlow gives them when it inlines the bodies at run time, but for the serial numbers that it
puts in (`while/body/_5/while/MatMul` is `while/body/while/MatMul` here): that is how a request and what became of it
are matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from graphsplit.core.protos.graphdefs import inputs_of, make_node, source_of, split_reference
from graphsplit.core.protos.marks import is_marked, shard_of
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names
from graphsplit.program.graph.inlining import Body, Replaced, function_called, is_compiled


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a node has of its own, or from the calls that contain it.

    Attributes:
      device: the device asked for: its own, or that of the call that contains it.
      root: the node of the given graph that it is or is inside of.
      compiled: the call that XLA compiles as a whole, "" if none.
      backward: whether it belongs to a backward pass.
      body_of: the loop, branch or call in whose body it is.
      shard: the shard that a transpilation noted on it, or on the node of the graph that it is inside of.
      prefix: what comes before the name that graphsplit gave such a node: the call of a SavedModel's signature.
    """

    device: str = ""
    root: str = ""
    compiled: str = ""
    backward: bool = False
    body_of: str = ""
    shard: int | None = None
    prefix: str = ""


@dataclass(frozen=True, eq=False)
class FlatNode(Surroundings):
    """One node of the flat list.

    Attributes:
      node: the `NodeDef`, for its type and attributes; its inputs are replaced by `data` and `controls`.
      data: references (`node:1`) of the tensors that it reads.
      results: references of tensors that come out of its bodies (a loop's, a branch's).
      argument: whether it only stands for the argument of a body, and is not an operation.
    """

    name: str
    node: Any
    data: tuple[str, ...]
    controls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    argument: bool = False


@dataclass(frozen=True)
class _Scope:
    """A body that is being read: what its names begin with, and what it inherits from the call."""

    names: str = ""
    inherited: Surroundings = Surroundings()
    body: Body | None = None

    def inputs(self, node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the flat names of what a node of this body reads, and of what it waits for."""
        data, waits = inputs_of(node)
        if self.body is None:
            return tuple(["{}:{}".format(*split_reference(r)) for r in data]), tuple([r[1:] for r in waits])
        waits = [r for r in waits if source_of(r) not in self.body.arguments]
        return tuple(map(self.body.reference, data)), tuple([self.body.reference(r)[1:] for r in waits])

    def around(self, node: Any) -> Surroundings:
        """Return the surroundings of a node of this body."""
        known, name = self.inherited, self.names + node.name
        marked: dict[str, Any] = {"shard": shard_of(node), "prefix": self.names} if is_marked(node) else {}
        return replace(
            known,
            device=node.device or known.device,
            root=known.root or name,
            backward=known.backward or any(p in ("gradient_tape", "gradients") for p in name.split("/")),
            **marked,
        )


def flatten(graph: Any) -> list[FlatNode]:
    """Return all operations of a `GraphDef`.

    Calls are replaced by the operations of the called functions. Loops and branches stay, followed by theirs; a loop's
    body is read once, with the first iteration's inputs. Bodies of other operations (data sets) are not entered.
    """
    flattener = _Flattener({function.signature.name: function for function in graph.library.function})
    flattener.read(graph.node, _Scope())
    return flattener.finish()


class _Flattener:
    def __init__(self, library: Mapping[str, Any]):
        self._library = library
        self._found: list[FlatNode] = []
        self._replaced = Replaced()

    def read(self, nodes: Sequence[Any], scope: _Scope) -> None:
        """Append the nodes of one body and, after each, what is inside of it."""
        for node in nodes:
            name, own = scope.names + node.name, scope.around(node)
            data, controls = scope.inputs(node)
            called = function_called(node, self._library)
            if called is not None:
                self._read_call(node, name, called, data, own)
                continue
            results: list[str] = []
            for part, function, operands in self._bodies(node, data):
                arguments = self._add_arguments(f"{name}/{part}", node, function, operands, own)
                inside = replace(own, body_of=name)
                results += self._read_body(f"{name}/{part}/", function, arguments, inside).results
            self._found.append(FlatNode(name, node, data, controls, tuple(results), **vars(own)))

    def finish(self) -> list[FlatNode]:
        """Return the nodes with references to calls replaced by references into the called bodies."""
        finished = []
        for flat in self._found:
            data, results = tuple(self._replaced.now(flat.data)), tuple(self._replaced.now(flat.results))
            waits = self._replaced.now([f"^{control}" for control in flat.controls])
            finished.append(replace(flat, data=data, results=results, controls=tuple([r[1:] for r in waits])))
        return finished

    def _read_call(self, node: Any, name: str, function: Any, data: Sequence[str], own: Surroundings) -> None:
        compiled = own.compiled or (name if is_compiled(node) else "")
        backward = own.backward or "__backward_" in function.signature.name
        body = self._read_body(f"{name}/", function, data, replace(own, compiled=compiled, backward=backward))
        self._replaced.add(name, body, map(source_of, body.results))

    def _read_body(self, names: str, function: Any, given: Sequence[str], inherited: Surroundings) -> Body:
        body = Body(function, names, given, self._library)
        self.read(body.nodes, _Scope(names, inherited, body))
        return body

    def _bodies(self, node: Any, data: Sequence[str]) -> Iterator[tuple[str, Any, Sequence[str]]]:
        """Yield the bodies of a loop or branch: what TensorFlow calls it, the function, its operands."""
        flow = CONTROL_FLOW.get(node.op)
        if flow is None or flow.compiled:
            return
        names = function_names(node)
        parts = [attribute.removesuffix("_branch") for attribute in flow.functions]
        if parts == ["branches"]:
            parts = [f"branch{k}" for k in range(len(names))]
        for part, name in zip(parts, names, strict=True):
            if name in self._library:
                yield part, self._library[name], data[1:] if flow.chooses else data

    def _add_arguments(
        self, prefix: str, node: Any, function: Any, operands: Sequence[str], own: Surroundings
    ) -> list[str]:
        """Add a stand-in for each argument of a body, so that what is read inside has the loop's shapes."""
        has_shapes = CONTROL_FLOW[node.op].loops and "output_shapes" in node.attr  # (to read a missing one adds it)
        shapes = node.attr["output_shapes"].list.shape if has_shapes else []
        arguments = []
        for k, argument in enumerate(function.signature.input_arg):
            name = f"{prefix}/argument_{k}"
            stand_in = make_node(name, "Identity", [], T=tf.as_dtype(argument.type))
            if k < len(shapes):
                stand_in.attr["shape"].shape.CopyFrom(shapes[k])
            data = (operands[k],)
            self._found.append(
                FlatNode(name, stand_in, data, argument=True, device=own.device, root=own.root, body_of=name)
            )
            arguments.append(f"{name}:0")
        return arguments
