"""One signature of a loaded SavedModel -> the same signature on several devices.

If weights are replicated, every device holds a copy of them, so that none travels per request. A copy is a resource of
its own that is made when the model is loaded, from the variable that the checkpoint restored: on disk there is one. For
the plan they are replicated variables like all others.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.call_signatures import as_call
from graphsplit.api.calls.chosen_devices import ChosenDevices
from graphsplit.api.calls.compilation import Called, trace_and_plan
from graphsplit.api.options import Options
from graphsplit.core import structures
from graphsplit.core.layouts import Replicate
from graphsplit.core.protos import GraphDef, output_type, source_of, split_reference, with_inputs
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.emission.emitted_graph import EmittedGraph
from graphsplit.emission.emitter import emit
from graphsplit.errors import UnsupportedError, bullet_list
from graphsplit.planning.plan import Plan
from graphsplit.planning.state import State, devices_of_handles
from graphsplit.program.graph.function_calls import functions_called
from graphsplit.program.program import Program
from graphsplit.program.reading.shape_inference import known_shape
from graphsplit.serving.parts import LARGE_BYTES, noting, resources_of
from graphsplit.tracing.trace import Trace, captured_variables


@dataclass(frozen=True, eq=False)
class PlannedSignature:
    """A signature and the decision what runs where.

    Attributes:
      name: its key.
      function: the loaded one.
      specs: its arguments by name.
    """

    name: str
    function: Any
    specs: Mapping[str, tf.TensorSpec]
    trace: Trace
    plan: Plan


def plan_signature(
    name: str, function: Any, options: Options, devices: Sequence[str], *, replicate_weights: bool = False
) -> PlannedSignature:
    """Trace a loaded signature and plan it.

    Args:
      name, function: the signature.
      options: has the split by the names of its arguments.
      devices: full names; the first is the default device.
      replicate_weights: whether variables are replicated: every device has a copy of them, and of large constants.

    Raises:
      UnsupportedError: if they shall have copies, and the signature changes variables.
    """

    def find_state(trace: Trace) -> State:
        variables = {trace.program.ops[i].name: variable for i, variable in captured_variables(trace).items()}
        if replicate_weights:
            check_only_read(name, trace.program, variables)
        places = dict.fromkeys(resources_of(trace.program), "")  # they are where the loader puts them
        if not replicate_weights:
            return State(places, largest_constant=LARGE_BYTES)
        return State(places, divisions=dict.fromkeys(variables, Replicate(tuple(devices), tuple(devices[:1]))))

    specs = dict(function.structured_input_signature[1])
    leaves = tuple(structures.TensorLeaf(spec.dtype, known_shape(spec.shape)) for spec in specs.values())
    arguments = structures.Container(dict, tuple(specs), leaves)
    called = Called(lambda inputs: function(**inputs), as_call(arguments), arguments)
    chosen = ChosenDevices(tuple(devices), devices[0], options)
    traced, plan, _ = trace_and_plan(called, chosen, Arrangement, find_state=find_state)
    return PlannedSignature(name, function, specs, traced, plan)


def build_signature(planned: PlannedSignature, mirrors: Mirrors | None) -> tuple[Any, int]:
    """Return the signature on several devices, as a `tf.function` that can be saved under the same names.

    With it comes how many bytes go from the default device to other devices in every request, besides rows of the
    batch.

    Args:
      planned: the signature.
      mirrors: where copies of weights on the devices come from; None to send weights from the default device.
    """
    trace, plan = planned.trace, planned.plan
    graph = emit(plan)
    captures = trace.captures if mirrors is None else _with_copies(planned, graph, mirrors)
    graph_def = _importable(graph, noting(plan, graph))
    declared = planned.function.structured_outputs

    def signature(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
        handles = [capture.handle() if isinstance(capture, Mirror) else capture for capture in captures]
        results = structures.unflatten(trace.result, _run(graph, graph_def, [*tensors, *handles]))
        if not isinstance(results, dict):
            raise UnsupportedError(f"The signature {planned.name!r} returns no tensors by name.")
        for name, tensor in results.items():
            tensor.set_shape(declared[name].shape)  # TensorFlow may not see through the joints
        return {name: tf.identity(tensor, name=name) for name, tensor in results.items()}

    specs = [tf.TensorSpec(spec.shape, spec.dtype, name) for name, spec in planned.specs.items()]
    signature.__name__ = f"transpiled_{planned.name}"
    function = tf.function(tf.autograph.experimental.do_not_convert(signature), input_signature=specs)
    return function, sent_bytes(plan)


def _with_copies(planned: PlannedSignature, graph: EmittedGraph, mirrors: Mirrors) -> list[tf.Tensor | Mirror]:
    """Return what the captures are fed with: copies of variables; the original, on the device where a loader puts it.

    (What nobody reads needs no copy.)
    """
    trace, plan = planned.trace, planned.plan
    variables, original = captured_variables(trace), where_variables_live(plan.devices)
    names_read = {source_of(reference) for node in graph.nodes for reference in node.input}
    handles: list[tf.Tensor | Mirror] = []
    devices, copied = devices_of_handles(plan.program, plan.state), plan.state.copied
    for (k, _), name, device in zip(plan.state.parts, graph.captures, devices, strict=True):
        if k not in copied or device == original or name not in names_read:
            handles.append(trace.captures[k])
        else:
            variable = variables[trace.program.captures[k]]
            handles.append(mirrors.get(variable, device))
    return handles


def _run(graph: EmittedGraph, graph_def: Any, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Add the emitted graph to the one that is being traced, and return its results.

    (A call of a function that the runtime knows would be quicker to make, but TensorFlow cannot save such a call.)
    """
    placeholders = [*graph.inputs, *graph.captures]
    graph_now = tf.compat.v1.get_default_graph()
    names_read = {source_of(reference) for node in graph_def.node for reference in node.input}
    names_read.update(map(source_of, graph.outputs))
    pairs = [(name, tensor) for name, tensor in zip(placeholders, tensors, strict=True) if name in names_read]
    input_map = {f"{name}:0": graph_now.capture(tensor) for name, tensor in pairs}
    wanted = [f"{name}:{index}" for name, index in map(split_reference, graph.outputs)]
    results = tf.graph_util.import_graph_def(graph_def, input_map=input_map, return_elements=wanted, name="")
    return list(results)


def _importable(graph: EmittedGraph, note: Callable[[Any], Any]) -> Any:
    """Return the graph without its placeholders, and with those functions only that it calls.

    What touches a variable has no device: it is where a loader puts that, on a machine with fewer devices, too.
    """
    result = GraphDef(versions=graph.versions)
    placeholders = {*graph.inputs, *graph.captures}
    held = {n.name for n in graph.nodes if n.name in placeholders and output_type(n, 0) == tf.resource.as_datatype_enum}
    for node in graph.nodes:
        if node.name not in placeholders:
            inputs = [r for r in node.input if r[0] != "^" or r[1:] not in placeholders]
            copy = note(with_inputs(node, inputs))
            if not held.isdisjoint(inputs):
                copy.device = ""
            result.node.append(copy)
    library = {function.signature.name: function for function in graph.library.function}
    result.library.function.extend(functions_called(result.node, library))
    return result


class Mirror(tf.saved_model.experimental.TrackableResource):  # type: ignore[misc]
    """A copy of a variable on a device, filled when the SavedModel that holds it is loaded.

    Whoever needs the copy names it anew, inside of a function: there, TensorFlow replaces a device that the server does
    not have. On a node outside of all functions, where a captured handle would stand, loading in C++ refuses it.
    """

    def __init__(self, variable: tf.Variable, device: str):
        super().__init__()
        self._variable = variable
        self._device = device
        self._shared_name = f"graphsplit_{uuid.uuid4().hex}"

    def handle(self) -> tf.Tensor:
        """Return the copy's handle in the function that is being traced."""
        with tf.device(self._device):
            return tf.raw_ops.VarHandleOp(
                dtype=self._variable.dtype, shape=self._variable.shape, shared_name=self._shared_name
            )

    def _create_resource(self) -> tf.Tensor:  # TensorFlow asks for one; it holds nothing, on any server
        return tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=f"{self._shared_name}_filled")

    def _initialize(self) -> None:
        tf.raw_ops.AssignVariableOp(resource=self.handle(), value=self._variable.read_value())

    def _destroy_resource(self) -> None:
        tf.raw_ops.DestroyResourceOp(resource=self.handle(), ignore_lookup_error=True)


class Mirrors:
    """All copies that the signatures of one model share."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, str], Mirror] = {}
        self._variables: dict[int, tf.Variable] = {}

    def get(self, variable: tf.Variable, device: str) -> Mirror:
        """Return the copy of a variable on a device."""
        key = (id(variable), device)
        if key not in self._made:
            self._variables[id(variable)] = variable
            self._made[key] = Mirror(variable, device)
        return self._made[key]

    @property
    def made(self) -> list[Mirror]:
        """All copies."""
        return list(self._made.values())

    @property
    def bytes(self) -> int:
        """The size of the copied variables, each counted once."""
        return sum(int(v.dtype.size) * int(v.shape.num_elements() or 0) for v in self._variables.values())


def check_only_read(name: str, program: Program, variables: Mapping[str, tf.Variable]) -> None:
    """Raise `UnsupportedError` if a signature may change variables: then copies of them would go stale.

    Args:
      name: of the signature.
      program: of the signature.
      variables: the captured variables by the names of their placeholders.
    """
    ops = program.ops
    changed = {
        variables[ops[tensor.op].name].name
        for op in ops
        for tensor in op.inputs
        if ops[tensor.op].name in variables and op.type not in ("ReadVariableOp", "VariableShape")
    }
    if changed:
        raise UnsupportedError(
            f"replicate_weights=True, but the signature {name!r} changes variables, so copies would go stale:\n"
            f"{bullet_list(sorted(changed))}\n"
            "Leave it out (signatures=[...]), or keep one copy of the weights (replicate_weights=False)."
        )


def sent_bytes(plan: Plan) -> int:
    """Return how many bytes of whole values, weights above all, the default device sends to others each time."""
    away = sum(device != plan.default_device for device in dict.fromkeys(plan.devices))
    return sum(plan.program.bytes(move.tensor) for move in plan.moves if move.kind == "broadcast") * away


def where_variables_live(devices: Sequence[str]) -> str:
    """Return where a loader puts variables without a device: the first GPU, or the CPU."""
    return "/device:GPU:0" if any("GPU" in name for name in devices) else "/device:CPU:0"
