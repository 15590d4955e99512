"""Worker processes that are joined by links of a bandwidth, as machines are: each in a network namespace of its own.

What passes between them goes through a link of its own for each, both ways at once, and all links meet in a switch
(Linux: a bridge, and a token bucket filter at both ends of each link). The cores are still those of this machine. It
needs `ip` and `tc` and the right to use them (root), and touches no interface but its own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence

from graphsplit.core.addresses import own_addresses

_NETWORK = "10.213"  # private addresses
_PORT = 2222
_made = itertools.count()
_BURST = "256kb"  # what may pass at once; then the rate counts
_STARTED = "graphsplit worker"


class LinksError(Exception):
    """This machine cannot make links."""


@contextlib.contextmanager
def linked(count: int, mbit: int) -> Iterator[dict[str, str]]:
    """Make a switch with links, and remove them.

    Args:
      count: how many namespaces, one for each machine.
      mbit: what a link carries each way, in megabits a second. This process' own link has it, too.

    Yields:
      The namespaces, by their addresses.

    Raises:
      LinksError: if this machine cannot.
    """
    own, network = f"g{os.getpid() % 100000}x{next(_made)}", _free_network()
    names = {f"{network}.{k + 1}": f"{own}n{k}" for k in range(count)}
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # which removes them, too
    try:
        _ip("link", "add", own, "type", "bridge")
        _ip("link", "set", own, "up")
        _ip("link", "add", f"{own}c", "type", "veth", "peer", "name", f"{own}s")
        _join(own, f"{own}s", mbit)
        _ip("addr", "add", f"{network}.{count + 1}/24", "dev", f"{own}c")
        _ip("link", "set", f"{own}c", "up")
        _limit(f"{own}c", mbit)
        for k, (address, name) in enumerate(names.items()):
            _ip("netns", "add", name)
            _ip("link", "add", f"{own}v{k}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _join(own, f"{own}v{k}", mbit)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for interface in ("eth0", "lo"):
                _ip("-n", name, "link", "set", interface, "up")
            _limit("eth0", mbit, "-n", name)
        yield names
    finally:
        for name in names.values():
            _quietly("ip", "netns", "del", name)
        _quietly("ip", "link", "del", f"{own}c")
        _quietly("ip", "link", "del", own)
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def linked_workers(count: int, mbit: int) -> Iterator[list[str]]:
    """Start workers behind links, one CPU device and one thread each, and end them. Yields their addresses."""
    with linked(count, mbit) as names, contextlib.ExitStack() as stack:
        for name in names.values():
            command = ["graphsplit.cli", "worker", "--port", str(_PORT), "--devices", "1", "--threads", "1"]
            process = stack.enter_context(started(name, ["-m", *command]))
            assert process.stdout is not None
            line = process.stdout.readline()
            if _STARTED not in line:
                raise LinksError(f"a worker said {line!r}")
        yield [f"{address}:{_PORT}" for address in names]


@contextlib.contextmanager
def started(
    name: str | None, arguments: Sequence[str], environment: dict[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Start this Python, in a namespace if one is named, and end it."""
    own = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", **(environment or {})}
    process = subprocess.Popen(
        [*(["ip", "netns", "exec", name] if name else []), sys.executable, *arguments],  # `ip` becomes that process
        env=own,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


def _free_network() -> str:
    """Return the first three numbers of addresses that no interface of this machine has."""
    taken = {address.rpartition(".")[0] for address in own_addresses()}
    return next(network for k in range(256) if (network := f"{_NETWORK}.{k}") not in taken)


def _join(bridge: str, interface: str, mbit: int) -> None:
    _ip("link", "set", interface, "master", bridge, "up")
    _limit(interface, mbit)


def _limit(interface: str, mbit: int, *where: str) -> None:
    bucket = ["root", "tbf", "rate", f"{mbit}mbit", "burst", _BURST, "latency", "50ms"]
    _run("tc", *where, "qdisc", "add", "dev", interface, *bucket)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or error
        raise LinksError(f"This machine cannot make links of a bandwidth ({' '.join(command)}: {said}).") from error


def _quietly(*command: str) -> None:
    """Run what removes, whether or not there is something to remove."""
    subprocess.run(command, check=False, capture_output=True)
