"""Variables in parts: where the value is, and how other code goes on finding it in the variable.

What enters: a variable, and which device has which part or copy (`Cut`, `Replicate`, `Nested`). What leaves: the same
variable, whose value is in its parts, which are variables on their devices.

A parallelized function reads and writes the parts. Other code (eager code, a `tf.function`, an optimizer, a checkpoint)
asks the variable for its handle, and gets it with the parts gathered first. Either the variable or its parts hold the
value, and the others are empty, so nobody can read an old one. The value moves only when the other side asks for it.

A variable may also have copies, and be one of them: see `copied_variables`.

A `tf.function` keeps the handles that it was traced with and asks no more. So it is given a handle that is looked up
whenever it is called; one that was traced before the variable got its layout, too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.devices import canonical_name, short_name, task_of
from graphsplit.core.layouts import MeshDivision, part_ranges, part_shapes
from graphsplit.core.tensorflow_internals import (
    ask_at_call,
    function_graph,
    give_handle,
    in_save_context,
    value_at_call,
    variable_without_value,
)
from graphsplit.core.variables.parted_classes import are_raw, give_parts, raw_handles, take_parts
from graphsplit.core.variables.records import noted_of, record_of
from graphsplit.core.variables.running_calls import calls
from graphsplit.core.variables.values import host_tensor, indices_of, pieces_of, whole_of
from graphsplit.errors import ArgumentError, UnsupportedError, WorkerLostError, bullet_list

OWN_TRACE = "_graphsplit_own_trace"
"""The attribute of the graphs of parallelized functions: these find the parts themselves, and are never saved."""

_by_handle: weakref.WeakValueDictionary[int, VariableParts] = weakref.WeakValueDictionary()
_changes = [0]  # how often a layout was changed
_SHOWN = 8  # names in an error
_MANY = 10  # calls in a row each of which had to move a variable's value: a loop does it every time
_warned = [-1]  # how often a layout had been changed when somebody was last told of that


class VariableParts:
    """The parts of one variable.

    Args:
      variable: it is given a class of its own, whose `handle` knows of the parts.
      division: how it is several, with the devices of its parts; of one part, it is whole and elsewhere.
      layout: how users call that.
      over: the devices over which it is divided together with others; its parts may be on a few of them.

    Attributes:
      division, layout, over: see there.
      devices: of the parts.
      name, path: what TensorFlow calls the variable, and what users do.
      in_parts: whether the parts hold the value, or the variable itself.
    """

    def __init__(self, variable: tf.Variable, division: MeshDivision, layout: Any, over: Sequence[str] = ()):
        self.division = division
        self.devices = division.devices
        self.over = tuple(over) or self.devices
        self.layout = layout
        self.in_parts = False
        self.name = variable.name.partition(":")[0]
        self.path = name_of(variable)
        record = record_of(variable)
        self._writing, self._given = record.writing, record.taking
        self._in_a_row = 0
        with raw_handles():
            self._own = variable.handle
        self._dtype, self._shape = variable.dtype, variable.shape
        self._parts = [self._new_part(part) for part in range(len(self.devices))]
        self._variable = weakref.ref(variable)
        give_parts(variable, self)
        with calls.lock:
            _by_handle[id(self._own)] = self  # last: from now on calls move the value, and the class has to know
            _changes[0] += 1

    def _new_part(self, part: int) -> tf.Variable:
        with tf.init_scope(), tf.device(self.devices[part]):
            name, shape = f"{self.name}/part_{part}", tf.TensorShape(None)
            part_variable = variable_without_value(name=name, dtype=self._dtype, shape=shape, trainable=False)
            self._empty(part_variable.handle)
            return part_variable

    @property
    def variable(self) -> tf.Variable | None:
        """The variable, if it is still there."""
        return self._variable()

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each part."""
        return part_shapes(self.division, self._shape.as_list())

    def handles(self) -> list[tf.Tensor]:
        """Return the handles of the parts, which hold the value now."""
        self._arrive()
        return [part.handle for part in self._parts]

    def whole_handle(self, only_read: bool = False) -> tf.Tensor:
        """Return the variable's own handle, which holds the value now (in a function that is traced, whenever it runs).

        Args:
          only_read: whether it is asked for by what reads the variable.
        """
        if in_save_context() and not tf.executing_eagerly():
            return self._own  # (in the file it stands for the variable, whoever holds the value now)
        graph = None if tf.executing_eagerly() else function_graph()
        if graph is not None and graph in self._given:  # whoever calls it gives it the handle that holds the value
            if not graph.outer_graph.building_function:
                return self._own
            with graph.outer_graph.as_default():
                return self.whole_handle(only_read)
        if graph is not None:
            if not only_read:
                self._writing.add(graph)
            writing = self._writing  # one handle for all that the function does, which TensorFlow keeps in order
            find = partial(handle_at_call, self._own, lambda: graph not in writing)
            return value_at_call(graph, find, self._own, (id(self._own), None))
        with tf.init_scope():  # a graph of TensorFlow 1 has no calls
            try:
                if not are_raw():
                    self._ask(only_read)
            except UnsupportedError as error:  # TensorFlow's eager runtime crashes if this raises: what reads it fails
                return tf.raw_ops.VarHandleOp(dtype=self._dtype, shape=self._shape, shared_name=str(error))
            return self._own

    def become_argument(self, graph: Any) -> None:
        """Be told that a function whose graph this is has the variable as an argument, not as what it captures."""
        self._given.add(graph)

    def _ask(self, only_read: bool) -> None:  # noqa: ARG002  # whoever reads it needs the whole as well
        self.put_together()

    def _how(self) -> str:
        return f"sharded on {', '.join(map(short_name, self.devices))}"

    def _arrive(self) -> None:
        """Let the parts hold the value for a call, and say when every call has to move it."""
        self._in_a_row = self._in_a_row + 1 if self.take_apart() else 0
        if self._in_a_row == _MANY and _warned[0] != _changes[0]:
            _warned[0] = _changes[0]
            warnings.warn(
                f"Variable {self.name!r}, {self._how()}, was read or changed by other code between each of the last "
                f"{_MANY} calls of a parallelized function, so each call moved its {self._bytes} bytes again (and "
                "perhaps those of other variables). Move that code into the function, or set the variable's layout to "
                "'home'.",
                stacklevel=2,
            )

    @property
    def _bytes(self) -> int:
        return int(self._dtype.size) * int(self._shape.num_elements() or 0)

    @property
    def raw_handle(self) -> tf.Tensor:
        """The variable's own handle, whatever it holds."""
        return self._own

    def take_apart(self) -> bool:
        """Let the parts hold the value, and return whether they did not."""
        with calls.lock:
            if self.in_parts:  # (asked in each call: to enter a scope takes longer than all else)
                return False
            self._wait_for_calls()
            with tf.init_scope():
                self._take_apart()
            return True

    def _wait_for_calls(self) -> None:
        calls.wait_for([self._own], f"Variable {self.path!r}")
        calls.moves += 1

    # A value may be interrupted on its way, by a signal or for want of memory. So the side to which it goes has all of
    # it before that side counts, and only then is the other one emptied.

    def _take_apart(self) -> None:
        if has_value := is_initialized(self._own):  # (a new variable may have none, which its own handle tells)
            value = read_handle(self._own, self._dtype)
            self._give(self._parts, pieces_of(value, self.division), value.device)
        self.in_parts = True
        if has_value:
            self._empty(self._own)

    def _give(self, parts: Sequence[tf.Variable], pieces: Iterator[tf.Tensor], where: str) -> None:
        """Let parts hold pieces, cut off where the value is: beside the parts there is one at a time."""
        for device, part in zip(self.devices, parts, strict=True):
            with tf.device(where):
                piece = next(pieces)
            with tf.device(device):
                assign(part.handle, tf.identity(piece))
            del piece  # before the next one is read

    def take(self, value: Any) -> bool:
        """Let the parts hold a value that somebody gives the variable, if it is they who hold the present one.

        Then no device gets all of it. Of an array, or what a file has of one, it gets one part after the other.

        Args:
          value: what may be assigned to the variable; or what `can_be_read_by_part`.

        Returns:
          Whether they do. If not, it is the variable that is to take it, or to say what is wrong with it.
        """
        if not tf.executing_eagerly():
            return False
        with calls.lock:
            if not self.in_parts:
                return False
            source = parts_of_variable(value if isinstance(value, tf.Variable) else getattr(value, "value", None))
            if source is not None and (whole := source.on_host()) is not None:  # (it stays in parts)
                value = whole
            by_part = can_be_read_by_part(value)
            if not by_part and not isinstance(value, tf.Tensor):
                with tf.device("CPU:0"):
                    value = tf.convert_to_tensor(value, self._dtype)
            if tuple(value.shape) != tuple(self._shape) or not (by_part or value.dtype == self._dtype):
                return False
            parts = [self._new_part(part) for part in range(len(self.devices))]  # the old ones hold all until then
            if by_part:
                self._give(parts, (host_tensor(value, at, self._dtype) for at in self._entries()), "CPU:0")
            else:
                self._give(parts, pieces_of(value, self.division), value.device)
            self._parts = parts
            calls.moves += 1
            self._empty(self._own)  # that it is there says that there is a value
            return True

    def fill(self, make: Callable[[Sequence[int]], tf.Tensor]) -> bool:
        """Give parts that have no value yet one whose entries are all the same: each is made on its device.

        Returns:
          As `take`.
        """
        for device, part, shape in zip(self.devices, self._parts, self.shapes, strict=True):
            with tf.device(device):
                assign(part.handle, make(shape))
        self._empty(self._own)
        return True

    def on_host(self) -> tf.Tensor | None:
        """Return the value in the host's memory, put together there; None if it is not the parts that hold it."""
        with calls.lock, tf.device("CPU:0"):
            return self._joined() if self.in_parts else None

    def as_array(self) -> np.ndarray[Any, Any] | None:
        """Return the value as an array, read one part after the other; None if it is not the parts that hold it."""
        with calls.lock:
            if not self.in_parts or not tf.executing_eagerly():
                return None
            self._check_has_value()
            whole = np.empty(self._shape.as_list(), self._dtype.as_numpy_dtype)
            with self._all_there():
                pairs = reversed([*zip(self._parts, self._entries(), strict=True)])
                for part, at in {str(at): (part, at) for part, at in pairs}.values():  # (of copies the first)
                    whole[indices_of(at)] = read_handle(part.handle, self._dtype).numpy()
            return whole

    def _entries(self) -> list[tuple[Sequence[int], ...]]:
        """Return which entries each part has, along each axis."""
        return part_ranges(self.division, list(map(range, self._shape)))

    def _check_has_value(self) -> None:
        check_have_values([] if is_initialized(self._own) else [self.path])

    def _joined(self) -> tf.Tensor:
        """Return the parts put together, on the device in whose scope this is called."""
        self._check_has_value()
        with self._all_there():
            return tf.identity(whole_of([read_handle(part.handle, self._dtype) for part in self._parts], self.division))

    @contextlib.contextmanager
    def _all_there(self) -> Iterator[None]:
        """Say whose parts are read, if a worker that has one of them does not answer."""
        try:
            yield
        except (tf.errors.AbortedError, tf.errors.UnavailableError) as error:
            tasks = sorted({task[1] for device in self.devices if (task := task_of(device)) is not None})
            if not tasks:
                raise
            raise WorkerLostError(
                f"Variable {self.name!r} cannot be read: one of workers {', '.join(map(str, tasks))}, which have its "
                "parts, ended, or does not answer. What is only there is lost. graphsplit.workers.resilient(step, "
                'checkpoint=...) restores such variables; a layout of "replicated" keeps copies.'
            ) from error

    def put_together(self) -> None:
        """Let the variable itself hold the value."""
        with calls.lock:
            if self.in_parts:
                self._wait_for_calls()
                self._put_together()

    def _put_together(self) -> None:
        with tf.init_scope():
            with tf.device(self._own.device):
                assign(self._own, self._joined())
            self.in_parts = False
            for part in self._parts:
                self._empty(part.handle)

    def _empty(self, handle: tf.Tensor) -> None:
        with tf.device(handle.device):
            assign(handle, tf.constant([], self._dtype))  # (`tf.zeros` has no 8-bit floats)

    def _handles(self) -> Sequence[tf.Tensor]:
        return [self._own, *[part.handle for part in self._parts]]

    def bytes_on_devices(self) -> dict[str, int]:
        """Return the bytes that each device has now."""
        bytes_by_device: dict[str, int] = {}
        for handle in filter(is_initialized, self._handles()):
            size = int(np.prod(read_handle(handle, self._dtype).shape)) * self._dtype.size
            bytes_by_device[handle.device] = bytes_by_device.get(handle.device, 0) + size
        return bytes_by_device

    def reshard(self, division: MeshDivision) -> None:
        """Let what is planned from now on drop the whole after the forward pass, or keep it."""
        self.division = division
        _changes[0] += 1

    def value_without(self, is_lost: Callable[[str], bool]) -> tf.Tensor | None:
        """Return the value as devices have it that are not lost; None if a part of it is gone, or all copies are."""
        with calls.lock, tf.init_scope():
            if not self.in_parts:
                return None if is_lost(canonical_name(self._own.device)) else read_handle(self._own, self._dtype)
            pairs = zip(self.devices, self._parts, strict=True)
            values = (None if is_lost(device) else read_handle(part.handle, self._dtype) for device, part in pairs)
            return whole_of(values, self.division)

    def release(self, variable: tf.Variable) -> None:
        """Make the variable an ordinary one again; it holds its value, if there is one."""
        with calls.lock:
            self._wait_for_calls()
            if self.in_parts and is_initialized(self._own):
                self._put_together()
            self.forget(variable)

    def forget(self, variable: tf.Variable) -> None:
        """Make the variable an ordinary one again, whatever it holds."""
        with calls.lock:
            _changes[0] += 1  # (and again below: an interrupt may come in between, and so may a plan of another thread)
            del _by_handle[id(self._own)]  # first: no call moves the value from now on
            _changes[0] += 1
            calls.moves += 1
            take_parts(variable)


def tell_functions(variables: Sequence[tf.Variable]) -> None:
    """Let functions that were traced before ordinary variables are laid out ask for their handles at each call.

    All that are traced later do so by themselves. (Not a `tf.data.Dataset` that was made before: its functions have the
    handles for good.)
    """
    with raw_handles():
        handles = [variable.handle for variable in variables if _references(variable) > _usual_references()]
    if handles:  # (to look through all that lives takes a while)
        ask_at_call({id(handle): partial(_handle_when_called, handle) for handle in handles}, OWN_TRACE)


def _references(variable: tf.Variable) -> int:
    """Return by how many a variable's handle is held: by each function that was traced with it, too."""
    with raw_handles():
        return sys.getrefcount(variable.handle)


@functools.cache
def _usual_references() -> int:
    with tf.init_scope(), tf.device("CPU:0"):
        return _references(variable_without_value(dtype=tf.float32, shape=(), trainable=False))


def _handle_when_called(handle: tf.Tensor, only_read: bool) -> tf.Tensor:
    return handle_at_call(handle, lambda: only_read)


def handle_at_call(handle: tf.Tensor, only_reads: Callable[[], bool]) -> tf.Tensor:
    """Return a variable's handle, which holds the value from now on, however the variable lies by now."""
    parts = parts_of(handle)
    return handle if parts is None else parts.whole_handle(only_reads())


def parts_of(handle: tf.Tensor) -> VariableParts | None:
    """Return the parts of the variable behind a handle; None for all other handles.

    Also None while a SavedModel is written: its variables are whole, and its functions are listed and not called.
    """
    return _by_handle.get(id(handle)) if _by_handle and not in_save_context() else None


def are_any_parts() -> bool:
    """Return whether any variable of this process lies in parts."""
    return bool(_by_handle)


def parts_of_variable(variable: Any) -> VariableParts | None:
    """Return the parts of a variable; None if it is an ordinary one, or was interrupted while it became so."""
    record = noted_of(variable)
    return None if record is None or record.parts is None else parts_of(record.parts.raw_handle)


def layout_changes() -> int:
    """Return how often a layout was changed in this process: what was planned before may have to be planned again."""
    return _changes[0]


def move_variable(variable: tf.Variable, device: str, value: tf.Tensor) -> None:
    """Let an ordinary variable live on another device, with a value: what it was went with its process.

    Functions that were traced with it before do not know.
    """
    with tf.init_scope(), tf.device(device):
        moved = tf.Variable(value, trainable=False, shape=variable.shape, name=variable.name.partition(":")[0])
    record = record_of(variable)
    record.resources = moved, *record.resources  # both live until the handle has changed
    give_handle(variable, moved.handle)
    record.resources = (moved,)
    _changes[0] += 1


def name_of(variable: Any) -> str:
    """Return the name under which users know a variable: with its layer, if Keras made it."""
    record = noted_of(variable)
    return str((record and record.path) or variable.name.partition(":")[0])


def bytes_of_variable(variable: Any) -> int:
    """Return the size of a variable."""
    return int(variable.shape.num_elements() or 0) * int(variable.dtype.size or 0)


def read_handle(handle: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Return the value behind a handle."""
    return tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)


def can_be_read_by_part(value: Any) -> bool:
    """Return whether a value is an array, or what stands for one in a file: it has a shape, and is read by slices."""
    return isinstance(value, np.ndarray) or hasattr(value, "read_direct")  # (as those of h5py have)


def is_initialized(handle: tf.Tensor) -> bool:
    """Return whether there is a value behind a handle, if only an empty one since the parts hold it."""
    with tf.init_scope():
        return bool(tf.raw_ops.VarIsInitializedOp(resource=handle))


def check_have_values(names: Sequence[str]) -> None:
    """Raise `ArgumentError` if there are names of variables that have no values."""
    if not names:
        return
    raise ArgumentError(
        "These variables have no values yet, since they were made under without_values:\n"
        f"{bullet_list(names, _SHOWN)}\n"
        "Load them with gs.load_weights, or let their initializers make them with gs.keras.initialize. Plans and "
        "predictions need none."
    )


def assign(handle: tf.Tensor, value: tf.Tensor) -> tf.Operation | None:
    """Let a handle hold a value; in a graph, return the operation that does."""
    return tf.raw_ops.AssignVariableOp(resource=handle, value=value)
