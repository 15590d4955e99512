"""Where variables live: `set_variable_layout` for those that exist, `variable_layout` for those that will."""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.core.copied_variables import VariableCopies
from graphsplit.core.devices import canonical_name, resolve_devices, short_name
from graphsplit.core.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.core.layouts import REPLICATE, Copied, Shard
from graphsplit.core.parted_variables import VariableParts, parts_of_variable
from graphsplit.planning.partitioning import Held, shares

LAYOUTS = ("home", "mirrored", "sharded")


def set_variable_layout(
    target: Any,
    layout: str | Mapping[str, str],
    devices: int | Sequence[str] | None = None,
    *,
    reshard_after_forward: bool = True,
) -> None:
    """Lay existing variables out: where their values live between calls of parallelized functions.

    Nothing else changes: not the code that uses them, not the numbers, not the files. To everybody else they are the
    variables that they were, with the right value at every moment. (Who asks for one that lies in parts has it put
    together first; the next parallelized call takes it apart again. Plans say which variables lie where.)

    Args:
      target: a variable, a `tf.Module`, a Keras 3 or tf_keras model (with its optimizer and metrics) or optimizer, or
        any structure of these.
      layout: `"home"`, whole where the variable was made; `"sharded"`, divided: each device owns its share of the
        bytes, large variables in slices and small ones whole, and updates it; `"mirrored"`, copied: each device has
        all of it, reads that, and updates it as all others do theirs. Or a mapping of patterns of names to
        layouts, the first that fits a variable counts: `{"embedding*": "sharded", "*": "home"}`.
      devices: how many, or which; all by default.
      reshard_after_forward: whether a device that has computed with the whole of a sharded variable drops it, and gets
        it again for the backward pass: it has no more at a time than two of the largest take, and half as many bytes
        again travel. If not, each is put together once, and kept.

    Raises:
      ArgumentError: for an unknown layout, a pattern that fits no variable, a target without variables, or a variable
        that lies on other devices.
      DeviceError: if there are not that many devices.
      UnsupportedError: in a graph, and for variables that are no `tf.Variable` of eager code.

    >>> import tensorflow as tf, graphsplit as gs
    >>> table = tf.Variable(tf.ones((1000, 64)))
    >>> gs.set_variable_layout(table, "sharded", devices=2)
    >>> step = gs.parallelize(lambda x: tf.reduce_sum(x @ table, 1), devices=2)
    >>> step(tf.ones((3, 1000))).numpy().tolist()
    [64000.0, 64000.0, 64000.0]
    >>> float(tf.reduce_sum(table))
    64000.0
    """
    if not tf.executing_eagerly():
        raise UnsupportedError("set_variable_layout is called while a graph is built. Call it outside of tf.function.")
    variables = _variables(target)
    if not variables:
        raise ArgumentError(f"set_variable_layout found no variables in {target!r}.")
    names = resolve_devices(devices)
    wanted = wanted_layouts(variables, layout)
    _check_free(variables, wanted, names)
    _check_may_be_copies([v for v, own in zip(variables, wanted, strict=True) if own == "mirrored"], names)
    for variable, own in zip(variables, wanted, strict=True):
        parts = parts_of_variable(variable)
        if own is not None and parts is not None and parts.layout != own:
            parts.release(variable)
    free = [(v, own) for v, own in zip(variables, wanted, strict=True) if parts_of_variable(v) is None]
    _shard([variable for variable, own in free if own == "sharded"], names, reshard_after_forward)
    _mirror([variable for variable, own in free if own == "mirrored"], names)


@contextlib.contextmanager
def variable_layout(
    layout: str, devices: int | Sequence[str] | None = None, *, reshard_after_forward: bool = True
) -> Iterator[None]:
    """Lay out the variables that are made inside the `with` block, each as soon as it is made.

    Args:
      layout, reshard_after_forward: see `set_variable_layout`.
      devices: how many, or which; all by default.

    Raises:
      ArgumentError: for an unknown layout.
      DeviceError: if there are not that many devices.

    >>> import tensorflow as tf, graphsplit as gs
    >>> with gs.variable_layout("sharded", devices=2):
    ...     table = tf.Variable(tf.ones((1000, 64)), name="table")
    >>> float(tf.reduce_sum(table))
    64000.0
    """
    _check_one(layout)
    names = resolve_devices(devices)
    loads = dict.fromkeys(names, 0)

    def create(make: Any, **options: Any) -> Any:
        variable = make(**options)
        if tf.executing_eagerly() and isinstance(variable, tf.Variable):
            if layout == "sharded":
                _shard([variable], names, reshard_after_forward, loads)
            elif layout == "mirrored":
                _check_may_be_copies([variable], names)
                _mirror([variable], names)
        return variable

    with tf.variable_creator_scope(create):
        yield


def _shard(
    variables: Sequence[tf.Variable], devices: Sequence[str], reshard: bool, loads: dict[str, int] | None = None
) -> None:
    held = [Held(name_of(v), tuple(v.shape.as_list()), v.dtype.size) for v in variables if can_move(v)]
    found = shares(held, len(devices), None if loads is None else [loads[device] for device in devices])
    for variable, share in zip(filter(can_move, variables), found, strict=True):
        if share is None:
            continue
        on = [devices[d] for d in share.devices]
        if loads is not None:
            for device, length in zip(on, share.cut.lengths, strict=True):
                loads[device] += variable.dtype.size * (variable.shape.num_elements() // share.cut.length) * length
        if on != [canonical_name(variable.device)]:
            VariableParts(variable, replace(share.cut, reshard=reshard), on).take_apart()


def _mirror(variables: Sequence[tf.Variable], devices: Sequence[str]) -> None:
    """Copy variables to all devices. What all copies need of a sum is added up where the variable's parts would lie."""
    chosen = [v for v in variables if can_move(v) and canonical_name(v.device) in devices and is_copied(v)]
    held = [Held(name_of(v), tuple(v.shape.as_list()), v.dtype.size) for v in chosen]
    for variable, share in zip(chosen, shares(held, len(devices)), strict=True):
        if len(devices) < 2:
            continue
        sums = [devices[d] for d in share.devices] if share is not None else [canonical_name(variable.device)]
        layout = Shard(0) if variable.shape.rank else REPLICATE
        VariableCopies(variable, Copied(tuple(devices), layout, tuple(sums)))


def is_copied(variable: tf.Variable) -> bool:
    """Return whether a variable is copied: all but counters, which are small and change in every step."""
    return bool(variable.shape.rank or not variable.dtype.is_integer)


def can_move(variable: tf.Variable) -> bool:
    """Return whether a variable's value can lie elsewhere: numbers of known shape."""
    return bool(variable.shape.is_fully_defined() and variable.dtype.size and variable.dtype != tf.string)


def check_layout(layout: Any) -> None:
    """Raise an error unless this is a layout, or layouts by patterns."""
    for own in layout.values() if isinstance(layout, Mapping) else [layout]:
        _check_one(own)


def _check_one(layout: Any) -> None:
    if layout not in LAYOUTS:
        raise ArgumentError(f"There is no variable layout {layout!r}; there are {', '.join(map(repr, LAYOUTS))}.")


def wanted_layouts(variables: Sequence[tf.Variable], layout: str | Mapping[str, str]) -> list[str | None]:
    """Return the layout of each variable; None where no pattern fits it: as it is."""
    check_layout(layout)
    if not isinstance(layout, Mapping):
        return [layout] * len(variables)
    names = [name_of(variable) for variable in variables]
    idle = [pattern for pattern in layout if not fnmatch.filter(names, pattern)]
    if idle:
        some = names[:8] + ([f"... and {len(names) - 8} more"] if len(names) > 8 else [])
        raise ArgumentError(
            f"No variable's name fits {', '.join(map(repr, idle))}. The variables are:\n{bullet_list(some)}"
        )
    return [next((own for p, own in layout.items() if fnmatch.fnmatchcase(name, p)), None) for name in names]


def _check_free(variables: Sequence[tf.Variable], wanted: Sequence[str | None], devices: Sequence[str]) -> None:
    wrong = []
    for variable, own in zip(variables, wanted, strict=True):
        parts = parts_of_variable(variable)
        if own not in (None, "home") and parts is not None and not set(parts.devices) <= set(devices):
            wrong.append(f"{name_of(variable)} on {', '.join(map(short_name, parts.devices))}")
    if wrong:
        raise ArgumentError(
            f"These variables lie on other devices than {', '.join(map(short_name, devices))}:\n{bullet_list(wrong)}\n"
            'Lay them out as "home" first.'
        )


def _check_may_be_copies(variables: Iterable[tf.Variable], devices: Sequence[str]) -> None:
    """Raise `ArgumentError` if variables that are to be copied are on none of the devices.

    Integers may be, and stay: on machines with GPUs, TensorFlow has those of 32 bits on the CPU.
    """
    places = {name_of(v): canonical_name(v.device) for v in variables if can_move(v) and not v.dtype.is_integer}
    wrong = [f"{name} on {short_name(device)}" for name, device in places.items() if device not in devices]
    if wrong:
        raise ArgumentError(
            "A mirrored variable is one of its copies, and these live on none of the devices "
            f"{', '.join(map(short_name, devices))}:\n{bullet_list(wrong)}\n"
            "Make them on one of these, under tf.device, or name theirs among the devices."
        )


def name_of(variable: Any) -> str:
    """Return the name under which users know a variable: with its layer, if Keras made it."""
    return str(getattr(variable, "_graphsplit_path", None) or variable.name.partition(":")[0])


def _variables(target: Any) -> list[tf.Variable]:
    """Return the TensorFlow variables of a target, each once, in its order."""
    found: dict[int, tf.Variable] = {}
    for variable in _all(target):
        value = variable
        if not isinstance(variable, tf.Variable):  # Keras 3 wraps them
            value = getattr(variable, "value", None)
            if isinstance(value, tf.Variable):
                value._graphsplit_path = variable.path
        if not isinstance(value, tf.Variable) or not hasattr(value, "_handle"):
            raise UnsupportedError(f"{variable!r} is no variable that can be laid out: it has no handle of its own.")
        found.setdefault(id(value), value)
    return list(found.values())


def _all(target: Any) -> Iterable[Any]:
    if isinstance(target, tf.Variable):
        yield target
    elif isinstance(target, Mapping):
        for value in target.values():
            yield from _all(value)
    elif isinstance(target, (list, tuple, set)):
        for value in target:
            yield from _all(value)
    elif hasattr(target, "variables"):
        own = target.variables
        yield from own() if callable(own) else own  # a method in old tf_keras optimizers
        for part in ("optimizer", "metrics"):
            yield from _all(getattr(target, part, None) or ())
    elif hasattr(target, "assign_add"):  # a variable of Keras 3 (whose optimizers have such a method, too)
        yield target
    else:
        raise ArgumentError(f"Variable layouts are for variables, modules, models and optimizers, got {target!r}.")
