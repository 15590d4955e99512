"""What `graphsplit inspect` looks at: a SavedModel's signature or somebody's function, and arguments for it."""

from __future__ import annotations

import importlib
import inspect
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.cli.checks import split_spec, split_target, working_directory_first
from graphsplit.core.devices import canonical_name, short_name
from graphsplit.core.errors import ArgumentError, GraphsplitError, bullet_list
from graphsplit.core.protos.marks import is_marked
from graphsplit.core.storage.model_files import model_file
from graphsplit.core.storage.stored_models import read_saved_model
from graphsplit.core.structures import spec_text
from graphsplit.core.user_code import place_of_error
from graphsplit.placement.sources import load_signature

_ROWS = 32  # of a batch of any size, where a signature is looked at without --spec


def load_target(target: str, signature: str) -> tuple[Any, dict[str, tf.TensorSpec]]:
    """Return the function that `target` names, and, for a SavedModel's signature, its arguments by name.

    Raises:
      ArgumentError: if there is none, or the user's module cannot be imported.
    """
    if os.path.isdir(target):
        function = load_signature(target, signature)
        return function, dict(function.structured_input_signature[1])
    module_name, names = split_target(target)
    with working_directory_first(), users_code(f"Importing {module_name!r}"):
        found: Any = importlib.import_module(module_name)
    for name in names:
        if not hasattr(found, name):
            raise ArgumentError(f"{target!r}: {found!r} has no attribute {name!r}.")
        found = getattr(found, name)
    if not callable(found):
        raise ArgumentError(f"{target!r} is no function: it is {found!r}.")
    return found, {}


def check_not_split(target: str, fn: Any) -> None:
    """Raise `ArgumentError` for a SavedModel's signature that has been split over devices already."""
    graph = fn.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    if any(map(is_marked, nodes)):
        devices = sorted({short_name(canonical_name(node.device)) for node in nodes if is_marked(node) and node.device})
        raise ArgumentError(
            f"{target!r} was transpiled before, for {', '.join(devices)}. Leave --devices out to see that, or name the "
            "original."
        )


def example_rows(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec] | None:
    """Return specifications with 32 rows where only their number is not known; None if none needs it, or more is not.

    Bytes and FLOPs of a signature for any number of rows are then those of some.
    """
    is_open = [bool(spec.shape.rank) and spec.shape[0] is None for spec in specs]
    known = [spec.shape[1:] if rows else spec.shape for rows, spec in zip(is_open, specs, strict=True)]
    if not any(is_open) or not all(shape.is_fully_defined() for shape in known):
        return None
    return [
        tf.TensorSpec([_ROWS, *shape] if rows else shape, spec.dtype, spec.name)
        for rows, shape, spec in zip(is_open, known, specs, strict=True)
    ]


def cpus_of_model(directory: str) -> int:
    """Return on how many CPU devices the graphs of a SavedModel ask to run; 1 for a model for one device."""
    if model_file(directory).suffix == ".cpb":  # in pieces, which only TensorFlow can put together
        return 1
    graphs = [meta_graph.graph_def for meta_graph in read_saved_model(directory).meta_graphs]
    nodes = [node for g in graphs for node in (*g.node, *(n for f in g.library.function for n in f.node_def))]
    found = {node.device for node in nodes}
    return 1 + max((int(match[1]) for device in found if (match := re.search(r"CPU:(\d+)$", device))), default=0)


@contextmanager
def users_code(what: str) -> Iterator[None]:
    """Turn an error of the user's own code, in which it stays whole, into a message for the terminal."""
    try:
        yield
    except GraphsplitError:
        raise
    except (Exception, SystemExit) as error:  # a script may end the program when it is imported
        place = place_of_error(error)
        where = f" at {place}" if place else ""
        raise ArgumentError(f"{what} failed{where}: {type(error).__name__}: {error}") from error


def parse_spec(text: str) -> tf.TensorSpec:
    """Return the specification of a tensor that people write as `float32[64,784]`.

    >>> parse_spec("int32[?, 3]")
    TensorSpec(shape=(None, 3), dtype=tf.int32, name=None)
    """
    dtype, sizes = split_spec(text)
    try:
        return tf.TensorSpec(sizes, tf.as_dtype(dtype))
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"--spec {text!r} is not understood; write it like 'float32[64,784]'.") from error


def check_specs(target: str, fn: Any, declared: dict[str, tf.TensorSpec], specs: Sequence[tf.TensorSpec]) -> None:
    """Raise `ArgumentError` unless the function takes arguments of these specifications."""
    if not declared:
        _check_count(target, fn, len(specs))
        return
    names = [f"{name}: {spec_text(spec)}" for name, spec in declared.items()]
    if len(specs) != len(declared):
        raise ArgumentError(
            f"{target!r} takes these arguments, and there {_are(len(specs))}; give one for each, in this order:\n"
            f"{bullet_list(names)}"
        )
    wrong = [
        f"{name} is {spec_text(own)}, --spec says {spec_text(spec)}"
        for (name, own), spec in zip(declared.items(), specs, strict=True)
        if own.dtype != spec.dtype or not own.shape.is_compatible_with(spec.shape)
    ]
    if wrong:
        raise ArgumentError(f"{target!r} does not take what --spec says:\n{bullet_list(wrong)}")


def _check_count(target: str, fn: Any, count: int) -> None:
    try:
        signature = inspect.signature(fn.function if isinstance(fn, ParallelFunction) else fn)
    except (TypeError, ValueError):  # of something written in C
        return
    try:
        signature.bind(*[None] * count)
    except TypeError as error:
        raise ArgumentError(
            f"{target!r} takes {signature}, and there {_are(count)} ({error}). Give one for each tensor, in order, "
            "like --spec 'float32[64,784]'."
        ) from error


def example(spec: tf.TensorSpec) -> tf.Tensor:
    """Return a tensor that fits: random numbers, zeros for integers.

    Raises:
      ArgumentError: if a size is not known, or there is no room for so many numbers.
    """
    if not spec.shape.is_fully_defined():
        raise ArgumentError(
            f"The argument {f'{spec.name} ' if spec.name else ''}{spec_text(spec)} has a size that is not known; name "
            "all sizes with --spec, like --spec 'float32[64,784]'."
        )
    try:
        if spec.dtype.is_floating:
            return tf.cast(tf.random.normal(spec.shape), spec.dtype)
        return tf.fill(spec.shape, "") if spec.dtype == tf.string else tf.zeros(spec.shape, spec.dtype)
    except (tf.errors.OpError, ValueError, TypeError) as error:
        raise ArgumentError(f"No tensor {spec_text(spec)} can be made here: {error}") from error


def by_position(fn: Callable[..., Any], names: Sequence[str], title: str) -> Callable[..., Any]:
    """Return a SavedModel's signature, which takes names, as a function of its arguments in their order."""

    def call(*args: Any) -> Any:
        return fn(**dict(zip(names, args, strict=True)))

    call.__name__ = title
    return call


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {count or 'no'} --spec"
