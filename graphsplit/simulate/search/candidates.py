"""Candidates: the plans that may be chosen, and the table of what may differ between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphsplit.api.options import Options
from graphsplit.core.device_mesh import BATCH_AXIS, LAYOUTS, MeshAxes
from graphsplit.core.patterns import pattern_of
from graphsplit.planning.amounts import count_text
from graphsplit.planning.schedule.recomputation import Recompute

SAVINGS: Mapping[str, Mapping[Any, float]] = {
    "recompute": {None: 1.0, 0.5: 0.5, "blocks": 0.0},
    "micro_batches": {1: 1.0, 2: 1 / 2, 4: 1 / 4, 8: 1 / 8, 16: 1 / 16},
}
"""What saves memory and takes time: fields of a candidate, their values from none to most, and which share of what is
alive each leaves at least. (Another way to save, keeping values on the host, is a line here, a field of `Candidate` of
this name, and what it is called in words.)"""
_IN_PIPELINE = 8  # micro-batches: of so many, the pipeline of a few stages is full most of the time
_SCHEDULE = "1f1b"
_NAMED = 4  # variables of a layout
_AXIS = "model"  # what the axis is called of a mesh that is chosen


def _counted(names: Sequence[str]) -> str:
    """Return how many variables these are, or patterns, each of which may fit several."""
    return count_text(len(names), "pattern" if "*" in "".join(names) else "variable")


@dataclass(frozen=True)
class Candidate:
    """A plan that may be chosen.

    Attributes:
      devices: how many.
      layout: of all variables.
      micro_batches: parts of each device's rows.
      recompute: what the backward pass makes again.
      stages: into which the function is cut, each with devices of its own; 1 for none.
      exceptions: variables that lie otherwise, by name.
      mesh: in which the devices are arranged, if they are.
      along: variables that are cut along axes of the mesh: patterns, and which dimension.
      axes: those axes, along all of which each is cut.
    """

    devices: int
    layout: str
    micro_batches: int = 1
    recompute: Recompute = None
    stages: int = 1
    exceptions: tuple[tuple[str, str], ...] = ()
    mesh: MeshAxes = MeshAxes()  # noqa: RUF009  # frozen
    along: tuple[tuple[str, int], ...] = ()
    axes: tuple[str, ...] = ()

    @property
    def columns(self) -> int:
        """How many devices there are for each along the axis of the rows: those along the other axes of its mesh."""
        return self.mesh.each

    def with_rows(self, rows: int) -> Candidate:
        """Return the plan for another number of devices, or of rows of its mesh."""
        return replace(self, devices=rows * self.columns, mesh=self.mesh and self.mesh.grown(rows))

    @property
    def options(self) -> dict[str, Any]:
        """The options of `parallelize` that it means."""
        stages = {"stages": self.stages, "schedule": _SCHEDULE} if self.stages > 1 else {}
        mesh = {"mesh": self.mesh} if self.mesh else {}
        return {**{name: getattr(self, name) for name in SAVINGS}, **stages, **mesh}

    @property
    def layouts(self) -> str | Mapping[str, Any]:
        """The layout of the variables, as `set_variable_layout` takes it."""
        layout_by_pattern: dict[str, Any] = {pattern_of(name): layout for name, layout in self.exceptions}
        in_rows = self.mesh.rows > 1 and self.layout in LAYOUTS[1:]
        for pattern, layout in self._dimensions.items():
            layout_by_pattern[pattern] = (layout, self.layout) if in_rows else layout
        return {**layout_by_pattern, "*": self.layout} if layout_by_pattern else self.layout

    @property
    def _dimensions(self) -> dict[str, tuple[str | tuple[str, ...] | None, ...]]:
        axes = self.axes if len(self.axes) > 1 else next(iter(self.axes), None)
        return {pattern: (*[None] * k, axes) for pattern, k in self.along}

    def __str__(self) -> str:
        return self.text(_NAMED)

    def text(self, most: int) -> str:
        """Return what it is; of variables that lie otherwise, so many by name, and for 0 how many they are.

        >>> Candidate(4, "home", along=(("*/kernel", 1),), axes=("model",)).text(0)
        "4 devices, variables home but 1 pattern (None, 'model')"
        """
        named: dict[object, list[str]] = {}
        for name, layout in (*self.exceptions, *self._dimensions.items()):
            named.setdefault(layout, []).append(name)
        more_by_layout = {
            layout: f" and {len(names) - most} more" if len(names) > most else "" for layout, names in named.items()
        }
        lists = {layout: ", ".join(names[:most]) + more_by_layout[layout] for layout, names in named.items()}
        counts = {layout: _counted(names) for layout, names in named.items()}
        apart = [f"{(lists if most else counts)[layout]} {layout}" for layout in named]
        but = f" but {'; '.join(apart)}" if apart else ""
        words = [count_text(self.devices, "device"), *([f"mesh {self.mesh}"] if self.mesh else [])]
        words += [f"variables {self.layout}{but}"]
        words += [f"{self.stages} stages"] if self.stages > 1 else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        words += [f"recompute={self.recompute!r}"] if self.recompute is not None else []
        return ", ".join(words)


@dataclass(frozen=True)
class Table:
    """What may differ between plans.

    Attributes:
      devices: numbers of devices, the largest first: plans for fewer of them save no memory otherwise.
      layouts: of all variables.
      savings: see `SAVINGS`; of what the user gave, that value alone.
      stages: into how many the function may be cut.
      large: names of variables that may lie otherwise than the others.
      meshes: in which all devices may be arranged.
      is_on_mesh: whether they are in any case.
      slots: names of those of an optimizer, which the host of the devices may keep and update.
    """

    devices: tuple[int, ...]
    layouts: tuple[str, ...]
    savings: Mapping[str, tuple[Any, ...]]
    stages: tuple[int, ...] = ()
    large: tuple[str, ...] = ()
    meshes: tuple[MeshAxes, ...] = ()
    is_on_mesh: bool = False
    slots: tuple[str, ...] = ()

    def plain(self) -> Iterator[Candidate]:
        """Return the plans that save no memory: numbers of devices by layouts, which are all one on one device."""
        least = {name: values[0] for name, values in self.savings.items()}
        for count in () if self.is_on_mesh else self.devices:
            for layout in self.layouts if count > 1 else self.layouts[:1]:
                yield Candidate(count, layout, **least)

    def on_mesh(
        self, mesh: MeshAxes, along: tuple[tuple[str, int], ...] = (), axes: tuple[str, ...] = ()
    ) -> Iterator[Candidate]:
        """Return the plans on a mesh that save no memory, by the layout of what is not cut along some axes of it."""
        least = {name: values[0] for name, values in self.savings.items()}
        for layout in self.layouts:
            yield Candidate(self.devices[0], layout, **least, mesh=mesh, along=along, axes=axes if along else ())

    def pipelines(self) -> Iterator[Candidate]:
        """Return the plans in stages, with as many micro-batches as these need."""
        least = {name: values[0] for name, values in self.savings.items()}
        parts = [count for count in self.savings["micro_batches"] if count <= _IN_PIPELINE]
        for stages in self.stages:
            yield Candidate(self.devices[0], self.layouts[0], **{**least, "micro_batches": parts[-1]}, stages=stages)

    def one_by_one(self, candidate: Candidate, name: str) -> Iterator[Candidate]:
        """Return a candidate with one variable laid out otherwise."""
        for layout in self.layouts:
            if layout != candidate.layout:
                yield replace(candidate, exceptions=(*candidate.exceptions, (name, layout)))

    def slots_on_host(self, candidate: Candidate) -> Candidate:
        """Return a candidate with all slots in the memory of the devices' host."""
        return replace(candidate, exceptions=tuple([(name, "host") for name in self.slots]))

    def saving_more(self, candidate: Candidate) -> dict[str, list[tuple[Candidate, float]]]:
        """Return what saves more than a candidate does in one way, from less to more; nothing for fewer devices.

        With each comes the share that it leaves at least of what is alive in the candidate.
        """
        if candidate.devices < self.devices[0]:
            return {}
        more_by_way = {}
        for name, values in self.savings.items():
            current = getattr(candidate, name)
            later_values, shares = values[values.index(current) + 1 :], SAVINGS[name]
            more_by_way[name] = [(replace(candidate, **{name: v}), shares[v] / shares[current]) for v in later_values]
        return more_by_way

    def extremes(self) -> Iterator[Candidate]:
        """Return the plans of the last layout that save nothing else, most in one way, and most in all."""
        least = {name: values[0] for name, values in self.savings.items()}
        most = {name: values[-1] for name, values in self.savings.items()}
        mesh = self.meshes[0] if self.is_on_mesh else MeshAxes()
        for saved in (least, *[{**least, name: most[name]} for name in most], most):
            yield Candidate(self.devices[0], self.layouts[-1], **saved, mesh=mesh)

    def saves_as_much(self, candidate: Candidate, other: Candidate) -> bool:
        """Return whether a candidate is another one that saves at least as much in all ways."""
        same = {name: getattr(other, name) for name in self.savings}
        return replace(candidate, **same) == other and all(
            values.index(getattr(candidate, name)) >= values.index(same[name]) for name, values in self.savings.items()
        )


def counts_of_devices(fewest: int, most: int) -> tuple[int, ...]:
    """Return all devices, powers of two of them, and one; the largest first.

    >>> counts_of_devices(1, 6)
    (6, 4, 2, 1)
    """
    return tuple([n for n in range(most, fewest - 1, -1) if n in (1, most) or n.bit_count() == 1])


def meshes_of(devices: int, rows: int) -> tuple[MeshAxes, ...]:
    """Return the meshes of all devices that have an axis beside the batch's, of which each row has rows of the batch.

    >>> [str(mesh) for mesh in meshes_of(6, 2)]
    ['(batch=2, model=3)', '(model=6)']
    """
    counts = [count for count in range(devices, 0, -1) if devices % count == 0 and devices // count > 1]
    sizes = [(*([(BATCH_AXIS, n)] if n > 1 else []), (_AXIS, devices // n)) for n in counts if n <= max(rows, 1)]
    return tuple([MeshAxes(axes) for axes in sizes])


def axes_to_cut_along(mesh: MeshAxes) -> list[tuple[str, ...]]:
    """Return the axes of a mesh along which variables may be cut: all of them, and if they are several, each alone.

    >>> axes_to_cut_along(MeshAxes((("batch", 2), ("model", 2), ("expert", 2))))
    [('model', 'expert'), ('model',), ('expert',)]
    """
    return list(dict.fromkeys([tuple(mesh.others), *[(name,) for name in mesh.others]]))


def savings_left_open(options: Options, rows: int) -> dict[str, tuple[Any, ...]]:
    """Return the ways to save that a user left open; of others what was given.

    Args:
      options: those that the function has.
      rows: of each device: more micro-batches than these there are not.
    """
    values_by_way: dict[str, tuple[Any, ...]] = {}
    for name, shares in SAVINGS.items():
        values = (None,) if name == "recompute" and options.jit_compile else tuple(shares)
        is_open = getattr(options, name) == values[0]
        values_by_way[name] = values if is_open else (getattr(options, name),)
        if is_open and name == "micro_batches":
            values_by_way[name] = tuple([count for count in values if count <= max(rows, 1)])
    return values_by_way


def large_names(sizes: Mapping[str, int], share: float = 1 / 8, most: int = 3) -> tuple[str, ...]:
    """Return the names of the variables that are a good part of all, the largest first; none if there is only one.

    >>> large_names({"a": 1, "b": 80, "c": 19})
    ('b', 'c')
    """
    large = [name for name, size in sizes.items() if size >= share * sum(sizes.values())]
    return tuple(sorted(large, key=lambda name: -sizes[name])[:most]) if len(sizes) > 1 else ()


def least_state(layout: str, sizes: Sequence[int], devices: int) -> int:
    """Return the bytes of variables that some device holds at least, whatever the plan is; 0 if that is not known."""
    whole = sum(sizes)
    return {"home": whole, "replicated": whole, "sharded": whole // devices}.get(layout, 0)
