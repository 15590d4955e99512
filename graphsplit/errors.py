"""The errors graphsplit raises for its users.

Inner code raises these with the facts they know; the public functions let them through unchanged. Errors of the
user's own function are never wrapped: they arrive with their own type and traceback. `docs/generated/errors.md` is
made of these docstrings, by `ci/errors.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "ArgumentError",
    "CheckError",
    "DeviceError",
    "GraphsplitError",
    "OutputError",
    "PlacementError",
    "RetracingWarning",
    "StorageError",
    "StrictError",
    "UnsupportedError",
    "WorkerLostError",
]


class GraphsplitError(Exception):
    """Base class of every error that graphsplit raises itself.

    Catch it to tell what graphsplit refuses from what your own code raises. Each kind is also one of Python's own, so
    that `except ValueError` still works.

    >>> import graphsplit as gs
    >>> try:
    ...     gs.parallelize(max, devices=0)
    ... except gs.GraphsplitError as error:
    ...     print(type(error).__name__, isinstance(error, ValueError))
    ArgumentError True
    """

    # AutoGraph, which rewrites errors that pass through a traced function to show the user's lines, keeps the type of
    # an error only if this is its constructor.
    __init__ = Exception.__init__


class DeviceError(GraphsplitError, ValueError):
    """The devices asked for do not exist, clash, or can no longer be made.

    Ask for fewer, or for those that the message lists. TensorFlow fixes its devices when it starts: call
    `use_logical_devices` before anything makes a tensor, and restart a notebook's runtime first.

    Attributes:
      asked: how many were asked for, where there are fewer; the command line says how to have them.

    >>> import tensorflow as tf, graphsplit as gs
    >>> gs.use_logical_devices(2)
    ('CPU:0', 'CPU:1')
    >>> gs.parallelize(tf.tanh, devices=8)(tf.ones((16, 3)))
    Traceback (most recent call last):
    graphsplit.errors.DeviceError: devices=8: there are only 2 CPU devices. This process has:
      - CPU:0
      - CPU:1
    To try several devices without GPUs, call graphsplit.use_logical_devices(n) before TensorFlow starts.
    For a plan or a placement only, name them: devices=[f"GPU:{k}" for k in range(8)].
    """

    asked: int | None = None


class ArgumentError(GraphsplitError, ValueError):
    """An option or argument does not fit the function or the other arguments.

    The message names all that is wrong, what the function takes, and what to write instead. Nothing has run.

    >>> import graphsplit as gs
    >>> gs.parallelize(lambda x, by: x * by, devices=2, split={"rows": 0})
    Traceback (most recent call last):
    graphsplit.errors.ArgumentError: split names 'rows', which the function does not take. It takes 'x', 'by'.
    """


class OutputError(GraphsplitError, TypeError):
    """The function returned something that cannot leave a TensorFlow graph.

    Return tensors, and make the object of them outside.

    >>> import tensorflow as tf, graphsplit as gs
    >>> described = gs.parallelize(lambda x: {"mean": tf.reduce_mean(x), "device": tf.config}, devices=2)
    >>> described(tf.ones((4, 2)))  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    graphsplit.errors.OutputError: The function returns values that are not tensors:
      - ['device']: builtins.module
    Return tensors, numpy arrays, Python numbers, strings, None, or lists, tuples, dicts and dataclasses of them; keep
    other objects outside of the function.
    """


class WorkerLostError(GraphsplitError, ConnectionError):
    """A worker process of the cluster ended, was started anew, or does not answer any more.

    Call again on the devices that are left: `gs.workers.resilient` does, and restores what was lost. If `undone` is
    False, end the worker's process first. [Several machines](docs/several_machines.md) says what is lost and what is
    not, and which lines TensorFlow's runtime writes beside.

    Attributes:
      tasks: the numbers of the lost workers.
      undone: whether variables have the values that they had before the call that failed.

    >>> import tensorflow as tf, graphsplit as gs
    >>> workers = gs.workers.LocalWorkers(2)
    >>> cluster = gs.connect(workers)
    >>> step = gs.parallelize(lambda x: tf.reduce_sum(x * x))
    >>> float(step(tf.ones((4, 2))))
    8.0
    >>> workers.kill(1)
    >>> step(tf.ones((4, 2)))  # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
    Traceback (most recent call last):
    graphsplit.errors.WorkerLostError: <lambda>: worker 1 (127.0.0.1:...) ended, or does not answer. The call did
    not happen: variables on other workers have the values from before the call. Variables stored only there are lost.
    gs.workers.resilient(...) continues with the remaining workers; cluster.reconnect() uses a worker again that was
    started again at its address.
    >>> workers.close()
    """

    tasks: tuple[int, ...] = ()
    undone: bool = True


class StrictError(GraphsplitError):
    """`strict=True` was asked for and an operation that carries the batch would run on one device.

    Each operation comes with its line, the bytes that would be gathered for it, why, and what to do about it
    ([all reasons](docs/limits.md#what-runs-on-one-device)). For a share of the work,
    `assert step.plan(x).balance > 0.9`.

    >>> import tensorflow as tf, graphsplit as gs
    >>> distinct = gs.parallelize(lambda x: tf.unique(tf.tanh(x)).y, devices=2, strict=True)
    >>> distinct(tf.ones(6))  # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
    Traceback (most recent call last):
    graphsplit.errors.StrictError: strict=True, but these operations work on rows of the batch and would run on
    one device:
      - Unique 'Unique' at ...: 24 B gathered; which entries are new depends on all rows
        -> leave it out if it only saves lookups, or call it in dataset.map, pad its values and pass them
        with split={...: None}
    Or drop strict=True, and assert how evenly devices work: step.plan(x).balance > 0.9.
    """


class StorageError(GraphsplitError, OSError):
    """A file could not be written: the disk is full, or the place may not be written. Nothing was replaced.

    graphsplit replaces only what it has written itself (a page, a picture), or, with overwrite=True, a SavedModel or a
    graph. Name another place, or move away what is there.

    >>> import pathlib, tempfile, tensorflow as tf, graphsplit as gs
    >>> page = pathlib.Path(tempfile.mkdtemp(), "thesis.html")
    >>> _ = page.write_text("<p>Chapter one.")
    >>> gs.placement(tf.tanh, tf.ones(3)).save(str(page))  # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
    Traceback (most recent call last):
    graphsplit.errors.StorageError: '.../thesis.html' was not written by graphsplit, so it is not replaced. Name
    another place, or move it away.
    """


class UnsupportedError(GraphsplitError, NotImplementedError):
    """A combination that graphsplit knows and does not support (yet).

    The message says what to write instead, where there is something. [Messages](docs/generated/messages.md)
    lists all of this kind; [what is not supported](docs/limits.md) puts them into context.

    >>> import tensorflow as tf, graphsplit as gs
    >>> x = tf.ones((4, 2))
    >>> square = gs.parallelize(tf.square, devices=2)
    >>> with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)):
    ...     square(x)  # doctest: +NORMALIZE_WHITESPACE
    Traceback (most recent call last):
    graphsplit.errors.UnsupportedError: square is called under tf.autodiff.ForwardAccumulator. Forward-mode
    differentiation around a parallelized function is not supported: use tf.GradientTape, or put the accumulator inside.
    """


class CheckError(GraphsplitError, AssertionError):
    """A checker found a broken program, plan or graph: a defect of graphsplit, not of the user's code.

    Please report it, with the function if you can. (Where your own `placement.assert_on` does not hold, that is a
    `PlacementError`, which is of this kind too.)

    >>> import dataclasses, tensorflow as tf, graphsplit as gs
    >>> plan = gs.parallelize(tf.reduce_sum, devices=2).plan(tf.ones(6))
    >>> dataclasses.replace(plan, moves=plan.moves[:-1]).check()
    Traceback (most recent call last):
    graphsplit.errors.CheckError: The reduce of 'Sum' from partial(sum) to whole on CPU:0 is missing.
    """


class PlacementError(CheckError):
    """An assertion about a placement does not hold: one of yours, by `assert_on` or `assert_colocated_gradients`.

    The message lists the operations that are elsewhere.

    >>> import tensorflow as tf, graphsplit as gs
    >>> gs.placement(tf.tanh, tf.ones(3)).assert_on("Tanh", "GPU:1")  # doctest: +NORMALIZE_WHITESPACE, +ELLIPSIS
    Traceback (most recent call last):
    graphsplit.errors.PlacementError: 1 of the 1 operations that match 'Tanh' are not on GPU:1:
      - Tanh on CPU:0
    """


class RetracingWarning(UserWarning):
    """A parallelized function is called with many different signatures, each of which costs about what the first cost.

    It is said once, at the eighth. The message names the arguments that differ. Pad to a few lengths; leave sizes open
    by `tuning={"reduce_retracing": True}`; pass Python numbers that change as tensors. (A function is traced and
    planned for each signature; a step of a Keras model is planned for each, from a trace that leaves the rows open.)
    It is also said when a plan for open sizes was made for calls in which two of them were the same, and they differ.

    >>> import warnings, tensorflow as tf, graphsplit as gs
    >>> square = gs.parallelize(tf.square, devices=2)
    >>> with warnings.catch_warnings(record=True) as told:
    ...     warnings.simplefilter("always")
    ...     for rows in range(1, 9):
    ...         _ = square(tf.ones(rows))
    >>> print(told[0].category.__name__, told[0].message, sep=": ")  # doctest: +NORMALIZE_WHITESPACE
    RetracingWarning: square has been called with 8 signatures, and has a plan for each:
      - x: float32[1], float32[2], float32[3], float32[4], ... (8 in all)
    A plan takes seconds for a large model. Pad or bucket lengths so that few shapes occur; or leave sizes that change
    open, by parallelize(..., tuning={"reduce_retracing": True}). Pass Python numbers that change as tensors.
    """


def bullet_list(lines: Sequence[str], most: int | None = None) -> str:
    """Return `lines`, or the first ones and how many more, as errors name several offenders at once."""
    shown = list(lines[:most])
    more = len(lines) - len(shown)
    return "\n".join(f"  - {line}" for line in [*shown, *([f"... and {more} more"] if more else [])])
