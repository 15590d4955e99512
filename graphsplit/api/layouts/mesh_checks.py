"""What a mesh asks of a function and its options: variables of the same mesh, and what columns cannot do yet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from graphsplit.core.device_mesh import BATCH_AXIS, DeviceMesh, MeshAxes
from graphsplit.core.devices import short_name
from graphsplit.core.layouts import MeshDivision, Nested, along_axis, axis_of
from graphsplit.core.patterns import meant
from graphsplit.core.sizes import has_sizes
from graphsplit.core.variables.parted_variables import parts_of
from graphsplit.errors import ArgumentError, UnsupportedError, bullet_list
from graphsplit.program.asked_layouts import asked_of, is_of_gradient
from graphsplit.program.program import Op, Program
from graphsplit.tracing.trace import Trace


def check_mesh(traced: Trace, mesh: DeviceMesh | None) -> None:
    """Raise an error unless a function's variables lie on its mesh, and it is one that can have columns.

    Raises:
      ArgumentError: for variables that lie along an axis of another mesh.
      UnsupportedError: for stages that `on_device` made, on a mesh whose devices are named column by column.
    """
    wrong = []
    for handle in traced.captures:
        parts = parts_of(handle)
        axis = axis_of(parts.division) if parts is not None else ""
        if parts is None or not axis:
            continue
        if mesh is None or not any(_lies_on(parts.division, alike.table, list(mesh.others)) for alike in mesh.alike):
            where = ", ".join(map(short_name, parts.devices))
            wrong.append(f"{parts.path} along {axis!r} on {where}")
    if wrong:
        rows = " and ".join([", ".join(map(short_name, row)) for row in mesh.rows]) if mesh else ""
        mesh_text = (
            f"mesh {mesh} with the {'rows' if mesh and len(mesh.rows) > 1 else 'row'} {rows}" if mesh else "no mesh"
        )
        raise ArgumentError(
            f"The function runs on {mesh_text}, but these variables are cut along an axis of another mesh:\n"
            f"{bullet_list(wrong)}\n"
            "Pass parallelize the same mesh and devices as set_variable_layout, or set the layout of the variables "
            "again."
        )
    stages = [stage for stage in traced.program.all_stages() if len(stage.devices) > 1]
    if mesh is not None and stages and mesh.by_row != mesh.devices:
        raise UnsupportedError(
            f"mesh {mesh}: the function calls {stages[0].name!r}, which has devices row by row from on_device. Name "
            f"the batch axis first, mesh={ {mesh.batch_axis: mesh.axes.rows, **mesh.sizes}!r}."
        )


def mesh_lain_on(traced: Trace, devices: Sequence[str]) -> MeshAxes:
    """Return the mesh of these devices along whose axis variables of a function lie; none if none, or several, are."""
    axes = {axis for handle in traced.captures if (parts := parts_of(handle)) for axis in _axes_of(parts.division)}
    if len(axes) != 1:
        return MeshAxes()
    [(axis, columns)] = axes
    rows = len(devices) // columns
    sizes = (*([(BATCH_AXIS, rows)] if rows > 1 else []), (axis, columns))
    return MeshAxes(sizes if rows * columns == len(devices) else ())


def _axes_of(division: MeshDivision) -> Iterator[tuple[str, int]]:
    """Yield the axes of a mesh, other than the batch's, along which a variable lies, with their numbers of devices."""
    if axis := axis_of(division):
        yield axis, along_axis(division).parts
    if isinstance(division, Nested):
        yield from _axes_of(division.rows[0])


def check_asked(program: Program, mesh: DeviceMesh) -> list[str]:
    """Return what to say of the layouts that `with_layout` asks for.

    Raises:
      ArgumentError: for an axis that the mesh has not, and for a dimension with fewer entries than an axis has devices.
      UnsupportedError: for a dimension of unknown length along another axis than the batch's.
    """
    ops = [op for op in program.ops if not is_of_gradient(op)]  # (whose layouts are those of what they are of)
    axes_by_op = [(op, axes) for op in ops if (axes := asked_of(op)) is not None]
    wrong = [
        text for op, axes in axes_by_op for name in axes if name and (text := _misfit(program, op, name, axes, mesh))
    ]
    if wrong:
        raise ArgumentError(f"with_layout does not fit mesh {mesh}:\n{bullet_list(list(dict.fromkeys(wrong)))}")
    count_by_text = Counter(f"with_layout {_described(program, op)}" for op, _ in axes_by_op)
    inside = [op for op in ops if any(asked_of(inner_op) for body in op.bodies.values() for inner_op in body.ops)]
    return [
        *[f"{text}, {count} times" if count > 1 else text for text, count in count_by_text.items()],
        *[f"with_layout inside of {op.type} {op.name!r} is not followed" for op in inside],
    ]


def _described(program: Program, op: Op) -> str:
    shape, line = op.out_shapes[0], program.line_of(op)
    sizes = "" if shape is None else f" of {[None if size is None else int(size) for size in shape]}"
    return f"{asked_of(op)!r}{sizes}" + (f" at {line}" if line else "")


def _misfit(program: Program, op: Op, name: str, axes: Sequence[str | None], mesh: DeviceMesh) -> str:
    """Say why what is asked of a tensor along an axis cannot be; "" if it can."""
    what, sizes = _described(program, op), mesh.sizes
    if name in (mesh.batch_axis, mesh.axes.copies_axis):
        return ""
    if name not in sizes:
        return f"{what}: there is no axis {name!r}; there are {', '.join(map(repr, sizes))}.{meant(name, sizes)}"
    dimension = axes.index(name)
    length = op.out_shapes[0][dimension] if op.out_shapes[0] is not None else None
    if not isinstance(length, int) or has_sizes((length,)):
        raise UnsupportedError(
            f"with_layout {what}: the length of dimension {dimension} is not known when planning, and {name!r} can "
            "only cut known lengths. Call the function with tensors of known shapes, or cut another dimension."
        )
    if length < sizes[name]:
        return f"{what}: dimension {dimension} has {length} entries, and {name!r} has {sizes[name]} devices"
    return ""


def _lies_on(division: MeshDivision, table: np.ndarray[Any, Any], axes: Sequence[str]) -> bool:
    """Return whether a variable lies along axes of a mesh, whose devices are in a table: of the batch's axis first."""
    axis = axis_of(division)
    if not axis:
        return set(division.devices) <= set(table.flat)
    if axis not in axes or along_axis(division).parts != table.shape[1 + axes.index(axis)]:
        return False
    k = axes.index(axis)
    tables = [table.take(d, 1 + k) for d in range(table.shape[1 + k])]
    if not isinstance(division, Nested):
        return division.devices == tuple([part_table.flat[0] for part_table in tables])
    other_axes = [*axes[:k], *axes[k + 1 :]]
    return all(_lies_on(row, part, other_axes) for row, part in zip(division.rows, tables, strict=True))
