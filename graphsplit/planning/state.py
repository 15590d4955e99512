"""Where lives what a program reads and does not compute: variables, tables, large constants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import tensorflow as tf

from graphsplit.core.devices import canonical_name
from graphsplit.core.layouts import Cut, MeshDivision, Replicate
from graphsplit.core.tensorflow_internals import resource_value
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import layout_changes, parts_of
from graphsplit.program.program import Op, Program
from graphsplit.tracing.trace import Trace, captured_variables


class Captured(NamedTuple):
    """What a traced function reads from outside.

    Attributes:
      placeholder: what stands for it in the function.
      name: of the variable, `sequential/dense/kernel`; "" for anything else.
      bytes: that it holds, 0 where that is not known.
      rank: its number of dimensions, likewise.
    """

    placeholder: str
    name: str
    bytes: int
    rank: int


@dataclass(frozen=True)
class State:
    """Where state lives.

    Attributes:
      devices: of captured variables and tables, by placeholder name; "" for those that are wherever a loader puts
        them: what touches them has no device either. Those not named are on the default device.
      largest_constant: constants of more bytes are on the default device only, and sent; smaller ones every device has
        for itself.
      divisions: how captured variables are several, and on which devices, by the traced function's placeholder names.
      parts: for each capture of a program whose variables lie in parts, which capture of the traced function it stands
        for, and which part of that; empty if no variable does.
      whole: variables that lie in parts and have to be put together for a call, by placeholder name, and why.
      in_place: those of the divided variables that are used where their parts are, along another axis of the mesh, and
        what users call them.
      gathered: those of them that are put together along that axis all the same, as some operation needs all of them.
      staying: variables that users want to be used where their parts are along the batch's axis, whose rows go there:
        by what users call them why they are put together all the same, or "".
      captured: what the traced function captured; empty where nothing is known of that.
      changes: how often a layout had been changed before this was read; None if it is not how variables lie.
    """

    devices: Mapping[str, str] = field(default_factory=dict)
    largest_constant: int | None = None
    divisions: Mapping[str, MeshDivision] = field(default_factory=dict)
    parts: tuple[tuple[int, int], ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    in_place: Mapping[str, str] = field(default_factory=dict)
    gathered: frozenset[str] = frozenset()
    staying: Mapping[str, str] = field(default_factory=dict)
    captured: tuple[Captured, ...] = ()
    changes: int | None = field(default=None, compare=False, repr=False)

    @property
    def copied(self) -> set[int]:
        """The numbers of those captures of the traced function of which each part is the whole."""
        divisions = [self.divisions.get(captured.placeholder) for captured in self.captured]
        return {k for k, division in enumerate(divisions) if isinstance(division, Replicate)}

    def is_everywhere(self, op: Op) -> bool:
        """Return whether every device has the value of an op, or makes it from nothing but sizes."""
        return op.is_constant and (self.largest_constant is None or sum(op.out_bytes) <= self.largest_constant)


def captured_by(trace: Trace) -> tuple[Captured, ...]:
    """Return what a traced function captured."""
    with raw_handles():
        names = {id(variable.handle): variable.name.partition(":")[0] for variable in trace.variables}
    inside = {tensor.op.name: tensor for tensor in trace.function.inputs}
    captured = []
    for position, handle in zip(trace.program.captures, trace.captures, strict=True):
        name, parts = trace.program.ops[position].name, parts_of(handle)
        called = names.get(id(handle), "") if parts is None else parts.path
        captured.append(Captured(name, called, *(_size_of(inside[name]) if name in inside else (0, 0))))
    return tuple(captured)


def _size_of(tensor: tf.Tensor) -> tuple[int, int]:
    """Return the bytes and the rank of a tensor, or of the variable of a handle; 0 where that is not known."""
    value = resource_value(tensor) if tensor.dtype == tf.resource else (tensor.dtype, tensor.shape)
    if value is None:
        return 0, 0
    dtype, shape = value
    return int(dtype.size or 0) * int(shape.num_elements() or 0), int(shape.rank or 0)


def state_on(program: Program, state: State, default_device: str) -> Iterator[tuple[str, Captured]]:
    """Yield the device of each variable, part of one, or other tensor that is captured, and its name and bytes.

    Args:
      program, state: what is planned, and where its variables are.
      default_device: the device of those of which nothing is said.
    """
    if not state.captured:
        return
    origins = state.parts or tuple([(k, 0) for k in range(len(program.captures))])
    for device, (k, part) in zip(devices_of_handles(program, state), origins, strict=True):
        captured = state.captured[k]
        division = state.divisions.get(captured.placeholder) if state.parts else None
        size = captured.bytes if division is None else _parts_of(captured.bytes, division)[part]
        yield device or default_device, captured._replace(bytes=size)


def devices_of_handles(program: Program, state: State) -> list[str]:
    """Return where each captured variable is, each part or copy of one; "" where nothing is said of it."""
    return [own_device or state.devices.get(program.ops[i].name, "") for i, own_device in program.handles]


def state_bytes(program: Program, state: State, default_device: str) -> dict[str, int]:
    """Return the bytes of captured variables and tensors by device; see `state_on`."""
    bytes_by_device: dict[str, int] = {}
    for device, captured in state_on(program, state, default_device):
        if captured.bytes:
            bytes_by_device[device] = bytes_by_device.get(device, 0) + captured.bytes
    return bytes_by_device


def _parts_of(size: int, division: MeshDivision) -> list[int]:
    """Return the bytes of each part: of a copy all, of a slice in proportion to its length."""
    if isinstance(division, Cut):
        return [size * length // max(sum(division.lengths), 1) for length in division.lengths]
    if isinstance(division, Replicate):
        return [size] * division.parts
    pairs = zip(division.rows, _parts_of(size, division.columns), strict=True)
    return [part for row, column in pairs for part in _parts_of(column, row)]


def state_of(trace: Trace, lies: Arrangement | None = None) -> State:
    """Return where the variables and tables are that a traced function captured, and how they are several.

    Args:
      trace: the function.
      lies: how variables are to lie; None for as they do.
    """
    changes, lies = layout_changes(), Arrangement() if lies is None else lies
    is_here = tf.executing_eagerly() or lies.default_device  # (in a graph they are whole: it may use them itself)
    divisions = lies.divisions(captured_variables(trace)) if is_here else {}
    divisions_by_name = {trace.program.ops[i].name: division for i, division in divisions.items()}
    if lies.default_device:
        pairs = zip(trace.program.captures, trace.captures, strict=True)
        names = [trace.program.ops[i].name for i, handle in pairs if handle.dtype == tf.resource]
        return State(dict.fromkeys(names, lies.default_device), divisions=divisions_by_name)
    return State(_devices(trace), divisions=divisions_by_name, changes=changes)


def _devices(trace: Trace) -> dict[str, str]:
    pairs = zip(trace.program.captures, trace.captures, strict=True)
    handles = {trace.program.ops[position].name: handle for position, handle in pairs if handle.dtype == tf.resource}
    return {name: canonical_name(handle.device) for name, handle in handles.items() if handle.device}
