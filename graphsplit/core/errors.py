"""The errors graphsplit raises for its users.

Inner floors raise these with the facts they know; the public functions let them through unchanged. Errors of the
user's own function are never wrapped: they arrive with their own type and traceback.
"""

from __future__ import annotations


class GraphsplitError(Exception):
    """Base class of every error that graphsplit raises itself."""

    # AutoGraph, which rewrites errors that pass through a traced function to show the user's lines, keeps the type of
    # an error only if this is its constructor.
    __init__ = Exception.__init__


class DeviceError(GraphsplitError, ValueError):
    """The devices asked for do not exist, clash, or can no longer be made.

    Attributes:
      asked: how many were asked for, where there are fewer; the command line says how to have them.
    """

    asked: int | None = None


class ArgumentError(GraphsplitError, ValueError):
    """An option or argument does not fit the function or the other arguments."""


class OutputError(GraphsplitError, TypeError):
    """The function returned something that cannot leave a TensorFlow graph."""


class WorkerLostError(GraphsplitError, ConnectionError):
    """A worker process of the cluster ended, was started anew, or does not answer any more.

    Attributes:
      tasks: the numbers of the lost workers.
      undone: whether variables have the values that they had before the call that failed.
    """

    tasks: tuple[int, ...] = ()
    undone: bool = True


class StrictError(GraphsplitError):
    """`strict=True` was asked for and an operation that carries the batch would run at home."""


class StorageError(GraphsplitError, OSError):
    """A file could not be written: the disk is full, or the place may not be written. Nothing was replaced."""


class UnsupportedError(GraphsplitError, NotImplementedError):
    """A combination that graphsplit knows and does not support (yet)."""


class CheckError(GraphsplitError, AssertionError):
    """A checker found a broken program, plan or graph: a defect of graphsplit, not of the user's code."""


def bullet_list(lines: list[str]) -> str:
    """Return `lines` as an indented list, the form in which errors name several offenders at once."""
    return "\n".join(f"  - {line}" for line in lines)
