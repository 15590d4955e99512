"""What control-flow ops call: the functions that they name, with which arguments, and new names for changed ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

# op type -> the attributes that name its functions, the attribute with the arguments' types, arguments before them
CONTROL_FLOW: dict[str, tuple[tuple[str, ...], str, int]] = {
    "While": (("cond", "body"), "T", 0),
    "StatelessWhile": (("cond", "body"), "T", 0),
    "If": (("then_branch", "else_branch"), "Tin", 1),
    "StatelessIf": (("then_branch", "else_branch"), "Tin", 1),
    "Case": (("branches",), "Tin", 1),
    "StatelessCase": (("branches",), "Tin", 1),
    "PartitionedCall": (("f",), "Tin", 0),  # only those that are not inlined: compiled by XLA
    "StatefulPartitionedCall": (("f",), "Tin", 0),
}


def function_names(node: Any) -> list[str]:
    """Return the functions that a control-flow node names, in the order of its attributes."""
    names = []
    for attribute in CONTROL_FLOW[node.op][0]:
        value = node.attr[attribute]
        names += [value.func.name] if value.HasField("func") else [f.name for f in value.list.func]
    return names


def rename_functions(node: Any, names: Mapping[str, str]) -> None:
    """Let a control-flow node name other functions."""
    for attribute in CONTROL_FLOW[node.op][0]:
        value = node.attr[attribute]
        for function in [value.func] if value.HasField("func") else value.list.func:
            function.name = names.get(function.name, function.name)


def hand_over(node: Any, given: Sequence[str]) -> None:
    """Let a control-flow node hand more arguments to its functions, 64-bit integers."""
    if given:
        inputs = [r for r in node.input if r[0] != "^"]
        controls = [r for r in node.input if r[0] == "^"]
        del node.input[:]
        node.input.extend([*inputs, *given, *controls])
        types = node.attr[CONTROL_FLOW[node.op][1]].list.type
        types.extend([tf.int64.as_datatype_enum] * len(given))
        if "While" in node.op:
            del node.attr["output_shapes"].list.shape[:]  # TensorFlow infers them again


def named_by_content(function: Any) -> Any:
    """Return `function` under a name that its content determines: equal functions are one, others never clash."""
    result = type(function)()
    result.CopyFrom(function)
    base = result.signature.name.split("__graphsplit_")[0]
    result.signature.name = ""
    digest = hashlib.sha256(result.SerializeToString(deterministic=True)).hexdigest()[:16]
    result.signature.name = f"{base}__graphsplit_{digest}"
    return result
