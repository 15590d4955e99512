"""Partitioning: which device owns which part of variables that are divided over devices.

Large variables are cut into slices, others are owned whole, greedily balanced by bytes. An optimizer's slots lie
where their variable lies, and count with it: no device owns more than its share of all bytes and one variable that is
not cut, with its slots. (The partitioning of ZeRO, Rajbhandari et al. 2020, by variables where they are small enough,
so that the work on thousands of biases is not multiplied by the number of devices.)

Every device reads every slice, so slices for all devices are messages that grow with the square of their number. From
nine devices on there are fewer: no slice with its slots is more of a device's share than a variable may be that is not
cut, so shares stay as equal.

Of the smallest the bytes do not matter, but that each takes as many operations to update as a large one: they are
balanced by their number.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from graphsplit.core.layouts import Cut
from graphsplit.planning.costs.work import SMALL_BYTES

STAYS = 256
"""Up to so many bytes nothing is cut; counters and rates stay where they are."""

_LARGE = 3  # a variable is cut if it and its slots are larger than this part of a device's share of all bytes

FEWEST_PARTS = 8
"""What is cut has so many parts at least, or one for each device: fewer links would carry all of it to all others. (Of
ResNet50 on 64 GPUs, 2 parts and more cost 3 to 5 % of a predicted step, 8 and more cost nothing.)"""

PART_BYTES = 1 << 20
"""Larger parts are cut further, over as many devices as there are: their bytes take longer than their number."""


@dataclass(frozen=True)
class Held:
    """A variable.

    Attributes:
      name: with what it belongs to.
      shape: its shape.
      item: bytes of an entry.
      head: which of all variables it is a slot of, if that is known.
      is_integer: whether its entries are integers, or truth values.
    """

    name: str
    shape: tuple[int, ...]
    item: int
    head: int | None = None
    is_integer: bool = False

    @property
    def bytes(self) -> int:
        """The bytes of all entries."""
        return math.prod(self.shape) * self.item


@dataclass(frozen=True)
class Share:
    """Where a variable lies: how it is cut, and the number of the device of each part."""

    cut: Cut
    devices: tuple[int, ...]


def shares(variables: Sequence[Held], devices: int, loads: Sequence[int] | None = None) -> list[Share | None]:
    """Return where each variable lies; None: where it is.

    Args:
      variables: all that are divided.
      devices: how many.
      loads: the bytes that each device owns already.

    >>> [share.devices for share in shares([Held("a", (64, 32), 4), Held("b", (96,), 4), Held("c", (80,), 4)], 2)]
    [(0, 1), (1,), (0,)]
    """
    load, updates = list(loads) if loads else [0] * devices, [0] * devices
    share_of_variable: list[Share | None] = [None] * len(variables)
    heads = [_head(variables, i) for i in range(len(variables))]
    families: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i, variable in enumerate(variables):
        families.setdefault((heads[i], variable.shape), []).append(i)
    for share, family in _cut_families(variables, families.values(), load):
        for i in family:
            share_of_variable[i] = share
    whole: dict[int, list[int]] = {}
    for i, variable in enumerate(variables):
        if share_of_variable[i] is not None:
            continue
        if _stays(variable, len(families[heads[i], variable.shape]) > 1):
            updates[0] += 1
        else:
            whole.setdefault(heads[i], []).append(i)
    for family in sorted(whole.values(), key=lambda family: -sum(variables[i].bytes for i in family)):
        is_small = all(variables[i].bytes <= SMALL_BYTES for i in family)
        # (what belongs to nobody runs on the first device, so that is the last to get more)
        d = min(range(devices), key=lambda d: (updates[d] if is_small else 0, load[d], -d))
        updates[d] += len(family)
        for i in family:
            length = variables[i].shape[0] if variables[i].shape else 1
            share_of_variable[i] = Share(Cut(0, length, 1), (d,))
            load[d] += variables[i].bytes
    return share_of_variable


def _stays(variable: Held, has_slots: bool) -> bool:
    """Return whether a variable stays where it is: a counter, a rate, a sum of a metric, the state of a generator."""
    is_number = variable.shape == () and not has_slots
    return variable.bytes <= STAYS and (variable.is_integer or is_number or not variable.bytes)


def _cut_families(
    variables: Sequence[Held], families: Iterable[Sequence[int]], load: list[int]
) -> Iterator[tuple[Share, Sequence[int]]]:
    """Yield how variables are cut that are large together with their slots, and add what devices own of them.

    Large ones are first, so that small ones even out. Those that are about as large stay in order: they are used one
    after the other, so their slices should be on different devices.
    """
    large = (sum(variable.bytes for variable in variables) + sum(load)) / len(load) / _LARGE
    bytes_of = [(sum([variables[i].bytes for i in family]), family) for family in families]
    for family_bytes, family in sorted(bytes_of, key=lambda pair: -pair[0].bit_length()):
        first = variables[family[0]]
        if family_bytes <= large or max(variables[i].bytes for i in family) <= STAYS:
            continue
        share = _cut_over(first, load, max(FEWEST_PARTS, first.bytes / PART_BYTES, family_bytes / large))
        if share is not None:
            for d, length in zip(share.devices, share.cut.lengths, strict=True):
                load[d] += family_bytes // share.cut.length * length
            yield share, family


def _cut_over(variable: Held, load: Sequence[int], fewest: float) -> Share | None:
    """Return how a variable is cut over the devices that have least; None if it has no axis for that.

    Of devices that have alike much, it takes some of each host.
    """
    most = min(len(load), math.ceil(fewest))
    axis = _axis(variable.shape, most)
    if axis is None:
        return None
    cut = Cut(axis, variable.shape[axis], min(most, variable.shape[axis]))
    apart = len(load) // cut.parts
    on = sorted(range(len(load)), key=lambda d: (load[d], d % apart, d))[: cut.parts]
    return Share(cut, tuple(sorted(on) if cut.parts == len(load) else on))


def _axis(shape: Sequence[int], devices: int) -> int | None:
    """Return the axis to cut: the first that has an entry for each device, or the longest."""
    enough = [axis for axis, size in enumerate(shape) if size >= devices]
    longest = max(range(len(shape)), key=lambda axis: shape[axis], default=None)
    axis = enough[0] if enough else longest
    return axis if axis is not None and shape[axis] > 1 else None


def _head(variables: Sequence[Held], position: int) -> int:
    """Return the variable that another one belongs to: its head, or one whose name is in its own, word for word.

    Of several of one name (those that were given none), it is the one at the same place among them.
    """
    variable = variables[position]
    if variable.head is not None:
        return variable.head
    fits = _fitting(variable, variables)
    place = sum(other.name == variable.name and other.shape == variable.shape for other in variables[:position])
    return fits[place % len(fits)] if fits else position


def head_by_name(held: Held, earlier: Sequence[Held]) -> int | None:
    """Return which of earlier variables one belongs to by its name; None if by its name it belongs to none.

    >>> earlier = [Held("dense_1/kernel", (3,), 4), Held("dense/kernel", (3,), 4)]
    >>> head_by_name(Held("adam/dense_kernel_momentum", (3,), 4), earlier)
    1
    """
    return next(iter(_fitting(held, earlier)), None)


def _fitting(held: Held, variables: Sequence[Held]) -> list[int]:
    """Return the variables of the same shape with the longest of names that are, word for word, in another one's.

    `bias_1` does not belong to `bias`: names that differ in their last number only are those of layers alike.
    """
    plain_name, unnumbered = _plain(held.name), _unnumbered(held.name)
    fits = [
        i
        for i, other in enumerate(variables)
        if other.shape == held.shape
        and len(other.name) < len(held.name)
        and _plain(other.name) in plain_name
        and _unnumbered(other.name) != unnumbered
    ]
    closest = max([len(variables[i].name) for i in fits], default=0)
    return [i for i in fits if len(variables[i].name) == closest]


@functools.cache
def _plain(name: str) -> str:
    return f"_{re.sub(r'[^a-zA-Z0-9]', '_', name)}_"


@functools.cache
def _unnumbered(name: str) -> str:
    return re.sub(r"(_\d+)?(:\d+)?$", "", name)
