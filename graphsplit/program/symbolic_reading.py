"""Which unknown sizes a program is read for: as many as its shapes follow for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from graphsplit.core.polynomials import Symbol
from graphsplit.core.symbolic_sizes import ROWS, Shape, symbols_in
from graphsplit.program.program import Program


def build_for_any_batch(
    build: Callable[..., Program], given_shapes: Mapping[str, Shape | None], notes: Sequence[str]
) -> Program:
    """Return the program for all sizes; if shapes do not follow for all, one that leaves some of them open.

    Args:
      build: `build_program` with its other arguments.
      given_shapes, notes: see there.
    """
    given = dict(given_shapes)
    notes = list(notes)
    while True:
        try:
            return build(given_shapes=given, notes=tuple(notes))
        except ValueError as error:
            symbols = symbols_in(list(given.values()))
            if not symbols:
                raise
            reason = str(error).strip().split("\n")[0]
            lengths = [symbol for symbol in symbols if symbol != ROWS]
            if lengths:  # perhaps they are not as independent as they seem
                last = max(lengths, key=lambda symbol: symbol.stand_in)
                given = {name: _without(shape, last) for name, shape in given.items()}
                notes.append(f"shapes do not follow for every {last.name}: {reason}")
            else:
                given = {}
                notes.append(f"shapes do not follow for every batch size, so everything runs at home: {reason}")


def _without(shape: Shape | None, symbol: Symbol) -> Shape | None:
    """Return a shape in which nothing is said of a size."""
    return shape and tuple([None if symbol in symbols_in([(size,)]) else size for size in shape])
