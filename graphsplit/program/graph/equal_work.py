"""Equal work: what operations that yield the same of the same operands have in common.

Whoever merges operations asks this, and adds what they read: references of nodes, or tensors of a program.
"""

from __future__ import annotations

import functools
from typing import Any

from graphsplit.core.protos import with_inputs
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.program.graph.function_calls import CONTROL_FLOW

_MOST_BYTES = 1 << 16  # of a node that is compared; a larger constant is hardly there twice
_MADE_IN_PIECES = frozenset({"BroadcastTo", "Fill", "Range"})  # each reader may want other pieces, for nothing


def equal_work(node: Any) -> bytes | None:
    """Return the type and attributes of a node as bytes, or None if it is not to be merged with others."""
    if node.op in _MADE_IN_PIECES or "TensorList" in node.op or node.ByteSize() > _MOST_BYTES:
        return None
    bare = with_inputs(node, ())
    bare.name = bare.device = ""
    if "_class" in bare.attr:  # colocation, which the plan replaces
        del bare.attr["_class"]
    return bytes(bare.SerializeToString(deterministic=True))


@functools.cache
def is_pure(op_type: str) -> bool:
    """Return whether an operation of this type has no effects, and its result follows from what it reads."""
    return op_type != "Placeholder" and op_type not in CONTROL_FLOW and not op_definition(op_type).is_stateful
