"""Cutting where a batch is read: each host that has the whole batch cuts out the pieces of its own devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphsplit.core.graphdefs import with_prefix
from graphsplit.core.hosts import host_device, host_name


def on_readers(
    readers: Sequence[str], scope: str, nodes: Sequence[Any], inputs: Sequence[str], sent: Sequence[Any]
) -> tuple[list[Any], list[str]]:
    """Return nodes that cut the arguments on each host that has them, and the names of the arguments.

    What devices of other hosts read comes from the first of them.

    Args:
      readers: the hosts.
      scope: a name scope that nodes of the user's are not in.
      nodes: what cuts the arguments, their placeholders included.
      inputs: names of the placeholders.
      sent: the nodes that take each piece to its device; they keep their names.
    """
    copies: list[Any] = []
    for k, host in enumerate(readers):
        copies += [_copy(node, f"{scope}/reader_{k}/", host_device(host), named=True) for node in nodes]
    for node in sent:
        host = host_name(node.device)
        reader = readers.index(host) if host in readers else 0
        copies.append(_copy(node, f"{scope}/reader_{reader}/", node.device, named=False))
    return copies, [f"{scope}/reader_{k}/{name}" for k in range(len(readers)) for name in inputs]


def _copy(node: Any, prefix: str, device: str, named: bool) -> Any:
    """Return a node on a device that reads what has a prefix; itself has it, too, if it is `named` so."""
    copy = with_prefix(node, prefix)
    copy.device = device
    if not named:
        copy.name = node.name
    return copy
