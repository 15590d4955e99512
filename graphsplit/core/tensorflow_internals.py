"""The only file that imports private TensorFlow modules, or uses private attributes of its objects.

Each says why no public name serves. (Those of its variables' classes that are overridden: `parted_classes`.)

Everything here is a thin function with a plain meaning, so that a change in TensorFlow is followed in one place.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

# What a worker's answer about its devices consists of, which comes with TensorFlow under no public name.
from tensorflow.core.framework import device_attributes_pb2

# `tf.types` exposes no way to describe a function of flat tensors; AtomicFunction needs one.
from tensorflow.core.function.polymorphism import function_type
from tensorflow.core.function.trace_type import default_types

# The stored forms of a SavedModel and of the objects in a checkpoint, which come with TensorFlow under no public name.
from tensorflow.core.protobuf import saved_model_pb2, trackable_object_graph_pb2

# Whether forward-mode differentiation is active, and whether several tapes are, which no public function says.
from tensorflow.python import pywrap_tfe

# `tf.function` rewrites what it is given, and what that calls; nothing public rewrites one function that is called from
# code that stays as it is, so that errors speak of the user's lines alone.
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.autograph.impl import conversion

# A graph as the C library imports it, without what `tf.graph_util.import_graph_def` does in Python for each operation.
from tensorflow.python.client import pywrap_tf_session

# The eager context owns the runtime's function library; the public way into it, tracing, would rebuild in Python
# every node that is already a finished proto (70 us a node; measured: seconds at 8 devices).
from tensorflow.python.eager import context, execute, record
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function

# By which attribute a call says which variables it only reads, and which ops only read.
# Names and counts of an op type's outputs: function bodies refer to tensors as `node:output_name:index`.
# Which kinds of device have a kernel for an op type: no public function says.
# How long the results of an import live in the C library.
from tensorflow.python.framework import auto_control_deps_utils, c_api_util, kernels, op_def_registry

# Whether the graph being built is to be compiled by XLA as a whole, which would erase all placement; what a captured
# resource holds (a variable's dtype and shape), which the public handle does not say; how a read makes tapes watch
# a trainable variable, without reading it; and which graphs are bodies of loops and branches.
from tensorflow.python.ops import (
    control_flow_util,
    control_flow_v2_func_graphs,
    gradients_util,
    handle_data_util,
    resource_variable_ops,
)

# How vectorized Jacobians write a call anew, for calls that have a gradient of their own.
from tensorflow.python.ops.parallel_for import pfor

# Whether functions are traced for a SavedModel, whose variables are looked up when it is loaded.
from tensorflow.python.saved_model import save_context

# Whether a tensor has a value, or stands for one in a graph.
from tensorflow.python.types import core

# The form in which the profiler writes what it recorded; the protos come with TensorFlow, under no public name.
from tensorflow.tsl.profiler.protobuf import xplane_pb2

from graphsplit.core.garbage_collection import living_objects, with_derived
from graphsplit.errors import CheckError

ANONYMOUS = "cd2c89b7-88b7-44c8-ad83-06c2a9158347"
"""The name under which `VarHandleOp` makes a variable that lives as long as its handle (`ResourceHandle` in C++)."""


def op_definition(op_type: str) -> Any:
    """Return the registered `OpDef` of an op type, or None if this process does not know the type."""
    return op_def_registry.get(op_type)


def rewritten_by_autograph(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose control flow on tensors becomes operations of the graph in which it is called."""
    enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
    # AutoGraph keeps what it rewrites by who asked; what it rewrites in any case, `tf.function` may have asked for.
    by_user = inspect.isroutine(fn) and not conversion.is_allowlisted(fn)
    rewritten: Callable[..., Any] = autograph.convert(recursive=True, user_requested=by_user, conversion_ctx=enabled)(
        fn
    )
    return rewritten


def is_compiled_function(fn: object) -> bool:
    """Return whether `fn` is a `tf.function(jit_compile=True)`, for which there is no public question."""
    return isinstance(fn, tf.types.experimental.PolymorphicFunction) and getattr(fn, "_jit_compile", None) is True


def is_retraced_less(fn: object) -> bool:
    """Return whether `fn` is a `tf.function(reduce_retracing=True)`, for which there is no public question either."""
    polymorphic = tf.types.experimental.PolymorphicFunction
    return isinstance(fn, polymorphic) and getattr(fn, "_reduce_retracing", None) is True


def last_seeding() -> object:
    """Return what is another object after each `tf.random.set_seed`, which lets kernels that draw begin anew.

    The seed itself, public or not, does not say that the same one was set again.
    """
    return getattr(context.context(), "_rng", None)  # (there is none before the first)


def registered_kernels(op_type: str) -> Sequence[Any]:
    """Return the kernels of an op type, `KernelDef`s: for which kind of device and which types each is."""
    return list(kernels.get_registered_kernels_for_op(op_type).kernel)


@functools.cache
def registered_xla_kernels(op_type: str) -> Sequence[Any]:
    """Return the kernels of an op type with which XLA compiles, `KernelDef`s.

    TensorFlow registers them when something is compiled for the first time.
    """
    _compile_something()
    return registered_kernels(op_type)


@functools.cache
def _compile_something() -> None:
    with tf.init_scope(), tf.device("CPU:0"):
        tf.function(lambda x: x + x, jit_compile=True)(tf.constant(1.0))


def import_operations(graph_def: Any) -> list[tf.Operation]:
    """Return the operations of a graph, imported into a graph of its own: with names, types and shapes.

    `tf.graph_util.import_graph_def` takes four times as long (0.1 ms instead of 0.026 an operation): it finds out
    about devices, colocation and control flow, which an import for the sake of shapes does without.

    Args:
      graph_def: it is changed: its nodes ask for no device, and for no other node's.

    Raises:
      ValueError: if TensorFlow cannot infer shapes, or the graph is not sound.
    """
    for node in graph_def.node:
        node.device = ""
        if "_class" in node.attr:
            del node.attr["_class"]
    graph = tf.Graph()
    options = c_api_util.ScopedTFImportGraphDefOptions()
    buffer = pywrap_tf_session.TF_NewBufferFromString(graph_def.SerializeToString())
    try:
        with graph._c_graph.get() as c_graph:
            imported = pywrap_tf_session.TF_GraphImportGraphDefWithResults(c_graph, buffer, options.options)
            c_api_util.ScopedTFImportGraphDefResults(imported)  # deletes them
    except tf.errors.InvalidArgumentError as error:
        raise ValueError(str(error)) from None
    finally:
        pywrap_tf_session.TF_DeleteBuffer(buffer)
    return [tf.Operation._from_c_op(operation, graph) for operation in graph.new_operations()]


def resource_value(handle: tf.Tensor) -> tuple[tf.DType, tf.TensorShape] | None:
    """Return dtype and shape of the variable behind a handle, in a function or not; None for other resources."""
    in_graph = not isinstance(handle, core.Value)
    handle_data = handle_data_util.get_resource_handle_data(handle) if in_graph else handle._handle_data
    if handle_data is None or not handle_data.is_set or len(handle_data.shape_and_type) != 1:
        return None
    return tf.as_dtype(handle_data.shape_and_type[0].dtype), tf.TensorShape(handle_data.shape_and_type[0].shape)


def variable_behind(handle: tf.Tensor, dtype: tf.DType, shape: tf.TensorShape, name: str) -> tf.Variable:
    """Return an object for the variable behind a handle, which lives as long as its own object does.

    Public `tf.Variable` makes a variable and takes no handle.
    """
    return resource_variable_ops.BaseResourceVariable(
        trainable=False, shape=shape, dtype=dtype, handle=handle, name=name, handle_name=f"{name}:0"
    )


def value_at_call(graph: Any, value: Callable[[], tf.Tensor], handle: tf.Tensor, key: Any) -> tf.Tensor:
    """Return a handle in a function's graph that is, each time the function is called, what `value` returns then.

    A handle that is captured as usual is the same at every call, and nobody is told of the call. As for the tables of
    parameter-server training, whose copies differ by worker.

    Args:
      graph: of the function.
      value: called whenever the function is, eagerly.
      handle: of a variable of the same dtype and shape.
      key: one graph has one such tensor for each.
    """
    with graph.as_default():
        return graph.capture_call_time_value(value, _HandleSpec.of(handle), key)


def captured_once_more(graph: Any, handle: tf.Tensor) -> tf.Tensor:
    """Return what stands in a function's graph for a handle that it has captured already, and is something else."""
    return value_at_call(graph, lambda: handle, handle, ("once more", id(handle)))


def is_eager(tensor: tf.Tensor) -> bool:
    """Return whether a tensor has a value, and is of no graph."""
    return isinstance(tensor, core.Value)


def take_other_input(operation: tf.Operation, index: int, tensor: tf.Tensor) -> None:
    """Let an operation take another tensor; public operations of a graph stay as they are made."""
    operation._update_input(index, tensor)


def ask_at_call(values: Mapping[int, Callable[[bool], tf.Tensor]], leave: str) -> None:
    """Let functions that were traced before ask, at each call, for tensors that they captured as usual.

    TensorFlow keeps no list of its functions, and only a function's private list says what it takes at a call.

    Args:
      values: what returns the value of a captured handle, by the id of the handle; it is told whether the function only
        reads the variable.
      leave: the attribute of the graphs of functions that stay as they are.
    """
    for function in living_objects(*with_derived(concrete_function.ConcreteFunction)):
        if getattr(function.graph, leave, False) or not any(
            id(tensor) in values for tensor in function._captured_inputs
        ):
            continue
        inside = {id(outer): id(inner) for outer, inner in function.graph.captures}
        indices = auto_control_deps_utils.get_read_only_resource_input_indices_graph(function.graph)
        only_read = {id(function.graph.inputs[i]) for i in indices}
        function.set_external_captures(
            [
                functools.partial(values[id(t)], inside[id(t)] in only_read) if id(t) in values else t
                for t in function._captured_inputs
            ]
        )


class _HandleSpec(tf.TensorSpec):  # type: ignore[misc]  # (TensorFlow has no types)
    """What stands for a handle in each function that asks for it: in one, and in those that call it in turn.

    It knows what the variable holds, or nothing is differentiated by it. And tapes, which know tensors by numbers,
    take it for the handle: what was recorded in eager code is asked for in functions (as a vectorized Jacobian is one).
    """

    def __init__(self, shape: Any, dtype: tf.DType, name: str | None, number: int):
        super().__init__(shape, dtype, name)
        self._number = number

    @classmethod
    def of(cls, handle: tf.Tensor) -> _HandleSpec:
        """Return what stands for a handle."""
        return cls((), handle.__tf_tracing_type__(None).dtype, None, handle._id)

    def _serialize(self) -> tuple[Any, ...]:  # what TensorFlow makes it of, for functions with `reduce_retracing`
        return (*super()._serialize(), self._number)

    def placeholder_value(self, placeholder_context: Any) -> Any:
        placeholder = super().placeholder_value(placeholder_context)
        placeholder._id = self._number
        return placeholder


def in_save_context() -> bool:
    """Return whether a SavedModel is being written: functions that are traced now are for it, and called by nobody."""
    return bool(save_context.in_save_context())


def captures_of_graph(graph: Any) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Return the placeholders of what a function's graph captured, and what they stand for now.

    Those of `value_at_call` come last, as among the inputs of the function. In a graph, the function asks for them that
    is traced, and not the body of a branch in it, which nobody calls with anything.
    """
    around = function_graph()
    with contextlib.nullcontext() if around is None else around.as_default():
        late = tf.nest.flatten([value() for value in graph.deferred_external_captures])
    placeholders = [*graph.internal_captures, *tf.nest.flatten(graph.deferred_internal_captures)]
    return placeholders, [*graph.external_captures, *late]


_BODIES = (
    control_flow_v2_func_graphs.CondBranchFuncGraph,
    control_flow_v2_func_graphs.WhileCondFuncGraph,
    control_flow_v2_func_graphs.WhileBodyFuncGraph,
)


def function_graph() -> Any:
    """Return the graph of the innermost function that is being traced; None in eager code and in other graphs.

    Bodies of loops and branches are graphs too, but no functions: they are called by the one that they stand in.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while isinstance(graph, _BODIES):
        graph = graph.outer_graph
    return graph if hasattr(graph, "capture_call_time_value") else None


def graph_around(tensor: tf.Tensor) -> Any:
    """Return the graph that has a tensor of those around what is being built: of a loop's body, the loop's, and so on.

    That of the innermost function for an eager tensor, which it captures; the present one, if none around has it: where
    a body is differentiated, it stands for a tensor of that.
    """
    present = graph = tf.compat.v1.get_default_graph()
    eager = isinstance(tensor, core.Value)
    while isinstance(graph, _BODIES) and (eager or tensor.graph is not graph):
        graph = graph.outer_graph
    return graph if eager or tensor.graph is graph else present


def stateless_call(function: Any, *tensors: tf.Tensor) -> tf.Tensor:
    """Return the result of a concrete function as that of an operation that counts as stateless.

    A `tf.function` that makes a variable counts as stateful: it runs whether anybody reads the result or not, and
    `tf.vectorized_map` and jacobians refuse it. (Calls lose what TensorFlow knows of a handle, which no public function
    gives.)
    """
    result = tf.raw_ops.PartitionedCall(args=list(tensors), Tout=[function.outputs[0].dtype], f=function)[0]
    handle_data_util.copy_handle_data(function.outputs[0], result)
    return result


def in_xla_context() -> bool:
    """Return whether the code that runs now is being traced for `jit_compile=True`."""
    if tf.executing_eagerly():
        return False
    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))


def tape_watches(tensors: Sequence[tf.Tensor], variables: Sequence[tf.Variable] = ()) -> bool:
    """Return whether an active `GradientTape` wants to know how results depend on these tensors and variables.

    As any read would, this makes tapes watch the trainable variables.
    """
    if not record.could_possibly_record():
        return False
    for variable in variables:
        resource_variable_ops.variable_accessed(variable)
    return bool(record.should_record_backprop(list(tensors)))


def tapes_watch_twice(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether several active tapes watch one of these tensors, or one that may record its own gradients."""
    return bool(
        pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors))
        == gradients_util.POSSIBLE_GRADIENT_TYPES_HIGHER_ORDER
    )


def accumulator_watches(tensors: Sequence[tf.Tensor]) -> bool:
    """Return whether an active `ForwardAccumulator`, and no tape, wants to know how results depend on these tensors."""
    if not record.could_possibly_record():
        return False
    possible = pywrap_tfe.TFE_Py_TapeSetPossibleGradientTypes(list(tensors))
    return bool(possible) and not record.should_record_backprop(list(tensors))


def record_on_tapes(
    name: str, outputs: Sequence[tf.Tensor], inputs: Sequence[tf.Tensor], backward: Callable[..., Any]
) -> None:
    """Tell the active tapes how to differentiate `outputs` by `inputs`.

    `backward` takes one gradient or None for each output, and returns one or None for each input. Public
    `tf.custom_gradient` does not take handles of variables as inputs, and copies every tensor in graphs.
    """
    record.record_operation(name, list(outputs), list(inputs), backward)


def record_captures(tensors: Sequence[tf.Tensor]) -> None:
    """Tell the active tapes what stands in the graph being built for those tensors that are from outside.

    Operations take that, and who writes one anew (`tf.vectorized_map`) has only that. Tapes are told whenever something
    is captured, but a call of a function is made while nothing is recorded.
    """
    if not tf.executing_eagerly():
        graph = tf.compat.v1.get_default_graph()
        for tensor in tensors:
            if isinstance(tensor, core.Value):
                graph.capture(tensor)


def set_graph_gradient(outputs: Sequence[tf.Tensor], backward: Callable[..., Any], by_rows: bool = False) -> None:
    """Give the op that made `outputs`, in the graph being built, a gradient of its own for `tf.gradients`.

    `backward` takes the op's inputs, its outputs, and one gradient or None for each output; it returns one or None for
    each input. It must not close over tensors: gradients of gradients are made in graphs where others stand for them.

    A gradient that is registered under a name lives as long as the process, and with it the graph; and a SavedModel
    traces it, under which a function with effects would run twice. This one belongs to the op, as that of every call
    of a `tf.function` does, and a SavedModel leaves it to the called function's own operations.

    Args:
      outputs: of a call.
      backward: see above.
      by_rows: whether the call keeps its gradient where a vectorized Jacobian writes it anew, for all rows at once.
        TensorFlow writes the function's operations anew one by one, and differentiates those: what the function says of
        its gradient is lost, and so is what `tf.custom_gradient` says of operations in it.
    """
    if outputs:
        call = outputs[0].op
        if by_rows:
            call.pfor_converter = functools.partial(_vectorized, backward=backward)
        call._gradient_function = lambda op, *gradients: backward(list(op.inputs), list(op.outputs), gradients)
        _register_gradient_of_copies()
        call._set_attr("_gradient_op_type", tf.compat.v1.AttrValue(s=_COPY.encode()))


_COPY = "graphsplit_copied_call"
"""The name under which copies of calls find their gradients."""


@functools.cache
def _register_gradient_of_copies() -> None:
    """Let a copy of a call have the call's own gradient: vectorized Jacobians copy what all their rows have in common.

    A copy has the attributes of the call, and knows the call as its original. Without this name TensorFlow
    differentiates it in C++, and finds zeros where an operation has no gradient there.
    """

    def gradient_of_copy(op: Any, *gradients: Any) -> Any:
        if op is None:  # so a SavedModel asks, which leaves calls to their functions' own operations
            return None
        original = op
        while getattr(original, "_gradient_function", None) is None:
            original = original._original_op
        return original._gradient_function(op, *gradients)

    tf.RegisterGradient(_COPY)(gradient_of_copy)


def _vectorized(call: Any, backward: Callable[..., Any]) -> Any:
    """Return what stands for the outputs of a call in a vectorized graph, with the call's gradient, taken row by row.

    Args:
      call: what pfor knows of the call: for each input what stands for it, and whether it has a row for each iteration.
      backward: the call's gradient.
    """
    inputs, stacked = [x.t for x in call.inputs], [x.is_stacked for x in call.inputs]
    with record.stop_recording():
        converted = pfor._convert_partitioned_call(call)
    outputs = [x.t for x in converted]
    gradient_by_rows = functools.partial(_by_rows, backward, stacked, [x.is_stacked for x in converted])
    set_graph_gradient(outputs, gradient_by_rows, by_rows=True)
    if not tf.executing_eagerly() and record.should_record_backprop(inputs):
        record_on_tapes("rows", outputs, inputs, lambda *gradients: gradient_by_rows(inputs, outputs, gradients))
    return converted


def _by_rows(
    backward: Callable[..., Any],
    stacked: Sequence[bool],
    stacked_outputs: Sequence[bool],
    inputs: Sequence[tf.Tensor],
    outputs: Sequence[tf.Tensor],
    gradients: Sequence[Any],
) -> list[Any]:
    """Return the gradients by the inputs of a vectorized call: of each row by itself, added up for what rows share."""
    own_inputs, total = inputs[: len(stacked)], next(tf.shape(x)[0] for x, s in zip(inputs, stacked, strict=False) if s)
    first = tf.one_hot(0, total, dtype=tf.int32)  # what rows share is given its gradient once
    row_gradients = [
        g if g is None or s else _in_row(tf.convert_to_tensor(g), first)
        for g, s in zip(gradients, stacked_outputs, strict=True)
    ]
    has_rows = [*stacked, *stacked_outputs, *[g is not None for g in row_gradients]]
    everything = [*own_inputs, *outputs, *row_gradients]

    def one(rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        following = iter(rows)
        row = [next(following) if has else whole for has, whole in zip(has_rows, everything, strict=True)]
        a, b = len(own_inputs), len(own_inputs) + len(outputs)
        by_inputs = backward(row[:a], row[a:b], row[b:])
        which[:] = [k for k, gradient in enumerate(by_inputs) if gradient is not None]
        return [tf.convert_to_tensor(by_inputs[k]) for k in which]

    which: list[int] = []
    by_row = tf.vectorized_map(one, [t for has, t in zip(has_rows, everything, strict=True) if has])
    result: list[Any] = [None] * len(inputs)
    for k, gradient in zip(which, by_row, strict=True):
        result[k] = gradient if stacked[k] else tf.reduce_sum(gradient, 0)
    return result


def _in_row(gradient: tf.Tensor, first: tf.Tensor) -> tf.Tensor:
    """Return a gradient as that of the first of several rows, and zeros for the others."""
    mask = tf.reshape(tf.cast(first, gradient.dtype), tf.concat([[-1], tf.ones_like(tf.shape(gradient))], 0))
    return mask * gradient[None]


def no_recording() -> Any:
    """Return a context in which tapes record nothing."""
    return record.stop_recording()


def eager_context_started() -> bool:
    """Return whether TensorFlow has started its eager runtime, after which devices cannot be made any more."""
    return bool(context.context()._initialized)


def own_task() -> tuple[str, int] | None:
    """Return the job and task that this process is in a cluster, None outside of one; does not start TensorFlow.

    Public names of devices tell, but only once TensorFlow has started.
    """
    definition = context.context()._server_def
    return None if definition is None else (str(definition.job_name), int(definition.task_index))


def device_attributes_file() -> Any:
    """Return the description of the proto file that has `tensorflow.DeviceAttributes`."""
    return device_attributes_pb2.DESCRIPTOR


def has_handle(variable: tf.Variable) -> bool:
    """Return whether a variable has a handle of its own; public `handle` of one with several raises `ValueError`."""
    return hasattr(variable, "_handle")


def variable_without_value(**options: Any) -> tf.Variable:
    """Return a variable whose resource is empty: no device has memory for it, until somebody assigns a value.

    Public `tf.Variable` wants a value, and has all of it on the variable's device.

    Args:
      **options: of `tf.Variable`, but for the value; dtype and shape must be among them.
    """
    variable = resource_variable_ops.UninitializedVariable(**options)
    variable.__class__ = resource_variable_ops.ResourceVariable  # what `tf.Variable` makes, with the same attributes
    return variable


def variable_creators() -> list[Any]:
    """Return the functions that make variables here instead of `tf.Variable`, the outermost scope's first."""
    return [creator for _, creator in tf.compat.v1.get_default_graph()._variable_creator_stack]


def lifting_variables(outside: tf.Graph) -> Any:
    """Return a scope in which a function that is traced makes variables as the code outside of it would.

    `tf.function` makes variables that get their values later, by a creator of its own, which no public name leaves out.

    Args:
      outside: the default graph there.
    """

    def create(make: Callable[..., Any], **options: Any) -> Any:
        if not callable(options.get("initial_value")):  # (a tensor of the graph: TensorFlow lifts it out)
            return make(**options)
        graph: Any = tf.compat.v1.get_default_graph()
        creators, graph._variable_creator_stack = graph._variable_creator_stack, outside._variable_creator_stack
        scope = graph.get_name_scope().lower().split("/")
        try:
            with tf.init_scope():
                return tf.Variable(**options)
        finally:
            graph._variable_creator_stack = creators
            for k in range(len(scope)):  # a scope of this name that is opened again is not numbered, as in eager code
                graph._names_in_use.pop("/".join(scope[: k + 1]), None)

    return tf.variable_creator_scope(create)


def give_handle(variable: tf.Variable, handle: tf.Tensor) -> None:
    """Let a variable object stand for another resource: its own went with the process that held it.

    No public variable changes its resource, and layers, optimizers and checkpoints hold the object.
    """
    variable._handle = handle


class RuntimeFunction:
    """A `FunctionDef` registered with TensorFlow's runtime, callable on flat tensors eagerly and in graphs.

    The runtime forgets the function and its library when the last reference to this object is gone.

    Args:
      definition: the `FunctionDef`.
      library: the functions that it calls.
      specs, outs: dtypes and shapes of its inputs and outputs.
      config: the serialized `ConfigProto` that says what TensorFlow's graph optimizer does to it; None: all it can.
      inline: whether it may become part of the graph that calls it, on which the optimizer works as a whole. If not,
        what it returns is brought to the device of the call.
    """

    def __init__(
        self,
        definition: Any,
        library: Sequence[Any],
        specs: Sequence[tf.TypeSpec],
        outs: Sequence[tf.TypeSpec],
        config: bytes | None = None,
        inline: bool = True,
    ):
        if not inline:
            definition.attr["_noinline"].b = True
        self._name = definition.signature.name
        self._outs = outs
        self._inline = inline
        self._config = config
        runtime = context.context()
        children = []
        for child in library:
            if not runtime.has_function(child.signature.name):
                runtime.add_function_def(child)
            children.append(atomic_function.AtomicFunction(child.signature.name, runtime, _type_of(child.signature)))
        runtime.add_function_def(definition)
        self._function = atomic_function.AtomicFunction(
            definition.signature.name,
            runtime,
            _flat_type(specs, outs),
            children,
            atomic_function.CallOptions(is_stateful=definition.signature.is_stateful),
        )

    def __call__(self, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run the function on `arguments`, one tensor for each input of the definition.

        Raises:
          CheckError: if a result is not what was traced. (In place of what never ran, TensorFlow returns an empty
            float32 tensor and says nothing.)
        """
        if not tf.executing_eagerly():
            return self._call_in_graph(arguments)
        if self._config is None:
            results = self._function.call_flat(*arguments)
        else:
            results = execute.execute(
                self._name,
                num_outputs=len(self._outs),
                inputs=list(arguments),
                attrs=("executor_type", "", "config_proto", self._config),
                ctx=context.context(),
            )
        for i, (result, spec) in enumerate(zip(results, self._outs, strict=True)):
            if result.dtype != spec.dtype or not spec.shape.is_compatible_with(result.shape):
                raise CheckError(
                    f"{self._name}: result {i} is {result.dtype.name} {result.shape}, and was traced as "
                    f"{spec.dtype.name} {spec.shape}. Part of the step did not run; variables may be old or new."
                )
        return list(results)

    def _call_in_graph(self, arguments: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Call from a graph: one that takes the body in, or else with an optimizer of its own.

        `call_flat` would always ask for the caller's optimizer. And it would make a Python graph of the body, of inputs
        without shapes, only to see which variables it reads: slow, and TensorFlow refuses a MatrixDiagV3 of known rows
        whose diagonal it does not know.
        """
        graph = tf.compat.v1.get_default_graph()
        graph._add_function_recursive(self._function)
        types = [spec.dtype.as_datatype_enum for spec in self._outs]
        stateful = self._function.call_options.is_stateful
        own_config = None if self._inline else self._config
        config = own_config or context.context().function_call_options.as_attrs()["config_proto"]
        with record.stop_recording():
            call = atomic_function.partitioned_call_op(self._name, list(arguments), stateful, types, config)
        only_read = tf.compat.v1.AttrValue()
        only_read.list.i.extend(_variables_only_read(self._function.cached_definition))
        call._set_attr(auto_control_deps_utils.READ_ONLY_RESOURCE_INPUTS_ATTR, only_read)
        for output, spec in zip(call.outputs, self._outs, strict=True):
            output.set_shape(spec.shape)
        return list(call.outputs)


def is_read(op_type: str) -> bool:
    """Return whether an op that takes a variable's handle only reads the variable."""
    return op_type in auto_control_deps_utils.RESOURCE_READ_OPS


def _variables_only_read(definition: Any) -> list[int]:
    """Return which arguments of a function are handles that nothing but reads of variables takes."""
    used = {reference for node in definition.node_def if not is_read(node.op) for reference in node.input}
    used.update(definition.ret.values())
    arguments = enumerate(definition.signature.input_arg)
    return [i for i, a in arguments if a.type == tf.resource.as_datatype_enum and a.name not in used]


def _type_of(signature: Any) -> Any:
    """Return the type of a function of a library, which `tf.vectorized_map` and Jacobians ask for."""
    arguments = (signature.input_arg, signature.output_arg)
    return _flat_type(*([tf.TensorSpec(None, tf.as_dtype(a.type)) for a in tensors] for tensors in arguments))


def _flat_type(specs: Sequence[tf.TypeSpec], outs: Sequence[tf.TypeSpec]) -> Any:
    parameters = [
        function_type.Parameter(f"a{i}", function_type.Parameter.POSITIONAL_ONLY, False, spec)
        for i, spec in enumerate(specs)
    ]
    return function_type.FunctionType(
        parameters, collections.OrderedDict(), return_annotation=default_types.Tuple(*outs)
    )


def new_saved_model() -> Any:
    """Return an empty `SavedModel` proto."""
    return saved_model_pb2.SavedModel()


def parse_checkpoint_objects(content: bytes) -> Any:
    """Return what a checkpoint says of its objects."""
    return trackable_object_graph_pb2.TrackableObjectGraph.FromString(content)


def parse_profile(content: bytes) -> Any:
    """Return what TensorFlow's profiler recorded, the content of an `.xplane.pb` file, as an `XSpace`."""
    return xplane_pb2.XSpace.FromString(content)


@contextlib.contextmanager
def partition_graphs() -> Iterator[list[Any]]:
    """Collect the graphs that TensorFlow runs inside the `with` block, one `GraphDef` per device and function.

    They are what is left after TensorFlow's placer and optimizer, with full device names. A function that was called
    before the block is not reported: the runtime hands its graphs out when it first instantiates the function.
    """
    collected: list[Any] = []
    context.context().enable_run_metadata()
    context.context().export_run_metadata()  # what an earlier block left behind
    try:
        yield collected
        metadata = context.context().export_run_metadata()
        for function_graphs in metadata.function_graphs:
            collected.extend(function_graphs.partition_graphs)
    finally:
        context.context().disable_run_metadata()
