"""Addresses of workers, as users write them and this machine's own, and who can reach a worker there."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Any

from graphsplit.errors import ArgumentError, DeviceError, UnsupportedError

_GET_ADDRESS = 0x8915  # SIOCGIFADDR: the IPv4 address of an interface
_ADDRESS = re.compile(r"(?:[\w.-]+|\[[0-9a-fA-F:.]+(?:%[\w.-]+)?\]):([0-9]{1,5})", re.ASCII)
_IPV6_TABLE = "/proc/net/if_inet6"
WARNING = (
    "TensorFlow's server listens on all interfaces, without passwords: whoever reaches this port can read and write "
    "this account's files and run any code. Let only your machines reach it."
)


def checked_address(address: object) -> str:
    """Return an address, `"10.0.0.1:2222"`, if it is one.

    Raises:
      ArgumentError: if it is not a host and a port.

    >>> checked_address("worker-1:2222")
    'worker-1:2222'
    """
    match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if match is None or not 0 < int(match[1]) < 65536:
        raise ArgumentError(f"{address!r} is not the address of a worker; write it like '10.0.0.1:2222'.")
    return str(address)


def worker_addresses(workers: Any) -> tuple[list[str], str | None]:
    """Return the addresses of workers, and that of this process if what is given knows it.

    Args:
      workers: addresses, or a `tf.distribute.cluster_resolver`. The tasks of all its jobs are workers, in the order of
        the jobs' names, but the one that this process is.

    Raises:
      ArgumentError: if there is none, one twice, or something is no address.
    """
    if hasattr(workers, "cluster_spec"):
        spec = workers.cluster_spec()
        tasks = {} if spec is None else {job: dict(enumerate(spec.job_tasks(job))) for job in sorted(spec.jobs)}
        own_task = (getattr(workers, "task_type", None), getattr(workers, "task_id", None))
        address = tasks.get(own_task[0] or "", {}).get(own_task[1] if own_task[1] is not None else -1)
        addresses = [a.removeprefix("grpc://") for job in tasks.values() for a in job.values() if a != address]
        if not addresses:
            raise ArgumentError(f"{type(workers).__name__} knows of no workers but this process: {spec!r}.")
        return [checked_address(a) for a in addresses], address
    if isinstance(workers, str) or not isinstance(workers, Iterable):
        raise ArgumentError(f"connect takes a list of addresses, ['10.0.0.1:2222'], got {workers!r}.")
    addresses = [checked_address(address) for address in workers]
    if not addresses or len(set(addresses)) != len(addresses):
        raise ArgumentError(f"connect takes one or more workers, each once; got {addresses}.")
    return addresses, None


def address_towards(worker: str) -> str:
    """Return an address, with a free port, under which a worker reaches this machine."""
    host, port = host_and_port(worker)
    with contextlib.closing(socket.socket(_family(host), socket.SOCK_DGRAM)) as probe:
        try:
            probe.connect((host, port))  # sends nothing: the system only chooses the way
        except OSError as error:
            raise DeviceError(f"There is no way to worker {worker}: {error}.") from error
        own_host = probe.getsockname()[0]
    return f"{f'[{own_host}]' if ':' in own_host else own_host}:{free_ports(1)[0]}"


def host_and_port(address: str) -> tuple[str, int]:
    """Return the parts of an address.

    >>> host_and_port("[::1]:2222")
    ('::1', 2222)
    """
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def free_ports(count: int) -> list[int]:
    """Return ports that nobody listened on a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for sock in sockets:
            sock.bind(("", 0))
        return [sock.getsockname()[1] for sock in sockets]


def is_free(port: int) -> bool:
    """Return whether nobody listens on a port of this machine."""
    with contextlib.closing(socket.socket()) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def public_addresses() -> list[str]:
    """Return the addresses of this machine's interfaces that the whole internet may reach."""
    return [address for address in own_addresses() if ipaddress.ip_address(address).is_global]


def own_addresses() -> Sequence[str]:
    """Return the addresses of this machine's interfaces (Linux)."""
    addresses: dict[str, None] = {}
    with contextlib.closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()[:15]))
                addresses[socket.inet_ntoa(answer[20:24])] = None
    with contextlib.suppress(FileNotFoundError), open(_IPV6_TABLE) as lines:  # a kernel without IPv6
        for line in lines:
            addresses[str(ipaddress.IPv6Address(bytes.fromhex(line.split()[0])))] = None
    return list(addresses)


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def check_port(port: int, insecure: bool, option: str = "--insecure") -> None:
    """Raise an error if a worker cannot, or should not, start.

    Args:
      port: where it is to listen.
      insecure: whether somebody said that a public address is known, by the `option`.
      option: see there.

    Raises:
      DeviceError: if the port is in use.
      UnsupportedError: if the machine has a public address, and nobody said that this is known.
    """
    if not is_free(port):
        raise DeviceError(f"Port {port} is in use here. Choose another --port, or end what listens there.")
    public = public_addresses()
    if public and not insecure:
        raise UnsupportedError(
            f"This machine has a public address, {', '.join(public)}. {WARNING} Close the port to all others (a "
            f"firewall, a network policy) and pass {option}, or use an SSH tunnel to a machine without a public "
            "address."
        )
