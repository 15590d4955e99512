"""Tracing: anything callable -> Program, by running the user's Python once on symbolic tensors of known shape."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graphsplit import structures
from graphsplit.errors import OutputError, bullet_list
from graphsplit.graphdefs import inline_calls
from graphsplit.programs import Program, build_program
from graphsplit.tensorflow_internals import resource_value

_OWN_FOLDER = os.path.dirname(os.path.abspath(__file__))
_RETURNED_AS_IS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced call.

    Attributes:
      program: what it computes.
      captures: the tensors from outside that it reads, in the order of `program.captures`: handles of variables and
        tables, constants of the surrounding program.
      variables: the variables behind them.
      result: the structure of what the function returns.
      outer_graph: the graph that the captures belong to, or None if all of them are eager.
      function: TensorFlow's own traced function, which owns the bodies of loops and branches.
    """

    program: Program
    captures: tuple[tf.Tensor, ...]
    variables: tuple[tf.Variable, ...]
    result: structures.Tree
    outer_graph: Any = field(repr=False)
    function: Any = field(repr=False)


def trace(fn: Callable[..., Any], arguments: structures.Tree, names: Sequence[str]) -> Trace:
    """Trace `fn`.

    Args:
      fn: called as `fn(*args, **kwargs)`.
      arguments: the structure of `(args, kwargs)`.
      names: how the user calls each tensor in it.

    Raises:
      OutputError: if the function returns something that is neither a tensor nor a plain Python value.
      Exception: whatever `fn` raises, unchanged.
    """
    results: list[structures.Tree] = []
    take_apart = tf.autograph.experimental.do_not_convert(_take_apart)
    put_together = tf.autograph.experimental.do_not_convert(structures.unflatten)

    def flat_function(*tensors: tf.Tensor) -> Any:
        args, kwargs = put_together(arguments, tensors)
        returned = fn(*args, **kwargs)
        return take_apart(returned, results)

    specs = [leaf.spec() for leaf in structures.leaves(arguments)]
    function = tf.function(flat_function).get_concrete_function(*specs)
    graph = function.graph
    captures = tuple(function.captured_inputs)
    names_in_graph = [tensor.op.name for tensor in function.inputs]
    capture_names = names_in_graph[len(specs) :]
    outputs = [tensor.name for tensor in function.outputs]
    effects = [f"^{operation.name}" for operation in graph.control_outputs]
    graph_def = graph.as_graph_def()
    nodes, references, lost = inline_calls(graph_def, outputs + effects)
    asked = sorted({node.device for node in nodes if node.device})
    if asked:
        lost.append(f"tf.device requests inside the function are replaced by the plan's: {', '.join(asked)}")
    resources = {
        name: value
        for name, handle in zip(capture_names, function.inputs[len(specs) :], strict=True)
        if handle.dtype == tf.resource and (value := resource_value(handle)) is not None
    }
    program = build_program(
        nodes,
        inputs=names_in_graph[: len(specs)],
        input_names=names,
        captures=capture_names,
        outputs=references[: len(outputs)],
        effects=[reference[1:] for reference in references[len(outputs) :]],
        library=graph_def.library,
        versions=graph_def.versions,
        resources=resources,
        notes=tuple(dict.fromkeys(lost)),
        locate=_locator(graph),
    )
    outside = next((tensor.graph for tensor in captures if not _is_eager(tensor)), None)
    variables = tuple(graph.variables)
    return Trace(program, captures, variables, results[-1], outside, function)


def _is_eager(tensor: tf.Tensor) -> bool:
    return hasattr(tensor, "numpy")


def _take_apart(returned: Any, results: list[structures.Tree]) -> list[tf.Tensor]:
    """Flatten what the function returned, refusing what cannot be returned again on the next call."""
    returned = _tensors_of_variables(returned)
    tensors, tree = structures.flatten(returned)
    foreign = [
        f"{path or 'the result'}: {type(value).__module__}.{type(value).__name__}"
        for path, value in structures.static_leaves(tree, "")
        if not isinstance(value, _RETURNED_AS_IS)
    ]
    if foreign:
        raise OutputError(
            "The function returns values that are not tensors:\n"
            f"{bullet_list(foreign)}\n"
            "Return tensors, numpy arrays, Python numbers, strings, None, or lists, tuples, dicts and dataclasses of "
            "them; keep other objects outside of the function."
        )
    results.append(tree)
    return [tf.identity(tensor) if isinstance(tensor, tf.Tensor) else tensor for tensor in tensors]


def _tensors_of_variables(returned: Any) -> Any:
    """Replace variables in the result by their values: what a variable is worth when the function returns."""

    def value(leaf: Any) -> Any:
        is_variable = isinstance(leaf, tf.Variable) or hasattr(leaf, "assign_add")
        return tf.convert_to_tensor(leaf) if is_variable else leaf

    return structures.map_static(value, returned)


def _locator(graph: Any) -> Callable[[str], str]:
    """Return a function from operation names to the line of the user's code that made them."""

    def locate(name: str) -> str:
        while name:
            try:
                operation = graph.get_operation_by_name(name)
            except KeyError:
                name = name.rpartition("/")[0]  # inlined: the call it came from
                continue
            return _user_line(operation.traceback)
        return ""

    return locate


def _user_line(frames: Any) -> str:
    skipped = (os.path.dirname(tf.__file__), _OWN_FOLDER, os.sep + "keras" + os.sep, "site-packages", "<")
    for frame in reversed(list(frames or ())):
        if not any(part in frame.filename for part in skipped) and "__autograph_generated_file" not in frame.filename:
            return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return ""
