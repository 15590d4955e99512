"""A contestant's process: reads a JSON command per line, answers with a JSON line. `python -m benchmarks.worker`."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, TextIO

Answer = dict[str, Any]


class Worker:
    """Answers commands for the contestant that `prepare` names."""

    def __init__(self) -> None:
        self._contestant: Any = None
        self._contestants: Any = None
        self._devices: list[str] = []

    def start(
        self,
        devices: int,
        kind: str,
        memory_mb: int | None = None,
        threads: int | None = 1,
        module: str = "benchmarks.contestants",
    ) -> Answer:
        """Import everything, and start TensorFlow with so many devices; of "jax", variables of this process did."""
        if kind == "jax":
            self._devices = [f"cpu:{d}" for d in range(devices)]
        else:
            from benchmarks.gpus import make_devices

            self._devices = make_devices(devices, kind, memory_mb, threads)
        self._contestants = importlib.import_module(module)
        return {"devices": self._devices}

    def prepare(self, contestant: str, name: str, small: bool, batch: int | None, mode: str) -> Answer:
        """Build the model and run the first step; `start` came before."""
        from benchmarks import workloads

        start = time.perf_counter()
        found = workloads.workload(name, small, batch)
        self._contestant = self._contestants.make(contestant, found, mode, self._devices)
        built = time.perf_counter() - start
        before = _peak_bytes()
        if self._gpus():
            from benchmarks.gpus import reset_peaks

            reset_peaks(self._gpus())
        seconds, result = self._contestant.first_call()
        check = float(result.reshape(-1)[:1000].astype("float64").mean())
        return {"build_s": built, "first_s": seconds, "before_bytes": before, "check": check, **self.memory()}

    def time(self, steps: int) -> Answer:
        """Run so many steps; return the seconds for all."""
        return {"seconds": self._contestant.seconds(steps)}

    def describe(self) -> Answer:
        """Return facts about the graph."""
        return self._contestant.describe()

    def memory(self) -> Answer:
        """Return the largest resident size of this process, and the most that was on each GPU, so far."""
        if not self._gpus():
            return {"peak_bytes": _peak_bytes(), "gpu_peak_bytes": {}}
        from benchmarks.gpus import peak_bytes

        return {"peak_bytes": _peak_bytes(), "gpu_peak_bytes": peak_bytes(self._gpus())}

    def _gpus(self) -> list[str]:
        return [device for device in self._devices if device.startswith("GPU")]  # (who asks for more needs TensorFlow)

    def traffic(self, name: str, small: bool, layout: str) -> Answer:
        """Count the bytes through the busiest device in a step; `start` came before, and nothing else is needed."""
        from benchmarks.layouts import count

        return count(name, small, layout, self._devices)

    def synthetic(self, operations: int, devices: int) -> Answer:
        """Return planning speed on a synthetic program; needs nothing before."""
        from benchmarks.planning import synthetic_speed

        return synthetic_speed(operations, devices)

    def environment(self) -> Answer:
        """Return what this process runs on; needs nothing before."""
        from benchmarks.environment import environment

        return environment()


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # https://man.freebsd.org/getrusage: bytes on macOS


def serve(commands: TextIO, answers: TextIO) -> None:
    """Answer until the parent closes the pipe."""
    worker = Worker()
    for line in commands:
        command = json.loads(line)
        try:
            action: Callable[..., Answer] = getattr(worker, command.pop("do"))
            answer = action(**command)
        except Exception as error:  # whatever it is, the parent reports it as the reason for skipping
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


if __name__ == "__main__":
    # Libraries print on stdout; the protocol gets a channel of its own, and stdout becomes stderr.
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)
        serve(sys.stdin, channel)
