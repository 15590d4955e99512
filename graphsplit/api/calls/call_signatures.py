"""Signatures: how a function is called, and under which shapes a call is traced.

A function that is called with many is warned of: each has a plan, and costs what the first one did.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.structures import Container
from graphsplit.core.tensorflow_internals import rewritten_by_autograph
from graphsplit.core.user_code import user_stack_level
from graphsplit.errors import ArgumentError, RetracingWarning, bullet_list

MANY_SIGNATURES = 8


def warn_of_retracing(name: str, signatures: Sequence[structures.Container]) -> None:
    """Warn, once, when a function has reached `MANY_SIGNATURES` signatures; name the arguments that differ."""
    if len(signatures) != MANY_SIGNATURES:
        return
    lines = [f"{path}: {_several(values)}" for path, values in _differing(signatures).items()]
    warnings.warn(
        f"{name} has been called with {MANY_SIGNATURES} signatures, and has a plan for each:\n{bullet_list(lines)}\n"
        "A plan takes seconds for a large model. Pad or bucket lengths so that few shapes occur; or leave sizes that "
        'change open, by parallelize(..., tuning={"reduce_retracing": True}). Pass Python numbers that change as '
        "tensors.",
        RetracingWarning,
        stacklevel=user_stack_level(),
    )


def _differing(signatures: Sequence[structures.Container]) -> dict[str, list[str]]:
    """Return what each argument was, for those that were not always the same."""
    values_by_path: dict[str, list[str]] = {}
    for signature in signatures:
        for path, leaf in structures.paths(signature):
            shape = "unknown" if leaf.shape is None else str(list(leaf.shape))
            _note(values_by_path, path, f"{leaf.dtype.name}{shape}")
        for path, value in structures.static_leaves(signature):
            _note(values_by_path, path, repr(value))
    return {path: values for path, values in values_by_path.items() if len(values) > 1}


def _note(values_by_path: dict[str, list[str]], path: str, value: Any) -> None:
    values = values_by_path.setdefault(path, [])
    if value not in values:
        values.append(value)


def _several(values: Sequence[str], most: int = 4) -> str:
    return ", ".join(values[:most]) + (f", ... ({len(values)} in all)" if len(values) > most else "")


def signature_of(fn: Callable[..., Any]) -> inspect.Signature:
    """Return how a function is called."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # builtins and some callables do not say
        return inspect.signature(lambda *args, **kwargs: (args, kwargs))
    return signature.replace(return_annotation=inspect.Signature.empty)


def parameters_of(signature: inspect.Signature) -> list[str] | None:
    """Return the parameters that `split` may name, or None if the function takes any."""
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    return None if inspect.Parameter.VAR_KEYWORD in kinds else list(signature.parameters)


def spread(arguments: structures.Container, signature: inspect.Signature) -> structures.Container:
    """Return the arguments by name with those of `**kwargs` among them, as the user wrote the call."""
    keys: list[str] = []
    entries: list[structures.Tree] = []
    for key, entry in zip(arguments.keys, arguments.entries, strict=True):
        if signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD and isinstance(entry, structures.Container):
            keys += entry.keys
            entries += entry.entries
        else:
            keys.append(key)
            entries.append(entry)
    return structures.Container(dict, tuple(keys), tuple(entries))


def check_no_specs(name: str, arguments: Container) -> None:
    """Raise `ArgumentError` for specifications where a call needs tensors."""
    static_values = structures.static_leaves(arguments)
    if specs := [f"{path}: {value}" for path, value in static_values if isinstance(value, tf.TypeSpec)]:
        raise ArgumentError(
            f"{name} was called with specifications, and needs tensors:\n"
            f"{bullet_list(specs)}\n"
            f"These accept specifications, because they run nothing: {name}.plan(...), {name}.placement(...), "
            f"predict({name}, ...)."
        )


def as_call(arguments: structures.Container) -> structures.Container:
    """Return the structure of `(args, kwargs)` for a function of the bound arguments."""
    return structures.Container(
        tuple, (0, 1), (structures.Container(tuple, (0,), (arguments,)), structures.Container(dict, (), ()))
    )


def by_bound_arguments(fn: Callable[..., Any], signature: inspect.Signature) -> Callable[[Mapping[str, Any]], Any]:
    """Return `fn` as a function of the mapping that `Signature.bind` gives."""
    rewritten = rewritten_by_autograph(fn)

    def call(arguments: Mapping[str, Any]) -> Any:
        bound = inspect.BoundArguments(signature, dict(arguments))  # type: ignore[arg-type]
        return rewritten(*bound.args, **bound.kwargs)

    as_it_is: Callable[[Mapping[str, Any]], Any] = tf.autograph.experimental.do_not_convert(call)
    return as_it_is


def check_takes_inputs(fn: Any, args: Sequence[Any]) -> None:
    """Raise `ArgumentError` for a Keras model and a batch: called, a model takes its inputs, then `training`."""
    if not hasattr(fn, "train_step") or not any(hasattr(argument, "shape") for argument in args[1:2]):
        return
    if list(inspect.signature(fn.call).parameters)[1:2] == ["training"]:
        raise ArgumentError(
            f"{fn.name!r} is a Keras model, which is called with its inputs, and there are {len(args)} arguments. For "
            "its training step, wrap it with multi_gpu_model, or pass model.train_step and (x, y)."
        )
