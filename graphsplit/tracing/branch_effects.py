"""Branches whose effects do not depend on the batch are two: one has the effects, the other computes.

`tf.cond(..., lambda: x + tf.random.normal(...), ...)` draws in one of its branches, once. A branch with effects runs
once, on all of `x`. Here what has effects becomes a branch of its own, which is given what the other was given
and returns what it drew or read; the other one takes that, has no effects, and can be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.protos import constant_node, constant_value, inputs_of, source_of, with_inputs
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names, named_by_content, rename_functions
from graphsplit.program.graph.graph import Graph

_RESOURCE = tf.resource.as_datatype_enum
_RANDOM = frozenset({"RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal"})

ShapeOf = Callable[[str, str], Sequence[Any]]
"""Returns the shapes (protos) of a node's outputs, given the names of its function and of the node; none if unknown."""


class _Crossing(NamedTuple):
    """What the effects of one branch hand to the rest of it."""

    branch: str
    reference: str
    dtype: int
    shape: tuple[int, ...]


def split_effects(node: Any, library: dict[str, Any], spelling: str, shapes: ShapeOf) -> list[Any]:
    """Return the nodes that a branch with effects becomes: its effects and the rest, or itself if it must stay one.

    Who waits for the branch has to wait for its effects, the first of the nodes.

    Args:
      node: the branch; it is changed.
      library: the functions by name; new ones are added.
      spelling: of references where the node is: `{}:{}` in a graph, `{}:output:{}` in a function.
      shapes: see `ShapeOf`.
    """
    flow, names = CONTROL_FLOW[node.op], function_names(node)
    functions = {name: library[name] for name in names}
    crossings: list[_Crossing] = []
    for function in functions.values():
        of_function = _crossings(function, library, shapes)
        if of_function is None:
            return [node]
        crossings += of_function
    effects = deepcopy(node)
    effects.name = f"{node.name}/effects"
    effects.attr["Tout"].list.type[:] = [crossing.dtype for crossing in crossings]
    del effects.attr["output_shapes"].list.shape[:]
    for crossing in crossings:
        effects.attr["output_shapes"].list.shape.add().CopyFrom(tf.TensorShape(crossing.shape).as_proto())
    effect_functions = {name: _effects_of(function, library, crossings) for name, function in functions.items()}
    pure_functions = {name: _rest_of(function, library, crossings) for name, function in functions.items()}
    _call(effects, effect_functions, library, ())
    drawn = [spelling.format(effects.name, k) for k in range(len(crossings))]
    _call(node, pure_functions, library, list(zip(drawn, [crossing.dtype for crossing in crossings], strict=True)))
    node.op = flow.stateless
    return [effects, node]


def _call(node: Any, functions: Mapping[str, Any], library: dict[str, Any], added: Sequence[tuple[str, int]]) -> None:
    """Let a branch call other functions, with what they use of its arguments and of added ones, each with its type.

    Args:
      node: the branch.
      functions: by the names of those that it calls now.
      library: the new functions are added.
      added: further arguments: references and types.
    """
    flow = CONTROL_FLOW[node.op]
    data, controls = inputs_of(node)
    types = node.attr[flow.types].list.type
    arguments = [*zip(data[flow.chooses :], types, strict=True), *added]
    unused = _unused(list(functions.values()))
    used = [argument for i, argument in enumerate(arguments) if i not in unused]
    node.input[:] = [*data[: flow.chooses], *[reference for reference, _ in used], *controls]
    types[:] = [dtype for _, dtype in used]
    functions_without = {name: named_by_content(_without(function, unused)) for name, function in functions.items()}
    library.update({function.signature.name: function for function in functions_without.values()})
    rename_functions(node, {name: function.signature.name for name, function in functions_without.items()})


def is_stateful(node: Any, library: Mapping[str, Any]) -> bool:
    """Return whether running a node twice differs from running it once; it may call a function by its name."""
    if node.op in library:
        return any(is_stateful(inner, library) for inner in library[node.op].node_def)
    return bool(op_definition(node.op).is_stateful)


def _crossings(function: Any, library: Mapping[str, Any], shapes: ShapeOf) -> list[_Crossing] | None:
    """Return what the effects of a function hand to the rest of it; None if they depend on its data."""
    nodes = {node.name: node for node in function.node_def}
    stateful = [node for node in function.node_def if is_stateful(node, library)]
    handles = {argument.name for argument in function.signature.input_arg if argument.type == _RESOURCE}
    for node in _slice(function, stateful):
        if any(source_of(r) not in nodes and source_of(r) not in handles for r in node.input):
            return None  # on rows, perhaps
    references = [r for node in function.node_def if node not in stateful for r in node.input if r[0] != "^"]
    effects = {node.name for node in stateful}
    crossing = [r for r in dict.fromkeys([*references, *function.ret.values()]) if source_of(r) in effects]
    crossings = []
    for reference in crossing:
        node = nodes[source_of(reference)]
        type_and_shape = _type_and_shape(function, node, shapes)
        if type_and_shape is None:
            return None
        crossings.append(_Crossing(function.signature.name, reference, *type_and_shape))
    return crossings


def _slice(function: Any, ends: Sequence[Any]) -> list[Any]:
    """Return the nodes of a function from which some of them follow, and these."""
    names = Graph.of_function(function).before([node.name for node in ends])
    return [node for node in function.node_def if node.name in names]


def _type_and_shape(function: Any, node: Any, shapes: ShapeOf) -> tuple[int, tuple[int, ...]] | None:
    """Return the type and the shape of what a node with effects yields, or None where these are not known."""
    if node.op in _RANDOM:
        sizes = next(n for n in function.node_def if n.name == source_of(node.input[0]))
        dtype = node.attr["Tout" if node.op == "RandomUniformInt" else "dtype"].type
        return (dtype, tuple(map(int, constant_value(sizes)))) if sizes.op == "Const" else None
    shape_protos = shapes(function.signature.name, node.name)
    shape = tf.TensorShape(shape_protos[0]) if shape_protos else tf.TensorShape(None)
    simple = node.op == "ReadVariableOp" and shape.is_fully_defined()
    return (node.attr["dtype"].type, tuple(shape.as_list())) if simple else None


def _effects_of(function: Any, library: Mapping[str, Any], crossings: Sequence[_Crossing]) -> Any:
    """Return a function that has the effects of a branch, and returns what they give; zeros for the other branches'."""
    result = deepcopy(function)
    nodes = _slice(function, [node for node in function.node_def if is_stateful(node, library)])
    del result.node_def[:]
    result.node_def.extend(nodes)
    del result.signature.output_arg[:]
    result.ret.clear()
    for k, crossing in enumerate(crossings):
        name = f"graphsplit_{k}"
        result.signature.output_arg.add(name=name, type=crossing.dtype)
        result.ret[name] = crossing.reference
        if crossing.branch != function.signature.name:
            dtype = tf.as_dtype(crossing.dtype)
            nothing = np.broadcast_to(np.zeros((), dtype.as_numpy_dtype), crossing.shape)
            result.node_def.append(constant_node(f"graphsplit_nothing_{k}", nothing, dtype))
            result.ret[name] = f"graphsplit_nothing_{k}:output:0"
    _keep_control_results(result)
    return result


def _rest_of(function: Any, library: Mapping[str, Any], crossings: Sequence[_Crossing]) -> Any:
    """Return a branch without its effects: it is given what these give, those of other branches as well."""
    result = deepcopy(function)
    argument_of_result = {}
    for k, crossing in enumerate(crossings):
        result.signature.input_arg.add(name=f"graphsplit_{k}", type=crossing.dtype)
        if crossing.branch == function.signature.name:
            argument_of_result[crossing.reference] = f"graphsplit_{k}"
    effects = {node.name for node in function.node_def if is_stateful(node, library)}
    del result.node_def[:]
    for node in function.node_def:
        if node.name not in effects:
            inputs = [argument_of_result.get(r, r) for r in node.input if r[0] != "^" or r[1:] not in effects]
            result.node_def.append(with_inputs(node, inputs))
    for output, reference in function.ret.items():
        result.ret[output] = argument_of_result.get(reference, reference)
    _keep_control_results(result)
    return result


def _keep_control_results(function: Any) -> None:
    """Drop what a function no longer has from the effects that it names."""
    nodes = {node.name for node in function.node_def}
    outputs = {output: name for output, name in function.control_ret.items() if name in nodes}
    function.control_ret.clear()
    function.control_ret.update(outputs)
    function.signature.control_output[:] = [name for name in function.signature.control_output if name in outputs]
    function.signature.is_stateful = bool(outputs)


def _unused(functions: Sequence[Any]) -> set[int]:
    """Return the numbers of the arguments that none of some functions uses."""
    unused = set(range(len(functions[0].signature.input_arg)))
    for function in functions:
        names_read = {source_of(r) for node in function.node_def for r in node.input} | set(function.ret.values())
        unused -= {i for i in unused if function.signature.input_arg[i].name in names_read}
    return unused


def _without(function: Any, dropped: set[int]) -> Any:
    """Return a function without some of its arguments."""
    result = deepcopy(function)
    numbers = [i for i in range(len(function.signature.input_arg)) if i not in dropped]
    del result.signature.input_arg[:]
    result.signature.input_arg.extend(function.signature.input_arg[i] for i in numbers)
    result.arg_attr.clear()
    for new, old in enumerate(numbers):
        if old in function.arg_attr:
            result.arg_attr[new].CopyFrom(function.arg_attr[old])
    return result
