"""Where the variables of models under a distribution live: as Keras' distribution says of each, and home again.

Keras is asked for the layout of each variable: its patterns are regular expressions, searched for in one version and
matched in full in another, and two that match are an error. No variable is marked, since Keras prefers such a mark to
all later maps.

What is not cut, which Keras calls replicated, stays where it was made, on GPUs too.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tensorflow as tf

from graphsplit.api.layouts.divisions import is_sharded
from graphsplit.api.layouts.layout_spellings import VariableLayout
from graphsplit.api.layouts.layout_targets import slots_of, variables_of, variables_with_owners
from graphsplit.api.layouts.new_variables import NewVariables
from graphsplit.api.layouts.variable_layouts import lay_out
from graphsplit.core.devices import canonical_name
from graphsplit.core.keras_internals import compilation_of, give_shape, layout_map_of, make_slots
from graphsplit.core.user_code import user_stack_level
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.errors import bullet_list
from graphsplit.keras.distribution.meshes import Asked, MeshOfKeras, mesh_of


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
        if any(asked.layout != "home" for asked in asked_of(model, distribution, mesh).values()):
            make_slots(getattr(model, "optimizer", None), model.trainable_variables)
            self._lay_out(model, distribution, mesh)
        self._models[model] = weakref.ref(distribution), present

    def _lay_out(self, model: Any, distribution: Any, mesh: MeshOfKeras) -> None:
        variables, asked = variables_of(model), asked_of(model, distribution, mesh)
        slots = slots_of(model, variables)
        self._say_what_is_otherwise(distribution, mesh, asked)
        wanted: list[VariableLayout | None] = []
        for variable in variables:
            is_ours = parts_of_variable(variable) is None or self._variables.get(id(variable)) is variable
            wanted.append(_of_head(variable, slots, asked).layout if is_ours else None)
        lay_out(variables, wanted, slots, mesh.devices, mesh.mesh)
        self._remember([v for v, own in zip(variables, wanted, strict=True) if own not in (None, "home")])

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
        variable._graphsplit_path = owner.path
        give_shape(owner, variable.shape)
        if distribution not in self._born:
            self._born[distribution] = NewVariables(mesh.devices, mesh=mesh.mesh)
        new = self._born[distribution]
        head = new.add(variable)
        if head is not None and head.shape == variable.shape:
            asked = Asked(_present_layout(head))
        else:
            asked = _asked(owner, variable, distribution, mesh)
            self._say_what_is_otherwise(distribution, mesh, {id(variable): asked})
        if asked.layout != "home":
            new.lay_out(variable, asked.layout, head)
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
        found, why_not = mesh.of_output(tensor, layout.axes)
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
        return found

    @property
    def of_outputs(self) -> Collection[Any]:
        """The layouts in layout maps that were for outputs of layers that ran."""
        return self._of_outputs

    def told_of(self, distribution: Any) -> set[str]:
        """Return what users were warned of about a distribution."""
        return self._told.setdefault(distribution, set())

    def _say_what_is_otherwise(self, distribution: Any, mesh: MeshOfKeras, asked: Mapping[int, Asked]) -> None:
        """Warn, once for a distribution, of all that is not done as its map says."""
        told = self.told_of(distribution)
        name = f"{type(distribution).__name__} on {len(mesh.devices)} devices"
        if mesh.why_not and any(own.layout == "sharded" for own in asked.values()) and "" not in told:
            told.add("")
            warnings.warn(
                f"{name}: variables that its layout map cuts are divided over all devices, whatever the axis, and "
                f"gathered in each step, because {mesh.why_not}. The results are the same as on one device. No matrix "
                "product is divided along the model's axes, as Keras does on JAX.",
                stacklevel=user_stack_level(),
            )
        new = {own.instead for own in asked.values() if own.instead} - told
        if new:
            told |= new
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


def _of_head(variable: tf.Variable, slots: Mapping[int, tf.Variable], asked: Mapping[int, Asked]) -> Asked:
    """Return how a variable is to lie: a slot of its variable's shape as that one."""
    head = slots.get(id(variable))
    return asked[id(variable if head is None or head.shape != variable.shape else head)]


def _present_layout(variable: tf.Variable) -> VariableLayout:
    parts = parts_of_variable(variable)
    return parts.layout if parts is not None else "sharded" if is_sharded(variable) else "home"
