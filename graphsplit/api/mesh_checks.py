"""What a mesh asks of a function and its options: variables of the same mesh, and what columns cannot do yet."""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.api.options import Options
from graphsplit.core.device_mesh import device_mesh
from graphsplit.core.devices import short_name
from graphsplit.core.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.core.layouts import Cut
from graphsplit.core.parted_variables import parts_of
from graphsplit.tracing.trace import Trace


def check_mesh(traced: Trace, options: Options, devices: Sequence[str]) -> None:
    """Raise an error unless a function's variables lie on its mesh, and it is one that can have columns.

    Raises:
      ArgumentError: for variables that lie along an axis of another mesh.
      UnsupportedError: for stages that `on_device` made, on a mesh with columns.
    """
    grid = device_mesh(options.mesh, devices) if options.mesh else None
    along = grid.rows[0] if grid is not None and grid.axis else ()
    wrong = []
    for handle in traced.captures:
        parts = parts_of(handle)
        cut = parts.division if parts is not None else None
        if parts is None or not isinstance(cut, Cut) or not cut.along:
            continue
        if grid is None or cut.along != grid.axis or cut.devices != along:
            where = ", ".join(map(short_name, cut.devices))
            wrong.append(f"{parts.path} along {cut.along!r} on {where}")
    if wrong:
        own = f"mesh {grid}, whose first row is {', '.join(map(short_name, along or devices))}" if grid else "no mesh"
        raise ArgumentError(
            f"The function runs on {own}, and these variables lie along an axis of another one:\n{bullet_list(wrong)}\n"
            "Give the function the mesh, and the devices, that set_variable_layout was given; or lay the variables out "
            "again."
        )
    if along and (stages := traced.program.all_stages()):
        raise UnsupportedError(
            f"mesh {grid}: the function calls {stages[0].name!r}, which on_device gives devices of its own. A mesh "
            "with another axis than the batch's has devices for all of it."
        )
