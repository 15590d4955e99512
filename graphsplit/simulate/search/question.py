"""What is asked of a search: a function, a machine, the memory of its devices, and what may differ between plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.plan import Plan
from graphsplit.program.program import Program
from graphsplit.simulate.search.candidates import Candidate, Table
from graphsplit.simulate.search.mesh_layouts import Variable

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
