"""Worker processes on this machine: to try several machines on one, and to test."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import TracebackType

from graphsplit.core.addresses import check_port, free_ports
from graphsplit.errors import ArgumentError


class LocalWorkers:
    """Worker processes on this machine, in a `with` block. Pass it to `connect` instead of a list of addresses.

    They end with the block, and with this process however that ends. One that does not answer is ended by `connect`'s
    cluster. TensorFlow's servers listen on all interfaces and authenticate nobody.

    Args:
      count: how many processes.
      devices: how many logical CPU devices each has.
      insecure: this machine has a public address, and its ports are closed to others.

    Attributes:
      addresses: where they listen.

    Raises:
      ArgumentError: for a number below 1.
      UnsupportedError: if this machine has a public address, and nobody said that this is known.
    """

    def __init__(self, count: int, devices: int = 1, *, insecure: bool = False):
        for name, number in {"count": count, "devices": devices}.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ArgumentError(f"LocalWorkers: {name} must be a whole number of at least 1, got {number!r}.")
        ports = free_ports(count)
        for port in ports:
            check_port(port, insecure, "insecure=True")
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self._devices = devices
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
        command = [sys.executable, "-m", "graphsplit.workers.nursery"]
        self._nursery = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._pids = [self._start(address) for address in self.addresses]

    def _start(self, address: str) -> int:
        """Start a worker, and return the number of its process."""
        stdin, stdout = self._nursery.stdin, self._nursery.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(f"{address.rpartition(':')[2]} {self._devices}\n")
        stdin.flush()
        return int(stdout.readline())

    def kill(self, task: int) -> None:
        """End a process at once, as a machine that breaks down does."""
        self._signal(task, signal.SIGKILL)
        self._pids[task] = 0

    def freeze(self, task: int) -> None:
        """Freeze a process, as if its machine hung."""
        self._signal(task, signal.SIGSTOP)

    def thaw(self, task: int) -> None:
        """Let a frozen process go on."""
        self._signal(task, signal.SIGCONT)

    def _signal(self, task: int, number: signal.Signals) -> None:
        if self._pids[task]:
            os.kill(self._pids[task], number)

    def restart(self, task: int) -> None:
        """Start a process at the address of one that ended, or that is ended now."""
        self.kill(task)
        self._pids[task] = self._start(self.addresses[task])

    def close(self) -> None:
        """End all of them."""
        for task in range(len(self._pids)):
            self.kill(task)
        for pipe in (self._nursery.stdin, self._nursery.stdout):
            if pipe is not None:
                pipe.close()
        self._nursery.wait()

    def __iter__(self) -> Iterator[str]:
        return iter(self.addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def __enter__(self) -> LocalWorkers:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()
