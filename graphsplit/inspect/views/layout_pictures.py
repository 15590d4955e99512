"""Where one tensor lies, drawn for a terminal: a box whose parts are the devices'. Plain Python.

In the manner of JAX's `visualize_array_sharding` (jax.debug).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphsplit.core.devices import short_name

_WIDTH, _MOST = 72, 16  # letters of a line; parts that are drawn, of more only the first and the last ones


@dataclass(frozen=True)
class Piece:
    """What one device has of a tensor.

    Attributes:
      place: the devices, full names; several if each has a copy.
      begin, end: of its entries along the axis that is cut; None if nobody knows yet.
    """

    place: tuple[str, ...]
    begin: int | None = None
    end: int | None = None

    @property
    def lines(self) -> tuple[str, str]:
        """Where, and which entries."""
        names = ", ".join(map(short_name, self.place[:_MOST])) + (", ..." if len(self.place) > _MOST else "")
        return names, "" if self.begin is None else f"{self.begin}:{self.end}"


def picture(title: str, pieces: Sequence[Piece], axis: int | None, rank: int) -> str:
    """Return the box: rows one above the other where axis 0 of several is cut, else columns side by side.

    >>> print(picture("w float32[4,2]", [Piece(("/device:CPU:0",), 0, 2), Piece(("/device:CPU:1",), 2, 4)], 0, 2))
    w float32[4,2]
    ┌────────────┐
    │ CPU:0  0:2 │
    ├────────────┤
    │ CPU:1  2:4 │
    └────────────┘
    """
    if len(pieces) > _MOST:
        half = _MOST // 2
        title += f" (of {len(pieces)} parts, the first and last {half})"
        pieces = [*pieces[:half], *pieces[-half:]]
    stacked = (axis == 0 and rank > 1) or len(pieces) == 1
    return "\n".join([title, *(_rows(pieces) if stacked else _columns(pieces))])


def _rows(pieces: Sequence[Piece]) -> list[str]:
    names, entries = zip(*[piece.lines for piece in pieces], strict=True)
    first, second = max(map(len, names)), max(map(len, entries))
    texts = [f"{name:{first}}  {own:{second}}" if second else name for name, own in zip(names, entries, strict=True)]
    line = "─" * (len(texts[0]) + 2)
    inner = f"\n├{line}┤\n".join([f"│ {text} │" for text in texts])
    return [f"┌{line}┐", *inner.split("\n"), f"└{line}┘"]


def _columns(pieces: Sequence[Piece]) -> list[str]:
    """Return the columns, in several boxes where one would be too wide."""
    wide = max(len(text) for piece in pieces for text in piece.lines) + 2
    each = max(1, (_WIDTH - 1) // (wide + 1))
    lines = []
    for begin in range(0, len(pieces), each):
        own = pieces[begin : begin + each]
        edge = ["─" * wide] * len(own)
        lines.append(f"┌{'┬'.join(edge)}┐")
        lines += [f"│{'│'.join(piece.lines[k].center(wide) for piece in own)}│" for k in range(2)]
        lines.append(f"└{'┴'.join(edge)}┘")
    return lines


def table(title: str, cells: Sequence[Sequence[tuple[str, str] | None]]) -> str:
    """Return a table of what the devices of a mesh have: its rows, and for each device which one and what, or nothing.

    >>> print(table("w float32[2,4]", [[("/device:CPU:0", ":, 0:2"), ("/device:CPU:1", ":, 2:4")]]))
    w float32[2,4]
    ┌────────┬────────┐
    │ CPU:0  │ CPU:1  │
    │ :, 0:2 │ :, 2:4 │
    └────────┴────────┘
    """
    texts = [[("", "") if cell is None else (short_name(cell[0]), cell[1]) for cell in row] for row in cells]
    wide = max(len(text) for row in texts for cell in row for text in cell)
    edges = ["─" * (wide + 2)] * len(texts[0])
    lines = [f"┌{'┬'.join(edges)}┐"]
    for k, row in enumerate(texts):
        lines += [f"├{'┼'.join(edges)}┤"] if k else []
        lines += ["".join([f"│ {cell[line]:{wide}} " for cell in row]) + "│" for line in range(2)]
    return "\n".join([title, *lines, f"└{'┴'.join(edges)}┘"])
