"""The variables of a function that may be cut along an axis of a mesh, for the search for plans."""

from __future__ import annotations

from collections import Counter

import tensorflow as tf

from graphsplit.api.layouts.new_variables import slots_by_name
from graphsplit.api.layouts.variable_layouts import can_be_parted
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.search.mesh_layouts import Variable
from graphsplit.tracing.trace import Trace, captured_variables


def variables_to_cut(trace: Trace) -> list[Variable]:
    """Return the variables of a traced function that may be cut, each with its slots, which lie as it does."""
    slots = slots_by_name(list(trace.variables))
    owners: dict[int, tf.Variable] = {}
    captures: dict[int, list[int]] = {}  # (what a gradient reads by itself is captured once more)
    for position, own in captured_variables(trace).items():
        head = slots.get(id(own), own)
        if head.shape == own.shape and own.shape.rank and can_be_parted(own):
            owners.setdefault(id(head), head)
            captures.setdefault(id(head), []).append(position)
    slot_bytes = Counter[int]()
    for own in trace.variables:
        if (head := slots.get(id(own))) is not None:
            slot_bytes[id(head)] += _bytes_of(own)
    names = Counter(map(name_of, trace.variables))
    found = [
        Variable(name_of(own), tuple(own.shape.as_list()), _bytes_of(own), tuple(captures[k]), slot_bytes[k])
        for k, own in owners.items()
    ]
    return [own for own in found if names[own.name] == 1]  # (two of one name cannot lie differently)


def _bytes_of(variable: tf.Variable) -> int:
    return (variable.shape.num_elements() or 0) * int(variable.dtype.size or 0)
