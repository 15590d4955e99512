"""Variables that a loop or branch only reads are read once, before it: then it has no effects and can be sharded.

`tf.while_loop` and `tf.cond` capture variables as resource handles and read them inside. Here such an argument becomes
the value: a read before the loop, the type of the argument, and an identity where the reads were, or a gather of rows
where rows were looked up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import tensorflow as tf

from graphsplit.core.protos import inputs_of, make_node, source_of
from graphsplit.program.graph.function_calls import CONTROL_FLOW, function_names, named_by_content, rename_functions
from graphsplit.tracing.branch_effects import ShapeOf, is_stateful, split_effects
from graphsplit.tracing.decompositions import GATHERS, gather_from

_RESOURCE = tf.resource.as_datatype_enum
_READS = ("ReadVariableOp", *GATHERS)


def hoist_reads(
    nodes: Sequence[Any],
    library: Mapping[str, Any],
    shapes: Mapping[str, tf.TensorShape],
    shapes_inside: ShapeOf = lambda *_: (),
) -> tuple[list[Any], dict[str, Any], dict[str, str]]:
    """Return `nodes` and the functions they use, with reads hoisted out of loops and branches, and effects of branches.

    And the names of those branches, each with that of the node that has its effects now.

    Args:
      nodes: `NodeDef`s in graph spelling.
      library: the functions by name.
      shapes: shapes of the variables behind captured handles, by placeholder name.
      shapes_inside: shapes of what nodes in functions yield.
    """
    hoister = _Hoister(dict(library), shapes, shapes_inside)
    hoisted, moved = hoister.hoist(list(nodes))
    return hoisted, hoister.library, moved


class _Hoister:
    def __init__(self, library: dict[str, Any], shapes: Mapping[str, tf.TensorShape], shapes_inside: ShapeOf):
        self.library = library
        self._shapes_inside = shapes_inside
        self._inside: dict[str, str] = {}  # what functions are called after that: several may call the same
        self._originals: dict[str, str] = {}  # functions that were changed -> as they were traced
        self._shapes = shapes

    def hoist(self, nodes: list[Any], returned: Sequence[str] | None = None) -> tuple[list[Any], dict[str, str]]:
        """Hoist out of every loop and branch among `nodes`: a graph's, or, with what it returns, a function's."""
        moved: dict[str, str] = {}  # branches -> where their effects are
        waits: dict[str, list[str]] = {}  # for a branch -> for its effects, and for reads before whoever writes later
        spelling = "{}:{}" if returned is None else "{}:output:{}"
        result: list[Any] = []
        handles: dict[str, str] = {}  # what a loop hands through -> what it was given
        for node in nodes:
            if handles:
                node.input[:] = [handles.get(reference, reference) for reference in node.input]
            if node.op not in CONTROL_FLOW:
                result.append(node)
                continue
            rename_functions(node, {name: self._hoist_inside(name) for name in function_names(node)})
            reads = self._hoist_node(node, set(returned or ()), spelling, handles)
            inside = [inner for name in function_names(node) for inner in self.library[name].node_def]
            if not any(is_stateful(inner, self.library) for inner in inside):
                node.op = CONTROL_FLOW[node.op].stateless
            elif CONTROL_FLOW[node.op].chooses:
                parts = split_effects(node, self.library, spelling, self._shape_inside)
                if len(parts) > 1:
                    moved[node.name] = parts[0].name
                    waits[f"^{node.name}"] = [f"^{node_after.name}" for node_after in (parts[0], *reads)]
                result += [*reads, *parts]
                continue
            result += [*reads, node]
        for node in result if waits else ():
            node.input[:] = [waited for reference in node.input for waited in waits.get(reference, [reference])]
        return result, moved

    def _shape_inside(self, function: str, node: str) -> Sequence[Any]:
        while function in self._originals:
            function = self._originals[function]
        return self._shapes_inside(function, node)

    def _hoist_inside(self, name: str) -> str:
        """Hoist out of the loops and branches inside a function, which is another one then; return its name.

        Nothing in it need be beside another node any more: of what several shards call, that is one place for all.
        """
        if name in self._inside:  # several branches may call it
            return self._inside[name]
        function = self.library[name]
        changed = deepcopy(function)
        for node in changed.node_def:
            if "_class" in node.attr:
                del node.attr["_class"]
        if any(node.op in CONTROL_FLOW for node in changed.node_def):
            nodes, moved = self.hoist([deepcopy(node) for node in changed.node_def], list(function.ret.values()))
            for output, node in function.control_ret.items():
                changed.control_ret[output] = moved.get(node, node)
            del changed.node_def[:]
            changed.node_def.extend(nodes)
        if changed != function:
            changed = named_by_content(changed)
            self._add(changed, name)
        new_name = str(changed.signature.name)
        self._inside |= {name: new_name, new_name: new_name}
        return new_name

    def _add(self, function: Any, original: str) -> None:
        self.library[function.signature.name] = function
        self._originals[function.signature.name] = original

    def _hoist_node(self, node: Any, returned: set[str], spelling: str, handles: dict[str, str]) -> list[Any]:
        """Hoist what can be hoisted out of one node; return the reads that now stand before it."""
        flow = CONTROL_FLOW[node.op]
        types, first, loop = flow.types, int(flow.chooses), flow.loops
        names = function_names(node)
        data, controls = inputs_of(node)
        reads, chosen = [], {}
        for i, reference in enumerate(data[first:]):
            if node.attr[types].list.type[i] != _RESOURCE:
                continue
            dtypes = {d or 0 for name in names for d in _dtypes_read(self.library[name], i, loop)}
            if len(dtypes) != 1 or 0 in dtypes or (loop and spelling.format(node.name, i) in returned):
                continue
            chosen[i] = dtypes.pop()
            if loop:
                handles[spelling.format(node.name, i)] = reference
            read_node = make_node(
                f"{node.name}/read_{i}", "ReadVariableOp", [reference, *controls], dtype=tf.as_dtype(chosen[i])
            )
            reads.append(read_node)
            data[first + i] = read_node.name if spelling == "{}:{}" else f"{read_node.name}:value:0"
            node.attr[types].list.type[i] = chosen[i]
            if loop and node.attr["output_shapes"].list.shape:
                shape = self._shapes.get(source_of(reference), tf.TensorShape(None))
                node.attr["output_shapes"].list.shape[i].CopyFrom(shape.as_proto())
        if chosen:
            node.input[:] = data + controls
            renamed = {}
            for name in dict.fromkeys(names):
                function = _with_values(self.library[name], chosen)
                renamed[name] = function.signature.name
                self._add(function, name)
            rename_functions(node, renamed)
        return reads


def _dtypes_read(function: Any, i: int, loop: bool) -> list[int | None]:
    """Return the dtypes that a function reads from argument `i`; with a None if it does anything else with it."""
    argument = function.signature.input_arg[i].name
    dtypes: list[int | None] = []
    for node in function.node_def:
        if argument in node.input:
            dtypes.append(node.attr["dtype"].type if node.op in _READS else None)
    returned = [output for output, reference in function.ret.items() if reference == argument]
    if returned:
        same_place = len(function.signature.output_arg) > i and returned == [function.signature.output_arg[i].name]
        if not (loop and same_place):
            dtypes.append(None)
    return dtypes


def _with_values(function: Any, chosen: Mapping[int, int]) -> Any:
    """Return `function` with values instead of handles as the chosen arguments."""
    result = deepcopy(function)
    values = {}
    for i, dtype in chosen.items():
        argument = result.signature.input_arg[i]
        values[argument.name] = dtype
        argument.ClearField("handle_data")
        argument.type = dtype
        if i in result.arg_attr:
            del result.arg_attr[i]
        if i < len(result.signature.output_arg) and result.signature.output_arg[i].type == _RESOURCE:
            result.signature.output_arg[i].type = dtype
            result.signature.output_arg[i].ClearField("handle_data")
    renamed, axes = {}, []
    for node in result.node_def:
        if node.op in GATHERS and node.input[0] in values:
            *axis, gather = gather_from(node, node.input[0], "{}:output:0")
            gather.input.extend(node.input[2:])  # what it waits for
            node.CopyFrom(gather)
            axes += axis
        elif node.op in _READS and node.input[0] in values:
            dtype = tf.as_dtype(node.attr["dtype"].type)
            renamed[f"{node.name}:value:0"] = f"{node.name}:output:0"
            inputs = list(node.input)
            identity = make_node(node.name, "Identity", inputs, T=dtype)
            node.CopyFrom(identity)
    result.node_def.extend(axes)
    for node in result.node_def:
        node.input[:] = [renamed.get(reference, reference) for reference in node.input]
    for output, reference in function.ret.items():
        result.ret[output] = renamed.get(reference, reference)
    return named_by_content(result)
