"""What has parallelized steps: wrapped Keras models, which import this folder."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.core.stand_ins import answering
from graphsplit.errors import ArgumentError


@runtime_checkable
class Stepping(Protocol):
    """Whatever has parallelized steps: a wrapped Keras model."""

    def _parallel_step(self, *args: Any, **kwargs: Any) -> tuple[ParallelFunction[..., Any], tuple[Any, ...]]: ...


def step_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a function and its arguments: of what has steps, the step for a batch; of a function, as they are."""
    fn = answering(fn)
    if isinstance(fn, ParallelFunction) or not isinstance(fn, Stepping):
        check_takes_inputs(fn, args)
        return fn, args, kwargs
    step, batch = fn._parallel_step(*args, **kwargs)
    return step, batch, {}


def check_takes_inputs(fn: Any, args: Sequence[Any]) -> None:
    """Raise `ArgumentError` for a Keras model and a batch: called, a model takes its inputs, then `training`."""
    if not hasattr(fn, "train_step") or not any(hasattr(own, "shape") for own in args[1:2]):
        return
    if list(inspect.signature(fn.call).parameters)[1:2] == ["training"]:
        raise ArgumentError(
            f"{fn.name!r} is a Keras model, which is called with its inputs, and there are {len(args)} arguments. For "
            "its training step, wrap it with multi_gpu_model, or pass model.train_step and (x, y)."
        )
