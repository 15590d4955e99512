"""What graphsplit notes on the nodes that it writes into graphs of others: that it did, for which shard, why at home.

Names of nodes are their users', and who loads a model prefixes them. Attributes that begin with `_` are kept by
TensorFlow wherever a graph goes, and mean nothing to it.
"""

from __future__ import annotations

from typing import Any

_WRITTEN = "_graphsplit"  # the number of the shard, or that it belongs to none
_AT_HOME = "_graphsplit_at_home"
_ROLE = "_graphsplit_role"
_OF_VARIABLE = "_graphsplit_of_variable"


def mark(node: Any, shard: int | None = None, home_reason: str = "", role: str = "") -> Any:
    """Note on a node that a transpilation wrote it, and return it.

    Args:
      node: a `NodeDef`.
      shard: the one that it belongs to, if it does.
      home_reason: why it runs at home, if it carries rows of the batch and does.
      role: what it is there for, if it is no operation of the model: the kind of a move, `"scatter"`, or `"sizes"`.

    >>> from graphsplit.core.protos.graphdefs import NodeDef
    >>> shard_of(mark(NodeDef(name="AddV2"), 0)), shard_of(mark(NodeDef(name="AddN")))
    (0, None)
    """
    if shard is None:
        node.attr[_WRITTEN].b = True
    else:
        node.attr[_WRITTEN].i = shard
    if home_reason:
        node.attr[_AT_HOME].s = home_reason.encode()
    if role:
        node.attr[_ROLE].s = role.encode()
    return node


def is_marked(node: Any) -> bool:
    """Return whether a transpilation wrote a node."""
    return _WRITTEN in node.attr


def shard_of(node: Any) -> int | None:
    """Return the shard that is noted on a node, or None."""
    return int(node.attr[_WRITTEN].i) if is_marked(node) and node.attr[_WRITTEN].HasField("i") else None


def home_reason_of(node: Any) -> str:
    """Return why a node that carries rows of the batch runs at home, as it is noted on it; "" for others."""
    return str(node.attr[_AT_HOME].s.decode()) if _AT_HOME in node.attr else ""


def role_of(node: Any) -> str:
    """Return what a node that is no operation of the model is there for, as it is noted on it; "" for others."""
    return str(node.attr[_ROLE].s.decode()) if _ROLE in node.attr else ""


def mark_of_variable(node: Any) -> Any:
    """Note on a gather that it is part of a lookup that reads its rows from a variable itself, and return it."""
    node.attr[_OF_VARIABLE].b = True
    return node


def is_of_variable(node: Any) -> bool:
    """Return whether a gather is part of a lookup that reads its rows from a variable itself."""
    return _OF_VARIABLE in node.attr
