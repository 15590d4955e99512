"""Who can reach a worker, looked at before TensorFlow starts."""

from __future__ import annotations

from graphsplit.clusters.addresses import is_free, public_addresses
from graphsplit.core.errors import DeviceError, UnsupportedError

WARNING = (
    "TensorFlow's server listens on all interfaces and asks nobody who they are: whoever reaches this port can read "
    "and write this account's files and run what they like. Let only your own machines reach it."
)


def check_port(port: int, insecure: bool) -> None:
    """Raise an error if a worker cannot, or should not, start.

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
            "firewall, a network policy) and say so with --insecure, or reach it through an SSH tunnel on a machine "
            "without a public address."
        )
