"""Hosts: devices of one process are near each other; those of another one are behind a network."""

from __future__ import annotations

import functools
from collections.abc import Iterable


@functools.cache
def host_name(device: str) -> str:
    """Return the host of a device, given its full name: "" for devices of this process.

    >>> host_name("/job:worker/replica:0/task:1/device:CPU:0"), host_name("/device:GPU:3")
    ('/job:worker/replica:0/task:1', '')
    """
    return device.rpartition("/device:")[0]


def host_device(host: str) -> str:
    """Return the CPU device of a host: that of its input pipelines.

    >>> host_device("/job:worker/replica:0/task:1"), host_device("")
    ('/job:worker/replica:0/task:1/device:CPU:0', '/device:CPU:0')
    """
    return f"{host}/device:CPU:0"


def host_devices(devices: Iterable[str]) -> tuple[str, ...]:
    """Return the CPU devices of the hosts of some devices: their hosts' memory.

    >>> host_devices(["/device:GPU:0", "/device:GPU:1", "/job:worker/replica:0/task:1/device:GPU:0"])
    ('/device:CPU:0', '/job:worker/replica:0/task:1/device:CPU:0')
    """
    return tuple(map(host_device, by_host(devices)))


def by_host(devices: Iterable[str]) -> dict[str, list[str]]:
    """Return devices, each once, by their hosts.

    >>> by_host(["/task:0/device:CPU:0", "/task:1/device:CPU:0", "/task:0/device:CPU:1"])
    {'/task:0': ['/task:0/device:CPU:0', '/task:0/device:CPU:1'], '/task:1': ['/task:1/device:CPU:0']}
    """
    devices_by_host: dict[str, list[str]] = {}
    for device in dict.fromkeys(devices):
        devices_by_host.setdefault(host_name(device), []).append(device)
    return devices_by_host
