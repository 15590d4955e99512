"""`visualize_layout`: where a variable, a tensor or the arguments of a parallelized function lie, in a terminal.

A tensor is a box whose parts are the devices', in the manner of JAX's `visualize_array_sharding` (jax.debug).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.layouts.variable_layouts import variables_of
from graphsplit.core.devices import canonical_name, short_name
from graphsplit.core.layouts import MeshDivision, Nested, Replicate, Shard, axis_of, part_ranges
from graphsplit.core.variables.arrangements import lying_now
from graphsplit.core.variables.parted_variables import name_of, parts_of_variable
from graphsplit.errors import ArgumentError
from graphsplit.inspect.views.pages import shape_text
from graphsplit.planning.amounts import count_text
from graphsplit.planning.plan import Plan

_MOST = 16  # devices that are named


class LayoutView(str):
    """A drawing of where values lie, as text: `print` it, or let a prompt or a notebook show it."""

    __slots__ = ()

    __repr__ = str.__str__


def visualize_layout(target: Any, *args: Any, **kwargs: Any) -> LayoutView:
    """Return a drawing of a layout: which device has which entries. `print` it.

    Args:
      target: a variable, a Keras variable, layer, model or optimizer: each of its variables. A tensor. A parallelized
        function: its arguments, as a call would cut them over the devices.
      *args, **kwargs: the function's arguments; `tf.TensorSpec`s are enough.

    Raises:
      ArgumentError: for anything else, or arguments beside what is no function.

    >>> import tensorflow as tf, graphsplit as gs
    >>> step = gs.parallelize(lambda x: 2 * x, devices=["GPU:0", "GPU:1"])
    >>> gs.visualize_layout(step, tf.TensorSpec([5, 3]))
    x float32[5,3], sharded along axis 0 over 2 devices
    ┌────────────┐
    │ GPU:0  0:3 │
    ├────────────┤
    │ GPU:1  3:5 │
    └────────────┘
    """
    if isinstance(target, ParallelFunction):
        plan = target.plan(*args, **kwargs)
        return LayoutView("\n".join(_pictures_of_arguments(plan)))
    if args or kwargs:
        raise ArgumentError(
            "visualize_layout(x, ...): with more than one argument, the first must be a parallelized function, got "
            f"{type(target).__name__}."
        )
    if isinstance(target, tf.Tensor) and hasattr(target, "numpy"):
        title = f"{_text('tensor', target.shape, target.dtype)}, whole"
        return LayoutView(_whole(title, [canonical_name(target.device)]))
    return LayoutView("\n".join(map(_picture_of_variable, _variables(target))))


def _variables(target: Any) -> list[tf.Variable]:
    takes = (
        "visualize_layout takes a variable, a model or other object with variables, a tensor or a parallelized function"
    )
    try:
        variables = variables_of(target)
    except ArgumentError as error:
        raise ArgumentError(f"{takes}, got {target!r}.") from error
    if not variables:
        raise ArgumentError(f"{takes}, and {target!r} has no variables.")
    return variables


def _text(name: str, shape: tf.TensorShape, dtype: tf.DType) -> str:
    return f"{name} {shape_text(None if shape.rank is None else tuple(shape.as_list()), dtype.name)}"


def _whole(title: str, devices: Sequence[str]) -> str:
    return table(title, [[_names(devices)]])


def _names(devices: Sequence[str]) -> str:
    return ", ".join(map(short_name, devices[:_MOST])) + (", ..." if len(devices) > _MOST else "")


def _picture_of_variable(variable: tf.Variable) -> str:
    parts, cut = parts_of_variable(variable), lying_now(variable).cut
    title = _text(name_of(variable), variable.shape, variable.dtype)
    if parts is None:
        return _whole(f"{title}, whole", [canonical_name(variable.device)])
    if isinstance(parts.division, Replicate) or (cut is not None and cut.groups and cut.parts == 1):
        return _whole(f"{title}, replicated", parts.devices)
    if cut is None or cut.blocks > 1:
        return _picture_on_mesh(title, parts.division, variable.shape.as_list())
    if len(parts.devices) == 1:
        return _whole(f"{title}, on one device", parts.devices)
    rows = parts.division.rows if isinstance(parts.division, Nested) else ()
    places = [row.devices for row in rows] or [(device,) for device in parts.devices]
    text = f", {len(cut.groups)} copies" if cut.groups else ""
    title += f", sharded along axis {cut.axis} over {cut.parts} devices{text}"
    return _cut(title, places, cut.lengths, stacked=cut.axis == 0 and (variable.shape.rank or 0) > 1)


def _cut(title: str, places: Sequence[Sequence[str]], lengths: Sequence[int], *, stacked: bool) -> str:
    """Return the picture of what is cut along one axis; no `lengths` if nobody knows them yet."""
    names, ends = list(map(_names, places)), itertools.accumulate(lengths)
    wide, apart = (max(map(len, names)), "  ") if stacked else (0, "\n")
    cells = [f"{n:{wide}}{apart}{end - size}:{end}" for n, end, size in zip(names, ends, lengths, strict=False)]
    return picture(title, cells or names, stacked=stacked)


def _picture_on_mesh(title: str, division: MeshDivision, shape: Sequence[int]) -> str:
    """Return a table with the devices of a column one above the other."""
    ranges = part_ranges(division, list(map(range, shape)))
    texts = [
        ", ".join([_range_text(numbers, size) for numbers, size in zip(part, shape, strict=True)]) for part in ranges
    ]
    cells = [f"{short_name(device)}\n{text}" for device, text in zip(division.devices, texts, strict=True)]
    firsts = division.firsts if isinstance(division, Nested) else range(division.parts)
    columns = [cells[first:end] for first, end in zip(firsts, [*firsts[1:], len(cells)], strict=True)]
    rows = list(itertools.zip_longest(*columns, fillvalue=""))
    return table(f"{title}, on a mesh, columns along {axis_of(division)!r}", rows)


def _range_text(numbers: Sequence[int], size: int) -> str:
    """Return `0:2`, or `0:2 6:8` of several blocks."""
    starts = [k for k in range(len(numbers)) if k == 0 or numbers[k] != numbers[k - 1] + 1]
    ends = [numbers[k - 1] + 1 for k in [*starts[1:], len(numbers)]]
    return (
        ":" if len(numbers) == size else " ".join([f"{numbers[k]}:{end}" for k, end in zip(starts, ends, strict=True)])
    )


def _pictures_of_arguments(plan: Plan) -> Iterator[str]:
    program, places = plan.program, [[device] for device in plan.devices]
    for name, position, layout in zip(program.input_names, program.inputs, plan.input_layouts, strict=True):
        op = program.ops[position]
        shape = None if op.out_shapes[0] is None else tuple(d if isinstance(d, int) else None for d in op.out_shapes[0])
        title = f"{name} {shape_text(shape, op.out_dtypes[0].name)}"
        if not isinstance(layout, Shard):
            yield _whole(f"{title}, whole", [plan.default_device])
            continue
        title += f", sharded along axis {layout.axis} over {count_text(len(set(plan.devices)), 'device')}"
        lengths = [layout.own(plan.rows, d) for d in range(len(plan.devices))] if plan.rows else []
        if plan.rows and len(layout.blocks) > 1:
            title, lengths = f"{title}, {lengths[0]} to {lengths[-1]} entries each", []
        yield _cut(title, places, lengths, stacked=layout.axis == 0 and len(shape or ()) > 1)


_WIDTH, _MOST_PARTS = 72, 16  # letters of a line; parts that are drawn, of more only the first and the last ones


def picture(title: str, parts: Sequence[str], *, stacked: bool) -> str:
    """Return the box: parts one above the other, or side by side, as many as fit into a line.

    >>> print(picture("w float32[4,2]", ["CPU:0  0:2", "CPU:1  2:4"], stacked=True))
    w float32[4,2]
    ┌────────────┐
    │ CPU:0  0:2 │
    ├────────────┤
    │ CPU:1  2:4 │
    └────────────┘
    """
    if len(parts) > _MOST_PARTS:
        half = _MOST_PARTS // 2
        title += f" (of {len(parts)} parts, the first and last {half})"
        parts = [*parts[:half], *parts[-half:]]
    wide = max(len(line) for part in parts for line in part.split("\n"))
    per_row = 1 if stacked else max(1, (_WIDTH - 1) // (wide + 3))
    return table(title, [parts[first : first + per_row] for first in range(0, len(parts), per_row)])


def table(title: str, rows: Sequence[Sequence[str]]) -> str:
    r"""Return a table of what devices have, several lines each; the last row may have fewer.

    >>> print(table("w float32[2,4]", [["CPU:0\n:, 0:2", "CPU:1\n:, 2:4"]]))
    w float32[2,4]
    ┌────────┬────────┐
    │ CPU:0  │ CPU:1  │
    │ :, 0:2 │ :, 2:4 │
    └────────┴────────┘
    """
    cells = [[cell.split("\n") for cell in [*row, *[""] * (len(rows[0]) - len(row))]] for row in rows]
    wide = max(len(line) for row in cells for cell in row for line in cell)
    edges = ["─" * (wide + 2)] * len(rows[0])
    lines = [f"┌{'┬'.join(edges)}┐"]
    for k, row in enumerate(cells):
        lines += [f"├{'┼'.join(edges)}┤"] if k else []
        for line in range(max(map(len, row))):
            texts = [cell[line] if line < len(cell) else "" for cell in row]
            lines.append("".join([f"│ {text:{wide}} " for text in texts]) + "│")
    return "\n".join([title, *lines, f"└{'┴'.join(edges)}┘"])
