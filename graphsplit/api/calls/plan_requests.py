"""What is to be planned, and how: a traced function for some devices, with its variables as they lie or otherwise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import tensorflow as tf

from graphsplit.api.calls.argument_splitting import Splitting
from graphsplit.api.calls.chosen_devices import stages_asked
from graphsplit.api.layouts.automatic import AutomaticLayouts, choose_layouts
from graphsplit.api.layouts.layout_spellings import AUTO
from graphsplit.api.layouts.learned_layouts import lie_as_asked, lie_in_stages, lie_in_units, slots_in
from graphsplit.api.layouts.mesh_checks import check_asked
from graphsplit.api.layouts.predicted_layouts import VariableLayouts as AskedLayout
from graphsplit.api.layouts.predicted_layouts import lying_elsewhere
from graphsplit.api.layouts.variable_layouts import decide
from graphsplit.api.options import Options
from graphsplit.axes.columns import program_on_mesh
from graphsplit.core.device_mesh import DeviceMesh, device_mesh, mesh_as_if
from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.hosts import host_device
from graphsplit.core.layouts import SINGLE_DEVICE, Layout
from graphsplit.core.sizes import Size
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.planning.costs.exchanges import exchange_bytes_between
from graphsplit.planning.holdings import most_held
from graphsplit.planning.mesh import Mesh, mesh_of
from graphsplit.planning.plan import Plan
from graphsplit.planning.planner import cut_first, gathered_again_or_kept, plan_program
from graphsplit.planning.state import State, state_of
from graphsplit.program.program import Program
from graphsplit.tracing.trace import Trace


@dataclass(frozen=True, eq=False)
class PlanRequest:
    """What is to be planned: a program for some devices. Calls, gradients, predictions, searches, serving ask by it.

    Attributes:
      program: what is planned; its inputs come from this process's memory.
      splitting: how its arguments are cut, and what is to be noted.
      options: all but the devices are taken from here.
      devices: full names. They need not exist here.
      default_device: full name of the default device; None for the `best_default_device`.
      mesh: the devices as a mesh, if they are one.
      trace: what was traced to the program; None for a graph that has no variables of this process.
      lies: how the variables are to lie; what is learned of them while it is planned is told to it.
      state: where variables and tables live; None: as `lies` says.
      is_automatic: whether `"auto"` says where variables without a layout lie.
    """

    program: Program
    splitting: Splitting
    options: Options
    devices: Sequence[str]
    default_device: str | None = None
    mesh: DeviceMesh | None = None
    trace: Trace | None = None
    lies: Arrangement = field(default_factory=Arrangement)
    state: State | None = None
    is_automatic: bool = False

    @property
    def traced(self) -> Trace:
        """The trace, with the program that is planned."""
        assert self.trace is not None
        return replace(self.trace, program=self.program)

    def noting(self, *notes: str) -> PlanRequest:
        """Return the request with more to be noted."""
        return replace(self, splitting=replace(self.splitting, notes=(*self.splitting.notes, *notes)))

    def as_if(
        self, options: Options, devices: Sequence[str], layout: AskedLayout = None, keep: bool = False
    ) -> PlanRequest:
        """Return the request for devices that need not exist, under other options, with variables laid out otherwise.

        Args:
          options, devices: see the attributes.
          layout: of the variables; `"auto"` is chosen for these devices; None: as they lie, others as the options say.
          keep: whether variables that are laid out already lie as they lie, and only the others anew.
        """
        mesh = mesh_as_if(options.mesh, devices)
        is_automatic = AUTO in (layout, options.variables if layout is None else "")
        if layout is None and options.variables not in (None, AUTO):
            layout, keep = options.variables, True
        anew = layout is not None and not is_automatic
        lies = lying_elsewhere(self.lies, self.traced, devices, mesh, on_first=anew and not keep)
        if anew:
            lie_as_asked(lies, self.traced, layout, devices, mesh)
        request = replace(self, options=options, devices=devices, default_device=devices[0], mesh=mesh)
        return replace(request, lies=lies, state=None, is_automatic=is_automatic)

    def planned(self, memory: Callable[[], float | None]) -> tuple[Plan, Arrangement]:
        """Return the plan, and how the variables are to lie for it.

        Args:
          memory: returns the bytes of each device, None where that is not known; asked where that may decide.
        """
        request = self.in_stages()
        return request._laid_out(memory) if self.is_automatic else (request.plan(), request.lies)

    def cut_first(self) -> PlanRequest:
        """Return the request with the stages of its mesh cut, and what is still asked of its plan; see `cut_first`."""
        splitting, stages = _as_read(self.splitting, self.program), stages_asked(self.options, self.devices)
        mesh = _mesh(splitting, self.options, self.devices)
        program, left_to_plan, notes = cut_first(
            self.program, mesh, splitting.layouts, self.options.of_planning, stages
        )
        return replace(self, program=program, options=replace(self.options, recompute=left_to_plan.recompute)).noting(
            *notes
        )

    def in_stages(self) -> PlanRequest:
        """Return what `cut_first` does; variables are to lie on the devices of their stages, and cut between units."""
        cut = self.cut_first()
        if self.mesh is None or self.state is not None:
            return cut
        moved = lie_in_stages(self.lies, cut.traced, self.mesh)
        lie_in_units(self.lies, cut.traced, self.mesh)
        return cut.noting(*moved)

    def plan(self) -> Plan:
        """Return the plan, with the variables where they are to lie."""
        noted = self if self.mesh is None else self.noting(*check_asked(self.program, self.mesh))
        splitting = _as_read(noted.splitting, self.program)
        planned = partial(
            plan_program,
            mesh=_mesh(splitting, self.options, self.devices),
            default_device=self.default_device or self.devices[0],
            input_layouts=splitting.layouts,
            asked=self.options.of_planning,
            stages=stages_asked(self.options, self.devices),
            notes=splitting.notes,
            input_devices=[host_device("")] * len(self.program.inputs),
            default_devices=() if self.default_device else self.devices,
        )
        if self.trace is None:
            return planned(self.program, state=self.state or State())
        state = state_of(self.traced, self.lies) if self.state is None else self.state
        return _plan_in_parts(self.traced, state, planned)

    def plan_like(self, plan: Plan, trace: Trace, layouts: Sequence[Layout]) -> Plan:
        """Return a plan like one that was made: of a function with its gradients, or for arguments that lie elsewhere.

        Args:
          plan: of the function.
          trace, layouts: what is planned, and the layouts of its arguments.
        """
        # shapes of gradients may not follow for every batch size where those of the function do (a note says so)
        split = trace.program.symbols == plan.program.symbols
        mesh, layouts = (plan.mesh, layouts) if split else (Mesh(), [SINGLE_DEVICE] * len(layouts))
        stages = plan.stage_starts.asked if plan.stage_starts else None
        program, left_to_plan, notes = cut_first(trace.program, mesh, layouts, plan.asked, stages)
        planned = partial(
            plan_program,
            mesh=mesh,
            default_device=plan.default_device,
            input_layouts=layouts,
            asked=left_to_plan,
            stages=stages,
            notes=(*plan.notes, *notes),
            input_devices=plan.input_devices,
        )
        return _plan_in_parts(replace(trace, program=program), state_of(trace, self.lies), planned)

    def _laid_out(self, memory: Callable[[], float | None]) -> tuple[Plan, Arrangement]:
        """Do what `planned` does, with variables where `"auto"` has them."""
        slots = slots_in(self.traced)
        chosen = choose_layouts(self.lies, self.traced, slots, self.devices, self.options)
        plan, lies = self._plan_with(chosen, slots, reshard=False)
        limit = memory() if any(chosen.layouts) and not plan.program.symbols else None
        if limit is not None and (bytes_held := most_held(plan)) > limit:
            return self._plan_with(chosen.smaller(bytes_held, limit), slots, reshard=True)
        return plan, lies

    def _plan_with(
        self, chosen: AutomaticLayouts, slots: dict[int, tf.Variable], reshard: bool
    ) -> tuple[Plan, Arrangement]:
        lies, variables = self.lies.copy(), list(self.traced.variables)
        request = replace(self, lies=lies).noting(chosen.why)
        if any(chosen.layouts):
            arguments = (variables, chosen.layouts, slots, self.devices, self.mesh)
            decide(lies, *arguments, reshard_after_forward=reshard, is_automatic=True)
            request = replace(request, state=None)
        return request.plan(), lies


@collection_paused()
def _plan_in_parts(trace: Trace, state: State, planned: partial[Plan]) -> Plan:
    """Return the plan of a traced function whose program is written in the columns and parts of its variables."""
    mesh: Mesh = planned.keywords["mesh"]

    def plan(reshard: bool) -> Plan:
        program, divided_state = program_on_mesh(trace, state, reshard, mesh)
        return planned(program, state=divided_state)

    return gathered_again_or_kept(mesh, plan)


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
