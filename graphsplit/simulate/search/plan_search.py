"""The search: candidates are planned and predicted, and the fastest of those that fit is taken.

What is asked (a `Question`) is a function, a machine, the memory of its devices, and what may differ between plans.

Numbers of devices and layouts of all variables come first. Where one does not fit, it is tried with more and more of
what saves memory, in each way, until it fits; what saves more than one that fits only takes longer, and is left out.
Where the fastest sends or waits for a good part of the step, single variables may lie otherwise. Where one did not fit
before it saved anything, slots may be on the host of the devices. Then come meshes, with the layouts along their axis
that a rough estimate finds fastest; then stages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from graphsplit.core.device_mesh import MeshAxes
from graphsplit.core.progress import phase
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.mesh import mesh_of
from graphsplit.planning.plan import Plan
from graphsplit.program.program import Program
from graphsplit.simulate.prediction.buffers import Memory
from graphsplit.simulate.prediction.predictions import predict_plan
from graphsplit.simulate.search.candidates import Candidate, Table, axes_to_cut_along, least_state
from graphsplit.simulate.search.mesh_layouts import Along, Laid, MeshLayouts, Variable

MakePlan = Callable[[Sequence[str], Candidate], Plan]
"""The names of devices, and what is to be planned for them -> the plan."""


@dataclass(frozen=True, eq=False)
class Question:
    """A function that is to fit.

    Attributes:
      title: the function's name.
      rows: of its batch; 0 for none.
      sizes: bytes of its variables.
      machine: by which speed is predicted.
      limit: bytes that each device may hold.
      table: what may differ between plans; the rest is as the user gave it.
      make_plan: makes a candidate's plan. Nothing runs, and nothing is moved for it.
      program: the function, for one device.
      variables: those that may be cut along an axis of a mesh.
    """

    title: str
    rows: int
    sizes: Sequence[int] = field(repr=False)
    machine: Machine = field(repr=False)
    limit: float
    table: Table
    make_plan: MakePlan = field(repr=False)
    program: Program | None = field(default=None, repr=False)
    variables: Sequence[Variable] = field(default=(), repr=False)


_SHOWN = 8
_UNKNOWN = "known only when it runs, counted as the least: {}"
_WORTH_IT = 0.1  # of the step, in which a device sends or waits: what other layouts and stages could save
_ROUGH = 1.5  # times as long as a plan takes an estimate may say that it does
_NEAR = 1.25  # times as long as the best layouts along an axis others may be estimated to take that are looked at
_ALL = 0.99  # of the bytes of variables: of less than the rest it does not matter where it lies
_COPIES = 6000  # of operations, on all devices, in the plans of a mesh that are looked at: about two seconds


@dataclass(frozen=True)
class Looked:
    """What is known of a candidate.

    Attributes:
      fullest: what the device holds that holds most.
      step_s: what a step takes; endless, if its variables alone do not fit, for which it was not planned.
      idle: the part of the step in which a device sends or waits, the most of all devices that are used.
      used: how many these are.
    """

    fullest: Memory
    step_s: float = math.inf
    idle: float = 0.0
    used: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that a device holds at a time."""
        return self.fullest.peak_bytes

    def peak_if(self, share: float) -> float:
        """Return what it would be if of the bytes that are alive only such a share were left."""
        return self.peak_bytes - (1 - share) * self.fullest.live_bytes


@dataclass(frozen=True)
class Choice:
    """What was compared, and what won.

    Attributes:
      chosen: the winner.
      looked: what is known of each candidate, in the order of the search.
      limit: bytes that each device may hold.
      machine: by which it was predicted.
      left_out: sentences on what could not be compared or is not known.
      why: a sentence on how variables are cut along an axis of a mesh; "" if none is.
    """

    chosen: Candidate
    looked: dict[Candidate, Looked] = field(repr=False)
    limit: float
    machine: Machine = field(repr=False)
    left_out: tuple[str, ...] = ()
    why: str = ""

    @property
    def seconds(self) -> dict[Candidate, float]:
        """What a step takes of those that fit, the fastest first."""
        return fitting(self.looked, self.limit)

    def explain(self) -> str:
        """Return why it was chosen: the fastest of those that fit, and by how much, or the only one."""
        fitting_others = [candidate for candidate in self.seconds if candidate != self.chosen]
        what = f"{self._text(self.chosen)} predicted"
        if len(self.looked) == 1:
            return what
        if not fitting_others:
            return f"{what}; the only one of {len(self.looked)} that fits into {format_bytes(int(self.limit))}"
        seconds = self.seconds[self.chosen]
        other = fitting_others[0].text(0)
        slower = self.seconds[fitting_others[0]] / seconds - 1 if seconds else 0.0
        return f"{what}, the fastest of {len(fitting_others) + 1} that fit; {other} takes {slower:.0%} more"

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for the plan: what was chosen and why, what else was compared, and on what that rests."""
        fitting_others = [candidate for candidate in self.seconds if candidate != self.chosen]
        lines = [f"chosen automatically: {self.explain()}", *([self.why] if self.why else [])]
        lines += [f"compared with {self._text(candidate)}" for candidate in fitting_others[:_SHOWN]]
        large = [candidate for candidate in self.looked if candidate not in self.seconds]
        if large:
            least = min(large, key=lambda candidate: self.looked[candidate].peak_bytes)
            lines.append(
                f"{len(large)} of {len(self.looked)} plans do not fit into {format_bytes(int(self.limit))}; the "
                f"closest of them: {self._text(least)}"
            )
        measured = "measured" if self.machine.calibrated else "from data sheets and assumptions, not validated"
        return (*lines, *self.left_out, f"predicted for {self.machine.name}, figures {measured}")

    def _text(self, candidate: Candidate) -> str:
        """Return what is known of a candidate. Only the chosen one names the variables that lie otherwise in it."""
        looked, text = self.looked[candidate], str(candidate) if candidate == self.chosen else candidate.text(0)
        seconds = f"{looked.step_s * 1e3:.2f} ms, " if looked.step_s < math.inf else ""
        return f"{text}: {seconds}{format_bytes(looked.peak_bytes)} a device"


class Search:
    """Looks at candidates, at each once.

    Attributes:
      question: what is asked.
      looked: what is known of each candidate, in the order of the search.
      left_out: sentences on what could not be compared, and why.
    """

    def __init__(self, question: Question):
        self.question = question
        self.looked: dict[Candidate, Looked] = {}
        self.left_out: list[str] = []
        self._laid: dict[tuple[MeshAxes, tuple[str, ...]], list[Laid]] = {}

    def run(self) -> Choice | None:
        """Return the fastest that fits; None if nothing does."""
        question, table = self.question, self.question.table
        for candidate in table.plain():
            self._save_until_it_fits(candidate)
        best = self._best()
        if best is not None and self.looked[best].idle > _WORTH_IT and best.devices > 1:
            for name in table.large:
                for candidate in table.one_by_one(self._best() or best, name):
                    self.look_at(candidate)
        if table.slots:
            self._look_at_slots_on_host()
        for mesh in table.meshes:
            for axes in axes_to_cut_along(mesh):
                self._look_at_mesh(mesh, axes)
        for candidate in table.pipelines():
            try:
                self._save_until_it_fits(candidate)
            except ArgumentError as error:  # it cannot be cut into so many, or has stages of its own
                where = f"{candidate.stages} stages on {candidate.devices} devices"
                self.left_out.append(f"not compared: {where}: {str(error).splitlines()[0]}")
        if self._best() is None:
            for candidate in table.extremes():
                self.look_at(candidate)
        best = self._best()
        if best is None:
            return None
        notes = tuple(self.left_out)
        return Choice(best, self.looked, question.limit, question.machine, notes, self._why(best))

    def _look_at_slots_on_host(self) -> None:
        """Look at plans whose slots are on the host, where they do not fit on devices and nothing faster fits."""
        question, table = self.question, self.question.table
        large = [candidate for candidate in table.plain() if self.looked[candidate].peak_bytes > question.limit]
        if large and question.machine.host_device is None:
            name = question.machine.name
            self.left_out.append(f"not compared: slots on the host: {name} does not say how fast its host computes")
            return
        for candidate in large:
            best, own_s = self._best(), self.looked[candidate].step_s
            if best is None or own_s == math.inf or own_s < self.looked[best].step_s:
                self._save_until_it_fits(table.slots_on_host(candidate))

    def _look_at_mesh(self, mesh: MeshAxes, axes: tuple[str, ...]) -> None:
        """Look at plans on a mesh: with the layouts that are estimated to be fastest, or, if none fits, smallest."""
        table, ways = self.question.table, self._ways_along(mesh, axes)
        if not ways:
            return
        laid, [*candidates] = self._laid_along(mesh, axes), table.on_mesh(mesh, ways[0], axes)
        cut_bytes = next((laid_out.bytes for laid_out in laid if laid_out.along == ways[0]), 0)
        if mesh.rows == 1 and cut_bytes > _ALL * sum(self.question.sizes):
            del candidates[1:]  # (they are for what is not cut)
        try:
            layout = min(candidates, key=lambda other: self.look_at(other).step_s).layout
            looks_left = max(self._most_looks - len(candidates), 0)
            other_ways = [along for along in ways[1 : 1 + looks_left] if along]
            candidates += [replace(candidates[0], layout=layout, along=along, axes=axes) for along in other_ways]
            fit = [candidate for candidate in candidates if self.fits(candidate)]
            if not fit and laid:
                most = laid[-1].along
                smallest = replace(candidates[-1], layout=table.layouts[-1], along=most, axes=axes if most else ())
                candidates.append(smallest)
            if not fit and not self.fits(candidates[-1]):
                self._save_until_it_fits(min(candidates, key=lambda other: self.looked[other].peak_bytes))
        except (ArgumentError, UnsupportedError) as error:  # it asks for layouts along axes of another mesh
            if table.is_on_mesh:
                raise
            self.left_out.append(f"not compared: mesh {mesh}: {str(error).splitlines()[0]}")

    def _ways_along(self, mesh: MeshAxes, axes: tuple[str, ...]) -> list[Along]:
        """Return the layouts along axes of a mesh that are worth a look, the fastest first; none where none is."""
        table, best = self.question.table, self._best()
        best_looked = None if best is None or table.is_on_mesh else self.looked[best]
        if best_looked is not None and best_looked.used == table.devices[0] and best_looked.idle <= _WORTH_IT:
            return []
        laid = self._laid_along(mesh, axes)
        if not laid or (best_looked is not None and laid[0].time.seconds > _ROUGH * best_looked.step_s):
            return [()] if table.is_on_mesh else []
        fast_ways = dict.fromkeys(
            [laid_out.along for laid_out in laid if laid_out.time.seconds <= _NEAR * laid[0].time.seconds]
        )
        ways = [along for along in fast_ways if along or table.is_on_mesh]  # (with nothing cut a mesh has no use)
        return ways or ([laid[-1].along] if best is None and laid[-1].along else [])

    @property
    def _most_looks(self) -> int:
        """How many plans of a mesh are looked at."""
        program, devices = self.question.program, self.question.table.devices[0]
        return 0 if program is None else _COPIES // (len(program.ops) * devices)

    def _laid_along(self, mesh: MeshAxes, axes: tuple[str, ...]) -> list[Laid]:
        """Return layouts along axes of a mesh as if they were one; see `MeshLayouts.found`. None without a choice."""
        question, columns = self.question, math.prod(mesh.others[name] for name in axes)
        if question.program is None or not question.variables or columns == 1:
            return []
        if (mesh, axes) not in self._laid:
            axis = axes[0]
            machine = question.machine.covering(question.table.devices[0])
            rows = mesh_of([""] * mesh.rows, question.rows)
            search = MeshLayouts(question.program, question.variables, machine, axis, columns, rows)
            self._laid[mesh, axes] = search.found()
            if search.left_out:
                self.left_out.append(f"not compared: mesh {mesh}: {search.left_out}")
        return self._laid[mesh, axes]

    def _why(self, best: Candidate) -> str:
        """Return why variables are cut so along an axis of a mesh; "" if none is."""
        laid = self._laid.get((best.mesh, best.axes), []) if best.along else []
        if not laid:
            return ""
        time = next(layout.time for layout in laid if layout.along == best.along)
        none = next(layout.time for layout in laid if not layout.along)
        return (
            f"along {' and '.join(map(repr, best.axes))} about {time.computing_s * 1e3:.2f} ms computing and "
            f"{time.sending_s * 1e3:.2f} ms sending {format_bytes(int(time.sent_bytes))}, estimated for "
            f"{len(laid) - 1} layouts; with none cut {none.seconds * 1e3:.2f} ms"
        )

    def again(self, chosen: Candidate) -> Choice | None:
        """Return what was chosen before for other sizes, with variables as they lie now; None if it does not fit here.

        (A last, smaller batch is not searched for, and moves no variables.)
        """
        layouts = self.question.table.layouts
        same = chosen.layout in layouts
        candidate = chosen if same else replace(chosen, layout=layouts[0], exceptions=(), along=(), axes=())
        if not self.fits(candidate):
            return None
        question, note = self.question, "it was chosen for an earlier call, and fits this one as well"
        return Choice(candidate, self.looked, question.limit, question.machine, (note,))

    def fits(self, candidate: Candidate) -> bool:
        """Return whether a candidate fits."""
        return self.look_at(candidate).peak_bytes <= self.question.limit

    def look_at(self, candidate: Candidate) -> Looked:
        """Return what is known of a candidate, which is planned and predicted."""
        if candidate not in self.looked or self.looked[candidate].step_s == math.inf:
            with phase(f"plan {len(self.looked) + 1}, {candidate}"):
                self.looked[candidate] = self._predict(candidate)
        return self.looked[candidate]

    def _predict(self, candidate: Candidate) -> Looked:
        question = self.question
        machine = question.machine.covering(candidate.devices)
        plan = question.make_plan(machine.names(candidate.devices), candidate)
        prediction = predict_plan(plan, machine, title=question.title, layout=candidate.layout)
        if prediction.unknown and (note := _UNKNOWN.format(prediction.unknown[0])) not in self.left_out:
            self.left_out.append(note)
        fullest = max(prediction.of_devices.values(), key=lambda memory: memory.peak_bytes)
        idle = max([1.0 - prediction.shares[device].computing for device in prediction.of_devices], default=0.0)
        return Looked(fullest, prediction.step_s, idle, prediction.used)

    def _best(self) -> Candidate | None:
        """Return the fastest of those that fit."""
        return next(iter(fitting(self.looked, self.question.limit)), None)

    def _save_until_it_fits(self, plain: Candidate) -> None:
        """Look at a candidate and, where it does not fit, at what saves more, in each way until that fits."""
        table = self.question.table
        waiting: list[tuple[Candidate, str, tuple[int, ...]]] = [(plain, "", ())]
        while waiting:
            candidate, way, peaks = waiting.pop(0)
            if (way and candidate in self.looked) or self._is_needless(candidate):
                continue
            if self._variables_of(candidate) > self.question.limit:
                self.looked[candidate] = Looked(Memory(state_bytes=self._variables_of(candidate)))
                return
            looked, best = self.look_at(candidate), self._best()
            if best is not None and looked.step_s >= self.looked[best].step_s:
                continue  # (what saves more takes longer still)
            for name, candidates in table.saving_more(candidate).items():
                peaks_before = peaks if name == way else ()
                if len(peaks_before) > 1 and looked.peak_bytes >= min(peaks_before[-2:]):
                    continue  # it has saved nothing twice
                enough = [other for other, share in candidates if looked.peak_if(share) <= self.question.limit]
                waiting += [(other, name, (*peaks_before, looked.peak_bytes)) for other in enough[:1]]

    def _is_needless(self, candidate: Candidate) -> bool:
        """Return whether another one fits that saves no more."""
        fits = fitting(self.looked, self.question.limit)
        return any(self.question.table.saves_as_much(candidate, other) for other in fits)

    def _variables_of(self, candidate: Candidate) -> int:
        if candidate.exceptions or candidate.along or candidate.stages > 1:
            return 0  # (not known before there is a plan)
        return least_state(candidate.layout, self.question.sizes, candidate.devices)


def fitting(looked: Mapping[Candidate, Looked], limit: float) -> dict[Candidate, float]:
    """Return what a step takes of those candidates that fit, the fastest first."""
    seconds = {c: looked_at.step_s for c, looked_at in looked.items() if looked_at.peak_bytes <= limit}
    return dict(sorted(seconds.items(), key=lambda pair: pair[1]))
