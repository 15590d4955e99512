"""graphsplit: a TensorFlow function written for one device, run on several, with exactly one device's results.

The names below are imported on first use, so that `import graphsplit` (and `graphsplit --help`) does not wait for
TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from graphsplit.core.patterns import NAMES_ELSEWHERE, near
from graphsplit.core.requirements import explained
from graphsplit.core.version import __version__ as __version__

if TYPE_CHECKING:
    from graphsplit.api.calls.parallel_function import ParallelFunction
    from graphsplit.api.calls.retracing import RetracingWarning
    from graphsplit.api.decorators import make_parallel, parallelize
    from graphsplit.api.layouts.layout_spellings import cut
    from graphsplit.api.layouts.new_variables import initialize, variable_layout, without_values
    from graphsplit.api.layouts.variable_layouts import set_variable_layout
    from graphsplit.api.layouts.with_layout import with_layout
    from graphsplit.api.on_device import on_device
    from graphsplit.api.verification import Difference, Report, verify
    from graphsplit.core.devices import available_devices, use_logical_devices
    from graphsplit.core.errors import (
        ArgumentError,
        CheckError,
        DeviceError,
        GraphsplitError,
        OutputError,
        StorageError,
        StrictError,
        UnsupportedError,
        WorkerLostError,
    )
    from graphsplit.inspect import Placement, Timeline, placement_of, timeline_of
    from graphsplit.inspect.layout_views import visualize_layout
    from graphsplit.keras.distribution.enabling import KerasDistribution, enable_keras_distribution
    from graphsplit.keras.loading import load_weights
    from graphsplit.keras.wrapping import multi_gpu_model
    from graphsplit.planning.costs.machine import Machine
    from graphsplit.planning.plan import Plan
    from graphsplit.serving import TranspileReport, strip_devices, transpile_graph_def, transpile_saved_model
    from graphsplit.simulate.calibration import calibrate
    from graphsplit.simulate.calls import predict
    from graphsplit.simulate.prediction.predictions import Prediction
    from graphsplit.simulate.prediction.scalings import Scaling
    from graphsplit.simulate.scaling_curves import scaling
    from graphsplit.workers.cluster import Cluster
    from graphsplit.workers.connecting import connect
    from graphsplit.workers.local_workers import LocalWorkers
    from graphsplit.workers.resilience import Resilient, resilient

_MODULES = {
    "simulate.calibration": ["calibrate"],
    "api.decorators": ["make_parallel", "parallelize"],
    "api.layouts.layout_spellings": ["cut"],
    "inspect.layout_views": ["visualize_layout"],
    "api.layouts.new_variables": ["initialize", "variable_layout", "without_values"],
    "api.on_device": ["on_device"],
    "api.calls.parallel_function": ["ParallelFunction"],
    "simulate.calls": ["predict"],
    "workers.resilience": ["Resilient", "resilient"],
    "api.calls.retracing": ["RetracingWarning"],
    "simulate.scaling_curves": ["scaling"],
    "api.layouts.variable_layouts": ["set_variable_layout"],
    "api.verification": ["Difference", "Report", "verify"],
    "api.layouts.with_layout": ["with_layout"],
    "workers.cluster": ["Cluster"],
    "workers.connecting": ["connect"],
    "workers.local_workers": ["LocalWorkers"],
    "core.devices": ["available_devices", "use_logical_devices"],
    "core.errors": [
        "ArgumentError",
        "CheckError",
        "DeviceError",
        "GraphsplitError",
        "OutputError",
        "StorageError",
        "StrictError",
        "UnsupportedError",
        "WorkerLostError",
    ],
    "planning.costs.machine": ["Machine"],
    "keras.distribution.enabling": ["KerasDistribution", "enable_keras_distribution"],
    "keras.loading": ["load_weights"],
    "keras.wrapping": ["multi_gpu_model"],
    "inspect": ["Placement", "Timeline", "placement_of", "timeline_of"],
    "planning.plan": ["Plan"],
    "simulate.prediction.predictions": ["Prediction"],
    "simulate.prediction.scalings": ["Scaling"],
    "serving": ["TranspileReport", "strip_devices", "transpile_graph_def", "transpile_saved_model"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ArgumentError",
    "CheckError",
    "Cluster",
    "DeviceError",
    "Difference",
    "GraphsplitError",
    "KerasDistribution",
    "LocalWorkers",
    "Machine",
    "OutputError",
    "ParallelFunction",
    "Placement",
    "Plan",
    "Prediction",
    "Report",
    "Resilient",
    "RetracingWarning",
    "Scaling",
    "StorageError",
    "StrictError",
    "Timeline",
    "TranspileReport",
    "UnsupportedError",
    "WorkerLostError",
    "available_devices",
    "calibrate",
    "connect",
    "cut",
    "enable_keras_distribution",
    "initialize",
    "load_weights",
    "make_parallel",
    "multi_gpu_model",
    "on_device",
    "parallelize",
    "placement_of",
    "predict",
    "resilient",
    "scaling",
    "set_variable_layout",
    "strip_devices",
    "timeline_of",
    "transpile_graph_def",
    "transpile_saved_model",
    "use_logical_devices",
    "variable_layout",
    "verify",
    "visualize_layout",
    "with_layout",
    "without_values",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        meant = near(name, __all__, cutoff=0.7)
        hint = f" Did you mean {' or '.join(map(repr, meant))}?" if meant else ""
        hint = f" {NAMES_ELSEWHERE[name]}" if name in NAMES_ELSEWHERE else hint
        raise AttributeError(f"module 'graphsplit' has no attribute {name!r}.{hint}")
    try:
        module = importlib.import_module(f"graphsplit.{_MODULE_OF[name]}")
    except ImportError as error:
        if (said := explained(error)) is error:
            raise
        raise said from error
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
