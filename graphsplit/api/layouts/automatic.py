"""`variables="auto"`: where the variables of a function are stored that have no layout yet.

The rule reads bytes, kinds of devices, and which variables a traced function writes. It predicts nothing.

* A variable that the function writes is divided (`"sharded"`), with its slots, and each device updates its part.
  Weights are gathered once a call; again for the backward pass only where they do not fit otherwise.
* A variable that it only reads has a copy on each device (`"replicated"`), so that no call sends it. Once another
  function writes it, it is divided.
* Of little, and where copies between devices cost nothing (logical CPU devices of one process), all stays where it is.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from graphsplit.api.layouts.layout_spellings import AUTO
from graphsplit.api.options import Options
from graphsplit.core.devices import copies_take_time
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_variables import bytes_of_variable
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.burdens import LEAST_BYTES
from graphsplit.tracing.trace import Trace, captured_variables


class AutomaticLayouts(NamedTuple):
    """What was chosen.

    Attributes:
      layouts: of each variable of the trace; None: it stays as it lies.
      why: a sentence for the plan.
    """

    layouts: tuple[Any, ...]
    why: str

    def smaller(self, bytes_held: int, memory: float) -> AutomaticLayouts:
        """Return what takes less memory: nothing is copied, and what is divided is freed after the forward pass."""
        layouts = tuple([layout and "sharded" for layout in self.layouts])
        reason = f"a device that has {format_bytes(int(memory))} would hold {format_bytes(bytes_held)}"
        return AutomaticLayouts(
            layouts, _said(f"sharded, and gathered again for the backward pass, as otherwise {reason}")
        )


def choose_layouts(
    lies: Arrangement, trace: Trace, slots: Collection[int], devices: Sequence[str], options: Options
) -> AutomaticLayouts:
    """Return the layouts of the variables of a traced function.

    Args:
      lies: how they lie.
      trace, devices, options: the function, full names, and what it was asked for.
      slots: the ids of variables that belong to others.
    """
    variables, variable_of_capture = trace.variables, captured_variables(trace)
    writes = [
        variable_of_capture[t.op]
        for op in trace.program.ops
        if op.writes
        for t in op.inputs
        if t.op in variable_of_capture
    ]
    written = set(map(id, writes))
    weights = sum([bytes_of_variable(variable) for variable in variables if id(variable) not in slots])
    why = why_they_stay(devices, options)
    if not why and weights < LEAST_BYTES:
        why = f"the weights are {format_bytes(weights)}"
    if not why and trace.program.all_stages():
        why = "stages have devices of their own"
    if not why and not tf.executing_eagerly():
        why = "the function is called inside of a graph"
    if why:
        return AutomaticLayouts((None,) * len(variables), _said(f"they stay where they are, as {why}"))

    def layout_of(variable: tf.Variable) -> str | None:
        writes, lying = id(variable) in written, lies.of(variable)
        is_free = lying.division is None and not lying.stays and not lying.automatic
        was_only_read = lying.automatic == "replicated"
        if not (is_free or (was_only_read and writes)) or not (variable.shape.rank or writes):
            return None  # (a number that is only read: a learning rate)
        is_there = lies.device_of(variable) in devices  # (one of the copies is the variable itself)
        return "replicated" if is_there and not writes else "sharded"

    layouts = tuple(map(layout_of, variables))
    chosen_before = [lying for lying in map(lies.of, variables) if lying.automatic and lying.division is not None]
    chosen = {*layouts, *[lying.layout for lying in chosen_before]}
    reshards = any(lying.reshards for lying in chosen_before)
    again = " again for the backward pass, to fit into memory" if reshards else " once a call"
    texts = {
        "sharded": f"what the function writes is sharded, and gathered{again}",
        "replicated": "what it only reads is replicated",
    }
    texts_said = [text for layout, text in texts.items() if layout in chosen]
    return AutomaticLayouts(layouts, _said("; ".join(texts_said) or "they keep the layouts that they have"))


def why_they_stay(devices: Sequence[str], options: Options) -> str:
    """Return why no variable is moved, whatever the function is; "" if some may be."""
    if len(set(devices)) == 1:
        return "there is one device"
    if not copies_take_time(devices):
        return "the devices are logical CPU devices of one process, which share its memory"
    if len({device.rpartition("device:")[2].partition(":")[0] for device in devices}) > 1:
        return "the devices are of several kinds"
    if options.stages is not None:
        return "stages have devices of their own"
    other_axes = [repr(axis) for axis in options.mesh.others]
    axes = f"{'axis' if len(other_axes) == 1 else 'axes'} {' and '.join(other_axes)}"
    return f"the mesh has the {axes}, along which you lay them out" if other_axes else ""


def _said(text: str) -> str:
    return f'variables="{AUTO}": {text}'
