"""What control-flow ops call: the functions that they name, with which arguments, and new names for changed ones."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core.protos.graphdefs import functions_named, inputs_of
from graphsplit.errors import UnsupportedError
from graphsplit.program.graph.walks import reached


@dataclass(frozen=True)
class ControlFlow:
    """How an op type calls functions.

    Attributes:
      functions: the attributes that name them.
      types: the attribute with the types of their arguments.
      chooses: whether its first operand says which function to call, and is not handed on.
      loops: whether what a function returns is handed to it again.
      compiled: whether XLA compiles the function as a whole. (Other calls are inlined.)
      stateless: the type of the same op without effects.
    """

    functions: tuple[str, ...]
    types: str = "Tin"
    chooses: bool = False
    loops: bool = False
    compiled: bool = False
    stateless: str = ""


_WHILE = ControlFlow(("cond", "body"), "T", loops=True, stateless="StatelessWhile")
_IF = ControlFlow(("then_branch", "else_branch"), chooses=True, stateless="StatelessIf")
_CASE = ControlFlow(("branches",), chooses=True, stateless="StatelessCase")
_CALL = ControlFlow(("f",), compiled=True, stateless="PartitionedCall")
CONTROL_FLOW = {
    "While": _WHILE,
    "StatelessWhile": _WHILE,
    "If": _IF,
    "StatelessIf": _IF,
    "Case": _CASE,
    "StatelessCase": _CASE,
    "PartitionedCall": _CALL,
    "StatefulPartitionedCall": _CALL,
}


_MOST_LEVELS = 50


def function_names(node: Any) -> list[str]:
    """Return the functions that a control-flow node names, in the order of its attributes."""
    names = []
    for attribute in CONTROL_FLOW[node.op].functions:
        value = node.attr[attribute]
        names += [value.func.name] if value.HasField("func") else [f.name for f in value.list.func]
    return names


def functions_called(nodes: Iterable[Any], library: Mapping[str, Any]) -> list[Any]:
    """Return the functions of a library that run where nodes do: those that they name, those that these name, ..."""
    names = reached(functions_named(nodes, library), lambda name: functions_named(library[name].node_def, library))
    return [library[name] for name in names]


def check_nesting(nodes: Iterable[Any], library: Mapping[str, Any]) -> None:
    """Raise `UnsupportedError` if functions in functions are too many levels for Python's stack.

    (Planning needs 12 of its 1,000 frames for each. With 100 levels TensorFlow takes 10 seconds for one run.)
    """
    level: Sequence[str] = ()
    for _ in range(_MOST_LEVELS + 1):
        calling = [node for node in nodes if node.op in CONTROL_FLOW]
        level = [name for name in dict.fromkeys(n for node in calling for n in function_names(node)) if name in library]
        if not level:
            return
        nodes = [node for name in level for node in library[name].node_def]
    raise UnsupportedError(
        f"Loops and branches are nested more than {_MOST_LEVELS} levels deep, down to the function {level[0]!r} and "
        "further. Merge some of them into one tf.while_loop or tf.switch_case."
    )


def rename_functions(node: Any, names: Mapping[str, str]) -> None:
    """Let a control-flow node name other functions."""
    for attribute in CONTROL_FLOW[node.op].functions:
        value = node.attr[attribute]
        for function in [value.func] if value.HasField("func") else value.list.func:
            function.name = names.get(function.name, function.name)


def hand_over(node: Any, given: Sequence[str]) -> None:
    """Let a control-flow node hand more arguments to its functions, 64-bit integers."""
    if given:
        data, controls = inputs_of(node)
        node.input[:] = [*data, *given, *controls]
        types = node.attr[CONTROL_FLOW[node.op].types].list.type
        types.extend([tf.int64.as_datatype_enum] * len(given))
        if CONTROL_FLOW[node.op].loops:
            del node.attr["output_shapes"].list.shape[:]  # TensorFlow infers them again


def named_by_content(function: Any) -> Any:
    """Return `function` under a name that its content determines: equal functions are one, others never clash."""
    result = deepcopy(function)
    base = result.signature.name.split("__graphsplit_")[0]
    result.signature.name = ""
    digest = hashlib.sha256(result.SerializeToString(deterministic=True)).hexdigest()[:16]
    result.signature.name = f"{base}__graphsplit_{digest}"
    return result
