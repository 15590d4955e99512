"""Layouts along an axis of a mesh: which variables are cut along which dimension, found from what a program does.

Each large variable, cut along each of its dimensions, has partners (`axes.partners`); together they are one choice, and
so is the variable alone. Equal blocks of a network, told by the numbers in their names, are cut alike. Choices are put
together by descent: each is added, or taken back, while that makes the step faster by `axis_times`.
"""

from __future__ import annotations

import functools
import glob
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from graphsplit.axes.partners import Partners
from graphsplit.axes.plans import AxisPlanner
from graphsplit.core.layouts import Shard
from graphsplit.core.patterns import fits, pattern_of
from graphsplit.costs.machine import Machine
from graphsplit.program.program import Program
from graphsplit.search.axis_times import AxisTime, AxisTimes, written_bytes

Cuts = Mapping[int, Shard]
"""How captures are cut that are, by position."""

Along = tuple[tuple[str, int], ...]
"""Patterns of names, and the dimension that is cut of the variables that they fit."""

_LARGE = 1 / 50  # of all bytes, of a variable and those like it: smaller ones are cut only as partners
_OPERATIONS, _FEWEST = 100_000, 12  # of a program, as often as it is gone through for a mesh: about ten seconds
_PASSES = 4  # through it, for each choice
_NUMBER = re.compile(r"_?(\d+)$")


@dataclass(frozen=True)
class Variable:
    """A variable that may be cut.

    Attributes:
      name: by which users know it.
      shape: of it.
      bytes: with its slots.
      captures: all that lies as it does: the positions of its captures, and those of its slots.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    captures: tuple[int, ...]

    @functools.cached_property
    def words(self) -> tuple[str, ...]:
        """The scopes of its name, and the last word, without numbers."""
        return tuple([_NUMBER.sub("", word) for word in self.name.split("/")])

    @functools.cached_property
    def numbers(self) -> tuple[int, ...]:
        """The numbers at the ends of these; 0 where there is none, as Keras calls the first of several."""
        return tuple([int(found[1]) if (found := _NUMBER.search(word)) else 0 for word in self.name.split("/")])


@dataclass(frozen=True)
class Laid:
    """A layout along an axis.

    Attributes:
      along: as patterns.
      time: about what a step takes.
      bytes: that lie in parts.
    """

    along: Along
    time: AxisTime
    bytes: int


@dataclass(eq=False)
class MeshLayouts:
    """Finds layouts; `found` does.

    Args:
      program: the function.
      variables: those that may be cut.
      machine: by which speed is told.
      axis: what the axis is called.
    """

    program: Program
    variables: Sequence[Variable]
    machine: Machine
    axis: str

    def found(self, rows: int, columns: int) -> list[Laid]:
        """Return layouts for a mesh of so many rows and columns, the fastest first, those that were met on the way.

        The one that cuts nothing is among them. The last one is once more the one that cuts most.
        """
        times, partners = self._times(), self._partners(columns)
        known: dict[frozenset[tuple[int, Shard]], tuple[dict[int, Shard], AxisTime]] = {}

        def seconds(cuts: Cuts) -> float:
            key = frozenset(cuts.items())
            if key not in known:
                known[key] = dict(cuts), times.of(partners.laid(cuts), rows, columns)
            return known[key][1].seconds

        choices, best, before = sorted(self.choices(columns), key=seconds), dict[int, Shard](), math.inf
        while seconds(best) < before and (before == math.inf or len(known) < self._most_passes):
            before = seconds(best)
            for choice in choices:  # it is taken, whatever was cut otherwise, or taken back
                left = {i: cut for i, cut in best.items() if choice.get(i) != cut}
                best = min([best, {**best, **choice}, left], key=seconds)
        most = dict(best)
        for choice in sorted(choices, key=self._bytes, reverse=True):
            most.update(choice if not any(most.get(i, cut) != cut for i, cut in choice.items()) else {})
        seconds(most)
        ordered = sorted(known.values(), key=lambda pair: pair[1].seconds)
        last = known[frozenset(most.items())]
        return [self._laid(*pair) for pair in [*ordered, last]]

    def choices(self, columns: int) -> list[dict[int, Shard]]:
        """Return what may be cut together: variables with their partners, and alone, in all equal blocks alike."""
        partners, found = self._partners(columns), dict[object, dict[int, Shard]]()
        ways: tuple[Callable[[dict[int, Shard]], dict[int, Shard]], ...] = (dict, partners.of)
        met: tuple[set[tuple[int, int]], ...] = (set(), set())  # alone, and with partners
        pairs = [(own, k) for own in self._large() for k, size in enumerate(own.shape) if size >= columns]
        for variable, dimension in pairs:
            if _PASSES * len(found) >= self._most_passes:
                break
            for known, cut_with in zip(met, ways, strict=True):
                if (variable.captures[0], dimension) not in known:
                    cuts = cut_with(partners.alone(variable.captures[0], dimension))
                    own = self._in_all_blocks(variable, cuts)
                    known.update((i, cut.axis) for i, cut in own.items())
                    found.setdefault(frozenset(own.items()), own)
        return list(found.values())

    @property
    def _most_passes(self) -> int:
        """How often the program is gone through, about, however large it is."""
        return max(_OPERATIONS // len(self.program.ops), _FEWEST)

    def _large(self) -> list[Variable]:
        """Return those of which there is much, the largest first."""
        total, sums = sum(own.bytes for own in self.variables), dict[object, int]()
        for own in self.variables:
            sums[own.words, own.shape] = sums.get((own.words, own.shape), 0) + own.bytes
        large = [own for own in self.variables if sums[own.words, own.shape] >= _LARGE * total]
        return sorted(large, key=lambda own: -own.bytes)

    def _in_all_blocks(self, variable: Variable, cuts: Cuts) -> dict[int, Shard]:
        """Return cuts of one block, of a variable and its partners, in all blocks that are like it."""
        found, named = dict(cuts), {(own.words, own.numbers, own.shape): own for own in self.variables}
        kinds = Counter((own.words, own.shape) for own in self.variables)
        owners = [(own, cuts[own.captures[0]]) for own in self.variables if own.captures[0] in cuts]
        for like in self.variables:
            apart = [k for k, (a, b) in enumerate(zip(like.numbers, variable.numbers, strict=False)) if a != b]
            if (like.words, like.shape) != (variable.words, variable.shape) or len(apart) != 1:
                continue
            [k] = apart
            more, there = like.numbers[k] - variable.numbers[k], list[tuple[Variable | None, Shard]]()
            for own, cut in owners:
                moved = own.words, _moved(own.numbers, k, more), own.shape
                there.append((own if kinds[own.words, own.shape] == 1 else named.get(moved), cut))
            fitting = {i: cut for one, cut in there if one is not None for i in one.captures}
            if all(one is not None for one, _ in there) and all(found.get(i, c) == c for i, c in fitting.items()):
                found |= fitting
        return found

    def _partners(self, columns: int) -> Partners:
        shapes = {i: own.shape for own in self.variables for i in own.captures}
        alike = {i: own.captures for own in self.variables for i in own.captures}
        return Partners(self.program, AxisPlanner(self.axis, columns), shapes, alike)

    def _times(self) -> AxisTimes:
        shapes = [own.shape for own in self.variables]
        sizes = {i: own.bytes // len(own.captures) for own in self.variables for i in own.captures}
        return AxisTimes(self.program, self.axis, self.machine, shapes, written_bytes(self.program, sizes))

    def _bytes(self, cuts: Cuts) -> int:
        return sum(own.bytes for own in self.variables if own.captures[0] in cuts)

    def _laid(self, cuts: Cuts, time: AxisTime) -> Laid:
        own = [(one, cuts[one.captures[0]].axis) for one in self.variables if one.captures[0] in cuts]
        return Laid(patterns(own, [one.name for one in self.variables]), time, self._bytes(cuts))


def _beginning(words: Iterable[str]) -> str:
    """Return with what all of some words begin.

    >>> _beginning(["block_0", "block_12"])
    'block_'
    """
    first, last = min(words), max(words)
    return first[: next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _moved(numbers: Sequence[int], k: int, more: int) -> tuple[int, ...]:
    """Return the numbers in a name of another block."""
    return tuple([number + more if i == k else number for i, number in enumerate(numbers)])


def patterns(cut: Iterable[tuple[Variable, int]], names: Sequence[str]) -> Along:
    """Return variables, and the dimension that is cut of each, as few patterns: one for those of equal blocks.

    Args:
      cut: the variables that are cut.
      names: of all variables, of which a pattern must fit no other ones.
    """
    groups: dict[tuple[tuple[str, ...], int], list[str]] = {}
    for one, dimension in cut:
        groups.setdefault((one.words, dimension), []).append(one.name)
    found: list[tuple[str, int]] = []
    for (_, dimension), own in groups.items():
        scopes = [set(scope) for scope in zip(*[name.split("/") for name in own], strict=True)]
        starts = [(glob.escape(_beginning(scope)), len(scope) > 1) for scope in scopes]
        pattern = "/".join([f"{start}*" if differs else start for start, differs in starts])
        if {name for name in names if fits(name, pattern)} == set(own):
            found.append((pattern, dimension))
            continue
        for name in own:
            is_an_end = sum(fits(other, glob.escape(name)) for other in names) > 1
            found.append((pattern_of(name) if is_an_end else glob.escape(name), dimension))
    return tuple(found)
