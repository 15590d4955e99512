"""The search of `plan="auto"`: plans are predicted, and the fastest that fits is taken.

First numbers of devices and layouts of all variables. Then, where the fastest of them sends or waits for a good part of
the step, single variables otherwise, and stages; where none fits, more and more micro-batches, which need less memory.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from graphsplit.api.layouts.layout_targets import name_of
from graphsplit.core.errors import ArgumentError
from graphsplit.costs.machine import Machine
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.plan import Plan
from graphsplit.prediction.predictions import Prediction, predict_plan
from graphsplit.prediction.state_bytes import state_bytes
from graphsplit.tracing.trace import Trace

LAYOUTS = ("home", "mirrored", "sharded")
_MICRO_BATCHES = (2, 4, 8, 16)
_IN_PIPELINE = 8  # micro-batches: of so many, the pipeline of a few stages is full most of the time
_SCHEDULE = "1f1b"
_SHOWN = 8
_WORTH_IT = 0.1  # of the step, in which a device sends or waits: what other layouts and stages could save
_LARGE, _MOST_LARGE = 1 / 8, 3  # the part of all variables' bytes of those that are looked at one by one, and how many


@dataclass(frozen=True)
class Candidate:
    """A plan that may be chosen.

    Attributes:
      devices: how many.
      layout: of all variables.
      micro_batches: parts of each device's rows.
      stages: into which the function is cut, each with devices of its own; 1 for none.
      others: variables that lie otherwise, by name.
    """

    devices: int
    layout: str
    micro_batches: int = 1
    stages: int = 1
    others: tuple[tuple[str, str], ...] = ()

    @property
    def options(self) -> dict[str, Any]:
        """The options of `parallelize` that it means."""
        stages = {"stages": self.stages, "schedule": _SCHEDULE} if self.stages > 1 else {}
        return {"micro_batches": self.micro_batches, **stages}

    @property
    def layouts(self) -> str | Mapping[str, str]:
        """The layout of the variables, as `set_variable_layout` takes it."""
        return (
            {**{glob.escape(name): own for name, own in self.others}, "*": self.layout} if self.others else self.layout
        )

    def __str__(self) -> str:
        plural = "s" if self.devices != 1 else ""
        but = f" but {', '.join(f'{name} {own}' for name, own in self.others)}" if self.others else ""
        stages = f", {self.stages} stages" if self.stages > 1 else ""
        micro = f", {self.micro_batches} micro-batches" if self.micro_batches > 1 else ""
        return f"{self.devices} device{plural}, variables {self.layout}{but}{stages}{micro}"


@dataclass(frozen=True)
class Choice:
    """What was compared, and what won.

    Attributes:
      chosen: the winner.
      compared: predicted seconds and the most bytes of a device, by candidate, in the order of the search.
      limit: bytes that each device may hold.
      machine: by which it was predicted.
      left_out: sentences on what could not be compared, and why.
    """

    chosen: Candidate
    compared: dict[Candidate, tuple[float, int]] = field(repr=False)
    limit: float
    machine: Machine = field(repr=False)
    left_out: tuple[str, ...] = ()

    def explain(self) -> str:
        """Return why it was chosen: the fastest of those that fit, and by how much, or the only one."""
        seconds, peak = self.compared[self.chosen]
        fitting = [c for c, (_, count) in self.compared.items() if count <= self.limit and c != self.chosen]
        what = f"{self.chosen}: {seconds * 1e3:.2f} ms and {format_bytes(peak)} a device predicted"
        if not fitting:
            return f"{what}; the only one of {len(self.compared)} that fits into {format_bytes(int(self.limit))}"
        second = min(fitting, key=lambda c: self.compared[c][0])
        slower = self.compared[second][0] / seconds - 1 if seconds else 0.0
        return f"{what}, the fastest of {len(self.compared)}; {second} takes {slower:.0%} more"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the plan: what was chosen and why, what else was compared, and on what that rests."""
        others = sorted((c for c in self.compared if c != self.chosen), key=lambda c: self.compared[c][0])
        lines = [f"chosen automatically: {self.explain()}"]
        for candidate in others[:_SHOWN]:
            seconds, peak = self.compared[candidate]
            fits = "" if peak <= self.limit else f", does not fit into {format_bytes(int(self.limit))}"
            lines.append(f"compared with {candidate}: {seconds * 1e3:.2f} ms, {format_bytes(peak)} a device{fits}")
        measured = "measured" if self.machine.calibrated else "from data sheets and assumptions, not validated"
        return (*lines, *self.left_out, f"predicted for {self.machine.name}, figures {measured}")


MakePlan = Callable[[Sequence[str], Candidate], Plan]


def choose(
    title: str,
    trace: Trace,
    devices: int,
    machine: Machine,
    memory: float | None,
    make_plan: MakePlan,
    layouts: Sequence[str] = LAYOUTS,
    fewest: int = 1,
) -> Choice:
    """Return the fastest plan that fits.

    Args:
      title: of the function.
      trace: of the function.
      devices: how many there are.
      machine: by which speed is predicted.
      memory: bytes that each device may hold; None: all it has.
      make_plan: device names and what is to be planned -> plan.
      layouts: those of variables that are compared; the first for one device.
      fewest: the smallest number of devices: those on which variables lie.

    Raises:
      ArgumentError: if nothing fits: with what would.
    """
    limit = machine.device.memory_bytes if memory is None else memory
    search = _Search(title, trace, devices, machine, limit, make_plan, layouts)
    return search.choose(fewest)


class _Search:
    def __init__(
        self,
        title: str,
        trace: Trace,
        devices: int,
        machine: Machine,
        limit: float,
        make_plan: MakePlan,
        layouts: Sequence[str],
    ):
        self._title = title
        self._trace = trace
        self._devices = devices
        self._machine = machine
        self._limit = limit
        self._make_plan = make_plan
        self._layouts = layouts
        self._compared: dict[Candidate, tuple[float, int]] = {}
        self._idle: dict[Candidate, float] = {}
        self._left_out: list[str] = []

    def choose(self, fewest: int) -> Choice:
        """Return the fastest that fits."""
        for candidate in _plain(range(fewest, self._devices + 1), self._layouts):
            self._look_at(candidate)
        best = self._best()
        if best is not None:
            best = self._one_by_one(best) if self._idle[best] > _WORTH_IT else best
            self._stages(_IN_PIPELINE)
        for count in _MICRO_BATCHES if best is None else ():
            for layout in self._layouts_for(self._devices):
                self._look_at(Candidate(self._devices, layout, count))
            best = self._best()
            if best is not None:
                break
        if best is None:
            self._stages(_MICRO_BATCHES[-1])
        best = self._best()
        if best is None:
            self._refuse()
        return Choice(best, self._compared, self._limit, self._machine, tuple(self._left_out))

    def _look_at(self, candidate: Candidate) -> Prediction:
        machine = self._machine.covering(candidate.devices)
        plan = self._make_plan(machine.names(candidate.devices), candidate)
        state = state_bytes(self._trace, plan.program, plan.state, plan.home)
        found = predict_plan(plan, machine, title=self._title, state=state, layout=candidate.layout)
        self._compared[candidate] = found.step_s, max(found.memory_bytes.values(), default=0)
        self._idle[candidate] = max([1.0 - share.computing for share in found.shares.values()], default=0.0)
        return found

    def _fits(self, candidate: Candidate) -> bool:
        return self._compared[candidate][1] <= self._limit

    def _best(self) -> Candidate | None:
        fitting = [candidate for candidate in self._compared if self._fits(candidate)]
        return min(fitting, key=lambda candidate: self._compared[candidate][0], default=None)

    def _layouts_for(self, devices: int) -> Sequence[str]:
        return self._layouts if devices > 1 else self._layouts[:1]

    def _one_by_one(self, best: Candidate) -> Candidate:
        """Return the best with large variables laid out otherwise, one after the other, where that is faster."""
        if best.devices == 1 or len(self._layouts) == 1:
            return best
        for name in _large(self._trace):
            for layout in self._layouts:
                if layout != best.layout:
                    self._look_at(replace(best, others=(*best.others, (name, layout))))
            best = self._best() or best
        return best

    def _stages(self, micro_batches: int) -> None:
        """Look at pipelines: all devices one behind the other, and two stages side by side."""
        for stages in dict.fromkeys((self._devices, 2)):
            if stages < 2 or self._devices % stages:
                continue
            try:
                self._look_at(Candidate(self._devices, self._layouts[0], micro_batches, stages))
            except ArgumentError as error:  # it cannot be cut into so many, or has stages of its own
                why = str(error).splitlines()[0]
                self._left_out.append(f"not compared: {stages} stages on {self._devices} devices: {why}")

    def _refuse(self) -> NoReturn:
        """Raise `ArgumentError`, and say what would fit."""
        devices = self._devices
        self._check_tensors(self._look_at(Candidate(devices, self._layouts_for(devices)[-1])))
        least = min(self._compared, key=lambda candidate: self._compared[candidate][1])
        count, size = len(self._compared), self._compared[least][1]
        would = self._what_would(replace(least, layout=self._layouts[-1], stages=1, others=()))
        raise ArgumentError(
            f"{self._title} does not fit: of {count} plans for up to {devices} device{'s' if devices != 1 else ''} the "
            f"smallest is that for {least}, with {format_bytes(size)} on a device, and each may hold "
            f"{format_bytes(int(self._limit))}. {would}"
        )

    def _check_tensors(self, prediction: Prediction) -> None:
        """Raise `ArgumentError` if a device could not even hold the largest tensor."""
        found = [(count, name) for memory in prediction.memory.values() for name, count in memory.largest]
        if found and max(found)[0] > self._limit:
            count, name = max(found)
            raise ArgumentError(
                f"memory: each device may hold {format_bytes(int(self._limit))}, and the largest tensor has "
                f"{format_bytes(count)} on a device ({name!r}, with variables {prediction.layout}). Allow more."
            )

    def _what_would(self, least: Candidate) -> str:
        """Say what would fit: the smallest number of devices, found by doubling and then by halving."""
        few = many = self._devices
        while many < 8 * self._devices:
            if self._machine.network is None and 2 * many > self._machine.most_devices:
                break
            few, many = many, 2 * many
            if self._would(least, many):
                break
        else:
            many = 0
        if not many or many == few or not self._fits(replace(least, devices=many)):
            return "Not even that for more devices fits. Allow more, or choose a smaller batch."
        while many - few > 1:
            middle = (few + many) // 2
            few, many = (few, middle) if self._would(least, middle) else (middle, many)
        found = replace(least, devices=many)
        return f"{many} devices would do: {found}, {format_bytes(self._compared[found][1])} on each."

    def _would(self, least: Candidate, devices: int) -> bool:
        candidate = replace(least, devices=devices)
        self._look_at(candidate)
        return self._fits(candidate)


def _plain(devices: range, layouts: Sequence[str]) -> Iterator[Candidate]:
    """Return plans for all devices, and for powers of two of them."""
    counts = [count for count in devices if count in (1, devices[-1]) or count.bit_count() == 1]
    for count in reversed(counts):
        for layout in layouts if count > 1 else layouts[:1]:
            yield Candidate(count, layout)


def _large(trace: Trace) -> list[str]:
    """Return the names of the variables that are a good part of all, the largest first; none if there is only one."""
    sizes: dict[str, int] = {}
    for variable in trace.variables:
        count = variable.shape.num_elements() or 0
        sizes[name_of(variable)] = sizes.get(name_of(variable), 0) + count * int(variable.dtype.size or 0)
    large = [name for name, size in sizes.items() if size >= _LARGE * sum(sizes.values())]
    return sorted(large, key=lambda name: -sizes[name])[:_MOST_LARGE] if len(sizes) > 1 else []
