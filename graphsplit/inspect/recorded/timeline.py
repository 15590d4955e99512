"""What one executed step looked like: which operation ran when on which device. Measured, not modelled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.inspect.actual import require_runnable
from graphsplit.inspect.builders import placement_of_source, source_of
from graphsplit.inspect.recorded.profiles import missing_in, read_events, record_hosts
from graphsplit.inspect.recorded.recorded_steps import Timeline
from graphsplit.inspect.sources import PlacementSource, StateKeeper


def timeline(fn: Any, *args: Any, **kwargs: Any) -> Timeline:
    """Run a function under TensorFlow's profiler and return what ran when on which device.

    The function runs three times: to learn where each operation runs, to warm up, and to be recorded. Variables get
    their values back. The recorded step is slower than others. Workers record, too; if one does not, the timeline's
    `note` names the devices without times.

    Args:
      fn: a function made by `parallelize`, or anything that `placement` takes but directories.
      *args, **kwargs: its arguments, tensors.

    Raises:
      ArgumentError: if arguments are specifications and not tensors.

    >>> import tensorflow as tf, graphsplit as gs
    >>> gs.inspect.timeline(tf.function(lambda x: tf.linalg.matmul(x, x)), tf.ones([64, 64])).slowest(1)[0].device
    '/device:CPU:0'
    """
    source, arguments, title = source_of(fn, args, kwargs)
    return timeline_of_source(source, arguments, title)


def timeline_of_source(source: PlacementSource, arguments: Sequence[Any], title: str, steps: int = 1) -> Timeline:
    """Return the timeline of a graph run on flat arguments, so many times one after the other."""
    require_runnable(source, arguments)
    assert source.make_run is not None
    run = source.make_run()
    with StateKeeper(source.state):
        with partition_graphs() as graphs:
            run(arguments)
        run(arguments)
        recordings, notes = record_hosts(lambda: _repeat(lambda: run(arguments), steps), graphs)
    events = read_events(recordings, graphs)
    note = "; ".join([*notes, *missing_in(recordings, events, graphs)])
    return Timeline(title, tuple(events), placement_of_source(source, title, graphs), note)


def _repeat(step: Callable[[], Sequence[Any]], times: int) -> None:
    """Take so many steps, each until its results are there."""
    for _ in range(times):
        for tensor in step():
            if hasattr(tensor, "numpy"):
                tensor.numpy()
