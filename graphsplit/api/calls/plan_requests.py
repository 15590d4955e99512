"""What is to be planned, and how: a traced function for some devices, with its variables as they lie or otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from graphsplit.api.calls.argument_splitting import Splitting
from graphsplit.api.calls.chosen_devices import stages_asked
from graphsplit.api.layouts.automatic import AutomaticLayouts, choose_layouts
from graphsplit.api.layouts.layout_spellings import AUTO
from graphsplit.api.layouts.learned_layouts import lie_as_asked, lie_in_stages, lie_in_units, slots_in
from graphsplit.api.layouts.mesh_checks import check_asked
from graphsplit.api.layouts.predicted_layouts import Layout, lying_elsewhere
from graphsplit.api.layouts.variable_layouts import decide
from graphsplit.core.device_mesh import DeviceMesh, device_mesh, mesh_as_if
from graphsplit.core.hosts import host_device
from graphsplit.core.sizes import Size
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.emission.axes.columns import program_on_mesh
from graphsplit.planning.costs.exchanges import exchange_bytes_between
from graphsplit.planning.decisions import Divide
from graphsplit.planning.mesh import Mesh, mesh_of
from graphsplit.planning.options import Options
from graphsplit.planning.plan import Plan
from graphsplit.planning.planner import cut_first, plan_program
from graphsplit.planning.state import State, state_of
from graphsplit.planning.text.held_text import most_held
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What is to be planned: a traced function, for some devices.

    Attributes:
      trace: the function.
      splitting: how its arguments are cut, and what is to be noted.
      options: all but the devices are taken from here.
      devices: full names. They need not exist here.
      home: full name of the default device; None for the `default_home`.
      mesh: the devices as a mesh, if they are one.
      lies: how the variables are to lie; what is learned of them while it is planned is told to it.
      find_state: says where variables and tables of a trace live; None: as `lies` says.
    """

    trace: Trace
    splitting: Splitting
    options: Options
    devices: Sequence[str]
    home: str | None = None
    mesh: DeviceMesh | None = None
    lies: Arrangement = field(default_factory=Arrangement)
    find_state: Callable[[Trace], State] | None = None

    def noting(self, *notes: str) -> PlanRequest:
        """Return the request with more to be noted."""
        return replace(self, splitting=replace(self.splitting, notes=(*self.splitting.notes, *notes)))

    def as_if(self, options: Options, devices: Sequence[str]) -> PlanRequest:
        """Return the request for devices that need not exist, under other options; see `lying_elsewhere`."""
        mesh = mesh_as_if(options.mesh, devices)
        return replace(self, options=options, devices=devices, home=devices[0], mesh=mesh)

    def cut_first(self) -> PlanRequest:
        """Return the request with the stages of its mesh cut, and what is still asked of its plan; see `cut_first`."""
        splitting, stages = _as_read(self.splitting, self.trace.program), stages_asked(self.options, self.devices)
        mesh = _mesh(splitting, self.options, self.devices)
        program, asked, notes = cut_first(self.trace.program, mesh, splitting.layouts, self.options, stages)
        options, trace = replace(self.options, recompute=asked.recompute), replace(self.trace, program=program)
        return replace(self, trace=trace, options=options).noting(*notes)

    def in_stages(self) -> PlanRequest:
        """Return what `cut_first` does; variables are to lie on the devices of their stages, and cut between units."""
        cut = self.cut_first()
        if self.mesh is None or self.find_state is not None:
            return cut
        moved = lie_in_stages(self.lies, cut.trace, self.mesh)
        lie_in_units(self.lies, cut.trace, self.mesh)
        return cut.noting(*moved)

    def plan(self) -> Plan:
        """Return the plan, with the variables where they are to lie."""
        noted = self if self.mesh is None else self.noting(*check_asked(self.trace.program, self.mesh))
        state = state_of(self.trace, self.lies) if self.find_state is None else self.find_state(self.trace)
        divide = partial(program_on_mesh, self.trace)
        return plan_for(self.trace.program, noted.splitting, self.options, self.devices, self.home, state, divide)


def plan_for(
    program: Program,
    splitting: Splitting,
    options: Options,
    devices: Sequence[str],
    home: str | None,
    state: State,
    divide: Divide | None = None,
) -> Plan:
    """Decide what of a program runs where, given how its inputs are split, which come from this process's memory.

    Args:
      program, splitting, options, devices, state: see `trace_and_plan`.
      home: full name; None for the `default_home`.
      divide: see `plan_program`.
    """
    splitting = _as_read(splitting, program)
    return plan_program(
        program,
        mesh=_mesh(splitting, options, devices),
        home=home or devices[0],
        input_layouts=splitting.layouts,
        state=state,
        asked=options,
        stages=stages_asked(options, devices),
        notes=splitting.notes,
        input_devices=[host_device("")] * len(program.inputs),
        homes=() if home else devices,
        divide=divide,
    )


def _as_read(splitting: Splitting, program: Program) -> Splitting:
    return splitting.whole() if isinstance(splitting.batch, Size) and not program.batch_is_unknown else splitting


def _mesh(splitting: Splitting, options: Options, devices: Sequence[str]) -> Mesh:
    """Return the shards of a batch."""
    stages = stages_asked(options, devices)
    mesh = None if options.mesh.is_of_rows else device_mesh(options.mesh, devices)
    heads = mesh.columns[0] if mesh is not None else stages.heads if stages is not None else devices
    shards = mesh_of(heads, splitting.batch, options.shares, options.micro_batches)
    if mesh is not None and mesh.others:
        shards = replace(shards, columns=mesh.columns, others=tuple(mesh.others.items()))
    most = exchange_bytes_between(devices, options.tuning["exchange_bytes"])
    return replace(shards, exchange_bytes=most)


def plan_laid_out(request: PlanRequest, memory: Callable[[], float | None]) -> tuple[Plan, Arrangement]:
    """Return the plan with variables where `"auto"` has them, and how they are to lie.

    Args:
      request: what is planned.
      memory: returns the bytes of each device, None where that is not known.
    """
    trace, devices = request.trace, request.devices
    variables, slots = list(trace.variables), slots_in(trace)

    def make_plan(chosen: AutomaticLayouts, reshard: bool) -> tuple[Plan, Arrangement]:
        own = replace(request, lies=request.lies.copy()).noting(chosen.why)
        if any(chosen.layouts):
            given = (variables, chosen.layouts, slots, devices, request.mesh)
            decide(own.lies, *given, reshard_after_forward=reshard, is_automatic=True)
            own = replace(own, find_state=None)
        return own.plan(), own.lies

    chosen = choose_layouts(request.lies, trace, slots, devices, request.options)
    plan, lies = make_plan(chosen, reshard=False)
    limit = memory() if any(chosen.layouts) and not plan.program.symbols else None
    if limit is not None and (held := most_held(plan)) > limit:
        return make_plan(chosen.smaller(held, limit), reshard=True)
    return plan, lies


def plan_as_if(request: PlanRequest, layout: Layout, keep: bool = False, memory: float | None = None) -> Plan:
    """Return the plan for devices that need not exist, with variables laid out otherwise.

    Args:
      request: see `PlanRequest.as_if`.
      layout: of the variables; `"auto"` is chosen for these devices; None: as they lie, others as the options say.
      keep: whether variables that are laid out already lie as they lie, and only the others anew.
      memory: bytes of each, if they are known.
    """
    trace, given = request.trace, (request.devices, request.mesh)
    automatic = AUTO in (layout, request.options.variables if layout is None else "")
    if layout is None and request.options.variables not in (None, AUTO):
        layout, keep = request.options.variables, True
    anew = layout is not None and not automatic
    lies = lying_elsewhere(request.lies, trace, *given, at_home=anew and not keep)
    if anew:
        lie_as_asked(lies, trace, layout, *given)
    request = replace(request, lies=lies).in_stages()
    return plan_laid_out(request, lambda: memory)[0] if automatic else request.plan()
