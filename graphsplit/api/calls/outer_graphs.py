"""What is said of calls whose surroundings decide more than the function: graphs, scopes of Keras, tf.distribute.

And where its variables are.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.traces import Signature, Traces
from graphsplit.core import structures
from graphsplit.core.devices import copies_take_time, is_of_dtensor, task_of
from graphsplit.core.keras_internals import only_shapes_count
from graphsplit.core.tensorflow_internals import in_save_context
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.errors import ArgumentError, GraphsplitError, OutputError, UnsupportedError, bullet_list
from graphsplit.planning.burdens import burden_of_variables
from graphsplit.planning.plan import Plan
from graphsplit.program.program import Program
from graphsplit.rules.families.random import seeded_kernels
from graphsplit.tracing.trace import Trace

_MANY_BYTES = 16_000_000
_ASKS_FOR_REPLICA = ("merge_call", "replica context", "cross-replica")
"""What errors of optimizers name that are applied in a strategy's scope and outside of its replicas."""


def warn_of_outer_graph(name: str, traces: Traces, devices: Iterable[str]) -> None:
    """Warn, once for a function, when a graph that is being built calls it and workers run it."""
    tasks = sorted({task for device in devices if (task := task_of(device)) is not None})
    if not tasks or traces.told_of_graph or in_save_context():
        return
    traces.told_of_graph = True
    several = "s" if len(tasks) > 1 else ""
    workers = ", ".join([str(number) for _, number in tasks])
    warnings.warn(
        f"{name} is called inside of a tf.function, and runs on worker{several} {workers}. TensorFlow runs the graph "
        "of that function by itself: while a worker hangs, the call does not end, and when a worker is lost, variables "
        f"keep what the call has written so far. Call {name} outside of tf.function, or parallelize the whole "
        "function: then a step happens completely or not at all.",
        stacklevel=user_stack_level(),
    )


def warn_of_variables(name: str, traces: Traces, plan: Plan) -> None:
    """Warn, once for a function, when much passes through one device of several because the variables are there."""
    if traces.told_of_variables or not copies_take_time(plan.devices):
        return
    burden = burden_of_variables(plan)
    if burden is not None and burden.travels and burden.own.sent + burden.own.received > _MANY_BYTES:
        traces.told_of_variables = True
        warnings.warn(f"{name} sends much through one device: {burden}.", stacklevel=user_stack_level())


def warn_of_kernels(name: str, traces: Traces, signature: Signature, program: Program) -> None:
    """Warn, once for a function, when kernels draw again what they drew, and those of one device's trace would go on.

    Args:
      name: of the function.
      traces: which have the signatures under which one device traces, of plans with kernels that count for themselves.
      signature: that of a new plan.
      program: what it was traced to.
    """
    kernels = list(dict.fromkeys(seeded_kernels(program))) if tf.executing_eagerly() else []
    if not kernels or traces.told_of_kernels:
        return
    if signature not in traces.of_kernels:
        traces.of_kernels.add(signature)
        return
    traces.told_of_kernels = True
    warnings.warn(
        f"{name} is planned once more, for other sizes or layouts, and draws seeded numbers by TensorFlow's kernels in "
        f"a loop, in a branch, under XLA or on workers: {', '.join(kernels[:3])}. They begin anew in each plan, and go "
        "on in one device's trace: from this call on, these numbers are not those of one device. Draw by a "
        "tf.random.Generator, by keras.random with a SeedGenerator, or by tf.random.stateless_normal and its like (in "
        "tf_keras, call tf_keras.backend.experimental.enable_tf_random_generator() before you make the model).",
        stacklevel=user_stack_level(),
    )


def warn_of_stateless_scope(name: str, traces: Traces) -> None:
    """Warn, once for a function, when it is called where Keras' variables have other values than they hold."""
    if traces.told_of_scope or only_shapes_count():
        return
    traces.told_of_scope = True
    warnings.warn(
        f"{name} is called in a keras.StatelessScope, as stateless_call opens one, where variables have other values. "
        "Its traces cannot be kept, so it runs unsplit, on one device. To split it, parallelize the function that "
        "calls stateless_call.",
        stacklevel=user_stack_level(),
    )


def check_no_replica(name: str) -> None:
    """Raise `UnsupportedError` if a function is called by each of a strategy's replicas, inside of `strategy.run`."""
    if tf.distribute.has_strategy() and not tf.distribute.in_cross_replica_context():
        replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        if replicas > 1:
            kind = type(tf.distribute.get_strategy()).__name__
            raise UnsupportedError(
                f"{name} is called in {kind}.run by each of {replicas} replicas, which already have their rows; it "
                "would split them again. A parallelized function takes the strategy's place: call it outside of "
                "strategy.run and of strategy.scope(), once, on the whole batch."
            )


@contextlib.contextmanager
def explaining_trace(name: str, arguments: structures.Container) -> Iterator[None]:
    """Say what is the matter if a function cannot be traced since it gets batches, or is in a strategy's scope.

    A function may take a dataset, and run in a scope. One that wants a tensor, or applies an optimizer, fails somewhere
    in TensorFlow or Keras.
    """
    try:
        yield
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, GraphsplitError) and not isinstance(error, OutputError):
            raise
        if batches := _what_yields_batches(arguments):
            raise ArgumentError(
                f"{name} takes one batch, and got what yields batches:\n"
                f"{bullet_list(batches)}\n"
                f"For a result for each batch, iterate over {name}.map(batches)."
            ) from error
        if tf.distribute.has_strategy() and any(words in str(error) for words in _ASKS_FOR_REPLICA):
            raise UnsupportedError(
                f"{name} is called inside of `with strategy.scope():` of a "
                f"{type(tf.distribute.get_strategy()).__name__}, where an optimizer can only be applied by each "
                "replica. A parallelized function takes the strategy's place: make the model and the optimizer, and "
                f"call {name}, outside of the scope."
            ) from error
        raise


def _what_yields_batches(arguments: structures.Container) -> list[str]:
    """Return the arguments that are datasets or iterators, with their types."""
    leaves = structures.static_leaves(arguments)
    return [f"{path}: {type(leaf).__name__}" for path, leaf in leaves if isinstance(leaf, (tf.data.Dataset, Iterator))]


def check_no_dtensors(name: str, trace: Trace, tensors: Sequence[Any]) -> None:
    """Raise `UnsupportedError` for arguments and variables that DTensor has divided over a mesh of its own."""
    with raw_handles():
        variables = [(f"variable {name_of(variable)}", variable.handle.device) for variable in trace.variables]
    arguments = zip(trace.program.input_names, [getattr(tensor, "device", None) for tensor in tensors], strict=False)
    divided = [what for what, device in [*arguments, *variables] if device and is_of_dtensor(device)]
    if divided:
        raise UnsupportedError(
            f"{name} is given tensors that DTensor has divided over a mesh of its own:\n"
            f"{bullet_list(divided)}\n"
            "Pass a tf.Tensor, and make variables by tf.Variable: "
            'gs.set_variable_layout(variable, "sharded") divides them.'
        )


def check_no_distributed_values(name: str, arguments: structures.Container) -> None:
    """Raise `ArgumentError` for `tf.distribute.DistributedValues` that are no variables: a batch of each replica."""
    distributed = []
    for path, leaf in structures.walk(arguments):
        if not isinstance(leaf, structures.TensorLeaf):
            kind = leaf.spec.value_type if isinstance(leaf, structures.CompositeLeaf) else type(leaf.value)
            is_variable = hasattr(kind, "assign")
            if issubclass(kind, tf.distribute.DistributedValues) and not is_variable:
                distributed.append(f"{path}: {kind.__name__}")
    if distributed:
        raise ArgumentError(
            f"{name} is called on values that a tf.distribute strategy has spread over its replicas:\n"
            f"{bullet_list(distributed)}\n"
            "It needs the whole batch, and splits it: iterate over the dataset, not over "
            "strategy.experimental_distribute_dataset(dataset)."
        )
