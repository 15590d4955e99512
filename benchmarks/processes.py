"""Worker processes and the pipe to them."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent


class NoAnswerError(Exception):
    """A process could not do what it was asked; the message is the reason, for leaving out what was to be measured."""


def in_a_process(
    function: Callable[..., Any],
    *arguments: Any,
    environment: Mapping[str, str] | None = None,
    limit_s: float | None = None,
) -> Any:
    """Return what a function returns in a new process without GPUs, which has these variables from its start on.

    Raises:
      NoAnswerError: if the process ends otherwise, or has no answer within the limit, after which it is killed. What
        it wrote to standard error is there, too.
    """
    own = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", **(environment or {})}
    new = multiprocessing.get_context("spawn")
    answers, answer = new.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as log, answers:
        child = new.Process(target=_send_answer, args=(answer, log.name, function, arguments))
        with mock.patch.dict(os.environ, own), answer:  # (once it is closed here, the child's end ends the pipe)
            child.start()
        try:
            if not answers.poll(limit_s):
                raise NoAnswerError(f"no answer within {limit_s:.0f} s")
            found = answers.recv()
            child.join(limit_s)
            return found
        except (EOFError, OSError) as error:  # (the latter if it ends while it sends)
            child.join()
            assert child.exitcode is not None
            raise NoAnswerError(_last_words(child.exitcode, log.read())) from error
        finally:
            child.kill()
            child.join()
            log.seek(0)
            sys.stderr.write(log.read())


def _send_answer(answer: Connection, log: str, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    """Send what a function returns; what it writes to standard error, and an error that it raises, go to a file."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 2)
    answer.send(function(*arguments))


def _last_words(code: int, log: str) -> str:
    """Return how a process ended, of which these are exit status and standard error."""
    if code < 0:  # https://docs.python.org/3/library/subprocess.html#subprocess.Popen.returncode
        killed = signal.Signals(-code).name
        return f"its process was ended by {killed}" + (", for memory as a rule" if killed == "SIGKILL" else "")
    lines = [line for line in log.splitlines() if line.strip()]
    return f"its process ended with {code}" + (f": {lines[-1][:200]}" if lines else "")


class Worker:
    """The `benchmarks.worker` process of one contestant.

    Args:
      kind: of its devices: "cpu", "gpu", "jax"; it sees no GPU unless it is "gpu".
      limit_s: how long any answer may take.
      variables: of its environment, from its start on.
    """

    def __init__(self, kind: str, limit_s: float, variables: Mapping[str, str] | None = None):
        environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONUNBUFFERED": "1", **(variables or {})}
        if kind == "gpu":
            environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # other contestants are on the same GPUs
        else:
            environment["CUDA_VISIBLE_DEVICES"] = "-1"
        self._limit_s = limit_s
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=ROOT,
            env=environment,
            text=True,
        )

    def send(self, do: str, **arguments: Any) -> None:
        """Send a command without waiting for its answer."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise NoAnswerError(self._last_words()) from error

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the last command."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._limit_s)[0]:
            raise NoAnswerError(f"no answer within {self._limit_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise NoAnswerError(self._last_words())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise NoAnswerError(answer["error"])
        return answer

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.send(do, **arguments)
        return self.answer()

    def _last_words(self) -> str:
        code = self._process.wait()
        self._log.seek(0)
        return _last_words(code, self._log.read())

    def close(self) -> None:
        """End the process; a second time does nothing."""
        if self._log.closed:
            return
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.close()
