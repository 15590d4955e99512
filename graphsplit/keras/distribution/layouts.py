"""Where the variables of models under a distribution live: as Keras' distribution says of each, and back again.

Keras is asked for the layout of each variable: its patterns are regular expressions, searched for in one version and
matched in full in another, and two that match are an error. No variable is marked, since Keras prefers such a mark to
all later maps. What is not cut, which Keras calls replicated, stays where it was made, on GPUs too.

Keras names the axes of a mesh as its user likes, and says which one the rows of the batch go along. A layout names an
axis for each dimension of a variable. What of that cannot be done as it is asked for is said, in `Asked.instead`; and
plans, which a map's author reads, tell what the map leaves out.
"""

from __future__ import annotations

import re
import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.divisions import can_be_parted
from graphsplit.api.layouts.layout_spellings import VariableLayout, check_layout
from graphsplit.api.layouts.new_variables import NewVariables
from graphsplit.api.layouts.variable_layouts import lay_out, slots_of, variables_of, variables_with_owners
from graphsplit.api.layouts.with_layout import with_layout
from graphsplit.core.device_mesh import DeviceMesh, MeshAxes, device_mesh
from graphsplit.core.devices import canonical_name
from graphsplit.core.keras_internals import compilation_of, give_shape, layout_map_of, make_slots
from graphsplit.core.patterns import near
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.variables.arrangements import lying_now
from graphsplit.core.variables.parted_variables import name_of, parts_of_variable
from graphsplit.core.variables.records import call_by_path
from graphsplit.errors import bullet_list
from graphsplit.keras.distribution.replacements import to_backend_mesh
from graphsplit.planning.amounts import format_bytes


class DistributedLayouts:
    """The layouts that distributions gave to variables. What a user has laid out stays as it is."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        self._born: weakref.WeakKeyDictionary[Any, NewVariables] = weakref.WeakKeyDictionary()
        self._variables: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
        self._told: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self._of_outputs: weakref.WeakSet[Any] = weakref.WeakSet()
        self._not_used: weakref.WeakSet[Any] = weakref.WeakSet()

    def follow(self, model: Any, distribution: Any) -> None:
        """Lay the variables of a model out as a distribution says: its optimizer's and its metrics' too."""
        by, compilation = self._models.get(model, (None, None))
        present = compilation_of(model)
        if by is not None and by() is distribution and compilation is present:
            return
        if by is not None and by() is not distribution:
            self.bring_home(model)
        mesh = mesh_of(distribution)
        if any(wanted.layout != "home" for wanted in asked_of(model, distribution, mesh).values()):
            make_slots(getattr(model, "optimizer", None), model.trainable_variables)
            self._lay_out(model, distribution, mesh)
        self._models[model] = weakref.ref(distribution), present

    def _lay_out(self, model: Any, distribution: Any, mesh: MeshOfKeras) -> None:
        variables, wanted_by_id = variables_of(model), asked_of(model, distribution, mesh)
        slots = slots_of(model, variables)
        self._say_what_is_otherwise(distribution, mesh, wanted_by_id)
        wanted: list[VariableLayout | None] = []
        for variable in variables:
            is_ours = parts_of_variable(variable) is None or self._variables.get(id(variable)) is variable
            wanted.append(_of_head(variable, slots, wanted_by_id).layout if is_ours else None)
        lay_out(variables, wanted, slots, mesh.devices, mesh.mesh)
        self._remember([v for v, layout in zip(variables, wanted, strict=True) if layout not in (None, "home")])

    def born(self, variable: tf.Variable, owner: Any, distribution: Any) -> None:
        """Lay out a variable of Keras that is being made, if its distribution cuts it: no device has all of it.

        Args:
          variable: it may have no value yet.
          owner: of Keras, whose value it will be.
          distribution: that is set.

        Raises:
          ValueError: as Keras says, if two patterns match.
        """
        mesh = mesh_of(distribution)
        call_by_path(variable, owner.path)
        give_shape(owner, variable.shape)
        if distribution not in self._born:
            self._born[distribution] = NewVariables(mesh.devices, mesh=mesh.mesh)
        new = self._born[distribution]
        head = new.add(variable)
        if head is not None and head.shape == variable.shape:
            wanted = Asked(_present_layout(head))
        else:
            wanted = _asked(owner, variable, distribution, mesh)
            self._say_what_is_otherwise(distribution, mesh, {id(variable): wanted})
        if wanted.layout != "home":
            new.lay_out(variable, wanted.layout, head)
            self._remember([variable])

    def bring_home(self, model: Any) -> None:
        """Make the variables of a model that a distribution laid out ordinary ones again."""
        if self._models.pop(model, None) is not None or len(self._variables):
            self._release(variables_of(model))

    def bring_all_home(self) -> None:
        """Make all variables that a distribution laid out ordinary ones again."""
        self._models.clear()
        self._born.clear()
        self._release(list(self._variables.values()))

    def _remember(self, variables: Iterable[tf.Variable]) -> None:
        for variable in variables:
            self._variables[id(variable)] = variable

    def _release(self, variables: Iterable[tf.Variable]) -> None:
        ours: list[Any] = [variable for variable in variables if self._variables.get(id(variable)) is variable]
        if ours:
            lay_out(ours, ["home"] * len(ours), {}, sorted({canonical_name(variable.device) for variable in ours}))
        for variable in ours:
            del self._variables[id(variable)]

    def with_layout(self, tensor: Any, layout: Any, distribution: Any) -> Any:
        """Ask that a tensor lies so; say, once for a layout, where that is not done."""
        if not isinstance(tensor, tf.Tensor) or not hasattr(layout, "axes"):
            return tensor  # (a symbolic one of Keras)
        self._of_outputs.add(layout)
        mesh = mesh_of(distribution)
        laid_out, why_not = mesh.of_output(tensor, layout.axes)
        if why_not and layout not in self._not_used:
            self._not_used.add(layout)
            layout_map = layout_map_of(distribution)
            pattern = next((p for p in layout_map or () if layout_map[p] is layout), None)
            entry = "a layout" if pattern is None else f"the entry {pattern!r} of its layout map"
            warnings.warn(
                f"{type(distribution).__name__} on {len(mesh.devices)} devices: {entry}, {tuple(layout.axes)!r}, for "
                f"a layer's output is not used: {why_not}. The results are the same as on one device.",
                stacklevel=user_stack_level(),
            )
        return laid_out

    @property
    def of_outputs(self) -> Collection[Any]:
        """The layouts in layout maps that were for outputs of layers that ran."""
        return self._of_outputs

    def told_of(self, distribution: Any) -> set[str]:
        """Return what users were warned of about a distribution."""
        return self._told.setdefault(distribution, set())

    def _say_what_is_otherwise(self, distribution: Any, mesh: MeshOfKeras, wanted_by_id: Mapping[int, Asked]) -> None:
        """Warn, once for a distribution, of all that is not done as its map says."""
        said_before = self.told_of(distribution)
        name = f"{type(distribution).__name__} on {len(mesh.devices)} devices"
        if (
            mesh.why_not
            and any(wanted.layout == "sharded" for wanted in wanted_by_id.values())
            and "" not in said_before
        ):
            said_before.add("")
            warnings.warn(
                f"{name}: variables that its layout map cuts are divided over all devices, whatever the axis, and "
                f"gathered in each step, because {mesh.why_not}. The results are the same as on one device. No matrix "
                "product is divided along the model's axes, as Keras does on JAX.",
                stacklevel=user_stack_level(),
            )
        new = {wanted.instead for wanted in wanted_by_id.values() if wanted.instead} - said_before
        if new:
            said_before |= new
            warnings.warn(
                f"{name}: some variables do not have the layouts of its layout map:\n"
                f"{bullet_list(sorted(new))}\n"
                "The results are the same as on one device. The plan names the variables.",
                stacklevel=user_stack_level(),
            )


def asked_of(model: Any, distribution: Any, mesh: MeshOfKeras) -> dict[int, Asked]:
    """Return how the variables of a model are to lie, its optimizer's and its metrics' too, by their ids.

    Raises:
      ValueError: as Keras says, if two patterns match.
    """
    return {
        id(variable): _asked(owner, variable, distribution, mesh) for variable, owner in variables_with_owners(model)
    }


def _asked(owner: Any, variable: tf.Variable, distribution: Any, mesh: MeshOfKeras) -> Asked:
    if isinstance(owner, tf.Variable):
        return Asked("home")
    return mesh.layout_of(variable, distribution.get_variable_layout(owner).axes)


def _of_head(variable: tf.Variable, slots: Mapping[int, tf.Variable], wanted_by_id: Mapping[int, Asked]) -> Asked:
    """Return how a variable is to lie: a slot of its variable's shape as that one."""
    head = slots.get(id(variable))
    return wanted_by_id[id(variable if head is None or head.shape != variable.shape else head)]


def _present_layout(variable: tf.Variable) -> VariableLayout:
    return lying_now(variable).named  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Asked:
    """How a variable is to lie.

    Attributes:
      layout: that of graphsplit.
      instead: what is done otherwise than Keras' layout says; "" if nothing is.
    """

    layout: VariableLayout
    instead: str = ""


@dataclass(frozen=True)
class MeshOfKeras:
    """A distribution's mesh.

    Attributes:
      devices: full names, row by row.
      mesh: it as ours, without axes of one device.
      why_not: why there is none, and variables are divided over all devices and gathered; "" where there is one.
    """

    devices: tuple[str, ...]
    mesh: DeviceMesh | None
    why_not: str = ""

    def layout_of(self, variable: tf.Variable, axes: Sequence[str | None]) -> Asked:
        """Return how a variable is to lie for which Keras has these axes.

        Raises:
          ArgumentError: if they name an axis twice.
        """
        if len(self.devices) == 1 or not any(axes):
            return Asked("home")
        if self.mesh is None:
            return Asked("sharded")
        axis_of_dimension = [name if name in self.mesh.sizes else None for name in axes]  # (others have one device)
        check_layout(axis_of_dimension, self.mesh)
        if not can_be_parted(variable):
            return Asked("home", f"TensorFlow cannot cut {variable.dtype.name}: it stays whole")
        short = self._too_short(axis_of_dimension, variable.shape)
        instead = [
            f"dimension {k} has {variable.shape[k]} entr{'y' if variable.shape[k] == 1 else 'ies'} for "
            f"{self.mesh.others[axis]} devices along {axis!r}: it stays whole"
            for k, axis in short.items()
        ]
        axis_of_dimension = [None if k in short else axis for k, axis in enumerate(axis_of_dimension)]
        return Asked(tuple(axis_of_dimension) if any(axis_of_dimension) else "home", "; ".join(instead))

    def _too_short(self, axis_of_dimension: Sequence[str | None], shape: Any) -> dict[int, str]:
        """Return the dimensions, with their axes, that have fewer entries than such an axis has devices."""
        assert self.mesh is not None
        named = [(k, axis) for k, axis in enumerate(axis_of_dimension[: len(shape)]) if axis in self.mesh.others]
        return {k: str(axis) for k, axis in named if axis and (shape[k] is None or shape[k] < self.mesh.others[axis])}

    def of_output(self, tensor: tf.Tensor, axes: Sequence[str | None]) -> tuple[tf.Tensor, str]:
        """Return what a layer returns, asked to lie as Keras has it; and why it does not, or "".

        Its rows lie as those of the batch do, whatever the axes say of the first dimension.
        """
        if self.mesh is None:
            return tensor, self.why_not
        shape, batch, devices_by_axis = tensor.shape, self.mesh.batch_axis, self.mesh.others
        if shape.rank != len(axes):
            return tensor, f"it has {len(axes)} dimensions, and the output {shape.rank}"
        if batch in axes[1:]:
            return tensor, f"{batch!r}, the batch's axis, cuts the rows of an output, which are its first dimension"
        if not devices_by_axis:
            return tensor, ""
        names = [name if name in devices_by_axis else None for name in axes]
        for k, axis in self._too_short(names, shape).items():
            entries = "an unknown number of" if shape[k] is None else shape[k]
            return tensor, f"dimension {k} has {entries} entries for {devices_by_axis[axis]} devices"
        return with_layout(tensor, tuple(names)), ""


def mesh_of(distribution: Any) -> MeshOfKeras:
    """Return the mesh of a distribution.

    Args:
      distribution: of Keras. The batch of a `DataParallel` goes over all of its devices, whatever the axes.
    """
    import keras

    mesh, devices = distribution.device_mesh, to_backend_mesh(distribution.device_mesh)
    batch_axis = str(distribution.get_data_layout((1,)).axes[0])
    sizes = tuple([(str(name), int(n)) for name, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1])
    if isinstance(distribution, keras.distribution.DataParallel):
        return MeshOfKeras(devices, None, "the batch goes over all of them")
    return MeshOfKeras(devices, device_mesh(MeshAxes(sizes, batch_axis), devices) if sizes else None)


_LARGE = 0.01  # of the bytes of a model: matrices alike count together, so that many layers hide none
_MOST_NAMED = 8


def notes_on_map(model: Any, distribution: Any, mesh: MeshOfKeras, of_outputs: Collection[Any]) -> tuple[str, ...]:
    """Return the notes on a distribution's layout map, as a model has it: none if there is no map.

    Args:
      model: built.
      distribution: of Keras.
      mesh: its mesh.
      of_outputs: the layouts, as they are in the map, that Keras has found for outputs of layers.
    """
    if layout_map_of(distribution) is None:
        return ()
    notes = [f"{_listed(names)}: {instead}" for instead, names in _otherwise(model, distribution, mesh).items()]
    if idle := idle_entries(model, distribution, of_outputs):
        notes.append(f"entries of the layout map that match no variable and no layer's output: {idle}")
    return (*notes, *_left_out(model, distribution))


def idle_entries(model: Any, distribution: Any, of_outputs: Collection[Any]) -> str:
    """Return the entries of a layout map that match nothing, each with what is near it; see `notes_on_map`."""
    if (layout_map := layout_map_of(distribution)) is None:
        return ""
    owners = [owner for _, owner in variables_with_owners(model) if hasattr(owner, "path")]
    used = {id(layout_map[owner.path]) for owner in owners} | {id(layout) for layout in of_outputs}
    names = [".*" + "/".join(variable.path.split("/")[-2:]) for variable in model.variables]
    idle = [pattern for pattern in layout_map if id(layout_map[pattern]) not in used]
    alike = [(pattern, near(pattern, names)) for pattern in idle]
    return ", ".join([f"{p!r} (similar: {', '.join(similar)})" if similar else repr(p) for p, similar in alike])


def _otherwise(model: Any, distribution: Any, mesh: MeshOfKeras) -> dict[str, list[str]]:
    """Return the names of variables that do not lie as the map says, by what is done instead."""
    wanted_by_id = asked_of(model, distribution, mesh)
    names_by_reason: dict[str, list[str]] = {}
    for variable, _ in variables_with_owners(model):
        if instead := wanted_by_id[id(variable)].instead:
            names_by_reason.setdefault(instead, []).append(name_of(variable))
    return names_by_reason


def _left_out(model: Any, distribution: Any) -> Iterable[str]:
    """Yield a note for the large matrices that no pattern matches; those whose names differ in numbers are one."""
    alike: dict[tuple[str, Any], list[Any]] = {}
    for variable in model.variables:
        if len(variable.shape) > 1 and not any(distribution.get_variable_layout(variable).axes):
            alike.setdefault((re.sub(r"\d+", "*", variable.path), tuple(variable.shape)), []).append(variable)
    all_bytes = sum(map(_bytes_of, model.variables))
    for (name, shape), variables in sorted(alike.items(), key=lambda pair: -sum(map(_bytes_of, pair[1]))):
        size = sum(map(_bytes_of, variables))
        if size >= _LARGE * all_bytes:
            named = variables[0].path if len(variables) == 1 else f"{len(variables)} of {name}"
            share = f"{format_bytes(size)}, {100 * size / all_bytes:.4g} % of the model"
            yield f"no pattern of the layout map matches {named} {list(shape)}, {share}: stored whole on one device"


def _bytes_of(variable: Any) -> int:
    value = variable.value
    return int(value.dtype.size) * int(value.shape.num_elements() or 0)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
