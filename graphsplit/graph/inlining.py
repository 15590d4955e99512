"""Inlining calls of functions: a flat graph, whose effects keep their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphsplit.core.graphdefs import NodeDef, make_node, output_names, split_reference

CALL_TYPES = frozenset({"PartitionedCall", "StatefulPartitionedCall"})
XLA_ATTRIBUTE = "_XlaMustCompile"


def is_compiled(node: Any) -> bool:
    """Return whether a call is compiled by XLA as a whole (`jit_compile=True`)."""
    return XLA_ATTRIBUTE in node.attr and bool(node.attr[XLA_ATTRIBUTE].b)


def inline_calls(graph: Any, results: Sequence[str], compiled: bool = False) -> tuple[list[Any], list[str]]:
    """Replace every function call in `graph` by the called body.

    Bodies of `While`, `If` and other ops that take functions as attributes stay in the library. Effects keep their
    order: what waited for the call waits for the effects of its body, and the body waits for what the call waited for.

    Args:
      graph: a `GraphDef`; its nodes are edited in place.
      results: references (`node:0`) and effects (`^node`) to follow into the bodies.
      compiled: whether calls that XLA compiles as a whole are replaced too. If not, they stay calls.

    Returns:
      The nodes, and `results` as they are named now.
    """
    library = {function.signature.name: function for function in graph.library.function}
    sink = NodeDef(name="", op="")
    sink.input.extend(results)
    nodes: list[Any] = [*graph.node, sink]
    while any(_called_function(node, library, compiled) for node in nodes):
        nodes = _inline_one_level(nodes, library, compiled)
    return nodes[:-1], list(sink.input)


def _inline_one_level(nodes: list[Any], library: Mapping[str, Any], compiled: bool) -> list[Any]:
    result: list[Any] = []
    tensors: dict[str, str] = {}  # "call:2" -> the reference inside the inlined body
    effects: dict[str, list[str]] = {}  # "call" -> the nodes that finish when the call has finished
    for node in nodes:
        name = _called_function(node, library, compiled)
        if not name:
            result.append(node)
            continue
        body, outputs, effects[node.name] = _body_of_call(node, library[name], library)
        tensors.update({f"{node.name}:{i}": reference for i, reference in enumerate(outputs)})
        result += body
    for node in result:
        _redirect(node, tensors, effects)
    return result


def _called_function(node: Any, library: Mapping[str, Any], compiled: bool) -> str:
    if node.op in CALL_TYPES:
        return "" if is_compiled(node) and not compiled else str(node.attr["f"].func.name)
    return str(node.op) if node.op in library else ""


def _redirect(node: Any, tensors: Mapping[str, str], effects: Mapping[str, list[str]]) -> None:
    """Point the inputs of `node` that name an inlined call at the body that replaced it."""
    data: list[str] = []
    controls: list[str] = []
    pending = list(reversed(node.input))
    changed = False
    while pending:
        reference = pending.pop()
        name, index = split_reference(reference.lstrip("^"))
        if name not in effects:
            (controls if reference[0] == "^" else data).append(reference)
        elif reference[0] == "^":
            pending += [f"^{finish}" for finish in reversed(effects[name])]
            changed = True
        else:
            pending.append(tensors[f"{name}:{index}"])
            changed = True
    if changed:
        del node.input[:]
        node.input.extend(data + list(dict.fromkeys(controls)))


def _body_of_call(call: Any, function: Any, library: Mapping[str, Any]) -> tuple[list[Any], list[str], list[str]]:
    """Return the nodes of the called body, the references of its outputs, and the nodes that end its effects."""
    data = [i for i in call.input if not i.startswith("^")]
    controls = [i for i in call.input if i.startswith("^")]
    arguments = {argument.name: data[i] for i, argument in enumerate(function.signature.input_arg)}
    prefix = call.name + "/"
    flat = {node.name: output_names(node, library) for node in function.node_def}

    def translate(reference: str) -> str:
        if reference.startswith("^"):
            name = reference[1:]
            return f"^{split_reference(arguments[name])[0]}" if name in arguments else f"^{prefix}{name}"
        if reference in arguments:
            return str(arguments[reference])
        name, _, output = reference.partition(":")
        return f"{prefix}{name}:{flat[name].index(output)}"

    body = []
    begin = f"{prefix}begin"
    if controls:
        body.append(make_node(begin, "NoOp", controls))
    for original in function.node_def:
        node = NodeDef()
        node.CopyFrom(original)
        node.name = prefix + original.name
        node.device = node.device or call.device
        inside = [i for i in original.input if i.lstrip("^").split(":")[0] not in arguments]
        inputs = [translate(i) for i in original.input]
        if controls and not inside:
            inputs.append(f"^{begin}")
        del node.input[:]
        node.input.extend(inputs)
        body.append(node)
    outputs = [translate(function.ret[argument.name]) for argument in function.signature.output_arg]
    finish = [prefix + name for name in function.control_ret.values()]
    finish += [name for reference in outputs if (name := split_reference(reference)[0]).startswith(prefix)]
    if controls:
        finish.append(begin)
    return body, outputs, list(dict.fromkeys(finish))
