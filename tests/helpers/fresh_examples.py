"""Which examples in docstrings need a process of their own."""

from __future__ import annotations

NEED_FRESH_PROCESS = {"DeviceError", "WorkerLostError", "use_logical_devices"}  # `test_docs` runs their examples
