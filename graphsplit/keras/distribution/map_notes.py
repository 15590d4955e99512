"""What a layout map leaves out, and what of it is not done as it says: for plans, which a map's author reads."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any

from graphsplit.api.layouts.layout_targets import variables_with_owners
from graphsplit.core.keras_internals import layout_map_of
from graphsplit.core.patterns import near
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.keras.distribution.layouts import asked_of
from graphsplit.keras.distribution.meshes import MeshOfKeras
from graphsplit.planning.amounts import format_bytes

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
    return ", ".join([f"{p!r} (similar: {', '.join(found)})" if found else repr(p) for p, found in alike])


def _otherwise(model: Any, distribution: Any, mesh: MeshOfKeras) -> dict[str, list[str]]:
    """Return the names of variables that do not lie as the map says, by what is done instead."""
    asked = asked_of(model, distribution, mesh)
    found: dict[str, list[str]] = {}
    for variable, _ in variables_with_owners(model):
        if instead := asked[id(variable)].instead:
            found.setdefault(instead, []).append(name_of(variable))
    return found


def _left_out(model: Any, distribution: Any) -> Iterable[str]:
    """Yield a note for the large matrices that no pattern matches; those whose names differ in numbers are one."""
    alike: dict[tuple[str, Any], list[Any]] = {}
    for variable in model.variables:
        if len(variable.shape) > 1 and not any(distribution.get_variable_layout(variable).axes):
            alike.setdefault((re.sub(r"\d+", "*", variable.path), tuple(variable.shape)), []).append(variable)
    all_bytes = sum(map(_bytes_of, model.variables))
    for (name, shape), found in sorted(alike.items(), key=lambda item: -sum(map(_bytes_of, item[1]))):
        size = sum(map(_bytes_of, found))
        if size >= _LARGE * all_bytes:
            named = found[0].path if len(found) == 1 else f"{len(found)} of {name}"
            share = f"{format_bytes(size)}, {100 * size / all_bytes:.4g} % of the model"
            yield f"no pattern of the layout map matches {named} {list(shape)}, {share}: stored whole on one device"


def _bytes_of(variable: Any) -> int:
    value = variable.value
    return int(value.dtype.size) * int(value.shape.num_elements() or 0)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
