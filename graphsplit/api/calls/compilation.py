"""From a function and options to a plan.

What enters: a function, the structure and shapes of its arguments, options, and full names of devices. What leaves: the
trace and its plan. In between, variables get the layouts that options ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.argument_splitting import Splitting, open_shapes, open_sparse_shapes, resolve_split
from graphsplit.api.calls.chosen_devices import ChosenDevices, check_no_others
from graphsplit.api.calls.plan_requests import PlanRequest
from graphsplit.api.calls.traces import Choices
from graphsplit.api.layouts.layout_spellings import AUTO
from graphsplit.api.layouts.learned_layouts import lie_as_asked, lie_together
from graphsplit.api.layouts.mesh_checks import check_mesh, mesh_lain_on
from graphsplit.api.layouts.predicted_layouts import lying_elsewhere
from graphsplit.core import structures
from graphsplit.core.device_mesh import device_mesh
from graphsplit.core.devices import canonical_name, short_name
from graphsplit.core.gpus import gpu_memory_bytes
from graphsplit.core.keras_internals import open_scopes
from graphsplit.core.progress import phase, say
from graphsplit.core.sizes import has_sizes
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.core.variables.parted_variables import layout_changes, parts_of
from graphsplit.planning.plan import Plan
from graphsplit.planning.state import State
from graphsplit.program.stages import Stage, check_stages
from graphsplit.tracing.draw_counters import DrawCounters
from graphsplit.tracing.graph_to_program import CallSizes
from graphsplit.tracing.trace import Trace, TracedFunction, trace_function


@dataclass(frozen=True, eq=False)
class Called:
    """A function, and the structure of arguments with which it is called.

    Attributes:
      fn: called as the structure `call` of `(args, kwargs)` says.
      call: see there. Sizes that it leaves open are open for `fn`: the plan has them from `arguments`.
      arguments: the same leaves by the names under which users know them.
      functions: those that were traced before, by what they are valid for; None to trace anew.
      draws: what counts the draws of kernels; None if they count for themselves.
    """

    fn: Callable[..., Any]
    call: structures.Tree
    arguments: structures.Container
    functions: dict[Hashable, TracedFunction] | None = None
    draws: DrawCounters | None = None


def trace_and_plan(
    called: Called,
    chosen: ChosenDevices,
    arrange: Callable[[], Arrangement],
    choices: Choices | None = None,
    find_state: Callable[[Trace], State] | None = None,
) -> tuple[Trace, Plan, PlanRequest]:
    """Trace a function for one structure of arguments, and decide where its variables are to lie, and what runs where.

    With it comes what was asked for, which knows how the variables are to lie.

    Args:
      called: the function.
      chosen: the devices, which need not exist here, and options. Where these give no default device, see
        `best_default_device`.
      arrange: returns how variables are to lie by what was asked before, also those that the function has just made.
      choices: automatic ones that were made for the function before; a new one is put there.
      find_state: says where variables and tables of a trace live, if not where they lie here.
    """
    options, devices = chosen.options, chosen.devices
    splitting = resolve_split(options.split, called.arguments)  # what does not fit is said before the user's code runs
    names = [path for path, _ in structures.paths(called.arguments)]
    with phase("tracing"):
        traced = trace_call(called, names, splitting, bool(options.jit_compile))
    check_no_others(traced.program, options)
    check_stages(traced.program.all_stages(), len(devices))
    if options.is_automatic and not options.mesh:
        options = replace(options, mesh=mesh_lain_on(traced, devices))
    mesh = device_mesh(options.mesh, devices) if options.mesh else None
    if mesh is not None and mesh.others and (placed := traced.program.all_stages()):
        mesh = replace(mesh, stages=tuple([stage.devices for stage in placed if len(stage.devices) > 1]))
    check_mesh(traced, mesh)
    lies, notes = arrange(), chosen.notes if find_state is None else ()
    moved = lie_together(lies, traced)
    asks = options.variables not in (None, AUTO)
    state = None if find_state is None else find_state(traced)
    if find_state is None and chosen.missing:
        lies = lying_elsewhere(lies, traced, devices, mesh, on_first=options.variables is None)
        state = None if asks else State()  # (variables are where a process that has the devices makes them)
    notes_on_layout = lie_as_asked(lies, traced, options.variables, devices, mesh) if asks else ()
    default_device = None if options.tuning["default_device"] is None else chosen.default_device
    is_automatic = options.variables == AUTO
    where = devices, default_device, mesh, traced, lies, state, is_automatic
    request = PlanRequest(traced.program, splitting, options, *where)
    request = request.noting(*variables_elsewhere(traced), *notes, *notes_on_layout, *moved)
    if options.is_automatic:
        plan, lies = _chosen_plan(request, Choices() if choices is None else choices, called.arguments)
    else:
        with phase("planning"):
            plan, lies = request.planned(partial(gpu_memory_bytes, devices))
    plan = replace(plan, first_move=lies.first_move(traced.variables))
    return traced, plan, replace(request, lies=lies)


def trace_call(called: Called, names: Sequence[str], splitting: Splitting, compiled: bool) -> Trace:
    """Trace a function for a call; see `trace_and_plan`.

    The trace has the sizes of the call, the function those that the structure of the call says.
    """
    call = called.call
    functions, valid = called.functions, (call, open_scopes(), layout_changes())
    functions = {} if functions is None else functions
    if valid not in functions:
        functions[valid] = trace_function(called.fn, call, names, compiled, called.draws)
    leaves, shapes = structures.leaves(call), splitting.shapes
    if any(map(has_sizes, shapes)) or all(
        leaf.shape == known_shape for leaf, known_shape in zip(leaves, shapes, strict=True)
    ):
        known_sparse = structures.known_sparse_shapes(call)
        values = {i: shape for i, shape in splitting.sparse.items() if i not in known_sparse}
        return functions[valid].read(names, splitting.shapes, values=values)
    open_values = open_sparse_shapes(splitting, call)
    sizes = CallSizes(splitting.shapes, {i: splitting.sparse[i] for i in open_values}, open_values)
    return functions[valid].read(names, open_shapes(splitting, leaves, names), sizes)


def _chosen_plan(request: PlanRequest, choices: Choices, arguments: Hashable) -> tuple[Plan, Arrangement]:
    """Return the plan that `memory=` or `plan="auto"` chooses for some arguments; see `trace_and_plan`."""
    from graphsplit.simulate.search.chosen_plans import ChosenPlans

    plans = ChosenPlans(request)
    if choices.changes != (changes := layout_changes()):
        choices.made, choices.changes = {}, changes
    if arguments not in choices.made:
        choices.made[arguments] = plans.choose(choices.ran)
    choice = choices.made[arguments]

    def ran() -> None:
        if choices.ran is None or choices.ran.chosen != choice.chosen:
            say(f"{request.options.asks_for_plan} chose {choice.explain()}")
        choices.ran = choice

    plan, lies = plans.laid_out(choice)
    lies.then(ran)
    return plan, lies


def variables_elsewhere(traced: Trace) -> list[str]:
    """Say which stages read variables that live on devices of others. (Of those in parts it is said where they lie.)"""
    program = traced.program
    lives = {
        position: canonical_name(handle.device)
        for position, handle in zip(program.captures, traced.captures, strict=True)
        if handle.dtype == tf.resource and handle.device and parts_of(handle) is None
    }
    devices_by_stage: dict[Stage, set[str]] = {}
    for op in program.ops:
        stage = op.stage
        away = {lives[t.op] for t in op.inputs if t.op in lives} - {stage.default_device if stage else ""}
        if stage and away:
            devices_by_stage.setdefault(stage, set()).update(away)
    return [
        f"{stage} reads variables on {', '.join(map(short_name, sorted(d)))}" for stage, d in devices_by_stage.items()
    ]
