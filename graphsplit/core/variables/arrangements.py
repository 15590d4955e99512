"""How variables lie, or are to lie: what decides about layouts asks and tells an `Arrangement`, and nothing moves.

What enters: decisions about variables. What leaves: the same decisions, for whoever plans; and, once a call runs, the
variables as they were decided (`apply`): the only place where a call changes a layout.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import canonical_name
from graphsplit.core.layouts import Cut, MeshDivision, in_groups, part_shapes
from graphsplit.core.variables.copied_variables import VariableCopies
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import (
    VariableParts,
    bytes_of_variable,
    parts_of_variable,
    tell_functions,
)
from graphsplit.core.variables.records import Lying, noted_of, record_of
from graphsplit.core.variables.running_calls import calls


def lying_now(variable: tf.Variable) -> Lying:
    """Return how a variable lies."""
    record, parts = noted_of(variable), parts_of_variable(variable)
    noted = _ORDINARY if record is None else record.lying
    return noted if parts is None else replace(noted, division=parts.division, layout=parts.layout, over=parts.over)


def forget_stage(variable: tf.Variable) -> None:
    """Let a variable belong to no stage."""
    record = record_of(variable)
    record.lying = replace(record.lying, stage=())


_ORDINARY = Lying()


@dataclass(frozen=True)
class FirstMove:
    """What a first call moves before it runs, as variables lie now.

    Attributes:
      variables, bytes: how many, and how large they are altogether.
      device, most_bytes: the device that holds most while they move, and how many bytes: of the variables that move,
        and of those that the function uses.
    """

    variables: int
    bytes: int
    device: str
    most_bytes: int


class Arrangement:
    """How variables are to lie: as they do, but for those of which something else was decided.

    Args:
      default_device: where all ordinary variables count as being, on devices that need not exist; "" for where they
        are.
      alike: one in which the same was decided.
    """

    def __init__(self, default_device: str = "", alike: Arrangement | None = None):
        self.default_device = default_device
        self.reason: str = "" if alike is None else alike.reason  # what asks for it, if a graph being built cannot
        self._lying_before: dict[int, Lying] = {} if alike is None else dict(alike._lying_before)
        self._decided: dict[int, tuple[tf.Variable, Lying]] = {} if alike is None else dict(alike._decided)
        self._then: list[Callable[[], Any]] = [] if alike is None else list(alike._then)

    def copy(self) -> Arrangement:
        """Return one in which the same was decided so far."""
        return Arrangement(self.default_device, self)

    def of(self, variable: tf.Variable) -> Lying:
        """Return how a variable is to lie."""
        decided = self._decided.get(id(variable))
        return lying_now(variable) if decided is None else decided[1]

    def device_of(self, variable: tf.Variable) -> str:
        """Return where an ordinary variable is."""
        return self.default_device or canonical_name(variable.device)

    def devices_of(self, variable: tf.Variable) -> set[str]:
        """Return where a variable is, or its parts are."""
        division = self.of(variable).division
        return {self.device_of(variable)} if division is None else set(division.devices)

    def decide(self, variable: tf.Variable, **changes: Any) -> None:
        """Let a variable lie otherwise; see `Lying` for what may change."""
        lying = self.of(variable)
        self._lying_before.setdefault(id(variable), lying)
        self._decided[id(variable)] = variable, replace(lying, **changes)

    def divide(self, variable: tf.Variable, division: MeshDivision, layout: Any, over: Sequence[str] = ()) -> None:
        """Let a variable be several; see `VariableParts` for `over`."""
        self.decide(variable, division=division, layout=layout, over=tuple(over) or division.devices, stays="")

    def share_out(self, variable: tf.Variable, cut: Cut, layout: Any, over: Sequence[str]) -> None:
        """Let a variable lie as a layout says, one of `PLACES`; of one part where it is, it stays."""
        if cut.devices == (self.device_of(variable),) and not cut.groups:
            self.decide(variable, division=None, stays=layout)
        else:
            self.divide(variable, in_groups(cut), layout, over)

    def cut_of(self, variable: tf.Variable, layout: Any) -> Cut | None:
        """Return how a variable of a layout, one of `PLACES`, is cut: whole on its own device, where it stays there."""
        lying = self.of(variable)
        if lying.division is not None:
            return lying.cut if lying.layout == layout else None
        return Cut(0, variable.shape[0], 1, devices=(self.device_of(variable),)) if lying.stays == layout else None

    def owned_bytes(self, variables: Sequence[tf.Variable], devices: Sequence[str]) -> dict[str, int]:
        """Return the bytes that each device owns of variables that are divided."""
        bytes_by_device = dict.fromkeys(devices, 0)
        for variable in variables:
            lying, shape = self.of(variable), variable.shape
            if lying.division is not None and lying.layout not in ("home", "replicated"):
                sizes = [math.prod(part) for part in part_shapes(lying.division, shape.as_list())]
                owned = [*zip(lying.division.devices, sizes, strict=True)]
            else:
                owned = [(self.device_of(variable), shape.num_elements())] if self.cut_of(variable, "sharded") else []
            for device, count in owned:
                bytes_by_device[device] = bytes_by_device.get(device, 0) + count * variable.dtype.size
        return bytes_by_device

    def then(self, run: Callable[[], Any]) -> None:
        """Have something run once all lie as it was decided."""
        self._then.append(run)

    @property
    def holds(self) -> bool:
        """Whether those variables lie as they did of which something was decided."""
        return all(lying_now(v) == self._lying_before[id(v)] for v, _ in self._decided.values())

    @property
    def is_applied(self) -> bool:
        """Whether nothing is decided that was not done."""
        return not self._decided and not self._then

    @property
    def is_noticed(self) -> bool:
        """Whether it takes time, or something is said, when it is applied: not if all lies so, and nothing follows."""
        return bool(self._then or self.moves)

    @property
    def moves(self) -> list[tuple[tf.Variable, Lying]]:
        """The variables that lie otherwise than was decided, and what was."""
        return [(v, lying) for v, lying in self._decided.values() if _place(lying_now(v)) != _place(lying)]

    def first_move(self, variables: Sequence[tf.Variable]) -> FirstMove | None:
        """Return what `apply` moves; None for nothing, or for devices that are not here.

        Args:
          variables: which devices hold besides.
        """
        moves = [] if self.default_device else [(v, lying) for v, lying in self.moves if not _only_reshards(v, lying)]
        if not moves:
            return None
        every = {id(v): v for v in (*variables, *[v for v, _ in moves])}.values()
        bytes_held = sum([next(_while_moving(variable, lying_now(variable))) for variable in every], Counter[str]())
        most = bytes_held.copy()
        for variable, lying in moves:
            alone = list(_while_moving(variable, lying))
            bytes_held.subtract(alone[0])
            for moment in alone:
                most |= bytes_held + moment
            bytes_held.update(alone[-1])
        device = max(most, key=most.__getitem__)
        return FirstMove(len(moves), sum([bytes_of_variable(v) for v, _ in moves]), device, most[device])

    def divisions(self, named: Mapping[int, tf.Variable]) -> dict[int, MeshDivision]:
        """Return how those of some variables are to be several that are, by the same keys."""
        return {k: division for k, variable in named.items() if (division := self.of(variable).division) is not None}

    def apply(self) -> None:
        """Move what lies otherwise than was decided, while no call runs that uses it."""
        assert not self.default_device  # (nothing lies on devices that need not exist)
        with calls.lock:
            moves = [(v, lying) for v, lying in self.moves if not _reshard(v, lying)]
            wait_for_calls([v for v, _ in moves])
            tell_functions([v for v, lying in moves if lying.division is not None])
            for variable, lying in moves:
                if (parts := parts_of_variable(variable)) is not None:
                    parts.release(variable)
                if lying.division is not None:
                    is_copy = _is_a_copy(variable, lying)
                    how = (lying.division,) if is_copy else (lying.division, lying.layout, lying.over)
                    (VariableCopies if is_copy else VariableParts)(variable, *how).take_apart()
            for variable, lying in self._decided.values():
                record_of(variable).lying = replace(lying, division=None, layout="home", over=())
            for run in self._then:
                run()
            self._decided, self._lying_before, self._then = {}, {}, []


def _only_reshards(variable: tf.Variable, lying: Lying) -> bool:
    """Return whether a variable is to stay where it is."""
    return _place(lying_now(variable).resharding(lying.reshards)) == _place(lying)


def _reshard(variable: tf.Variable, lying: Lying) -> bool:
    """Let what stays where it is be dropped after the forward pass, or be kept; return whether it stays."""
    stays = _only_reshards(variable, lying)
    if stays and lying.division is not None:
        record_of(variable).parts.reshard(lying.division)
    return stays


def _while_moving(variable: tf.Variable, lying: Lying) -> Iterator[Counter[str]]:
    """Yield what a variable takes on each device, at each moment from now on until it lies as was decided.

    It is put together first, and then divided; the side that has the value is emptied once the other one has it.
    """
    parts, whole = parts_of_variable(variable), _bytes_by_device(variable, None)
    if parts is not None and parts.in_parts:
        yield (bytes_now := _bytes_by_device(variable, parts.division))
        if not isinstance(parts, VariableCopies):
            yield bytes_now + whole
    yield whole
    if lying.division is not None:
        after = _bytes_by_device(variable, lying.division)
        if not _is_a_copy(variable, lying):
            yield whole + after
        yield after


def _bytes_by_device(variable: tf.Variable, division: MeshDivision | None) -> Counter[str]:
    """Return what a variable takes on each device, whole where it was made or divided."""
    bytes_by_device = Counter[str]()
    if division is None:
        bytes_by_device[canonical_name(variable.device)] = bytes_of_variable(variable)
    else:
        for device, shape in zip(division.devices, part_shapes(division, variable.shape.as_list()), strict=True):
            bytes_by_device[device] += math.prod(shape) * variable.dtype.size
    return bytes_by_device


def _is_a_copy(variable: tf.Variable, lying: Lying) -> bool:
    """Return whether a variable is to be one of its copies."""
    devices = () if lying.division is None else lying.division.devices
    return lying.layout == "replicated" and canonical_name(variable.device) in devices


def _place(lying: Lying) -> tuple[Any, ...]:
    return lying.division, None if lying.division is None else (lying.layout, lying.over)


def wait_for_calls(variables: Sequence[tf.Variable]) -> None:
    """Wait until no call runs that uses variables whose layout is set; see `RunningCalls.wait_for`.

    No handle is held afterwards: `tell_functions` knows by who else holds it whether a function was traced with it.
    """
    with raw_handles():
        calls.wait_for([variable.handle for variable in variables], "A variable whose layout is set")
