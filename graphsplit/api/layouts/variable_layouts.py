"""Set the layouts of variables that exist: `set_variable_layout`, and which variables targets and patterns mean.

Users lay out variables, modules, models and optimizers. `divisions` says how each variable becomes several;
`new_variables` is for those that are yet to be made.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.api.layouts.divisions import (
    PLACES,
    can_move,
    divided,
    divisions_in_stage,
    divisions_on_mesh,
    groups_for,
    replicated,
)
from graphsplit.api.layouts.layout_spellings import (
    VariableLayout,
    check_layout,
    spelling_of,
)
from graphsplit.core import keras_internals
from graphsplit.core.device_mesh import DeviceMesh, device_mesh, devices_of, mesh_axes
from graphsplit.core.devices import is_of_dtensor, short_name
from graphsplit.core.keras_internals import is_built
from graphsplit.core.patterns import SLOTS, fits, fits_variable, near, scopes_and_names, suggesting_options
from graphsplit.core.tensorflow_internals import has_handle
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.core.variables.records import call_by_path
from graphsplit.core.variables.running_calls import calls
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list


@suggesting_options
def set_variable_layout(
    target: Any,
    layout: VariableLayout | Mapping[str, VariableLayout],
    devices: int | Sequence[str] | None = None,
    *,
    mesh: Mapping[str, int] | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Set the layout of existing variables: on which devices they are between calls of parallelized functions.

    Nothing else changes: not the code that uses them, not the numbers, not the files. Other code reads and writes them
    as before. (If it needs a variable that is in parts, the parts are gathered, and the next parallelized call divides
    it again.) Plans list the layouts.

    Args:
      target: a variable, a `tf.Module`, a Keras 3 or tf_keras model (with its optimizer and metrics) or optimizer, or
        any structure of these. An optimizer without slots has them laid out in the first parallelized call.
      layout: `"home"`, whole where the variable was made; `"sharded"`, divided: each device stores and updates its
        share of the bytes, slices of large variables and some small ones whole; `"replicated"`, a copy on each device,
        which updates it; `"host"`, in the memory of the devices' host, on its `CPU:0`, which also updates slots. Or a
        mapping from patterns of names to layouts, `{"embedding*": "sharded", "*": "home"}`: the first match counts. A
        pattern matches a name from its beginning or from any `/` on: Keras 3 calls a table
        `sequential/embedding/embeddings`. One that begins with `/` matches from the beginning only. An optimizer's slot
        also matches what its variable matches; `"slots of embedding*"` matches only slots. With a `mesh`, a layout may
        name an axis of the mesh for each dimension, `(None, "model")`: the variable is cut along that dimension, and
        each device of the axis computes with its part. `cut` instead of the axis says which units the dimension
        consists of. What is cut along the batch axis, `("batch", "model")`, is gathered before it is used. A pair says
        how the variable is stored along the axis that no dimension names, `((None, "model"), "replicated")`.
        `docs/large_layers.md` has a table.
      devices: how many, or which; all by default. Those of a mesh row by row.
      mesh: the mesh of the functions that use the variables, `{"batch": 2, "model": 4}`; see `parallelize`. On
        `{"data": 2, "fsdp": 4}`, `"sharded"` is divided along `"fsdp"`, and copied along `"data"`.
      reshard_after_forward: whether a device frees a sharded variable after the forward pass and gathers it again for
        the backward pass. Then it has at most two of the largest at a time, and half as many bytes again are sent. If
        False, each is gathered once a step and kept.

    Raises:
      ArgumentError: for an unknown layout, a pattern that matches no variable, a target without variables, a variable
        to be copied that is on none of the devices, or one that cannot be cut like that: it has fewer dimensions, or
        fewer entries along a dimension than the axis has devices, or a shape that is not known. (A word, `"sharded"`,
        leaves a variable of unknown shape where it is.)
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
    check_eager()
    lies = Arrangement()
    with calls.lock:  # no call of another thread begins until all of them lie as they are wanted
        decide_target(lies, target, layout, devices, mesh, reshard_after_forward)
        lies.apply()


def decide_target(
    lies: Arrangement,
    target: Any,
    layout: VariableLayout | Mapping[str, VariableLayout],
    devices: int | Sequence[str] | None = None,
    mesh: Mapping[str, int] | None = None,
    reshard_after_forward: bool = True,
) -> None:
    """Decide what `set_variable_layout` then does; its arguments, and what is told."""
    variables, optimizers = variables_of(target), list(optimizers_of(target))
    if not variables and not (isinstance(target, (list, tuple)) and not target):
        raise ArgumentError(f"set_variable_layout found no variables in {target!r}.")
    if not optimizers and isinstance(layout, Mapping):
        _check_no_slots(layout)
    axes = mesh_axes(mesh)
    names = devices_of(axes, devices)
    mesh_devices = device_mesh(axes, names) if axes else None
    names = names if mesh_devices is None else mesh_devices.devices
    slots = slots_of(target, variables)
    wanted = wanted_layouts(variables, layout, slots, mesh_devices)
    decide_in_stages(lies, variables, wanted, slots, names, mesh_devices, reshard_after_forward)
    trained = [weakref.ref(variable) for variable in variables]

    def remember() -> None:
        for optimizer in optimizers:
            _later.pop(optimizer, None)
            if not is_built(optimizer):
                _later[optimizer] = functools.partial(
                    _decide_slots, weakref.ref(optimizer), trained, layout, names, mesh_devices, reshard_after_forward
                )

    lies.then(remember)


_later: weakref.WeakKeyDictionary[Any, Callable[[Arrangement], None]] = weakref.WeakKeyDictionary()
"""Optimizers that had no slots when a layout was set for them."""


def decide_later(lies: Arrangement) -> None:
    """Decide how the slots lie that optimizers have made since a layout was set for them."""
    for optimizer, decide in list(_later.items()) if tf.executing_eagerly() else ():
        if is_built(optimizer):
            decide(lies)
            lies.then(functools.partial(_later.pop, optimizer, None))


def _decide_slots(
    reference: weakref.ref[Any],
    trained: Sequence[weakref.ref[tf.Variable]],
    layout: VariableLayout | Mapping[str, VariableLayout],
    devices: Sequence[str],
    mesh: DeviceMesh | None,
    reshard_after_forward: bool,
    lies: Arrangement,
) -> None:
    """Decide how the slots of an optimizer lie, as `set_variable_layout` was told before it had any."""
    optimizer = reference()
    variables = variables_of(optimizer)
    slots = slots_of(optimizer, [alive_variable for variable in trained if (alive_variable := variable()) is not None])
    patterns = layout if isinstance(layout, Mapping) else {"*": layout}
    wanted = [layout_by_name(variable, patterns, slots.get(id(variable))) for variable in variables]
    decide_in_stages(lies, variables, wanted, slots, devices, mesh, reshard_after_forward)


def stage_known(lies: Arrangement, variable: tf.Variable | None, mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Return the devices of the stage on a mesh to which a variable is known to belong; none if none is."""
    devices = () if variable is None else lies.of(variable).stage
    return devices if mesh is not None and devices in mesh.stages else ()


def decide_in_stages(
    lies: Arrangement,
    variables: Sequence[tf.Variable],
    wanted: Sequence[VariableLayout | None],
    slots: Mapping[int, tf.Variable],
    devices: Sequence[str],
    mesh: DeviceMesh | None,
    reshard_after_forward: bool,
) -> None:
    """Decide how variables lie, those that are known to belong to a stage on its devices; see `decide`."""
    pairs = [(stage_known(lies, v, mesh), stage_known(lies, slots.get(id(v)), mesh)) for v in variables]
    places = [own_place or of_head or tuple(devices) for own_place, of_head in pairs]
    for place in dict.fromkeys(places):
        numbers = [k for k, other in enumerate(places) if other == place]
        stage_mesh, laid = None if mesh is None else mesh.of_stage(place), [variables[k] for k in numbers]
        layouts = [wanted[k] for k in numbers]
        decide(lies, laid, layouts, slots, place, stage_mesh, reshard_after_forward=reshard_after_forward)


def _check_no_slots(layout: Mapping[str, VariableLayout]) -> None:
    if patterns := [pattern for pattern in layout if pattern.startswith(SLOTS)]:
        raise ArgumentError(
            f"{patterns[0]!r} is for the slots of an optimizer, and the target has none. Pass the optimizer, too: "
            "[model, optimizer]. For slots of your own, call set_variable_layout on them."
        )


def check_eager() -> None:
    """Raise `UnsupportedError` while a graph is built: in it no variable can be laid out."""
    if not tf.executing_eagerly():
        raise UnsupportedError("set_variable_layout is called while a graph is built. Call it outside of tf.function.")


def lay_out(*arguments: Any, **options: Any) -> None:
    """Lay variables out, each as it is wanted; see `decide`."""
    lies = Arrangement()
    with calls.lock:  # no call of another thread begins until all of them lie as they are wanted
        decide(lies, *arguments, **options)
        lies.apply()


def decide(
    lies: Arrangement,
    variables: Sequence[tf.Variable],
    wanted: Sequence[VariableLayout | None],
    slots: Mapping[int, tf.Variable],
    devices: Sequence[str],
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool = True,
    loads: dict[str, int] | None = None,
    is_automatic: bool = False,
) -> None:
    """Decide how variables lie, each as it is wanted; see `set_variable_layout`.

    Args:
      lies: is told; how they lie before is as it says.
      variables, wanted: which, and the layout of each; None leaves it as it is.
      slots: the variables of slots, by the slots' ids.
      devices: full names.
      mesh: they as a mesh, if layouts name axes of one.
      reshard_after_forward: see there.
      loads: the bytes that each device owns already, if not of these variables alone; theirs are added.
      is_automatic: whether nobody asked for these layouts.
    """
    on_mesh = {} if mesh is None else divisions_on_mesh(lies, variables, wanted, mesh, slots, reshard_after_forward)
    if mesh is not None and tuple(devices) in mesh.stages:
        on_mesh |= divisions_in_stage(lies, variables, wanted, mesh, slots)  # (numbers stay, wherever they were made)
    else:
        copied = [v for v, layout_wanted in zip(variables, wanted, strict=True) if layout_wanted == "replicated"]
        check_may_be_copies(lies, copied, devices)
    for variable, layout_wanted in zip(variables, wanted, strict=True):
        if layout_wanted is None:
            continue
        lying, division = lies.of(variable), on_mesh.get(id(variable))
        over, groups = tuple(PLACES.get(layout_wanted, tuple)(devices)), groups_for(layout_wanted, mesh)
        lies_so = lying.division is not None and (
            (lying.layout, lying.over, lying.groups) == (layout_wanted, over, groups)
            if division is None
            else lying.division == division
        )
        if not lies_so:
            lies.decide(variable, division=None, layout="home", over=())
        elif layout_wanted in PLACES:
            lies.decide(variable, division=lying.resharding(reshard_after_forward).division)  # it stays where it is
        if groups or layout_wanted != lying.stays:
            lies.decide(variable, stays="")
    free = [
        (v, layout_wanted) for v, layout_wanted in zip(variables, wanted, strict=True) if lies.of(v).division is None
    ]
    for variable, layout_wanted in free:
        if (division := on_mesh.get(id(variable))) is not None:
            lies.divide(variable, division, layout_wanted)
    copied = [
        variable for variable, layout_wanted in free if layout_wanted == "replicated" and id(variable) not in on_mesh
    ]
    for variable, how in replicated(lies, copied, devices, slots):
        lies.divide(variable, how, "replicated")
    for layout, places in PLACES.items():
        new = [
            variable
            for variable, layout_wanted in free
            if layout_wanted == layout and lies.cut_of(variable, layout) is None
        ]
        owned = lies.owned_bytes(variables, places(devices)) if loads is None else loads
        over, groups = tuple(places(devices)), groups_for(layout, mesh)
        for variable, cut in divided(lies, new, over, slots, owned, layout, reshard_after_forward, groups):
            lies.share_out(variable, cut, layout, over)
    for variable, layout_wanted in zip(variables, wanted, strict=True):
        if layout_wanted is not None:
            wish = layout_wanted, tuple(devices), mesh, reshard_after_forward
            # for slots yet to be made
            lies.decide(variable, automatic=layout_wanted if is_automatic else "", wish=wish)


def wanted_layouts(
    variables: Sequence[tf.Variable],
    layout: VariableLayout | Mapping[str, VariableLayout],
    slots: Mapping[int, tf.Variable],
    mesh: DeviceMesh | None = None,
) -> list[VariableLayout | None]:
    """Return the layout of each variable; None where no pattern fits it: as it is.

    Args:
      variables, layout: see `set_variable_layout`.
      slots: the variables of slots, by the slots' ids; a pattern that fits a variable fits its slots.
      mesh: the mesh whose axes layouts may name.
    """
    check_layout(layout, mesh)
    if not isinstance(layout, Mapping):
        return [spelling_of(layout).plain(variable.shape.rank) for variable in variables]
    check_patterns(layout, list(dict.fromkeys([name_of(variable) for variable in (*variables, *slots.values())])))
    return [layout_by_name(variable, layout, slots.get(id(variable))) for variable in variables]


def layout_by_name(
    variable: tf.Variable, layout: Mapping[str, VariableLayout], head: tf.Variable | None
) -> VariableLayout | None:
    """Return the layout of the first pattern that fits a variable, or the one that it is a slot of; None: of none."""
    names = name_of(variable), None if head is None else name_of(head)
    fitting = next((fitting for pattern, fitting in layout.items() if fits_variable(*names, pattern)), None)
    if fitting is not None and not isinstance(fitting, str) and head is not None and head.shape != variable.shape:
        fitting = "home"  # what an optimizer keeps of rows and columns is small
    return None if fitting is None else spelling_of(fitting).plain(variable.shape.rank)


def check_patterns(layout: Mapping[str, VariableLayout], names: Sequence[str]) -> None:
    """Raise `ArgumentError` if a pattern fits none of the names. (It may fit no slot: some optimizers have none.)"""
    if idle := idle_patterns(layout, names):
        alike = {pattern: near(pattern.removeprefix(SLOTS), scopes_and_names(names)) for pattern in idle}
        lines = [f"\nSimilar to {p!r}: {', '.join(map(repr, similar))}." for p, similar in alike.items() if similar]
        raise ArgumentError(
            f"No variable's name fits {', '.join(map(repr, idle))}. The variables are:\n{bullet_list(names, 8)}"
            + "".join(lines)
        )


def idle_patterns(layout: Mapping[str, VariableLayout], names: Sequence[str]) -> list[str]:
    """Return the patterns that fit none of the names; see `check_patterns`."""
    return [pattern for pattern in layout if not any(fits(name, pattern.removeprefix(SLOTS)) for name in names)]


def check_may_be_copies(lies: Arrangement, variables: Iterable[tf.Variable], devices: Sequence[str]) -> None:
    """Raise `ArgumentError` if variables that are to be copied are on none of the devices.

    Integers may be, and stay: on machines with GPUs, TensorFlow has those of 32 bits on the CPU.
    """
    places = {name_of(v): lies.device_of(v) for v in variables if can_move(v) and not v.dtype.is_integer}
    wrong = [f"{name} on {short_name(device)}" for name, device in places.items() if device not in devices]
    if wrong:
        raise ArgumentError(
            "A replicated variable must be on one of the devices that get copies. These are on none of "
            f"{', '.join(map(short_name, devices))}:\n"
            f"{bullet_list(wrong)}\n"
            "Make them on one of these devices, under tf.device, or add their device to devices=."
        )


def variables_of(target: Any) -> list[tf.Variable]:
    """Return the TensorFlow variables of a target, each once, in its order.

    Raises:
      ArgumentError: for what has no variables.
      UnsupportedError: for a variable that is no `tf.Variable` of eager code.
    """
    return [value for value, _ in variables_with_owners(target)]


def variables_with_owners(target: Any) -> list[tuple[tf.Variable, Any]]:
    """Return `variables_of(target)`, each with the variable of Keras 3 that it is the value of, else itself."""
    owner_by_id: dict[int, tuple[tf.Variable, Any]] = {}
    for variable in _all(target):
        value = plain_variable(variable)
        if value is not variable and isinstance(value, tf.Variable):
            call_by_path(value, variable.path)
        with raw_handles():  # what lies in parts stays there
            is_plain = isinstance(value, tf.Variable) and has_handle(value)
            if is_plain and is_of_dtensor(value.handle.device):
                raise UnsupportedError(
                    f"{name_of(value)} is a variable of DTensor, which has a layout on DTensor's mesh. Make it by "
                    "tf.Variable; set_variable_layout then divides it."
                )
        if not is_plain:
            raise UnsupportedError(f"{variable!r} is not a variable that can have a layout: it has no handle.")
        owner_by_id.setdefault(id(value), (value, variable))
    return list(owner_by_id.values())


def slots_of(target: Any, variables: Sequence[tf.Variable]) -> dict[int, tf.Variable]:
    """Return the variable that each slot belongs to, by the slot's id, as the optimizers of a target have it."""
    head_by_slot = {}
    for optimizer in optimizers_of(target):
        for slot, variable in keras_internals.slots_of(optimizer, variables):
            head_by_slot[id(plain_variable(slot))] = plain_variable(variable)
    return head_by_slot


def optimizers_of(target: Any) -> Iterable[Any]:
    """Yield the optimizers in a target: all that a model has, also in a list, which a step of its own applies."""
    if isinstance(target, (list, tuple, set, Mapping)):
        for value in _entries(target):
            yield from optimizers_of(value)
    elif hasattr(type(target), "apply_gradients"):
        yield target
    elif hasattr(target, "variables"):
        values = [entry for value in getattr(target, "__dict__", {}).values() for entry in _entries(value)]
        yield from [entry for entry in values if hasattr(type(entry), "apply_gradients")]


def _entries(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return value if isinstance(value, (list, tuple, set)) else [value]


def plain_variable(variable: Any) -> Any:
    """Return TensorFlow's variable; Keras 3 wraps them."""
    return variable if isinstance(variable, tf.Variable) else getattr(variable, "value", None)


def _all(target: Any) -> Iterable[Any]:
    if isinstance(target, tf.Variable):
        yield target
    elif isinstance(target, (list, tuple, set, Mapping)):
        for value in _entries(target):
            yield from _all(value)
    elif hasattr(target, "variables"):
        own_variables = target.variables
        yield from own_variables() if callable(own_variables) else own_variables  # a method in old tf_keras optimizers
        yield from _all([other_optimizer for other_optimizer in optimizers_of(target) if other_optimizer is not target])
        yield from _all(getattr(target, "metrics", None) or ())
    elif hasattr(target, "assign_add"):  # a variable of Keras 3 (whose optimizers have such a method, too)
        yield target
    else:
        what, ask = repr(target), ""
        if isinstance(target, (tf.Tensor, np.ndarray)):
            what, ask = f"a tensor of shape {list(target.shape)}", " In a function, gs.with_layout asks for a tensor's."
        raise ArgumentError(f"Variable layouts are for variables, modules, models and optimizers, got {what}.{ask}")
