"""How long the phases of graphsplit take inside a first call."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from graphsplit.api.calls import compilation, plan_requests
from graphsplit.runtime import executable

PHASES = {
    "trace": (compilation, "trace_call"),
    "plan": (plan_requests, "plan_program"),
    "emit": (executable, "emit"),
    "register": (executable, "runtime_function"),
}


def watch() -> dict[str, float]:
    """Make the phases of this process note their seconds, and return where they note them."""
    seconds = dict.fromkeys(PHASES, 0.0)
    for phase, (module, name) in PHASES.items():
        setattr(module, name, _timed(getattr(module, name), phase, seconds))
    return seconds


def _timed(function: Callable[..., Any], phase: str, seconds: dict[str, float]) -> Callable[..., Any]:
    @functools.wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[phase] += time.perf_counter() - start

    return timed
