"""Processes of Python that have imported TensorFlow and nothing else: forked, since to import it takes seconds.

A process forked before TensorFlow starts is as good as a new one: other logical devices, another cluster, no graphsplit
until it asks. What is read from the environment or the command line on import needs a process of its own.
"""

from __future__ import annotations

import functools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent.parent
_BEFORE = {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}  # what TensorFlow may read on import


def python(
    *arguments: object, cwd: Path | None = None, env: Mapping[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Run Python with `-c CODE`, `-m MODULE` or a script and their arguments, and return what it said.

    Raises:
      subprocess.TimeoutExpired: if it does not end; it is killed.
    """
    command = list(map(str, arguments))
    environment = {**(os.environ if env is None else env), **_BEFORE}
    server = _server()
    with tempfile.TemporaryDirectory() as folder:
        said = [Path(folder) / name for name in ("stdout", "stderr")]
        job = {"arguments": command, "cwd": str(cwd or Path.cwd()), "env": environment, "said": list(map(str, said))}
        print(json.dumps(job), file=server.stdin, flush=True)
        pid = int(server.stdout.readline())
        if not select.select([server.stdout], [], [], timeout)[0]:
            os.killpg(pid, signal.SIGKILL)
            server.stdout.readline()
            raise subprocess.TimeoutExpired(command, timeout, said[0].read_bytes(), said[1].read_bytes())
        code = int(server.stdout.readline())
        return subprocess.CompletedProcess(command, code, *[path.read_text() for path in said])


def keep_compiled() -> None:
    """Let Python keep what it compiles of the package and the tests, aside if it may not beside them.

    A run of all tests has a hundred processes. (TensorFlow is imported before, and was compiled when it was installed.)
    """
    if sys.dont_write_bytecode:
        sys.dont_write_bytecode = False
        sys.pycache_prefix = os.environ.get("PYTHONPYCACHEPREFIX") or str(ROOT / ".pytest_cache" / "compiled")


@functools.cache
def _server() -> Any:
    """Return the process that forks; it ends with this one, whose end closes its input."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(
        [sys.executable, __file__],
        env={**environment, **_BEFORE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def _serve() -> None:
    import keras  # noqa: F401 (so that those who are forked have it)
    import tensorflow as tf  # noqa: F401

    del sys.path[0]  # the folder of this file
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()  # (TensorFlow has only been imported: it has no threads yet)
        if not pid:
            _become(job["arguments"], job["cwd"], job["env"], job["said"])
            return
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def _become(arguments: Sequence[str], cwd: str, env: Mapping[str, str], said: Sequence[str]) -> None:
    """Be the process that was asked for, up to its end."""
    os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    for descriptor, path in enumerate([os.devnull, *said]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(i, mode) for i, mode in enumerate(["r", "w", "w"]))
    keep_compiled()
    how, *rest = arguments
    here = [""] if how == "-c" else [cwd] if how == "-m" else [str(Path(how).resolve().parent)]
    sys.path[:0] = [*here, *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    if how == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = arguments if how != "-c" else ["-c", *rest[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    code = rest[0] if how == "-c" else Path(how).read_text()
    main.__dict__.update({} if how == "-c" else {"__file__": how})
    exec(compile(code, "<string>" if how == "-c" else how, "exec"), main.__dict__)


if __name__ == "__main__":
    _serve()
