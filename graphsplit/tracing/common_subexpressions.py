"""Equal operations become one, and waits that order nothing are dropped, before a graph is read.

A traced training step repeats itself: Keras' Adam computes the powers of its decay rates for every variable anew, and
every axis and shape is a constant of its own. TensorFlow's graph optimizer would merge them, but on CPUs graphsplit
does without it; and what is merged before the split is not planned, copied to every device, placed and started.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

from graphsplit.core.protos.graphdefs import set_inputs, source_of, with_inputs
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.program.graph.function_calls import CONTROL_FLOW

_MOST_BYTES = 1 << 16  # of a node that is compared; a larger constant is hardly there twice
_MADE_IN_PIECES = frozenset({"BroadcastTo", "Fill", "Range"})  # each reader may want other pieces, for nothing
_READ = "ReadVariableOp"


def merge(
    nodes: Sequence[Any],
    references: Sequence[str],
    named: Collection[str],
    place_of: Callable[[str], Hashable] = lambda _: None,
) -> tuple[list[Any], list[str]]:
    """Return the nodes without repetitions, and `references` as they are named now.

    Operations are equal if their types, attributes, inputs and controls are. Reads of a variable between the same
    controls read the same value: whatever writes waits for the reads before it, and is waited for by those after it.

    Args:
      nodes: `NodeDef`s in graph spelling, calls inlined. Those that stand behind their inputs are merged; their inputs
        are edited in place.
      references: references (`node:0`) and effects (`^node`).
      named: names of nodes that stay: captured tensors, which may be constants.
      place_of: from a node's name to where it was asked to run; nodes with different answers stay apart.
    """
    twins: dict[str, str] = {}  # the name of a dropped node -> that of the one that is kept
    found: dict[Hashable, str] = {}
    kept: list[Any] = []
    for node in nodes:
        key = _key(node, twins)
        apart = key is None or node.name in named
        name = node.name if apart else found.setdefault((key, place_of(node.name)), node.name)
        if name == node.name:
            kept.append(node)
        else:
            twins[node.name] = name
    for node in kept:  # again, for those that stand before their inputs
        _let_read(node, [_renamed(reference, twins) for reference in node.input])
    return kept, [_renamed(reference, twins) for reference in references]


def drop_idle_waits(nodes: Sequence[Any]) -> None:
    """Let operations without effects not wait for such, which orders nothing; edits the nodes.

    (The gradient of a squared difference waits for the gradient that it is given: that would be made whole at home only
    to be waited for, where it is read in pieces.)
    """
    idle: set[str] = set()
    for node in nodes:
        pure = _is_pure(node.op)
        if pure:
            _let_read(node, [r for r in node.input if r[0] != "^" or r[1:] not in idle])
        # EnsureShape may be there for its error, and others wait for that
        silent = (pure and node.op != "EnsureShape") or node.op in ("Placeholder", _READ)
        if silent and all(source_of(reference) in idle for reference in node.input):
            idle.add(node.name)


def _let_read(node: Any, inputs: list[str]) -> None:
    """Let a node read something else, if it is something else: for most nodes it is not."""
    if inputs != node.input:
        set_inputs(node, inputs)


def _key(node: Any, twins: Mapping[str, str]) -> Hashable | None:
    """Return what equal nodes have in common, or None for a node that is not to be merged."""
    if not (_is_pure(node.op) or node.op == _READ) or node.op in _MADE_IN_PIECES or "TensorList" in node.op:
        return None
    if node.ByteSize() > _MOST_BYTES:
        return None
    inputs = [_renamed(reference, twins) for reference in node.input]
    bare = with_inputs(node, ())
    bare.name = bare.device = ""
    if "_class" in bare.attr:  # colocation, which the plan replaces
        del bare.attr["_class"]
    data = tuple([reference for reference in inputs if reference[0] != "^"])
    return bare.SerializeToString(deterministic=True), data, frozenset(inputs).difference(data)


@functools.cache
def _is_pure(op_type: str) -> bool:
    return op_type != "Placeholder" and op_type not in CONTROL_FLOW and not op_definition(op_type).is_stateful


def _renamed(reference: str, twins: Mapping[str, str]) -> str:
    name = source_of(reference)
    return reference.replace(name, twins[name], 1) if name in twins else reference
