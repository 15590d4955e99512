"""Worker processes on this machine: to try several machines on one, and to test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from graphsplit.clusters.addresses import free_ports
from graphsplit.core.errors import ArgumentError


class LocalWorkers:
    """Worker processes on this machine, in a `with` block; `connect` takes it as it takes a list of addresses.

    They end with the block, and with this process however that ends. One that does not answer is ended by `connect`'s
    cluster.

    Args:
      count: how many processes.
      devices: how many logical CPU devices each has.

    Attributes:
      addresses: where they listen.

    Raises:
      ArgumentError: for a number below 1.
    """

    def __init__(self, count: int, devices: int = 1):
        for name, number in {"count": count, "devices": devices}.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ArgumentError(f"LocalWorkers({name}={number!r}): it is a number, at least 1.")
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        self._devices = devices
        self._processes: list[Any] = [self._start(address) for address in self.addresses]

    def _start(self, address: str) -> Any:
        port = address.rpartition(":")[2]
        command = [sys.executable, "-m", "graphsplit.cli", "worker", "--port", port, "--devices", str(self._devices)]
        command += ["--threads", "1", "--until-closed", "--insecure"]  # on this machine, for as long as this process
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        return subprocess.Popen(command, env=environment, stdin=pipe, stdout=nothing, stderr=nothing)

    def kill(self, task: int) -> None:
        """End a process at once, as a machine that breaks down does."""
        self._processes[task].kill()
        self._processes[task].wait()
        self._processes[task].stdin.close()

    def freeze(self, task: int) -> None:
        """Let a process stand still, as a machine that hangs does."""
        self._processes[task].send_signal(signal.SIGSTOP)

    def thaw(self, task: int) -> None:
        """Let a frozen process go on."""
        self._processes[task].send_signal(signal.SIGCONT)

    def restart(self, task: int) -> None:
        """Start a process at the address of one that ended."""
        if self._processes[task].poll() is None:
            self.kill(task)
        self._processes[task] = self._start(self.addresses[task])

    def close(self) -> None:
        """End all of them."""
        for task, process in enumerate(self._processes):
            if process.poll() is None:
                self.kill(task)

    def __iter__(self) -> Iterator[str]:
        return iter(self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
