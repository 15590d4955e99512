"""Amounts of bytes, and tables of amounts, for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graphsplit.core.sizes import ROWS, STAND_IN, symbols_in
from graphsplit.program.program import Program, Tensor


def size_text(program: Program, tensors: Iterable[Tensor]) -> str:
    """Return the size of some tensors, for people: of a batch of unknown size, by how much it grows per row."""
    known_bytes, per_row, open_ended = 0, 0, 0
    for tensor in tensors:
        shape, size = program.shape(tensor), program.bytes(tensor)
        symbols = symbols_in([shape])
        if shape is None or None in shape or set(symbols) - {ROWS}:
            open_ended += 1
        elif symbols:
            per_row += size // STAND_IN
        else:
            known_bytes += size
    parts = [format_bytes(known_bytes)] if known_bytes or not (per_row or open_ended) else []
    parts += [f"{format_bytes(per_row)} a row"] if per_row else []
    parts += [f"{open_ended} of unknown size"] if open_ended else []
    return " and ".join(parts)


def count_text(number: int, what: str) -> str:
    """Return how many there are.

    >>> count_text(1, "row")
    '1 row'
    """
    return f"{number} {what}{'' if number == 1 else 's'}"


def format_bytes(count: int, *, is_least: bool = False) -> str:
    """Return a number of bytes for people; `is_least`: of which others are not known.

    >>> format_bytes(2_500_000), format_bytes(7, is_least=True)
    ('2.5 MB', 'at least 7 B')
    """
    return "at least " * is_least + scaled(count, "B", "kB", "MB", "GB", "TB")


def scaled(count: int, *units: str) -> str:
    """Return a number in the unit in which it is short, each a thousand times the one before."""
    size, power = float(count), 0
    while size >= 1000 and power < len(units) - 1:
        size, power = size / 1000, power + 1
    return f"{size:.{1 if power else 0}f} {units[power]}"


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows as lines of aligned columns, so many of them to the left, the others to the right.

    >>> aligned([("device", "ops"), ("CPU:0", "3")])
    ['device  ops', 'CPU:0     3']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        lines.append("  ".join([c.ljust(w) if i < left else c.rjust(w) for i, (c, w) in enumerate(cells)]).rstrip())
    return lines
