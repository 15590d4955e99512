"""Graphs to look at: where they come from, and how to run one of them once and leave no trace of it."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import tensorflow as tf

from graphsplit.core.devices import canonical_name, missing_devices
from graphsplit.core.gpus import has_gpus
from graphsplit.core.layouts import part_shapes
from graphsplit.core.protos import function_definition, is_marked
from graphsplit.core.storage.files import model_file
from graphsplit.core.storage.integrity import check_whole
from graphsplit.core.storage.stored_models import load_saved_model, read_saved_model, signatures_of
from graphsplit.core.structures import spec_text
from graphsplit.core.tensorflow_internals import RuntimeFunction, resource_value, rewritten_by_autograph
from graphsplit.core.user_code import line_in_models
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.emission.clusters import compile_clusters
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.planning.plan import Plan
from graphsplit.planning.state import devices_of_handles
from graphsplit.runtime.executable import make_executable
from graphsplit.runtime.handles import captured
from graphsplit.tracing.trace import Trace, source_locator

_serial = itertools.count()
_INFERENCE = re.compile(r"__inference_(.+)_\d+")
_WRITTEN = re.compile(r"((shard_*\d*|graphsplit_*/[a-z_]+\d+)/(?=.))*")  # of a shard or column, of a move
HeldValue = tuple[tf.DType, tf.TensorShape]


class Planned(NamedTuple):
    """A function of one signature, planned for several devices, with the flat arguments of a call."""

    trace: Trace
    plan: Plan
    tensors: Sequence[Any]
    name: str


@runtime_checkable
class Planning(Protocol):
    """Whatever plans its calls: a parallelized function. (`api/` imports this folder.)"""

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool) -> Planned: ...


@dataclass(frozen=True, eq=False)
class PlacementSource:
    """A graph with what is known about it.

    Attributes:
      graph: a `GraphDef`, with placeholders for arguments and captures.
      outputs, effects: references of what it returns, names of what must run; None if nobody knows (a bare graph).
      inputs: names of the placeholders, in the order in which the function takes them.
      held: what captured variables hold, by the name of their placeholder.
      variables: names of captured variables, by the name of their placeholder.
      arguments: how users call arguments, by the name of their placeholder.
      resource_devices: where captured variables and tables live, by the name of their placeholder.
      locate: operation name -> the user's source line.
      shard_of: the shard of the nodes that run on shards.
      role_of: what nodes are there for that are no operations of the function: a move of which kind, ...
      written_of: the scopes that come before the names that nodes' operations have in the function.
      stage_of: the name of the stage of those of them that are in one.
      run_once: for nodes that carry the batch and run once: the reason and the bytes gathered for it.
      rows: rows of the batch on each shard; empty if not known.
      compiled: nodes that run as part of a call that XLA compiles -> the call, which is not in the graph.
      make_run: returns a new function of the flat arguments that runs the graph; None if it cannot be run.
      state: returns the handles of the captured variables, with their dtypes, for a run: values may move to them.
    """

    graph: Any = field(repr=False)
    outputs: Sequence[str] | None = None
    effects: Sequence[str] = ()
    inputs: Sequence[str] = ()
    held: Mapping[str, HeldValue] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    resource_devices: Mapping[str, str] = field(default_factory=dict)
    locate: Callable[[str], str] = lambda _: ""
    shard_of: Mapping[str, int] = field(default_factory=dict)
    role_of: Mapping[str, str] = field(default_factory=dict)
    written_of: Mapping[str, str] = field(default_factory=dict)
    stage_of: Mapping[str, str] = field(default_factory=dict)
    run_once: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    rows: Sequence[int] = ()
    compiled: Mapping[str, str] = field(default_factory=dict)
    make_run: Callable[[], Callable[[Sequence[tf.Tensor]], Any]] | None = None
    state: Callable[[], Sequence[tuple[tf.Tensor, tf.DType]]] = tuple


def source_of_plan(trace: Trace, plan: Plan, name: str) -> PlacementSource:
    """Return the multi-device graph of a `ParallelFunction` for one signature."""
    emitted = emit(plan)

    @functools.cache
    def locate_op(position: int) -> str:
        return plan.program.line_of(plan.program.ops[position])  # once for all shards

    def locate(node: str) -> str:
        while node and node not in emitted.origins:  # inside of a function: the node that calls it
            node = node.rpartition("/")[0]
        position = emitted.origins[node].op if node else None
        return "" if position is None else locate_op(position)

    has_sizes = not plan.program.symbols  # else bytes and rows are only known in each run
    return PlacementSource(
        graph=emitted.graph_def(),
        outputs=emitted.outputs,
        effects=emitted.effects,
        inputs=(*emitted.inputs, *emitted.captures),
        arguments=dict(zip(emitted.inputs, plan.program.input_names, strict=True)),
        locate=locate,
        role_of={name: role for name in emitted.origins if (role := emitted.serves(name))},
        written_of=_written(emitted, plan),
        stage_of=_stages(emitted, plan),
        shard_of={name: origin.shard for name, origin in emitted.origins.items() if origin.shard is not None},
        run_once={op.name: (reason, plan.gathered_bytes(op) if has_sizes else 0) for op, reason in plan.unsharded_ops},
        rows=plan.rows,
        compiled=_calls(emitted),
        make_run=lambda: make_executable(trace, plan, name),
        **_captures(emitted, trace, plan),
    )


def _calls(emitted: EmittedGraph) -> Mapping[str, str]:
    if not emitted.compiled:
        return {}
    return compile_clusters(emitted, emitted.nodes, emitted.outputs, emitted.effects).inside


def _captures(emitted: EmittedGraph, trace: Trace, plan: Plan) -> dict[str, Any]:
    """Return what is known of captures: a variable that lies in parts is a capture for each of them.

    They are where the plan has them: nothing has moved yet, and they may be on devices that this process lacks.
    """
    origins = plan.state.parts or [(k, 0) for k in range(len(trace.captures))]
    symbols = trace.function.inputs[len(emitted.inputs) :]
    original = [trace.captures[k] for k, _ in origins]
    default = plan.default_device if missing_devices([plan.default_device]) else ""
    fields = _resources(emitted.captures, [symbols[k] for k, _ in origins], original)
    if plan.state.parts:
        fields["state"] = lambda: _state(emitted.captures, fields["held"], captured(trace, plan))
    devices = devices_of_handles(plan.program, plan.state)
    for name, (k, part), device in zip(emitted.captures, origins, devices, strict=True):
        division = plan.state.divisions.get(trace.program.ops[trace.program.captures[k]].name)
        if name in fields["held"] and division is not None and plan.state.parts:
            dtype, shape = fields["held"][name]
            fields["held"][name] = dtype, tf.TensorShape(part_shapes(division, shape.as_list())[part])
        if name in fields["resource_devices"]:
            fields["resource_devices"][name] = device or default or fields["resource_devices"][name]
    return {"variables": _variable_names(emitted.captures, original, trace.variables), **fields}


def _stages(emitted: EmittedGraph, plan: Plan) -> dict[str, str]:
    """Return the names of the stages of nodes that work on the rows of a shard in one."""
    program, stage_by_node = plan.program, {}
    for name, origin in emitted.origins.items():
        if origin.shard is not None and origin.op is not None:
            stage = program.ops[origin.op].stage
            stage_by_node.update({name: stage.name} if stage else {})
    return stage_by_node


def _written(emitted: EmittedGraph, plan: Plan) -> dict[str, str]:
    """Return the scopes before the names of operations of the function, or before what is moved or counted for them."""
    scope_by_node = {}
    for name, origin in emitted.origins.items():
        op = None if origin.op is None else plan.program.ops[origin.op]
        scope, origin_in_name, _ = (
            f"/{name}".partition(f"/{op.provenance.origin}") if op and op.provenance.origin else ("", "", "")
        )
        if op is None or (plan.mesh.columns and not origin_in_name):
            scope = f"/{(_WRITTEN.match(name) or [''])[0]}".removesuffix("/")
        scope_by_node.update({name: f"{scope}/"[1:]} if scope else {})
    return scope_by_node


def source_of_function(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[PlacementSource, list[Any]]:
    """Return the graph of anything callable, and the flat arguments (tensors, or specifications of tensors)."""
    concrete = _concrete(fn, args, kwargs)
    graph, frames_of = concrete.graph, source_locator(concrete.graph)
    graph_def = graph.as_graph_def()
    count = len(concrete.inputs) - len(concrete.captured_inputs)
    flat = [
        tf.convert_to_tensor(leaf) if not isinstance(leaf, tf.TensorSpec) else leaf
        for leaf in tf.nest.flatten((tuple(args), dict(kwargs)), expand_composites=True)
        if hasattr(leaf, "shape") and hasattr(leaf, "dtype") and not isinstance(leaf, tf.Variable)
    ]
    inputs = [tensor.op.name for tensor in concrete.inputs]
    outputs = [tensor.name for tensor in concrete.outputs]
    effects = [operation.name for operation in graph.control_outputs]
    captures = tuple(concrete.captured_inputs)

    def make_run() -> Callable[[Sequence[tf.Tensor]], Any]:
        name = f"placement_{next(_serial)}_" + re.sub(r"\W", "_", tf.compat.as_str(concrete.name))[:60]
        definition = function_definition(name, graph_def.node, inputs, outputs, effects)
        specs = [tf.TensorSpec.from_tensor(tensor) for tensor in concrete.inputs]
        outs = [tf.TensorSpec.from_tensor(tensor) for tensor in concrete.outputs]
        function = RuntimeFunction(definition, graph_def.library.function, specs, outs)
        return lambda tensors: function([*tensors, *captures])

    source = PlacementSource(
        graph=graph_def,
        outputs=outputs,
        effects=effects,
        inputs=inputs,
        locate=lambda name: line_in_models(frames_of(name)),
        make_run=make_run,
        variables=_variable_names(inputs[count:], captures, graph.variables),
        **_resources(inputs[count:], concrete.inputs[count:], captures),
    )
    return source, flat if len(flat) == count else [tf.TensorSpec.from_tensor(t) for t in concrete.inputs[:count]]


def load_signature(directory: str, signature: str) -> Any:
    """Return a signature of a SavedModel.

    Raises:
      ArgumentError: if there is no SavedModel in `directory`, a damaged one, or it has no signature of that name.
      UnsupportedError: if it has several graphs, or operations of types that are not registered.
    """
    if model_file(directory).suffix != ".cpb":  # else it is in pieces, which only TensorFlow can put together
        check_whole(directory, read_saved_model(directory))
    model = load_saved_model(directory)
    signatures = signatures_of(model, directory, ())
    if signature not in signatures:
        known_names = ", ".join(map(repr, sorted(signatures))) or "none"
        raise ArgumentError(f"The SavedModel in {directory!r} has no signature {signature!r}; it has {known_names}.")
    function = signatures_of(model, directory, [signature])[signature]
    function.graphsplit_owner = model  # the variables live as long as the loaded model does
    return function


def loaded_with_gpus(source: PlacementSource) -> PlacementSource:
    """Return a source; of a transpiled model with variables where a loader puts them that has the GPUs it names."""
    nodes = [*source.graph.node, *[node for function in source.graph.library.function for node in function.node_def]]
    if has_gpus() or not any("GPU" in node.device and is_marked(node) for node in nodes):
        return source
    return replace(source, resource_devices=dict.fromkeys(source.resource_devices, "/device:GPU:0"))


def name_of(fn: Any) -> str:
    """Return what users call a function or model."""
    name = fn.graph.name if _is_concrete(fn) else getattr(fn, "__name__", None) or getattr(fn, "name", None)
    name = tf.compat.as_str(name or type(fn).__name__)
    match = _INFERENCE.fullmatch(name)  # what TensorFlow makes of a function's name when it traces it
    return (match[1] if match else name).removeprefix("signature_wrapper_")


def _is_concrete(fn: Any) -> bool:
    return hasattr(fn, "captured_inputs") and hasattr(fn, "graph")


def _concrete(fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if _is_concrete(fn):
        _check_fits(fn, args, kwargs)
        return fn
    if hasattr(fn, "get_concrete_function"):
        return fn.get_concrete_function(*args, **kwargs)
    if not callable(fn):
        raise ArgumentError(
            f"placement takes a function, a Keras model, a SavedModel directory or a tf.Graph, got {fn!r}."
        )
    rewritten = rewritten_by_autograph(fn)  # so that errors speak of the user's lines alone
    return tf.function(lambda *a, **k: rewritten(*a, **k), autograph=False).get_concrete_function(*args, **kwargs)


def _check_fits(concrete: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `ArgumentError` unless a graph that is there takes tensors like these, if there are any."""
    tensors = [leaf for leaf in tf.nest.flatten((tuple(args), dict(kwargs))) if hasattr(leaf, "shape")]
    declared = tf.nest.flatten(concrete.structured_input_signature)
    takes = [spec for spec in declared if isinstance(spec, tf.TensorSpec)]
    wrong = [
        f"{spec.name or f'argument {i}'} must be {spec_text(spec)}, got {spec_text(leaf)}"
        for i, (spec, leaf) in enumerate(zip(takes, tensors, strict=False))
        if spec.dtype != tf.as_dtype(leaf.dtype) or not spec.shape.is_compatible_with(leaf.shape)
    ]
    if tensors and len(tensors) != len(takes):
        plural = "" if len(takes) == 1 else "s"
        wrong = [f"it takes {len(takes)} tensor{plural}, got {len(tensors)}"]
    if wrong:
        raise ArgumentError(f"{name_of(concrete)} does not take these arguments:\n{bullet_list(wrong)}")


def _resources(names: Sequence[str], symbols: Sequence[Any], captures: Sequence[tf.Tensor]) -> dict[str, Any]:
    """Return what captured resources hold and where they are, by the name of their placeholder.

    Args:
      names: the placeholders' names in the graph to be looked at.
      symbols: the captured tensors inside the traced function, which know what a resource holds.
      captures: the same outside.
    """
    held_values, devices = {}, {}
    for name, symbol, handle in zip(names, symbols, captures, strict=True):
        if handle.dtype != tf.resource:
            continue
        value = resource_value(symbol)
        if value is not None:
            held_values[name] = value
        if handle.device:
            devices[name] = canonical_name(handle.device)
    return {"held": held_values, "resource_devices": devices, "state": lambda: _state(names, held_values, captures)}


def _state(
    names: Sequence[str], held_values: Mapping[str, HeldValue], handles: Sequence[tf.Tensor]
) -> list[tuple[tf.Tensor, tf.DType]]:
    """Return the handles of captured variables, with their dtypes; those of a graph that is being built have none."""
    pairs = zip(names, handles, strict=True)
    return [(h, held_values[name][0]) for name, h in pairs if name in held_values and hasattr(h, "numpy")]


def _variable_names(names: Sequence[str], captures: Sequence[Any], variables: Sequence[tf.Variable]) -> dict[str, str]:
    with raw_handles():  # (who asks a laid out variable for its handle has it put together)
        name_by_handle = {id(variable.handle): variable.name.removesuffix(":0") for variable in variables}
    return {
        name: name_by_handle[id(handle)]
        for name, handle in zip(names, captures, strict=True)
        if id(handle) in name_by_handle
    }


class StateKeeper:
    """Gives variables back the values that they had when the `with` block began."""

    def __init__(self, state: Sequence[tuple[tf.Tensor, tf.DType]]):
        self._state = state
        self._values_before: list[tf.Tensor] = []

    def __enter__(self) -> StateKeeper:
        self._values_before = [tf.identity(tf.raw_ops.ReadVariableOp(resource=h, dtype=d)) for h, d in self._state]
        return self

    def __exit__(self, *_: object) -> None:
        for (handle, _dtype), value in zip(self._state, self._values_before, strict=True):
            tf.raw_ops.AssignVariableOp(resource=handle, value=value)
