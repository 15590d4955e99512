"""What has parallelized steps: wrapped Keras models, which import this folder."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from graphsplit.api.calls.call_signatures import check_takes_inputs
from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.core.stand_ins import answering


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
