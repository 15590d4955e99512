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
from graphsplit.graph.function_calls import CONTROL_FLOW
from graphsplit.graph.inlining import Body, Replaced, function_called, is_compiled

_LOOPS = frozenset(op_type for op_type, flow in CONTROL_FLOW.items() if flow.loops)
_BRANCHES = frozenset({"If", "StatelessIf"})
_CASES = frozenset({"Case", "StatelessCase"})


@dataclass(frozen=True, eq=False)
class FlatNode:
    """One node of the flat list.

    Attributes:
      node: the `NodeDef`, for its type and attributes; its inputs are replaced by `data` and `controls`.
      data: references (`node:1`) of the tensors that it reads.
      results: references of tensors that come out of its bodies (a loop's, a branch's).
      device: the device asked for: its own, or that of the call that contains it.
      root: the node of the given graph that it is or is inside of.
      argument: whether it only stands for the argument of a body, and is not an operation.
      compiled: the call that XLA compiles as a whole, "" if none.
      shard: the shard that a transpilation noted on it, or on the node of the graph that it is inside of.
      prefix: what comes before the name that graphsplit gave such a node: the call of a SavedModel's signature.
    """

    name: str
    node: Any
    data: tuple[str, ...]
    controls: tuple[str, ...]
    device: str
    root: str
    results: tuple[str, ...] = ()
    argument: bool = False
    compiled: str = ""
    backward: bool = False
    body_of: str = ""
    shard: int | None = None
    prefix: str = ""


@dataclass(frozen=True)
class _Scope:
    """Where a body is being read: the prefix of its names and what it inherits from the call."""

    prefix: str = ""
    device: str = ""
    root: str = ""
    compiled: str = ""
    backward: bool = False
    body_of: str = ""
    shard: int | None = None
    outside: str = ""
    body: Body | None = None

    def inputs(self, node: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return the flat names of what a node of this body reads, and of what it waits for."""
        data, waits = inputs_of(node)
        if self.body is None:
            return tuple(["{}:{}".format(*split_reference(r)) for r in data]), tuple([r[1:] for r in waits])
        waits = [r for r in waits if source_of(r) not in self.body.arguments]
        return tuple(map(self.body.reference, data)), tuple([self.body.reference(r)[1:] for r in waits])


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
            name = scope.prefix + node.name
            inner = _Scope(
                device=node.device or scope.device,
                root=scope.root or name,
                compiled=scope.compiled,
                backward=scope.backward or any(p in ("gradient_tape", "gradients") for p in name.split("/")),
                body_of=scope.body_of,
                shard=shard_of(node) if is_marked(node) else scope.shard,
                outside=scope.prefix if is_marked(node) else scope.outside,
            )
            data, controls = scope.inputs(node)
            called = function_called(node, self._library)
            if called is not None:
                self._read_call(node, name, called, data, inner)
                continue
            results: list[str] = []
            for part, function, operands in self._bodies(node, data):
                arguments = self._add_arguments(f"{name}/{part}", node, function, operands, inner)
                results += self._read_body(f"{name}/{part}/", name, function, arguments, inner).results
            self._add(name, node, data, controls, inner, tuple(results))

    def finish(self) -> list[FlatNode]:
        """Return the nodes with references to calls replaced by references into the called bodies."""
        finished = []
        for flat in self._found:
            data, results = tuple(self._replaced.now(flat.data)), tuple(self._replaced.now(flat.results))
            waits = self._replaced.now([f"^{control}" for control in flat.controls])
            finished.append(replace(flat, data=data, results=results, controls=tuple([r[1:] for r in waits])))
        return finished

    def _add(
        self, name: str, node: Any, data: Sequence[str], controls: Sequence[str], scope: _Scope, results: Any = ()
    ) -> None:
        self._found.append(
            FlatNode(
                name=name,
                node=node,
                data=tuple(data),
                controls=tuple(controls),
                results=results,
                device=scope.device,
                root=scope.root,
                compiled=scope.compiled,
                backward=scope.backward,
                body_of=scope.body_of,
                shard=scope.shard,
                prefix=scope.outside,
            )
        )

    def _read_call(self, node: Any, name: str, function: Any, data: Sequence[str], scope: _Scope) -> None:
        compiled = scope.compiled or (name if is_compiled(node) else "")
        backward = scope.backward or "__backward_" in function.signature.name
        inner = replace(scope, compiled=compiled, backward=backward)
        body = self._read_body(f"{name}/", scope.body_of, function, data, inner)
        self._replaced.add(name, body, map(source_of, body.results))

    def _read_body(self, prefix: str, body_of: str, function: Any, given: Sequence[str], scope: _Scope) -> Body:
        body = Body(function, prefix, given, self._library)
        self.read(body.nodes, replace(scope, prefix=prefix, body_of=body_of, body=body))
        return body

    def _bodies(self, node: Any, data: Sequence[str]) -> Iterator[tuple[str, Any, Sequence[str]]]:
        """Yield the bodies of a loop or branch: what TensorFlow calls it, the function, its operands."""
        if node.op in _LOOPS:
            named = [("cond", node.attr["cond"].func.name), ("body", node.attr["body"].func.name)]
            operands = data
        elif node.op in _BRANCHES:
            named = [("then", node.attr["then_branch"].func.name), ("else", node.attr["else_branch"].func.name)]
            operands = data[1:]
        elif node.op in _CASES:
            named = [(f"branch{k}", function.name) for k, function in enumerate(node.attr["branches"].list.func)]
            operands = data[1:]
        else:
            return
        for part, function in named:
            if function in self._library:
                yield part, self._library[function], operands

    def _add_arguments(
        self, prefix: str, node: Any, function: Any, operands: Sequence[str], scope: _Scope
    ) -> list[str]:
        """Add a stand-in for each argument of a body, so that what is read inside has the loop's shapes."""
        shapes = node.attr["output_shapes"].list.shape if node.op in _LOOPS and "output_shapes" in node.attr else []
        arguments = []
        for k, argument in enumerate(function.signature.input_arg):
            name = f"{prefix}/argument_{k}"
            stand_in = make_node(name, "Identity", [], T=tf.as_dtype(argument.type))
            if k < len(shapes):
                stand_in.attr["shape"].shape.CopyFrom(shapes[k])
            self._found.append(
                FlatNode(name, stand_in, (operands[k],), (), scope.device, scope.root, argument=True, body_of=name)
            )
            arguments.append(f"{name}:0")
        return arguments
