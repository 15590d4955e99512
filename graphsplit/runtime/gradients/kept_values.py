"""Values that variables had when a function was called: what is differentiated later is differentiated there.

A gradient of a gradient runs the function forward again. In between somebody may have changed the variables, so they
are read when the function runs, and what runs again is given variables of its own that hold what was read. A value that
is read is not copied: TensorFlow copies it once somebody adds to the variable in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from graphsplit.core.layouts import MeshDivision
from graphsplit.core.tensorflow_internals import (
    ANONYMOUS,
    graph_around,
    no_recording,
    record_on_tapes,
    resource_value,
    set_graph_gradient,
    stateless_call,
)
from graphsplit.core.variables.parted_variables import assign, read_handle
from graphsplit.core.variables.values import gradient_of, pieces_of, whole_of
from graphsplit.planning.plan import Plan
from graphsplit.runtime.handles import asked_of_workers, captured, origins_of
from graphsplit.tracing.trace import Trace


@dataclass(frozen=True)
class _Capture:
    """Where the values of one capture are among all: a variable's own, or those of its parts; a table is itself."""

    values: slice
    devices: tuple[str, ...]
    division: MeshDivision | None
    is_variable: bool


@dataclass(frozen=True)
class KeptValues:
    """The values that the captured variables of a function had.

    Attributes:
      tensors: the values, and what else was captured.
      captures: what these are, by the names of the captures' placeholders.
    """

    tensors: tuple[tf.Tensor, ...]
    captures: Mapping[str, _Capture]

    @classmethod
    def now(cls, trace: Trace, plan: Plan, handles: Sequence[tf.Tensor]) -> KeptValues:
        """Return the values that the variables have now."""
        value_types = [resource_value(handle) if handle.dtype == tf.resource else None for handle in handles]

        def read_values() -> tuple[tf.Tensor, ...]:
            with no_recording():
                pairs = zip(handles, value_types, strict=True)
                return tuple([handle if value is None else _read(handle, value[0]) for handle, value in pairs])

        positions: dict[str, list[int]] = {}
        for position, (name, _) in enumerate(origins_of(trace, plan)):
            positions.setdefault(name, []).append(position)
        captures = {}
        for name, positions_of_capture in positions.items():
            values, devices = (
                slice(positions_of_capture[0], positions_of_capture[-1] + 1),
                tuple([handles[i].device for i in positions_of_capture]),
            )
            captures[name] = _Capture(
                values, devices, plan.state.divisions.get(name), value_types[positions_of_capture[0]] is not None
            )
        kept = cls(asked_of_workers(trace, read_values), captures)
        kept._record(trace, handles)
        return kept

    def _record(self, trace: Trace, handles: Sequence[tf.Tensor]) -> None:
        """Tell the tapes of which variables the values are.

        What runs again says by itself how it depends on variables, unless somebody writes it anew: a vectorized
        Jacobian is made of the operations in it, which read these values.
        """
        variables = dict(zip([trace.program.ops[i].name for i in trace.program.captures], trace.captures, strict=True))
        for name, capture in self.captures.items():
            if capture.is_variable:
                whole = handles[capture.values.start] if capture.division is None else variables[name]
                values = self.tensors[capture.values]
                record_on_tapes("kept_values", values, [whole], partial(_by_variable, values, capture.division))

    def handles(self, trace: Trace, plan: Plan) -> list[tf.Tensor]:
        """Return what a plan takes for its captures: variables of its own that hold these values."""
        handles_by_name: dict[str, list[tf.Tensor]] = {}
        handles = []
        for position, (name, part) in enumerate(origins_of(trace, plan)):
            if name not in self.captures:  # what only a derivative takes
                handles.append(captured(trace, plan)[position])
                continue
            if name not in handles_by_name:
                handles_by_name[name] = self._made(self.captures[name], plan.state.divisions.get(name))
            handles.append(handles_by_name[name][part])
        return handles

    def _made(self, capture: _Capture, division: MeshDivision | None) -> list[tf.Tensor]:
        values: Sequence[tf.Tensor] = self.tensors[capture.values]
        devices = capture.devices
        if not capture.is_variable:
            return list(values)
        if division != capture.division:  # the layout was changed since, or a plan needs all of it in one place
            whole = values[0] if capture.division is None else whole_of(values, capture.division)
            values = [whole] if division is None else list(pieces_of(whole, division))
            devices = devices[:1] if division is None else division.devices
        return [_variable(value, device) for value, device in zip(values, devices, strict=True)]


def _read(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the value of a variable, read before what changes it next.

    In a graph TensorFlow lets a change wait for a read in a function that is called before only if that function reads
    the result; what a derivative reads, later, does not count.
    """
    value = read_handle(handle, dtype)
    if not tf.executing_eagerly():
        tf.identity(value)
    return value


def _by_variable(values: Sequence[tf.Tensor], division: MeshDivision | None, *gradients: Any) -> list[Any]:
    """Return the gradient by a variable, given those by its value or by the values of its parts."""
    return [gradients[0] if division is None else gradient_of(values, gradients, division)]


def _variable(value: tf.Tensor, device: str) -> tf.Tensor:
    """Return the handle of a variable that lives as long as it. (`tf.Variable` makes none in a `tf.function`.)

    In a graph what is differentiated by the variable is by the value. It is made where the value is, before loops and
    branches that read it: TensorFlow differentiates no loop whose body makes a variable, and vectorizes no operations
    that are stateful.
    """

    def make(value: tf.Tensor) -> tf.Tensor:
        with tf.device(device):
            handle = tf.raw_ops.VarHandleOp(dtype=value.dtype, shape=value.shape, shared_name=ANONYMOUS)
            with tf.control_dependencies([assign(handle, value)]):
                return handle if tf.executing_eagerly() else tf.identity(handle)

    if tf.executing_eagerly():
        return make(value)
    with tf.init_scope():
        making = tf.function(make, autograph=False).get_concrete_function(tf.TensorSpec(value.shape, value.dtype))
    with graph_around(value).as_default(), tf.control_dependencies(None), no_recording():
        handle = stateless_call(making, value)
    set_graph_gradient([handle], lambda _inputs, _results, gradients: list(gradients))
    record_on_tapes("kept_variable", [handle], [value], lambda gradient: [gradient])
    return handle
