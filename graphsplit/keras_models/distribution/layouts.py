"""Where the variables of models under a distribution live: as Keras' distribution says of each, and home again.

Keras is asked for the layout of each variable: its patterns are regular expressions, searched for in one version and
matched in full in another, and two that match are an error. No variable is marked, since Keras prefers such a mark to
all later maps.

What is not cut, which Keras calls replicated, stays where it was made, on GPUs too. Copies on all devices would be
right for graphsplit's own calls only: a `tf.function` of the user's that was traced before them writes to one of them.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from graphsplit.api.layout_targets import slots_of, variables_of, variables_with_owners
from graphsplit.api.variable_layouts import NewVariables, is_sharded, lay_out
from graphsplit.core.devices import canonical_name
from graphsplit.core.keras_internals import compilation_of, make_slots, value_of_new
from graphsplit.core.parted_variables import parts_of_variable
from graphsplit.core.user_code import user_stack_level
from graphsplit.keras_models.distribution.backend import to_backend_mesh


class DistributedLayouts:
    """The layouts that distributions gave to variables. What a user has laid out stays as it is."""

    def __init__(self) -> None:
        self._models: weakref.WeakKeyDictionary[Any, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        self._born: weakref.WeakKeyDictionary[Any, NewVariables] = weakref.WeakKeyDictionary()
        self._variables: weakref.WeakValueDictionary[int, tf.Variable] = weakref.WeakValueDictionary()
        self._told: weakref.WeakSet[Any] = (
            weakref.WeakSet()
        )  # distributions of which somebody was told that they gather

    def follow(self, model: Any, distribution: Any) -> None:
        """Lay the variables of a model out as a distribution says: its optimizer's and its metrics' too."""
        by, compilation = self._models.get(model, (None, None))
        present = compilation_of(model)
        if by is not None and by() is distribution and compilation is present:
            return
        if by is not None and by() is not distribution:
            self.bring_home(model)
        if "sharded" in self._wanted(model, distribution)[1]:
            make_slots(getattr(model, "optimizer", None), model.trainable_variables)
            self._lay_out(model, distribution)
        self._models[model] = weakref.ref(distribution), present

    def _lay_out(self, model: Any, distribution: Any) -> None:
        variables, wanted = self._wanted(model, distribution)
        self._say_that_it_gathers(distribution, wanted)
        lay_out(variables, wanted, slots_of(model, variables), to_backend_mesh(distribution.device_mesh))
        self._remember([v for v, own in zip(variables, wanted, strict=True) if own == "sharded"])
        if getattr(model, "generate_function", None) is not None:
            model.generate_function = None  # KerasHub's: traced before variables were laid out, it reads empty ones

    def _wanted(self, model: Any, distribution: Any) -> tuple[list[tf.Variable], list[str | None]]:
        """Return the variables of a model and the layout of each; None for what the user has laid out."""
        pairs = variables_with_owners(model)
        variables, several = [variable for variable, _ in pairs], distribution.device_mesh.devices.size > 1
        cut = {id(variable): several and _is_cut(owner, distribution) for variable, owner in pairs}
        shapes = {id(variable): variable.shape for variable in variables}
        for slot, head in slots_of(model, variables).items():
            if id(head) in cut and shapes.get(slot) == head.shape:
                cut[slot] = cut[id(head)]
        found: list[str | None] = []
        for variable in variables:
            is_ours = parts_of_variable(variable) is None or self._variables.get(id(variable)) is variable
            found.append(("sharded" if cut[id(variable)] else "home") if is_ours else None)
        return variables, found

    def born(self, owner: Any, distribution: Any) -> None:
        """Lay out a variable of Keras that has just been made, if its distribution cuts it: no device has all of them.

        Raises:
          ValueError: as Keras says, if two patterns match.
        """
        variable = value_of_new(owner)
        if not tf.executing_eagerly() or parts_of_variable(variable) is not None:
            return
        devices = to_backend_mesh(distribution.device_mesh)
        variable._graphsplit_path = owner.path
        if distribution not in self._born:
            self._born[distribution] = NewVariables(devices)
        new = self._born[distribution]
        head = new.add(variable)
        cut = is_sharded(head) if head is not None and head.shape == variable.shape else _is_cut(owner, distribution)
        if cut and len(devices) > 1:
            self._say_that_it_gathers(distribution, ["sharded"])
            new.lay_out(variable, "sharded", head)
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

    def _say_that_it_gathers(self, distribution: Any, wanted: Iterable[str | None]) -> None:
        if "sharded" not in wanted or distribution in self._told:
            return
        self._told.add(distribution)
        mesh = distribution.device_mesh
        warnings.warn(
            f"{type(distribution).__name__} on {mesh.devices.size} devices: variables that its layout map cuts are "
            "divided over all of them, whatever the axis, and each step gathers what it computes with (print its "
            "plan). The numbers are those of one device. No matrix product is divided along the model's axes, as Keras "
            "does on JAX.",
            stacklevel=user_stack_level(),
        )


def _is_cut(owner: Any, distribution: Any) -> bool:
    return not isinstance(owner, tf.Variable) and any(distribution.get_variable_layout(owner).axes)
