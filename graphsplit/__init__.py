"""graphsplit: a TensorFlow function written for one device, run on several, with exactly one device's results.

The names below are imported on first use, so that `import graphsplit` (and `graphsplit --help`) does not wait for
TensorFlow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphsplit.device_functions import on_device
    from graphsplit.devices import available_devices, use_logical_devices
    from graphsplit.errors import (
        ArgumentError,
        CheckError,
        DeviceError,
        GraphsplitError,
        OutputError,
        StorageError,
        StrictError,
        UnsupportedError,
    )
    from graphsplit.functions import ParallelFunction, make_parallel, parallelize
    from graphsplit.keras_models.wrapping import multi_gpu_model
    from graphsplit.placement import Placement, placement_of
    from graphsplit.plans import Plan
    from graphsplit.retracing import RetracingWarning
    from graphsplit.saved_models import TranspileReport, strip_devices, transpile_graph_def, transpile_saved_model
    from graphsplit.verification import Difference, Report, verify

__version__ = "0.1.0"

_MODULES = {
    "devices": ["available_devices", "use_logical_devices"],
    "errors": [
        "ArgumentError",
        "CheckError",
        "DeviceError",
        "GraphsplitError",
        "OutputError",
        "StorageError",
        "StrictError",
        "UnsupportedError",
    ],
    "functions": ["ParallelFunction", "make_parallel", "parallelize"],
    "keras_models.wrapping": ["multi_gpu_model"],
    "device_functions": ["on_device"],
    "placement": ["Placement", "placement_of"],
    "plans": ["Plan"],
    "retracing": ["RetracingWarning"],
    "saved_models": ["TranspileReport", "strip_devices", "transpile_graph_def", "transpile_saved_model"],
    "verification": ["Difference", "Report", "verify"],
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "ArgumentError",
    "CheckError",
    "DeviceError",
    "Difference",
    "GraphsplitError",
    "OutputError",
    "ParallelFunction",
    "Placement",
    "Plan",
    "Report",
    "RetracingWarning",
    "StorageError",
    "StrictError",
    "TranspileReport",
    "UnsupportedError",
    "available_devices",
    "make_parallel",
    "multi_gpu_model",
    "on_device",
    "parallelize",
    "placement_of",
    "strip_devices",
    "transpile_graph_def",
    "transpile_saved_model",
    "use_logical_devices",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'graphsplit' has no attribute {name!r}")
    return getattr(importlib.import_module(f"graphsplit.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
