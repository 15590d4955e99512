"""Where one tensor lies, drawn for a terminal: a box whose parts are the devices'. Plain Python.

In the manner of JAX's `visualize_array_sharding` (jax.debug).
"""

from __future__ import annotations

from collections.abc import Sequence

_WIDTH, _MOST = 72, 16  # letters of a line; parts that are drawn, of more only the first and the last ones


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
    if len(parts) > _MOST:
        half = _MOST // 2
        title += f" (of {len(parts)} parts, the first and last {half})"
        parts = [*parts[:half], *parts[-half:]]
    wide = max(len(line) for part in parts for line in part.split("\n"))
    each = 1 if stacked else max(1, (_WIDTH - 1) // (wide + 3))
    return table(title, [parts[first : first + each] for first in range(0, len(parts), each)])


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
