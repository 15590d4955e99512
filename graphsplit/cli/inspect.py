"""`graphsplit inspect`: the placement of a function or SavedModel, from the command line."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import rich.console
import tensorflow as tf

from graphsplit.api.decorators import parallelize
from graphsplit.api.parallel_function import ParallelFunction
from graphsplit.core.devices import use_logical_devices
from graphsplit.core.errors import ArgumentError
from graphsplit.core.tensorflow_internals import eager_context_started
from graphsplit.placement.builders import placement_of
from graphsplit.placement.sources import load_signature
from graphsplit.placement.timeline import timeline_of

_SPEC = re.compile(r"^\s*(?P<dtype>[a-z]+[0-9]*)\s*\[(?P<sizes>[^\]]*)\]\s*$")


def inspect(
    target: str,
    *,
    specs: Sequence[str] = (),
    devices: int | None = None,
    actual: bool = False,
    signature: str = "serving_default",
    outputs: Sequence[str] = (),
    timeline: str | None = None,
) -> None:
    """Print where every operation runs, and the warnings; write pictures.

    Args:
      target: the directory of a SavedModel, or `module:function`.
      specs: the arguments, `float32[64,784]`; `?` for a size that is not known.
      devices: split the function over that many devices: GPUs if there are any, else logical CPU devices.
      actual: run it once, on random numbers.
      signature: which one, for a SavedModel.
      outputs: files to write; their suffix chooses the form.
      timeline: file for the timeline of one step, `.json`, `.png` or `.svg`.

    Raises:
      ArgumentError: if something is not understood or does not exist.
    """
    console = rich.console.Console(stderr=True)
    if devices is not None and not eager_context_started() and not tf.config.list_physical_devices("GPU"):
        use_logical_devices(devices)
    parsed = [parse_spec(text) for text in specs]
    with _progress(console, f"loading {target}"):
        fn, keywords = load_target(target, signature)
    if keywords and not parsed and devices is not None:
        parsed = list(keywords.values())
    if devices is not None and not isinstance(fn, ParallelFunction):
        fn = parallelize(_by_position(fn, list(keywords)) if keywords else fn, devices=devices)
    needs_values = actual or timeline is not None or isinstance(fn, ParallelFunction)
    arguments: list[Any] = [example(spec) for spec in parsed] if needs_values else list(parsed)
    with _progress(console, "tracing, running and reading back" if actual else "tracing"):
        placement = placement_of(fn, *arguments, actual=actual)
    print(placement)
    for path in outputs:
        with _progress(console, f"writing {path}"):
            placement.save(path)
    if timeline is not None:
        with _progress(console, "recording a step"):
            recorded = timeline_of(fn, *arguments)
            recorded.save(timeline)
        print(recorded)


def load_target(target: str, signature: str) -> tuple[Any, dict[str, tf.TensorSpec]]:
    """Return the function that `target` names, and, for a SavedModel's signature, its arguments by name."""
    if os.path.isdir(target):
        function = load_signature(target, signature)
        return function, dict(function.structured_input_signature[1])
    module_name, separator, path = target.partition(":")
    if not separator:
        raise ArgumentError(f"{target!r} is neither the directory of a SavedModel nor of the form module:function.")
    sys.path.insert(0, os.getcwd())  # as `python -m` does: the user's own modules lie where the command is given
    try:
        found: Any = importlib.import_module(module_name.removesuffix(".py"))
    except ModuleNotFoundError as error:
        raise ArgumentError(f"{target!r}: {error}. It is looked for in {os.getcwd()!r} and in sys.path.") from error
    finally:
        sys.path.pop(0)
    for part in path.split("."):
        if not hasattr(found, part):
            raise ArgumentError(f"{target!r}: {found!r} has no attribute {part!r}.")
        found = getattr(found, part)
    return found, {}


def parse_spec(text: str) -> tf.TensorSpec:
    """Return the specification of a tensor that people write as `float32[64,784]`.

    >>> parse_spec("int32[?, 3]")
    TensorSpec(shape=(None, 3), dtype=tf.int32, name=None)
    """
    match = _SPEC.match(text)
    try:
        if match is None:
            raise ValueError(text)
        sizes = [size.strip() for size in match["sizes"].split(",") if size.strip()]
        shape = [None if size in ("?", "None") else int(size) for size in sizes]
        return tf.TensorSpec(shape, tf.as_dtype(match["dtype"]))
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"--spec {text!r} is not understood; write it like 'float32[64,784]'.") from error


def example(spec: tf.TensorSpec) -> tf.Tensor:
    """Return a tensor that fits: random numbers, zeros for integers.

    Raises:
      ArgumentError: if a size is not known.
    """
    if not spec.shape.is_fully_defined():
        raise ArgumentError(
            f"The argument {spec.name or ''} {spec.dtype.name}{spec.shape} has a size that is not known; name all "
            "sizes with --spec, like --spec 'float32[64,784]'."
        )
    if spec.dtype.is_floating:
        return tf.cast(tf.random.normal(spec.shape), spec.dtype)
    return tf.fill(spec.shape, "") if spec.dtype == tf.string else tf.zeros(spec.shape, spec.dtype)


def _by_position(fn: Callable[..., Any], names: Sequence[str]) -> Callable[..., Any]:
    """Return a SavedModel's signature, which takes names, as a function of its arguments in their order."""

    def call(*args: Any) -> Any:
        return fn(**dict(zip(names, args, strict=True)))

    call.__name__ = str(getattr(fn, "name", "signature"))
    return call


@contextmanager
def _progress(console: rich.console.Console, what: str) -> Iterator[None]:
    with console.status(f"{what} ..."):
        yield
