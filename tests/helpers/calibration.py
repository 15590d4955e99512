"""A machine that is measured roughly."""

from __future__ import annotations

from graphsplit.planning.costs.machine import Device, Host, Link, Machine


def rough() -> Machine:
    device = Device("core", "CPU", {"float32": 1e10}, {"float32": 1e9}, 1e10, 1e10, overhead_s=1e-6)
    host = Host(threads=2, call_s=1e-5)
    return Machine("rough", device, 8, Link("memory", float("inf"), 1e-6, shared=True, copies=False), host=host)
