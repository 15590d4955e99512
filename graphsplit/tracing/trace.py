"""Tracing: the user's Python runs once, on symbolic tensors, and its graph is read.

What enters: a function, and the structure, dtypes and shapes of its arguments. What leaves: a `Trace`: the program, the
tensors and variables that it captured, and TensorFlow's own graph, to which gradients are added.

The variables that a function captured are those of which TensorFlow knows, and those behind handles alone.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.protos import make_node, set_inputs
from graphsplit.core.sizes import Shape
from graphsplit.core.tensorflow_internals import (
    captures_of_graph,
    resource_value,
    rewritten_by_autograph,
    variable_behind,
)
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import OWN_TRACE, parts_of
from graphsplit.errors import OutputError, bullet_list
from graphsplit.program.program import Locate, Program, is_stateful, is_write
from graphsplit.program.reading.function_bodies import Memo
from graphsplit.tracing.branch_effects import ShapeOf
from graphsplit.tracing.draw_counters import DrawCounters
from graphsplit.tracing.graph_to_program import CallSizes, Reading, graph_to_program

_objects: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()  # by the ids of their handles


def variables_of(
    graph: tf.Graph, placeholders: Sequence[tf.Tensor], captured: Sequence[tf.Tensor]
) -> tuple[tf.Variable, ...]:
    """Return the variables that a function captured, each once, in the order in which it did.

    A graph keeps a set of variables whose objects were used while it was built. Of others it has the handle (an old
    optimizer hands those of its slots to its kernels): for such there is a new object, for the same variable.

    Args:
      graph: of the function.
      placeholders: of what it captured.
      captured: what these stand for.
    """
    variables, places = list(graph.variables), {id(handle): k for k, handle in enumerate(captured)}
    with tf.init_scope(), raw_handles():
        handle_ids = {id(variable.handle) for variable in variables}
        for placeholder, handle in zip(placeholders, captured, strict=True):
            content = resource_value(placeholder) if handle.dtype == tf.resource and hasattr(handle, "numpy") else None
            if content is None or id(handle) in handle_ids:
                continue
            handle_ids.add(id(handle))
            parts = parts_of(handle)
            parted = parts.variable if parts is not None else None
            variables.append(_behind(handle, *content, placeholder.op.name) if parted is None else parted)
        # (what is laid out lies by this order: not by that of a set, which is another one in every process)
        return tuple(
            sorted(variables, key=lambda variable: (places.get(id(variable.handle), len(places)), variable.name))
        )


def _behind(handle: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape, name: str) -> tf.Variable:
    """Return the object for the variable behind a handle, the same as long as somebody has it (and so the handle)."""
    variable = _objects.get(id(handle))
    if variable is None:
        variable = _objects[id(handle)] = variable_behind(handle, dtype, shape, name)
    return variable


_COLLECTION = "graphsplit_traces"  # of a graph, and of graphs inside it: lists of parallelized functions called
_RETURNED_AS_IS = (bool, int, float, complex, str, bytes, type(None))


@dataclass(frozen=True, eq=False)
class SharedByTraces:
    """What the traces of one graph share: a function, its gradients, and the gradients of those.

    Attributes:
      lock: held by whoever adds to the graph or reads it.
      bodies: of loops and branches, as far as they were read.
      compiled: whether XLA compiles all of it, and not only the calls that ask for it.
      captured: what captures stand for, by the names of their placeholders: what they did when the first of the traces
        was made. A derivative may be traced in a graph of TensorFlow's (of a vectorized Jacobian), and be used later.
      draws: what kernels have drawn that remember it; None if they count for themselves.
    """

    lock: Any = field(default_factory=threading.RLock)
    bodies: Memo = field(default_factory=dict)
    compiled: bool = False
    captured: dict[str, tf.Tensor] = field(default_factory=dict)
    draws: DrawCounters | None = None


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A function that TensorFlow has traced, of which `read` makes a program.

    Attributes:
      function: TensorFlow's traced function.
      result: the structure of what it returns.
      shared: what traces of its graph have in common.
    """

    function: Any
    result: structures.Tree
    shared: SharedByTraces

    def read(
        self,
        names: Sequence[str],
        shapes: Sequence[Shape | None],
        sizes: CallSizes | None = None,
        values: Mapping[int, Shape] = MappingProxyType({}),
    ) -> Trace:
        """Return what it computes, for all sizes that the trace leaves open, or for some.

        Args:
          names: how the user calls each flat argument.
          shapes: of each, with what is said of open sizes: which axes are a batch.
          sizes: in a call, if the program is for calls of these shapes only.
          values: of arguments that are the shape of a sparse tensor, where these follow from open sizes.
        """
        function = self.function
        effects = [operation.name for operation in function.graph.control_outputs]
        graph_parts = function, function.inputs[: len(names)], function.outputs, effects, self.result
        named = {function.inputs[i].op.name: value for i, value in values.items()}
        return read_graph(*graph_parts, names, shapes, shared=self.shared, sizes=sizes, values=named)


@dataclass(frozen=True, eq=False)
class Trace:
    """A traced call.

    Attributes:
      program: what it computes.
      captures: the tensors from outside that it reads, in the order of `program.captures`: handles of variables and
        tables, constants of the surrounding program.
      variables: the variables behind them.
      result: the structure of what the function returns.
      inputs, outputs: the flat arguments and results as tensors of `graph`.
      effects: names of the operations of `graph` that must run: a call, whatever is in it. (TensorFlow puts another
        function into a call that it differentiates.)
      graph: TensorFlow's own graph of the function. Gradients are added to it; the program is read off it.
      function: TensorFlow's traced function, which owns the graph and the bodies of loops and branches.
      shared: what traces of one graph have in common.
      values: of inputs that are the shape of a sparse tensor, where these follow from open sizes.
    """

    program: Program
    captures: tuple[tf.Tensor, ...]
    variables: tuple[tf.Variable, ...]
    result: structures.Tree
    inputs: tuple[tf.Tensor, ...] = field(repr=False)
    outputs: tuple[tf.Tensor, ...] = field(repr=False)
    effects: tuple[str, ...] = field(repr=False)
    graph: Any = field(repr=False)
    function: Any = field(repr=False)
    shared: SharedByTraces = field(repr=False)
    values: Mapping[str, Shape] = field(default_factory=dict, repr=False)

    @property
    def lock(self) -> Any:
        """Held by whoever adds to the graph or reads it."""
        return self.shared.lock

    @property
    def draws(self) -> DrawCounters | None:
        """What counts the draws of its kernels; None if it has none, or they count for themselves."""
        draws = self.shared.draws
        return draws if draws is not None and draws.variables else None

    @property
    def counters(self) -> set[str]:
        """The names of the placeholders of what counts its draws."""
        handles = set(map(id, self.draws.handles if self.draws else ()))
        pairs = zip(self.program.captures, self.captures, strict=True)
        return {self.program.ops[i].name for i, handle in pairs if id(handle) in handles}

    @property
    def outer_graph(self) -> Any:
        """The graph that captures belong to, or None if all of them are eager."""
        return next((tensor.graph for tensor in self.captures if not hasattr(tensor, "numpy")), None)


def trace_function(
    fn: Callable[..., Any],
    arguments: structures.Tree,
    names: Sequence[str],
    compiled: bool = False,
    draws: DrawCounters | None = None,
) -> TracedFunction:
    """Trace `fn`.

    Args:
      fn: called as `fn(*args, **kwargs)`.
      arguments: the structure of `(args, kwargs)`.
      names: how the user calls each tensor in it.
      compiled: whether XLA is going to compile all of it.
      draws: what counts the draws of its kernels; None if they count for themselves.

    Raises:
      OutputError: if the function returns something that is neither a tensor nor a plain Python value.
      Exception: whatever `fn` raises, unchanged.
    """
    results: list[structures.Tree] = []
    rewritten = rewritten_by_autograph(fn)

    def flat_function(*tensors: tf.Tensor) -> Any:
        tf.compat.v1.add_to_collection(_COLLECTION, [])
        setattr(tf.compat.v1.get_default_graph(), OWN_TRACE, True)
        args, kwargs = structures.unflatten(arguments, _with_known_shapes(arguments, tensors))
        return _take_apart(rewritten(*args, **kwargs), results)  # refused results are reported below

    # (TensorFlow's errors then name an argument as the user does)
    leaves = zip(structures.leaves(arguments), names, strict=True)
    specs = [tf.TensorSpec(leaf.shape, leaf.dtype, _as_name(name)) for leaf, name in leaves]
    # (for XLA, TensorFlow writes loops whose lists have a greatest length)
    traced = tf.function(flat_function, autograph=False, jit_compile=compiled or None)
    function = traced.get_concrete_function(*specs)
    _check_result(results[-1])
    return TracedFunction(function, results[-1], SharedByTraces(compiled=compiled, draws=None if compiled else draws))


def read_graph(
    function: Any,
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    effects: Sequence[str],
    result: structures.Tree,
    names: Sequence[str],
    shapes: Sequence[Shape | None] | None = None,
    seeds: int = 0,
    shared: SharedByTraces | None = None,
    sizes: CallSizes | None = None,
    values: Mapping[str, Shape] = MappingProxyType({}),
) -> Trace:
    """Return some of a traced function's graph as a trace of its own, calls inlined.

    If shapes do not follow for every number of rows of a batch of unknown size, no axis of it counts as one.

    Args:
      function: the `ConcreteFunction` that the graph belongs to.
      inputs, outputs: tensors of its graph.
      effects: names of the operations that must run; if there are none, nothing in the graph waits for any.
      result: the structure of the outputs.
      names: how the user calls each input.
      shapes: of each input, if more is known than the graph says: which axes are a batch of unknown size.
      seeds: how many of the inputs, the last, are gradients of outputs.
      shared: by the traces of this graph, if there is one already.
      sizes: see `TracedFunction.read`.
      values: see `Reading`.
    """
    graph, shared = function.graph, shared or SharedByTraces()
    pairs = captures_in_order(graph, shared)
    placeholders = [placeholder for placeholder, _ in pairs]
    captured = [shared.captured.setdefault(placeholder.op.name, tensor) for placeholder, tensor in pairs]
    draws = shared.draws

    def counter_of(node: Any) -> str:
        assert draws is not None
        handle = draws.handle(node, taped=bool(seeds))
        name = str(graph.capture(handle).op.name)
        shared.captured[name] = handle
        return name

    inner = sorted({name for names in graph.get_collection(_COLLECTION)[-1:] for name in names})
    reading = Reading(
        inputs=[tensor.op.name for tensor in inputs],
        input_names=names,
        captures=[placeholder.op.name for placeholder in placeholders],
        outputs=[tensor.name for tensor in outputs],
        effects=effects,
        shapes=shapes or (),
        known=graph,
        held={p.op.name: value for p in placeholders if (value := _held(p)) is not None},
        locate=source_locator(graph),
        seeds=seeds,
        notes=[
            f"{name} is parallelized as well; it is planned with the rest, its own options are ignored"
            for name in inner
        ],
        adjust=_as_in_eager_code if effects else _without_effects,
        bodies=shared.bodies,
        shapes_inside=_shapes_inside(graph),
        compiled=shared.compiled,
        sizes=sizes,
        values=values,
        counter_of=None if draws is None else counter_of,
    )
    program = graph_to_program(graph.as_graph_def(), reading)
    counters = set(map(id, draws.handles if draws else ()))
    users = [k for k, handle in enumerate(captured) if id(handle) not in counters]
    variables = variables_of(graph, [placeholders[k] for k in users], [captured[k] for k in users])
    captures = tuple([shared.captured[program.ops[i].name] for i in program.captures])
    graph_parts = (tuple(inputs), tuple(outputs), tuple(effects), graph, function, shared)
    return Trace(program, captures, variables, result, *graph_parts, values)


def captured_variables(trace: Trace) -> dict[int, tf.Variable]:
    """Return the captured variables by the positions of their placeholders in the program."""
    with raw_handles():  # (nothing is put together, and there may be nothing yet)
        by_handle = {id(variable.handle): variable for variable in trace.variables}
    pairs = zip(trace.program.captures, trace.captures, strict=True)
    return {i: by_handle[id(handle)] for i, handle in pairs if id(handle) in by_handle}


def captures_in_order(graph: Any, shared: SharedByTraces) -> list[tuple[tf.Tensor, tf.Tensor]]:
    """Return what a graph captured, placeholders and what they stand for: first what the traces of it know, as they do.

    (What a gradient captures stands before what functions ask for at each call, and would move these.)
    """
    with raw_handles():
        pairs = list(zip(*captures_of_graph(graph), strict=True))
    position_by_name = {name: position for position, name in enumerate(shared.captured)}
    return sorted(pairs, key=lambda pair: position_by_name.get(pair[0].op.name, len(position_by_name)))


def _shapes_inside(graph: tf.Graph) -> ShapeOf:
    """Return what looks up the shapes of what nodes in the functions of a graph yield, if somebody asks."""

    @functools.cache
    def found() -> Mapping[tuple[str, str], Sequence[Any]]:
        bodies = graph.as_graph_def(add_shapes=True).library.function
        named = ((body.signature.name, inner) for body in bodies for inner in body.node_def)
        return {(name, inner.name): inner.attr["_output_shapes"].list.shape for name, inner in named}

    return lambda function, node: found().get((function, node), ())


def inside_trace(name: str = "") -> bool:
    """Return whether a parallelized function is being traced around the code that runs now.

    If so, `name` goes on that function's plan as one whose operations were planned with the rest.
    """
    traces = [] if tf.executing_eagerly() else tf.compat.v1.get_collection(_COLLECTION)
    if traces and name:
        traces[-1].append(name)
    return bool(traces)


def _as_name(path: str) -> str:
    """Return the path of an argument, `batch['x']`, as the name of an operation."""
    return re.sub(r"[^A-Za-z0-9]+", "_", path).strip("_") or "argument"


def held_by(trace: Trace) -> dict[str, tuple[tf.DType, tuple[int, ...]]]:
    """Return what captured variables of known shape hold, dtype and shape, by the names of their placeholders."""
    with raw_handles():
        placeholders, _ = captures_of_graph(trace.graph)
    held_by_name = {placeholder.op.name: _held(placeholder) for placeholder in placeholders}
    defined = {name: held for name, held in held_by_name.items() if held is not None and held[1].is_fully_defined()}
    return {name: (dtype, tuple(shape.as_list())) for name, (dtype, shape) in defined.items()}


def _held(placeholder: tf.Tensor) -> tuple[tf.DType, tf.TensorShape] | None:
    """Return what the variable behind a captured handle holds, or None for captures of other kinds."""
    return resource_value(placeholder) if placeholder.dtype == tf.resource else None


def _as_in_eager_code(nodes: Sequence[Any]) -> None:
    _order_writes_after_asserts(nodes)
    _forget_open_sizes(nodes)


def _without_effects(nodes: Sequence[Any]) -> None:
    """Let nothing wait for effects: in what runs forward again, they are those of the first run and must not happen.

    (What a called function returns waits for what it writes.)
    """
    _forget_open_sizes(nodes)
    effects = {f"^{node.name}" for node in nodes if is_stateful(node.op)}
    for node in nodes:
        set_inputs(node, [reference for reference in node.input if reference not in effects])


def _order_writes_after_asserts(nodes: Sequence[Any]) -> None:
    """Make every write wait for the assertions before it, as in eager code: what fails changes nothing.

    (A `tf.function` lets them race.)
    """
    asserts: list[str] = []
    for node in nodes:
        # tf.debugging guards its Assert by a branch, which touches no variable
        if node.op == "Assert" or (node.op == "If" and tf.resource.as_datatype_enum not in node.attr["Tin"].list.type):
            asserts.append(f"^{node.name}")
        elif asserts and is_write(node.op):
            node.input.extend(name for name in asserts if name not in node.input)


def _forget_open_sizes(nodes: Sequence[Any]) -> None:
    """Turn placeholders with defaults, which only hide sizes from Python while it is traced, into what they compute."""
    for node in nodes:
        if node.op == "PlaceholderWithDefault":
            node.CopyFrom(make_node(node.name, "Identity", node.input, T=tf.as_dtype(node.attr["dtype"].type)))


def _with_known_shapes(arguments: structures.Tree, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Return the flat arguments with constants for the shapes of sparse tensors, which are part of the signature."""
    shapes = structures.known_sparse_shapes(arguments)
    constants = {i: tf.constant(shape, tf.int64) for i, shape in shapes.items()}
    return [constants.get(i, tensor) for i, tensor in enumerate(tensors)]


def _take_apart(returned: Any, results: list[structures.Tree]) -> list[tf.Tensor]:
    tensors, tree = structures.flatten(_converted(returned))
    results.append(tree)
    return [tf.identity(tensor) for tensor in tensors]


def _check_result(tree: structures.Tree) -> None:
    """Refuse what cannot be returned again on the next call."""
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


def _converted(returned: Any) -> Any:
    """Replace what TensorFlow converts to tensors, as a `tf.function` does: a variable, a distribution.

    A variable counts as what it is worth when the function returns.
    """

    def value(leaf: Any) -> Any:
        if isinstance(leaf, (*_RETURNED_AS_IS, type)):
            return leaf
        try:
            return tf.convert_to_tensor(leaf)
        except (TypeError, ValueError):
            return leaf  # refused by `_check_result`, which knows where in the result it is

    return structures.map_static(value, returned)


def source_locator(graph: Any) -> Locate:
    """Return what finds the Python code that made an operation of a graph, or the call that it was inlined from."""

    def locate(name: str) -> Sequence[Any]:
        while name:
            try:
                operation = graph.get_operation_by_name(name)
            except KeyError:
                name = name.rpartition("/")[0]  # inlined: the call it came from
                continue
            return list(operation.traceback or ())
        return ()

    return locate
