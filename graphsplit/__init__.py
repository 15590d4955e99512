"""graphsplit: a TensorFlow function written for one device, run on several, with exactly one device's results.

What a first day needs is here. The rest is in modules: `gs.errors`, `gs.inspect` (placements, timelines, plans),
`gs.keras`, `gs.serving` (finished models), `gs.simulate` (predictions), `gs.workers` (several machines). Everything is
imported on first use, so that `import graphsplit` (and `graphsplit --help`) does not wait for TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graphsplit.core.patterns import NAMES_ELSEWHERE, near
from graphsplit.core.renamed import NAMES
from graphsplit.core.requirements import explained
from graphsplit.core.version import __version__ as __version__

if TYPE_CHECKING:
    from graphsplit import errors, inspect, keras, serving, simulate, workers
    from graphsplit.api.calls.parallel_function import ParallelFunction
    from graphsplit.api.decorators import make_parallel, parallelize
    from graphsplit.api.layouts.layout_spellings import cut
    from graphsplit.api.layouts.new_variables import variable_layout
    from graphsplit.api.layouts.variable_layouts import set_variable_layout
    from graphsplit.api.layouts.with_layout import with_layout
    from graphsplit.api.on_device import on_device
    from graphsplit.api.verification import verify
    from graphsplit.core.devices import available_devices, use_logical_devices
    from graphsplit.errors import GraphsplitError
    from graphsplit.inspect import placement
    from graphsplit.inspect.views.layout_views import visualize_layout
    from graphsplit.keras import load_weights, multi_gpu_model
    from graphsplit.simulate import predict, scaling
    from graphsplit.workers import connect

_MODULE_OF = {
    "ParallelFunction": "api.calls.parallel_function",
    "make_parallel": "api.decorators",
    "parallelize": "api.decorators",
    "cut": "api.layouts.layout_spellings",
    "variable_layout": "api.layouts.new_variables",
    "set_variable_layout": "api.layouts.variable_layouts",
    "with_layout": "api.layouts.with_layout",
    "on_device": "api.on_device",
    "verify": "api.verification",
    "available_devices": "core.devices",
    "use_logical_devices": "core.devices",
    "GraphsplitError": "errors",
    "placement": "inspect",
    "visualize_layout": "inspect.views.layout_views",
    "load_weights": "keras",
    "multi_gpu_model": "keras",
    "predict": "simulate",
    "scaling": "simulate",
    "connect": "workers",
}
_MODULES = ("errors", "inspect", "keras", "serving", "simulate", "workers")

__all__ = [
    "GraphsplitError",
    "ParallelFunction",
    "available_devices",
    "connect",
    "cut",
    "errors",
    "inspect",
    "keras",
    "load_weights",
    "make_parallel",
    "multi_gpu_model",
    "on_device",
    "parallelize",
    "placement",
    "predict",
    "scaling",
    "serving",
    "set_variable_layout",
    "simulate",
    "use_logical_devices",
    "variable_layout",
    "verify",
    "visualize_layout",
    "with_layout",
    "workers",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'graphsplit' has no attribute {name!r}.{_hint(name)}")
    try:
        module = importlib.import_module(f"graphsplit.{_MODULE_OF.get(name, name)}")
    except ImportError as error:
        if (explanation := explained(error)) is error:
            raise
        raise explanation from error
    return module if name in _MODULES else getattr(module, name)


def _hint(name: str) -> str:
    if name in NAMES:
        return f" It is gs.{NAMES[name]} now."
    if name in NAMES_ELSEWHERE:
        return f" {NAMES_ELSEWHERE[name]}"
    meant = near(name, __all__, cutoff=0.7)
    return f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
