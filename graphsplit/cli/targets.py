"""What `graphsplit inspect` looks at: a SavedModel's signature or somebody's function, and arguments for it."""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from graphsplit.api.parallel_function import ParallelFunction
from graphsplit.cli.checks import split_spec, split_target, working_directory_first
from graphsplit.core.errors import ArgumentError, GraphsplitError, bullet_list
from graphsplit.core.structures import spec_text
from graphsplit.core.user_code import place_of_error
from graphsplit.placement.sources import load_signature


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
