"""Which code is the user's: not TensorFlow's, Keras', the standard library's, another package's, or this one's."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import tensorflow as tf

from graphsplit.errors import GraphsplitError

P = ParamSpec("P")
R = TypeVar("R")

_OURS = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_NOT_USERS = ("<", _OURS, *{os.path.join(folder, "") for folder in sysconfig.get_paths().values()})
_DEFINITION = re.compile(r"(?P<indent>[ \t]*)(async )?(?P<kind>class|def) +(?P<name>\w+)")
_PACKAGES = tuple(os.path.join(sysconfig.get_path(kind), "") for kind in ("purelib", "platlib"))
_FRAMEWORKS = ("absl", "click", "decorator", "keras", "numpy", "six", "tensorflow", "tf_keras", "typer", "wrapt")
_REWRITTEN = "__autograph_generated_file"  # AutoGraph's form of somebody's function


def is_users(filename: str) -> bool:
    """Return whether a file is the user's own, not of an installed package and not generated."""
    return not filename.startswith(_NOT_USERS) and _REWRITTEN not in filename


def line_in_models(frames: Iterable[Any]) -> str:
    """Return the innermost line outside of TensorFlow and Keras, "" if there is none.

    That is a line of the user, `train.py:14`, or of a package that has the model, `deepchem/models/layers.py:90`.

    Args:
      frames: with a `filename` and a `lineno`, outermost first.
    """
    places = ((_in_models(frame.filename), frame.lineno) for frame in reversed(list(frames)))
    return next((f"{place}:{line}" for place, line in places if place), "")


@functools.cache
def _in_models(filename: str) -> str:
    """Return how a file is called that is the user's or of a package outside of TensorFlow and Keras; else ""."""
    folder = next((folder for folder in _PACKAGES if filename.startswith(folder)), None)
    if folder is None:
        return os.path.basename(filename) if is_users(filename) else ""
    inside = filename.removeprefix(folder)
    is_framework = inside.startswith(_FRAMEWORKS) or filename.startswith(_OURS)
    return "" if is_framework else inside.replace(os.sep, "/")


def calling_class(frames: Iterable[Any]) -> str:
    """Return the class in whose `call` the innermost of some frames is, which of Keras is a layer; "" for none.

    (TensorFlow keeps of each frame the file and the line. The class is that above the function in the source.)

    Args:
      frames: with a `filename`, a `lineno` and a `name`, outermost first.
    """
    frame = next((frame for frame in reversed(list(frames)) if frame.name == "call"), None)
    lines = linecache.getlines(frame.filename)[: frame.lineno] if frame is not None else []
    indent = None  # of the function, once that was met
    for line in reversed(lines):
        match = _DEFINITION.match(line)
        if match is None or (match["name"] != "call" if indent is None else len(match["indent"]) >= indent):
            continue
        if match["kind"] == "class":
            return match["name"]
        indent = len(match["indent"])
    return ""


def place_of_error(error: BaseException) -> str:
    """Return the user's innermost line that an error came through, `/home/me/train.py:14`, "" if there is none."""
    return _user_place(traceback.extract_tb(error.__traceback__))


def _user_place(frames: Iterable[Any]) -> str:
    return next((f"{f.filename}:{f.lineno}" for f in reversed(list(frames)) if is_users(f.filename)), "")


def user_stack_level() -> int:
    """Return the `stacklevel` with which the caller's `warnings.warn` points at the user's line that led to it."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def with_users_traceback(function: Callable[P, R]) -> Callable[P, R]:
    """Return a public function whose errors show the user's lines, see `shortened`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            raise shortened(error) from error.__cause__

    return call


def shortened(error: Exception) -> Exception:
    """Return an error with a traceback of the user's lines only, if it is for the user to fix.

    That is an error of the user's own code, one of an operation that ran, or one of ours that says what was asked. All
    else keeps every line, and so does everything after `tf.debugging.disable_traceback_filtering()`. Functions that
    AutoGraph rewrote have their lines in the error's message, if AutoGraph could put them there.
    """
    is_explained = hasattr(error, "ag_error_metadata")
    files = [(frame, frame.tb_frame.f_code.co_filename) for frame in _frames(error.__traceback__)]
    users = [frame for frame, name in files if is_users(name) or (_REWRITTEN in name and not is_explained)]
    is_for_user = is_explained or users or isinstance(error, (GraphsplitError, tf.errors.OpError))
    if not is_for_user or not tf.debugging.is_traceback_filtering_enabled():
        return error
    following: TracebackType | None = None
    for frame in reversed(users):
        following = TracebackType(following, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return error.with_traceback(following)


def _frames(entry: TracebackType | None) -> Iterable[TracebackType]:
    while entry is not None:
        yield entry
        entry = entry.tb_next
