"""Starts worker processes on this machine quickly: one process imports TensorFlow, and each worker is its fork.

`python -m graphsplit.workers.nursery`. It reads a line for each worker, "port devices", and answers with the number of
its process. Workers end when it ends, and it ends with its input: with the process that started it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys

from graphsplit.workers.worker import serve


def main() -> None:
    """Start a worker for each line of the input."""
    children: dict[int, int] = {}  # by port
    for line in sys.stdin:
        port, devices = map(int, line.split())
        if port in children:  # that one was killed, and has the port until it has ended
            os.waitpid(children.pop(port), 0)
        child = os.fork()  # (TensorFlow has only been imported: it has no threads yet)
        if not child:
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nothing, descriptor)
            serve(port, devices, threads=1, with_parent=True)
        children[port] = child
        print(child, flush=True)
        _reap(children)
    for child in children.values():
        with contextlib.suppress(ProcessLookupError):  # one that was ended before
            os.kill(child, signal.SIGKILL)


def _reap(children: dict[int, int]) -> None:
    """Forget the workers that have ended: a number may be another process' by and by."""
    for port, child in list(children.items()):
        if os.waitpid(child, os.WNOHANG)[0]:
            del children[port]


if __name__ == "__main__":
    main()
