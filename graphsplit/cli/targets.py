"""What commands look at: a SavedModel's signature or somebody's function, and arguments for it."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.core.devices import canonical_name, short_name
from graphsplit.core.gpus import has_gpus
from graphsplit.core.patterns import meant
from graphsplit.core.progress import phase
from graphsplit.core.protos import is_marked
from graphsplit.core.storage.files import model_file
from graphsplit.core.storage.stored_models import read_saved_model
from graphsplit.core.structures import spec_text
from graphsplit.core.tensorflow_internals import eager_context_started
from graphsplit.core.user_code import place_of_error
from graphsplit.errors import ArgumentError, GraphsplitError, bullet_list
from graphsplit.inspect.sources import load_signature

_SPEC = re.compile(r"^\s*(?P<dtype>[a-z]+[0-9]*)\s*\[(?P<sizes>[^\]]*)\]\s*$")
_ROWS = 32  # of a batch of any size, where a signature is looked at without --spec


def called(
    target: str, signature: str, specs: Sequence[str], devices: int | Sequence[str] | None, needs_values: bool
) -> tuple[Any, list[Any]]:
    """Return the function that `target` names, split over devices if there are any, and arguments for it.

    Args:
      target: the directory of a SavedModel, or `module:function`.
      signature: which one, for a SavedModel.
      specs: the arguments, `float32[64,784]`; `?` for a size that is not known.
      devices: how many, GPUs if there are any, else logical CPU devices; or which ones.
      needs_values: whether arguments are to be tensors.

    Raises:
      ArgumentError: if something is not understood or does not exist.
    """
    given_specs = [parse_spec(text) for text in specs]
    _make_devices(target, devices)
    with phase(f"loading {target}"):
        fn, declared = load_target(target, signature)
    if given_specs or not declared:
        _check_specs(target, fn, declared, given_specs)
    if declared and devices is not None:
        _check_not_split(target, fn)
    specified = given_specs or list(declared.values() if needs_values or devices is not None else ())
    if not given_specs and (rows := _example_rows(list(declared.values()))) is not None:
        specified = rows
        print(f"Bytes and FLOPs are those of {', '.join(map(spec_text, rows))}; --spec says otherwise.")
    if declared and (specified or devices is not None):
        fn = _by_position(fn, list(declared), f"{target} ({signature})")
    if devices is not None and not isinstance(fn, ParallelFunction):
        fn = gs.parallelize(fn, devices=devices)
    return fn, [example(spec) for spec in specified] if needs_values else list(specified)


def function_of(target: str, specs: Sequence[str]) -> tuple[Any, list[tf.TensorSpec]]:
    """Return the function that `module:function` names, and its arguments.

    Raises:
      ArgumentError: if something is not understood or does not exist, or is a SavedModel.
    """
    arguments = [parse_spec(text) for text in specs]
    fn, declared = load_target(target, "serving_default")
    if declared:
        raise ArgumentError(f"{target!r} is a SavedModel; predict takes a function, module:function.")
    _check_specs(target, fn, {}, arguments)
    return fn, arguments


def load_target(target: str, signature: str) -> tuple[Any, dict[str, tf.TensorSpec]]:
    """Return the function that `target` names, and, for a SavedModel's signature, its arguments by name.

    Raises:
      ArgumentError: if there is none, or the user's module cannot be imported.
    """
    if os.path.isdir(target):
        function = load_signature(target, signature)
        return function, dict(function.structured_input_signature[1])
    module, _, path = target.partition(":")
    names = path.split(".")
    if not module or not all(name.isidentifier() for name in names):
        raise ArgumentError(f"{target!r} is neither the directory of a SavedModel nor of the form module:function.")
    module = module.removesuffix(".py")
    directory = os.getcwd()
    sys.path.insert(0, directory)  # as `python -m` does: the user's own modules lie where the command is
    try:
        if not _exists(module.partition(".")[0]):
            raise ArgumentError(
                f"{target!r}: there is no module {module!r}. It is looked for in {directory!r} and in sys.path."
                + meant(module, [path.stem for path in Path().glob("*.py")])
            )
        with users_code(f"Importing {module!r}"):
            target_object: Any = importlib.import_module(module)
    finally:
        sys.path.remove(directory)
    for name in names:
        if not hasattr(target_object, name):
            names = [public_name for public_name in dir(target_object) if not public_name.startswith("_")]
            raise ArgumentError(f"{target!r}: {target_object!r} has no attribute {name!r}.{meant(name, names)}")
        target_object = getattr(target_object, name)
    if not callable(target_object):
        raise ArgumentError(f"{target!r} is no function: it is {target_object!r}.")
    return target_object, {}


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):  # a name with dots only; a module that has no specification
        return False


def _make_devices(target: str, devices: int | Sequence[str] | None) -> None:
    """Make logical CPU devices where there are no GPUs: those that are asked for, or that a SavedModel names."""
    if eager_context_started() or has_gpus():
        return
    count = devices if isinstance(devices, int) else 1
    if devices is None and os.path.isdir(target):
        count = _cpus_of_model(target)
    if isinstance(devices, int) or count > 1:
        gs.use_logical_devices(count)


def _check_not_split(target: str, fn: Any) -> None:
    """Raise `ArgumentError` for a SavedModel's signature that has been split over devices already."""
    graph = fn.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    if any(map(is_marked, nodes)):
        devices = sorted({short_name(canonical_name(node.device)) for node in nodes if is_marked(node) and node.device})
        raise ArgumentError(
            f"{target!r} was transpiled before, for {', '.join(devices)}. Leave --devices out to see that, or name the "
            "original."
        )


def _example_rows(specs: Sequence[tf.TensorSpec]) -> list[tf.TensorSpec] | None:
    """Return specifications with 32 rows where only their number is not known; None if none needs it, or more is not.

    Bytes and FLOPs of a signature for any number of rows are then those of some.
    """
    is_open = [bool(spec.shape.rank) and spec.shape[0] is None for spec in specs]
    shapes = [spec.shape[1:] if rows else spec.shape for rows, spec in zip(is_open, specs, strict=True)]
    if not any(is_open) or not all(shape.is_fully_defined() for shape in shapes):
        return None
    return [
        tf.TensorSpec([_ROWS, *shape] if rows else shape, spec.dtype, spec.name)
        for rows, shape, spec in zip(is_open, shapes, specs, strict=True)
    ]


def _cpus_of_model(directory: str) -> int:
    """Return on how many CPU devices the graphs of a SavedModel ask to run; 1 for a model for one device."""
    if model_file(directory).suffix == ".cpb":  # in pieces, which only TensorFlow can put together
        return 1
    graphs = [meta_graph.graph_def for meta_graph in read_saved_model(directory).meta_graphs]
    nodes = [node for g in graphs for node in (*g.node, *(n for f in g.library.function for n in f.node_def))]
    devices = {node.device for node in nodes}
    return 1 + max((int(match[1]) for device in devices if (match := re.search(r"CPU:(\d+)$", device))), default=0)


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
    match = _SPEC.match(text)
    sizes = [size.strip() for size in match["sizes"].split(",")] if match and match["sizes"].strip() else []
    try:
        if match is not None and all(size in ("?", "None") or size.isdecimal() for size in sizes):
            shape = [None if size in ("?", "None") else int(size) for size in sizes]
            return tf.TensorSpec(shape, tf.as_dtype(match["dtype"]))
    except (TypeError, ValueError, OverflowError):
        pass  # no dtype, or more than a size can be
    raise ArgumentError(f"--spec {text!r} is not understood; write it like 'float32[64,784]'.")


def _check_specs(target: str, fn: Any, declared: dict[str, tf.TensorSpec], specs: Sequence[tf.TensorSpec]) -> None:
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
        f"{name} is {spec_text(declared_spec)}, --spec says {spec_text(spec)}"
        for (name, declared_spec), spec in zip(declared.items(), specs, strict=True)
        if declared_spec.dtype != spec.dtype or not declared_spec.shape.is_compatible_with(spec.shape)
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


def _by_position(fn: Callable[..., Any], names: Sequence[str], title: str) -> Callable[..., Any]:
    """Return a SavedModel's signature, which takes names, as a function of its arguments in their order."""

    def call(*args: Any) -> Any:
        return fn(**dict(zip(names, args, strict=True)))

    call.__name__ = title
    return call


def _are(count: int) -> str:
    return f"{'is' if count == 1 else 'are'} {count or 'no'} --spec"
