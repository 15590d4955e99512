"""From a function and options to a plan.

What enters: a function, the structure and shapes of its arguments, options, and full names of devices. What leaves: the
trace and its plan. In between, variables get the layouts that options ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.argument_splitting import Splitting, open_shapes, open_sparse_shapes, resolve_split
from graphsplit.api.calls.chosen_devices import check_no_others, stages_asked
from graphsplit.api.calls.traces import Choices
from graphsplit.api.layouts.automatic import AutomaticLayouts, choose_layouts
from graphsplit.api.layouts.layout_spellings import AUTO
from graphsplit.api.layouts.lying_in_stages import lay_in_stages
from graphsplit.api.layouts.lying_together import lay_together, slots_in
from graphsplit.api.layouts.mesh_checks import check_asked, check_mesh, mesh_lain_on
from graphsplit.api.layouts.predicted_layouts import Layout, divisions_for, divisions_wanted
from graphsplit.api.layouts.told_variables import lay_out_in_units, learn_units
from graphsplit.api.layouts.variable_layouts import lay_out, lay_out_later
from graphsplit.core import structures
from graphsplit.core.device_mesh import DeviceMesh, device_mesh, mesh_as_if
from graphsplit.core.devices import canonical_name, short_name
from graphsplit.core.gpus.logical_gpus import gpu_memory_bytes
from graphsplit.core.hosts import host_device
from graphsplit.core.keras_internals import open_scopes
from graphsplit.core.progress import phase, say
from graphsplit.core.sizes.symbolic_sizes import Size, has_sizes
from graphsplit.core.variables.parted_variables import layout_changes, parts_of
from graphsplit.emission.axes.on_mesh import program_on_mesh
from graphsplit.planning.decisions import Divide
from graphsplit.planning.mesh import Mesh, mesh_of
from graphsplit.planning.options import Options
from graphsplit.planning.plan import Plan
from graphsplit.planning.planner import cut_first, plan_program
from graphsplit.planning.state import State, state_as_if, state_of
from graphsplit.planning.text.held_text import most_held
from graphsplit.program.program import Program
from graphsplit.program.stages import Stage, check_stages
from graphsplit.tracing.graph_to_program import CallSizes
from graphsplit.tracing.trace import Trace, TracedFunction, trace_function


def trace_and_plan(
    fn: Callable[..., Any],
    call: structures.Tree,
    arguments: structures.Branch,
    options: Options,
    devices: Sequence[str],
    home: str,
    find_state: Callable[[Trace], State] = state_of,
    notes: Sequence[str] = (),
    runs: bool = True,
    choices: Choices | None = None,
    functions: dict[Hashable, TracedFunction] | None = None,
) -> tuple[Trace, Plan]:
    """Trace `fn` for one structure of arguments, and decide what runs where.

    Args:
      fn: called as the structure `call` of `(args, kwargs)` says.
      call: see there. Sizes that it leaves open are open for `fn`: the plan has them from `arguments`.
      arguments: the same leaves by the names under which users know them.
      options: all but the devices are taken from here.
      devices, home: full names. They need not exist here. Where the options give no home, see `default_home`.
      find_state: says where variables and tables of a trace live.
      notes: for the plan.
      runs: whether the plan is to run: then an automatic one lays the variables out.
      choices: automatic ones that were made for the function before; a new one is put there.
      functions: those that were traced before, by what they are valid for; None to trace anew.
    """
    splitting = resolve_split(options.split, arguments)  # what does not fit is said before the user's code runs
    names = [path for path, _ in structures.paths(arguments)]
    with phase("tracing"):
        traced = trace_call(fn, call, names, splitting, bool(options.jit_compile), functions)
    check_no_others(traced.program, options)
    check_stages(traced.program.all_stages(), len(devices))
    if options.is_automatic and not options.mesh:
        options = replace(options, mesh=mesh_lain_on(traced, devices))
    grid = device_mesh(options.mesh, devices) if options.mesh else None
    if grid is not None and grid.others and (placed := traced.program.all_stages()):
        grid = replace(grid, stages=tuple([stage.devices for stage in placed if len(stage.devices) > 1]))
    check_mesh(traced, grid)
    lay_out_later()
    moved = lay_together(traced)
    splitting = replace(splitting, notes=(*splitting.notes, *variables_elsewhere(traced), *notes, *moved))
    if options.is_automatic:
        known = Choices() if choices is None else choices
        return traced, _chosen_plan(traced, splitting, options, devices, known, arguments, runs)
    whole = traced
    traced, splitting, options = _in_stages(traced, splitting, options, devices, grid, find_state)
    with phase("planning"):
        near = None if options.tuning["default_device"] is None else home
        if options.variables == AUTO:
            memory = partial(gpu_memory_bytes, devices)
            plan = _plan_laid_out(traced, splitting, options, devices, near, grid, memory, find_state, runs)
            return whole, plan
        return whole, _plan_traced(traced, splitting, options, devices, near, find_state(traced), grid)


def trace_call(
    fn: Callable[..., Any],
    call: structures.Tree,
    names: Sequence[str],
    splitting: Splitting,
    compiled: bool,
    functions: dict[Hashable, TracedFunction] | None = None,
) -> Trace:
    """Trace `fn` for a call; see `trace_and_plan`. The trace has the sizes of the call, `fn` those that `call` says."""
    functions, valid = {} if functions is None else functions, (call, open_scopes(), layout_changes())
    if valid not in functions:
        functions[valid] = trace_function(fn, call, names, compiled)
    seen = structures.leaves(call)
    if all(leaf.shape == shape or has_sizes(shape) for leaf, shape in zip(seen, splitting.shapes, strict=True)):
        return functions[valid].read(names, splitting.shapes)
    open_values = open_sparse_shapes(splitting, call)
    sizes = CallSizes(splitting.shapes, {i: splitting.sparse[i] for i in open_values}, open_values)
    return functions[valid].read(names, open_shapes(splitting, seen, names), sizes)


def _cut_first(
    traced: Trace, splitting: Splitting, options: Options, devices: Sequence[str]
) -> tuple[Trace, Splitting, Options]:
    """Return a traced function with the stages of its mesh, and what is still asked of its plan; see `cut_first`."""
    read, stages = _as_read(splitting, traced.program), stages_asked(options, devices)
    program, asked, notes = cut_first(traced.program, _mesh(read, options, devices), read.layouts, options, stages)
    splitting = replace(splitting, notes=(*splitting.notes, *notes))
    return replace(traced, program=program), splitting, replace(options, recompute=asked.recompute)


def _in_stages(
    traced: Trace,
    splitting: Splitting,
    options: Options,
    devices: Sequence[str],
    grid: DeviceMesh | None,
    find_state: Callable[[Trace], State] = state_of,
) -> tuple[Trace, Splitting, Options]:
    """Return what `_cut_first` does; the variables move to the devices of their stages, and are cut between units.

    Variables that are elsewhere by `find_state` do not move: the plan is for them as if they lay there.
    """
    traced, splitting, options = _cut_first(traced, splitting, options, devices)
    if grid is None:
        return traced, splitting, options
    moved = lay_in_stages(traced, grid) if find_state is state_of else ()
    lay_out_in_units(traced, find_state(traced).divisions, grid)
    return traced, replace(splitting, notes=(*splitting.notes, *moved)), options


def _plan_in_stages(
    traced: Trace,
    splitting: Splitting,
    options: Options,
    devices: Sequence[str],
    home: str | None,
    grid: DeviceMesh | None,
) -> Plan:
    """Return the plan that was chosen, with the variables as they lie and where they have to; see `_plan_traced`."""
    traced, splitting, options = _in_stages(traced, splitting, options, devices, grid)
    return _plan_traced(traced, splitting, options, devices, home, state_of(traced), grid)


def _plan_traced(
    traced: Trace,
    splitting: Splitting,
    options: Options,
    devices: Sequence[str],
    home: str | None,
    state: State,
    grid: DeviceMesh | None,
) -> Plan:
    """Return the plan of a traced function; see `plan_for`."""
    if grid is not None:
        splitting = replace(splitting, notes=(*splitting.notes, *check_asked(traced.program, grid)))
    divide = partial(program_on_mesh, traced)
    return plan_for(traced.program, splitting, options, devices, home, state, divide)


def _plan_laid_out(
    traced: Trace,
    splitting: Splitting,
    options: Options,
    devices: Sequence[str],
    home: str | None,
    grid: DeviceMesh | None,
    memory: Callable[[], float | None],
    find_state: Callable[[Trace], State] = state_of,
    runs: bool = False,
) -> Plan:
    """Return the plan with variables where `"auto"` has them; if it is to run, lay them out so.

    Args:
      traced, splitting, options, devices, find_state, runs: see `trace_and_plan`.
      home: see `plan_for`.
      grid: the mesh, if any.
      memory: returns the bytes of each device, None where that is not known.
    """
    variables, slots = list(traced.variables), slots_in(traced)

    def make_plan(chosen: AutomaticLayouts, reshard: bool) -> Plan:
        if not any(chosen.layouts):
            state = find_state(traced)
        elif runs:
            lay_out(variables, chosen.layouts, slots, devices, reshard_after_forward=reshard, is_automatic=True)
            state = state_of(traced)
        else:
            held = divisions_wanted(traced, chosen.layouts, devices, grid, reshard)
            state = state_as_if(traced, held, home or devices[0])
        said = replace(splitting, notes=(*splitting.notes, chosen.why))
        return _plan_traced(traced, said, options, devices, home, state, grid)

    chosen = choose_layouts(traced, slots, devices, options, runs)
    plan = make_plan(chosen, reshard=False)
    limit = memory() if any(chosen.layouts) and not plan.program.symbols else None
    if limit is not None and (held := most_held(plan)) > limit:
        return make_plan(chosen.smaller(held, limit), reshard=True)
    return plan


def _chosen_plan(
    traced: Trace,
    splitting: Splitting,
    options: Options,
    devices: Sequence[str],
    choices: Choices,
    arguments: Hashable,
    runs: bool,
) -> Plan:
    """Return the plan that `memory=` or `plan="auto"` chooses for some arguments; see `trace_and_plan`."""
    from graphsplit.simulate.search.chosen_plans import ChosenPlans

    plans = ChosenPlans(traced, splitting, options, devices, plan_as_if, _plan_in_stages)
    if choices.changes != (changes := layout_changes()):
        choices.made, choices.changes = {}, changes
    if arguments not in choices.made:
        choices.made[arguments] = plans.choose(choices.ran)
    choice = choices.made[arguments]
    if not runs:
        return plans.as_if(choice)
    if choices.ran is None or choices.ran.chosen != choice.chosen:
        say(f"{options.asks_for_plan} chose {choice.explain()}")
    choices.ran = choice
    return plans.laid_out(choice)


def plan_as_if(
    traced: Trace,
    splitting: Splitting,
    options: Options,
    devices: Sequence[str],
    layout: Layout,
    keep: bool = False,
    memory: float | None = None,
) -> Plan:
    """Return the plan for devices that need not exist, with variables laid out otherwise.

    Args:
      traced, splitting, options, devices: see `trace_and_plan`.
      layout, keep: see `divisions_for`; `"auto"` is chosen for these devices.
      memory: bytes of each, if they are known.
    """
    grid = mesh_as_if(options.mesh, devices)
    traced, splitting, options = _cut_first(traced, splitting, options, devices)
    if AUTO in (layout, options.variables if layout is None else ""):
        as_they_lie = lambda own: state_as_if(own, divisions_for(own, None, devices, grid), devices[0])  # noqa: E731
        near = devices[0], grid, lambda: memory
        return _plan_laid_out(traced, splitting, options, devices, *near, as_they_lie)
    held = divisions_for(traced, layout, devices, grid, keep)
    if grid is not None and learn_units(traced, held, grid):
        held = divisions_for(traced, layout, devices, grid, keep)
    state = state_as_if(traced, held, devices[0])
    return _plan_traced(traced, splitting, options, devices, devices[0], state, grid)


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
    grid = device_mesh(options.mesh, devices) if options.mesh.others or options.mesh.stages else None
    heads = grid.columns[0] if grid is not None else stages.heads if stages is not None else devices
    mesh = mesh_of(heads, splitting.batch, options.shares, options.micro_batches)
    if grid is None or not grid.others:
        return mesh
    return replace(mesh, columns=grid.columns, others=tuple(grid.others.items()))


def variables_elsewhere(traced: Trace) -> list[str]:
    """Say which stages read variables that live on devices of others. (Of those in parts it is said where they lie.)"""
    program = traced.program
    lives = {
        position: canonical_name(handle.device)
        for position, handle in zip(program.captures, traced.captures, strict=True)
        if handle.dtype == tf.resource and handle.device and parts_of(handle) is None
    }
    found: dict[Stage, set[str]] = {}
    for op in program.ops:
        stage = op.stage
        away = {lives[t.op] for t in op.inputs if t.op in lives} - {stage.home if stage else ""}
        if stage and away:
            found.setdefault(stage, set()).update(away)
    return [f"{stage} reads variables on {', '.join(map(short_name, sorted(d)))}" for stage, d in found.items()]
