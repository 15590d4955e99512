"""One flat list of operations out of a graph: those of function bodies, loops and branches included, each once.

Names are those that TensorFlow gives them when it inlines the bodies at run time, but for the serial numbers that it
puts in (`while/body/_5/while/MatMul` is `while/body/while/MatMul` here): that is how a request and what became of it
are matched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from graphsplit.core.errors import UnsupportedError
from graphsplit.core.graphdefs import make_node, output_names, source_of
from graphsplit.core.marks import is_marked, shard_of
from graphsplit.graph.function_calls import CONTROL_FLOW
from graphsplit.graph.inlining import CALL_TYPES, XLA_ATTRIBUTE
from graphsplit.graph.walks import reached

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
    arguments: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def reference(self, text: str) -> str:
        """Return the flat name of what a node of this body calls `text`."""
        if text in self.arguments:
            return self.arguments[text]
        name, _, output = text.partition(":")
        if name not in self.outputs:  # a graph, which counts outputs: `node:1`
            return f"{self.prefix}{name}:{int(output or 0)}"
        return f"{self.prefix}{name}:{list(self.outputs[name]).index(output)}"


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
        self._results: dict[str, str] = {}  # "call:1" -> the reference inside the called body
        self._ends: dict[str, list[str]] = {}  # "call" -> what finishes when the call does

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
            data = tuple(scope.reference(i) for i in node.input if i[0] != "^")
            controls = tuple(
                f"{scope.prefix}{i[1:]}" for i in node.input if i[0] == "^" and i[1:] not in scope.arguments
            )
            called = self._called(node)
            if called is not None:
                self._read_call(node, name, called, data, inner)
                continue
            results: list[str] = []
            for part, function, operands in self._bodies(node, data):
                arguments = self._add_arguments(f"{name}/{part}", node, function, operands, inner)
                results += self._read_body(f"{name}/{part}/", name, function, arguments, inner)[0]
            self._add(name, node, data, controls, inner, tuple(results))

    def finish(self) -> list[FlatNode]:
        """Return the nodes with references to calls replaced by references into the called bodies."""
        finished = []
        for flat in self._found:
            controls = list(dict.fromkeys(end for control in flat.controls for end in self._end(control)))
            data, results = tuple(map(self._resolve, flat.data)), tuple(map(self._resolve, flat.results))
            finished.append(replace(flat, data=data, results=results, controls=tuple(controls)))
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

    def _called(self, node: Any) -> Any:
        if node.op in CALL_TYPES:
            return self._library.get(node.attr["f"].func.name)
        return self._library.get(node.op)

    def _read_call(self, node: Any, name: str, function: Any, data: Sequence[str], scope: _Scope) -> None:
        compiled = scope.compiled or (name if XLA_ATTRIBUTE in node.attr and node.attr[XLA_ATTRIBUTE].b else "")
        backward = scope.backward or "__backward_" in function.signature.name
        inner = replace(scope, compiled=compiled, backward=backward)
        arguments = {argument.name: data[k] for k, argument in enumerate(function.signature.input_arg)}
        results, ends = self._read_body(f"{name}/", scope.body_of, function, arguments, inner)
        self._results.update({f"{name}:{k}": reference for k, reference in enumerate(results)})
        self._ends[name] = ends

    def _read_body(
        self, prefix: str, body_of: str, function: Any, arguments: Mapping[str, str], scope: _Scope
    ) -> tuple[list[str], list[str]]:
        inside = replace(
            scope,
            prefix=prefix,
            body_of=body_of,
            arguments=arguments,
            outputs={node.name: self._output_names(node) for node in function.node_def},
        )
        self.read(function.node_def, inside)
        results = [inside.reference(function.ret[argument.name]) for argument in function.signature.output_arg]
        ends = [prefix + end for end in function.control_ret.values()]
        return results, ends + [source_of(reference) for reference in results]

    def _output_names(self, node: Any) -> list[str]:
        try:
            return output_names(node, self._library)
        except UnsupportedError:
            return []

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
    ) -> dict[str, str]:
        """Add a stand-in for each argument of a body, so that what is read inside has the loop's shapes."""
        shapes = node.attr["output_shapes"].list.shape if node.op in _LOOPS and "output_shapes" in node.attr else []
        arguments = {}
        for k, argument in enumerate(function.signature.input_arg):
            name = f"{prefix}/argument_{k}"
            stand_in = make_node(name, "Identity", [], T=tf.as_dtype(argument.type))
            if k < len(shapes):
                stand_in.attr["shape"].shape.CopyFrom(shapes[k])
            self._found.append(
                FlatNode(name, stand_in, (operands[k],), (), scope.device, scope.root, argument=True, body_of=name)
            )
            arguments[argument.name] = f"{name}:0"
        return arguments

    def _resolve(self, reference: str) -> str:
        while reference in self._results:
            reference = self._results[reference]
        return reference

    def _end(self, name: str) -> list[str]:
        return [end for end in reached([name], lambda call: self._ends.get(call, ())) if end not in self._ends]
