"""graphsplit: a TensorFlow function written for one device, run on several, with exactly one device's results."""

from graphsplit.devices import available_devices, use_logical_devices
from graphsplit.errors import (
    ArgumentError,
    CheckError,
    DeviceError,
    GraphsplitError,
    OutputError,
    StrictError,
    UnsupportedError,
)
from graphsplit.functions import ParallelFunction, make_parallel, parallelize
from graphsplit.plans import Plan
from graphsplit.verification import Difference, Report, verify

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "CheckError",
    "DeviceError",
    "Difference",
    "GraphsplitError",
    "OutputError",
    "ParallelFunction",
    "Plan",
    "Report",
    "StrictError",
    "UnsupportedError",
    "available_devices",
    "make_parallel",
    "parallelize",
    "use_logical_devices",
    "verify",
]
