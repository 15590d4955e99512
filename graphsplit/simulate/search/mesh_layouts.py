"""Layouts along an axis of a mesh: which variables are cut along which dimension, found from what a program does.

Each large variable, cut along each of its dimensions, has partners (`partners`); together they are one choice, and
so is the variable alone. Equal blocks of a network, told by the numbers in their names, are cut alike. Choices are put
together by descent: each is added, or taken back, while that makes the step faster by `axis_times`.
"""

from __future__ import annotations

import functools
import glob
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from graphsplit.core.layouts import Shard
from graphsplit.core.patterns import fits, pattern_of
from graphsplit.emission.axes.partners import Partners
from graphsplit.emission.axes.plans import AxisPlanner
from graphsplit.planning.amounts import count_text
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.mesh import Mesh
from graphsplit.program.program import Program
from graphsplit.simulate.search.axis_times import AxisTime, AxisTimes

Cuts = Mapping[int, Shard]
"""How captures are cut that are, by position."""

Along = tuple[tuple[str, int], ...]
"""Patterns of names, and the dimension that is cut of the variables that they fit."""

_LARGE = 1 / 50  # of all bytes, of a variable and those like it: smaller ones are cut only as partners
_OPERATIONS, _FEWEST = 100_000, 12  # of a program, as often as a layout of it is estimated: about ten seconds
_NAMED = 3  # variables, of those that are not looked at
_NUMBER = re.compile(r"_?(\d+)$")


@dataclass(frozen=True)
class Variable:
    """A variable that may be cut.

    Attributes:
      name: by which users know it.
      shape: of it.
      bytes: of it.
      captures: all that lies as it does: the positions of its captures, and those of its slots.
      slot_bytes: of its slots.
    """

    name: str
    shape: tuple[int, ...]
    bytes: int
    captures: tuple[int, ...]
    slot_bytes: int = 0

    @property
    def all_bytes(self) -> int:
        """Those of its slots, too."""
        return self.bytes + self.slot_bytes

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
      columns: how many devices it has.
      rows: the shards of the batch, along the other axis.

    Attributes:
      left_out: what was not looked at because the function is large; "" if everything was.
    """

    program: Program
    variables: Sequence[Variable]
    machine: Machine
    axis: str
    columns: int
    rows: Mesh
    left_out: str = field(default="", init=False)
    _known: dict[frozenset[tuple[int, Shard]], tuple[dict[int, Shard], AxisTime]] = field(
        default_factory=dict, init=False
    )

    def found(self) -> list[Laid]:
        """Return layouts, the fastest first, those that were met on the way.

        The one that cuts nothing is among them. The last one is once more the one that cuts most.
        """
        best, before = dict[int, Shard](), math.inf
        self._seconds(best)
        choices = sorted(self._choices(), key=self._seconds)
        while self._seconds(best) < before:
            before = self._seconds(best)
            for choice in choices:  # it is taken, whatever was cut otherwise, or taken back
                left = {i: cut for i, cut in best.items() if choice.get(i) != cut}
                best = min([best, *self._affordable({**best, **choice}, left)], key=self._seconds)
        most = dict(best)
        for choice in sorted(choices, key=self._bytes, reverse=True):
            most.update(choice if not any(most.get(i, cut) != cut for i, cut in choice.items()) else {})
        self._seconds(most)
        ordered = sorted(self._known.values(), key=lambda pair: pair[1].seconds)
        last = self._known[frozenset(most.items())]
        return [self._laid(*pair) for pair in [*ordered, last]]

    def _seconds(self, cuts: Cuts) -> float:
        """Return about what a step takes; each layout is estimated once."""
        key = frozenset(cuts.items())
        if key not in self._known:
            self._known[key] = dict(cuts), self._times.of(self._partners.laid(cuts))
        return self._known[key][1].seconds

    def _affordable(self, *layouts: dict[int, Shard]) -> list[dict[int, Shard]]:
        """Return the layouts whose times are known, and others as long as few have been estimated."""
        found = [cuts for cuts in layouts if self._left > 0 or frozenset(cuts.items()) in self._known]
        if len(found) < len(layouts):
            self.left_out = self.left_out or "some combinations of variables that are cut"
        return found

    @property
    def _left(self) -> int:
        """How many layouts may be estimated still."""
        return max(_OPERATIONS // len(self.program.ops), _FEWEST) - len(self._known)

    def _choices(self) -> list[dict[int, Shard]]:
        """Return what may be cut together: variables alone, and with their partners, in all equal blocks alike."""
        found, alone, together = dict[object, dict[int, Shard]](), set[tuple[int, int]](), set[tuple[int, int]]()
        keys = [(own, k) for own in self._large() for k, size in enumerate(own.shape) if size >= self.columns]
        half = self._left // 2  # (the others are for combinations)
        missed = dict[str, None]()
        for variable, dimension in keys:
            key = variable.captures[0], dimension
            if key in alone and key in together:
                continue
            if len(found) >= half:
                missed[variable.name] = None
                continue
            own = self._partners.alone(*key)
            ways = [(alone, own)] if key not in alone else []
            ways += [(together, self._partners.of(own))] if key not in together else []
            for met, cuts in ways:
                everywhere = self._in_all_blocks(variable, cuts)
                met.update((i, cut.axis) for i, cut in everywhere.items())
                found.setdefault(frozenset(everywhere.items()), everywhere)
        if missed:
            named = ", ".join([*list(missed)[:_NAMED], *(["..."] if len(missed) > _NAMED else [])])
            self.left_out = f"ways to cut {count_text(len(missed), 'large variable')}: {named}"
        return list(found.values())

    def _large(self) -> list[Variable]:
        """Return those of which there is much, the largest first."""
        total, sums = sum(own.all_bytes for own in self.variables), Counter[object]()
        for own in self.variables:
            sums[own.words, own.shape] += own.all_bytes
        large = [own for own in self.variables if sums[own.words, own.shape] >= _LARGE * total]
        return sorted(large, key=lambda own: -own.all_bytes)

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

    @functools.cached_property
    def _planner(self) -> AxisPlanner:
        return AxisPlanner(self.axis, self.columns)

    @functools.cached_property
    def _partners(self) -> Partners:
        shapes = {i: own.shape for own in self.variables for i in own.captures}
        alike = {i: own.captures for own in self.variables for i in own.captures}
        return Partners(self.program, self._planner, shapes, alike)

    @functools.cached_property
    def _times(self) -> AxisTimes:
        ops, shapes = self.program.ops, [own.shape for own in self.variables]
        written = {tensor.op for i in self.program.writes for tensor in ops[i].inputs}
        changed = [own for own in self.variables if not written.isdisjoint(own.captures)]
        gradients = {ops[own.captures[0]].name: own.bytes for own in changed}  # (slots are made of the same sum)
        return AxisTimes(self.program, self._planner, self.rows, self.machine, shapes, gradients)

    def _bytes(self, cuts: Cuts) -> int:
        return sum(own.all_bytes for own in self.variables if own.captures[0] in cuts)

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
