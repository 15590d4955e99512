"""What failed while a graph ran, in the user's terms: the device, the rows of the batch, the line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import short_name
from graphsplit.core.user_code import line_in_models
from graphsplit.emission.emitter import emit
from graphsplit.planning.plan import Plan
from graphsplit.program.graph.function_calls import CONTROL_FLOW, functions_called

_COUNT = re.compile(r"^\d+ root error\(s\) found\.\s*\(0\) [A-Z_]+: ")
_OTHERS = re.compile(r"\n\s*\(1\) .*|\n\d+ successful operations\..*|\s*\[Op:[^\]]*\]\s*$", re.DOTALL)
_FUNCTION = re.compile(r"\{\{function_node [^}]*\}\}\s*")
_PLACE = re.compile(r"\[\[(?:\{\{function_node ([^}]*)\}\})?\{\{node ([^}]*)\}\}")
# (an operation's name, with its function or alone on a line; the values that a failed assertion prints are [[1 2]] too)
_PLACES = re.compile(r"\s*\[\[\{\{.*?\]\]|\n\s*\[\[\S*\]\]", re.DOTALL)
_REFUSED = "tf2xla conversion failed"  # what TensorFlow says when XLA cannot compile, before how to find out more
_LINES_OF_XLA = re.compile(rf"\s*(Stack trace for op definition:|The op is created at:|{_REFUSED}).*", re.DOTALL)


# One for each code of the runtime; their constructors are alike, the base class has another.
_KINDS = {kind for kind in vars(tf.errors).values() if isinstance(kind, type) and tf.errors.OpError in kind.__bases__}


@dataclass(frozen=True, eq=False)
class Located:
    """A context in which functions of a plan's graph run: what fails there says where, in the user's terms.

    The error is of the type that TensorFlow raised, and raised from that one. (In a graph that is being built nothing
    runs.)

    Attributes:
      plan: that the graph was emitted from.
      tensors: the flat arguments of the plan, which tell the number of rows.
    """

    plan: Plan
    tensors: Sequence[tf.Tensor]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if type(error) in _KINDS and tf.executing_eagerly():
            assert isinstance(error, tf.errors.OpError)
            if tf.debugging.is_traceback_filtering_enabled():
                error.__traceback__ = None  # its lines are ours and TensorFlow's
            raise located(error, self.plan, self.tensors) from error


def located(error: Any, plan: Plan, tensors: Sequence[tf.Tensor]) -> Any:
    """Return an error that says which device, rows and line of the user's failed; its own words come after that."""
    where = ", ".join(_places(error.message, plan, tensors))
    if not where:
        return type(error)(error.node_def, error.op, error.message)
    words = _own_words(error.message)
    if _REFUSED in words:
        words = (
            f"{_LINES_OF_XLA.sub('', words).rstrip('.')}. XLA cannot compile this. Leave out jit_compile=True, "
            "or compile a Keras model with jit_compile=False, which is not its default where a GPU is. You may put "
            "@tf.function(jit_compile=True) on functions inside that XLA can compile."
        )
    return type(error)(error.node_def, error.op, f"{where}: {words}")


def _places(message: str, plan: Plan, tensors: Sequence[tf.Tensor]) -> list[str]:
    """Return the device, the rows and the line of the first operation that an error names, as far as they are known.

    Shards whose iteration of a loop or branch is the same share its function: then it is known which loop, of no shard.
    """
    named = _PLACE.search(message)
    if named is None:
        return []
    graph = emit(plan)
    function, name = named.groups()
    library = {child.signature.name: child for child in graph.library.function}
    nodes = [node for node in graph.nodes if node.name == name] or _callers(graph.nodes, library, function or "")
    places = []
    if len(nodes) == 1:
        shard = graph.shard_of(nodes[0].name)
        places = [short_name(nodes[0].device), *([] if shard is None else _rows(plan, shard, tensors))]
    op = graph.origins[nodes[0].name].op if nodes else None
    line = line_in_models(plan.program.locate(name)) if op is None else plan.program.line_of(plan.program.ops[op])
    return [*places, line] if line else places


def _callers(nodes: Iterable[Any], library: Mapping[str, Any], function: str) -> list[Any]:
    """Return the loops and branches among nodes that call a function, or one that calls it."""
    named = {node.name: functions_called([node], library) for node in nodes if node.op in CONTROL_FLOW}
    return [node for node in nodes if any(f.signature.name == function for f in named.get(node.name, ()))]


def _rows(plan: Plan, shard: int, tensors: Sequence[tf.Tensor]) -> list[str]:
    """Return which rows of the batch a shard has, `rows 12-15`, if there is an argument that tells."""
    sources = plan.rows_sources()
    if not sources:
        return []
    position, axis, per_row = sources[0]
    rows = plan.mesh.rows_of(int(tensors[plan.program.inputs.index(position)].shape[axis]) // per_row)
    first, count = sum(rows[:shard]), rows[shard]
    return [f"row {first}" if count == 1 else f"rows {first}-{first + count - 1}"]


def _own_words(message: str) -> str:
    """Return what an operation said, without TensorFlow's account of where."""
    message = _OTHERS.sub("", _COUNT.sub("", message))
    return _PLACES.sub("", _FUNCTION.sub("", message)).strip()
