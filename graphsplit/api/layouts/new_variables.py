"""Where variables live that are yet to be made: no device has the whole of one that is to lie in parts."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.divisions import can_be_parted, can_move, held_of
from graphsplit.api.layouts.layout_spellings import VariableLayout, check_layout, spelling_of
from graphsplit.api.layouts.variable_layouts import check_patterns, lay_out, layout_by_name, variables_of
from graphsplit.core.device_mesh import DeviceMesh, device_mesh, devices_of, mesh_axes
from graphsplit.core.hosts import host_devices
from graphsplit.core.initial_values import InitialValue, give_values, initial_value
from graphsplit.core.keras_internals import new_variable_of
from graphsplit.core.patterns import suggesting_options
from graphsplit.core.tensorflow_internals import variable_creators, variable_without_value
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.core.variables.records import call_by_path
from graphsplit.planning.variables.partitioning import Held, head_by_name

_OPTIONS = ("trainable", "name", "constraint", "synchronization", "aggregation")


@suggesting_options
@contextlib.contextmanager
def variable_layout(
    layout: VariableLayout | Mapping[str, VariableLayout],
    devices: int | Sequence[str] | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    reshard_after_forward: bool = True,
) -> Iterator[None]:
    """Give a layout to the variables that are made inside the `with` block: no device ever has the whole.

    Random initial values are drawn in the host's memory, one variable at a time, and each device gets its part. If
    Keras' initializer makes all entries equal (zeros, ones, a constant), each device makes its part. The values are
    those of a variable that is made in the host's memory as usual. An optimizer's slots, which are not trained, get the
    layout of the variable in the same block that has their shape, and whose name is in theirs.

    Args:
      layout, mesh, reshard_after_forward: see `set_variable_layout`. A name is the one that the variable is
        made with: a layer outside of a model does not know the model's name.
      devices: how many, or which; all by default.

    Raises:
      ArgumentError: for an unknown layout, or a variable that cannot be cut like that; at the end of the block, for a
        pattern that matches no variable.
      DeviceError: if there are not that many devices.

    >>> import tensorflow as tf, graphsplit as gs
    >>> with gs.variable_layout({"table": "sharded"}, devices=2):
    ...     table = tf.Variable(lambda: tf.ones((1000, 64)), name="table")
    >>> float(tf.reduce_sum(table))
    64000.0
    """
    axes = mesh_axes(mesh)
    names = devices_of(axes, devices)
    mesh_devices = device_mesh(axes, names) if axes else None
    names = names if mesh_devices is None else mesh_devices.devices
    check_layout(layout, mesh_devices)
    new = NewVariables(names, reshard_after_forward, mesh_devices)
    names_made: list[str] = []

    def lay(variable: tf.Variable) -> None:
        head = new.add(variable)
        names_made.append(name_of(variable))
        if isinstance(layout, Mapping):
            new.lay_out(variable, layout_by_name(variable, layout, head), head)
        else:
            new.lay_out(variable, spelling_of(layout).plain(variable.shape.rank), head)

    with laid_out_when_made(lay):
        yield
    if isinstance(layout, Mapping):
        check_patterns(layout, names_made)


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Make a model that takes no memory: inside of the block, weights and slots have shapes and dtypes, and no values.

    You can plan it, predict it (`gs.predict`) and set layouts, here or under `variable_layout`, so that you know its
    memory before you have a device that it fits on. Later, `gs.load_weights` loads values from a file, or
    `gs.keras.initialize` draws initial values: one variable at a time, in parts where variables are in parts. Reading
    or calling the model before that is an `ArgumentError`.

    Only variables that Keras 3 or tf_keras makes by an initializer have no values. Counters, seeds, learning rates
    and your own `tf.Variable`s have them.

    >>> import keras, tensorflow as tf, graphsplit as gs
    >>> with gs.keras.without_values(), gs.variable_layout("sharded", devices=2):
    ...     layer = keras.layers.Dense(1000)
    ...     layer.build((None, 1000))
    >>> step = gs.parallelize(layer, devices=2)
    >>> step.plan(tf.ones((4, 1000))).mesh.shards
    2
    >>> try:
    ...     step(tf.ones((4, 1000)))
    ... except gs.errors.ArgumentError as error:
    ...     print(str(error).partition(",")[0])
    These variables have no values yet
    >>> gs.keras.initialize(layer)
    >>> step(tf.ones((4, 1000))).shape
    TensorShape([4, 1000])
    """
    with laid_out_when_made(None):
        yield


def initialize(target: Any) -> None:
    """Draw the initial values of variables that were made under `without_values`, in parts where they are in parts.

    Args:
      target: a variable, model, optimizer or any structure of these. What has a value keeps it. Values are drawn in
        the order in which the variables were made.

    >>> import keras, graphsplit as gs
    >>> with gs.keras.without_values():
    ...     layer = keras.layers.Dense(3, bias_initializer="ones")
    ...     layer.build((None, 5))
    >>> gs.keras.initialize(layer)
    >>> layer.bias.numpy().tolist()
    [1.0, 1.0, 1.0]
    """
    give_values(variables_of(target))


@contextlib.contextmanager
def laid_out_when_made(lay: Callable[[tf.Variable], None] | None, only: Any = None) -> Iterator[None]:
    """Have each eager variable that is made in a block laid out before it has a value, if TensorFlow alone makes it.

    What somebody else makes, a strategy say, has its value first. Of several such blocks the innermost counts.

    Args:
      lay: lays a variable out; None: what is made has no value, and other blocks lay it out.
      only: the initial value of the one that is meant; None: all are. (An initializer may make variables, too.)
    """

    def create(make: Callable[..., Any], **options: Any) -> Any:
        other_creators = [creator for creator in variable_creators() if creator not in _ours]
        value = options.get("initial_value")
        is_other = (only is not None and value is not only) or (lay is None and are_laid_out_when_made())
        if is_other or not tf.executing_eagerly():
            return make(**options)
        first = None
        if not other_creators and not options.get("caching_device"):
            first = initial_value(value, options.get("dtype"), options.get("shape"))
        if isinstance(first, InitialValue):
            return _made(first, new_variable_of(value), lay, options)
        variable = make(**(options if first is None else {**options, "initial_value": first}))
        if lay is not None and isinstance(variable, tf.Variable):
            lay(variable)
        return variable

    _ours[create] = lay is not None
    with tf.variable_creator_scope(create):
        yield


def _made(
    first: InitialValue, of_keras: Any, lay: Callable[[tf.Variable], None] | None, options: Mapping[str, Any]
) -> tf.Variable:
    variable_options = {name: options[name] for name in _OPTIONS if name in options}
    variable = variable_without_value(shape=first.shape, dtype=first.dtype, **variable_options)
    if of_keras is not None:
        call_by_path(variable, of_keras[1].path)
    is_asked = any(_ours.get(creator) is False for creator in variable_creators())
    is_weight = first.dtype.is_floating or first.dtype.size == 1  # (seeds and counters are whole numbers of more bytes)
    waits = is_asked and is_weight and bool(first.shape) and not first.is_made
    if waits:
        first.wait(variable)
    if lay is not None:
        lay(variable)
    if not waits:
        first.give(variable)
    return variable


_ours: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()  # creators: whether they lay variables out


def are_laid_out_when_made() -> bool:
    """Return whether a block is open that lays out what is made in it."""
    return any(_ours.get(creator) for creator in variable_creators())


class NewVariables:
    """Lays variables out one by one, each as soon as it is made."""

    def __init__(self, devices: Sequence[str], reshard_after_forward: bool = True, mesh: DeviceMesh | None = None):
        self._devices = tuple(devices)
        self._reshard = reshard_after_forward
        self._mesh = mesh
        self._loads = dict.fromkeys([*devices, *host_devices(devices)], 0)
        self._trained = _Trained()

    def add(self, variable: tf.Variable) -> tf.Variable | None:
        """Remember a new variable, if it is trained; return the one that it is a slot of, if it is a slot."""
        return self._trained.head_of(variable)

    def lay_out(self, variable: tf.Variable, layout: VariableLayout | None, head: tf.Variable | None) -> None:
        """Lay a new variable out; a sharded slot goes to where the variable lies to which it belongs, its head."""
        slots = {} if head is None else {id(variable): head}
        arguments = [variable], [layout], slots, self._devices, self._mesh
        lay_out(*arguments, reshard_after_forward=self._reshard, loads=self._loads)


class _Trained:
    """The variables of a block that are trained; slots that are made after them are told by their names."""

    def __init__(self) -> None:
        self._made: list[weakref.ref[tf.Variable]] = []
        self._held_variables: list[Held] = []

    def head_of(self, variable: tf.Variable) -> tf.Variable | None:
        """Return the variable that a new one is a slot of; None if it is none, and remember it if it is trained."""
        if not can_move(variable):
            return None
        [held_variable] = held_of([variable], {})
        if variable.trainable:
            self._made.append(weakref.ref(variable))
            self._held_variables.append(held_variable)
            return None
        position = head_by_name(held_variable, self._held_variables)
        return None if position is None else self._made[position]()


def slots_for_host(variables: Sequence[tf.Variable]) -> tuple[str, ...]:
    """Return the names of the slots among variables that can lie on the host; no other variable has such a name."""
    slots = slots_by_name(variables)
    other_names = {name_of(variable) for variable in variables if id(variable) not in slots}
    names = dict.fromkeys([name_of(v) for v in variables if id(v) in slots and can_be_parted(v)])
    return tuple([name for name in names if name not in other_names])


def slots_by_name(variables: Sequence[tf.Variable]) -> dict[int, tf.Variable]:
    """Return the variable that each slot belongs to, by the slot's id, as its name tells; `slots_of` knows better."""
    trained = _Trained()
    first = sorted(variables, key=lambda variable: not variable.trainable)
    return {id(variable): head for variable in first if (head := trained.head_of(variable)) is not None}
