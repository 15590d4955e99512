"""Warnings for calls whose surroundings decide more than the function: somebody else's graph, Keras' scopes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from graphsplit.api.traces import Traces
from graphsplit.core.devices import task_of
from graphsplit.core.keras_internals import only_shapes_count
from graphsplit.core.tensorflow_internals import in_save_context
from graphsplit.core.user_code import user_stack_level


def warn_of_outer_graph(name: str, traces: Traces, devices: Iterable[str]) -> None:
    """Warn, once for a function, when a graph that is being built calls it and workers run it.

    Args:
      name: the function's.
      traces: the function's; they remember.
      devices: where it runs, full names.
    """
    tasks = sorted({task for device in devices if (task := task_of(device)) is not None})
    if not tasks or traces.told_of_graph or in_save_context():
        return
    traces.told_of_graph = True
    several = "s" if len(tasks) > 1 else ""
    workers = ", ".join([str(number) for _, number in tasks])
    warnings.warn(
        f"{name} is called inside of a tf.function, and runs on worker{several} {workers}. There it is a part of that "
        "function's graph, which TensorFlow runs by itself: a call that waits for a worker that stands still waits as "
        "long as that does, and when a worker is lost, variables that the call has written are not given back their "
        f"values. Call {name} outside of tf.function, or give parallelize the whole function: then a step happens or "
        "does not.",
        stacklevel=user_stack_level(),
    )


def warn_of_stateless_scope(name: str, traces: Traces) -> None:
    """Warn, once for a function, when it is called where Keras' variables have other values than they hold.

    Args:
      name: the function's.
      traces: the function's; they remember.
    """
    if traces.told_of_scope or only_shapes_count():
        return
    traces.told_of_scope = True
    warnings.warn(
        f"{name} is called in a keras.StatelessScope, as stateless_call opens one, where variables have other values. "
        "No trace of it can be kept, so it runs as it is, on one device. To split it, parallelize the function that "
        "calls stateless_call.",
        stacklevel=user_stack_level(),
    )
