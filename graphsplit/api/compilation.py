"""From a function and options to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from graphsplit.api.argument_splitting import Splitting, argument_paths, resolve_split
from graphsplit.api.options import Options
from graphsplit.api.pipeline_devices import check_no_others, stages_asked
from graphsplit.core import structures
from graphsplit.core.symbolic_sizes import Size
from graphsplit.planning.mesh import mesh_of
from graphsplit.planning.plan import Plan
from graphsplit.planning.planner import plan_program
from graphsplit.planning.state import State, program_of, state_of
from graphsplit.program.program import Program
from graphsplit.program.stages import check_stages
from graphsplit.tracing.stage_notes import variables_elsewhere
from graphsplit.tracing.trace import Trace, trace


def trace_and_plan(
    fn: Callable[..., Any],
    call: structures.Tree,
    arguments: structures.Branch,
    options: Options,
    devices: Sequence[str],
    home: str,
    find_state: Callable[[Trace], State] = state_of,
    notes: Sequence[str] = (),
) -> tuple[Trace, Plan]:
    """Trace `fn` for one structure of arguments, and decide what runs where.

    Args:
      fn: called as the structure `call` of `(args, kwargs)` says.
      call: see there.
      arguments: the same leaves by the names under which users know them.
      options: all but the devices are taken from here.
      devices, home: full names. They need not exist here.
      find_state: says where variables and tables of a trace live.
      notes: for the plan.
    """
    splitting = resolve_split(options.split, arguments)  # what does not fit is said before the user's code runs
    names = [path for path, _ in argument_paths(arguments)]
    traced = trace(fn, call, names, splitting.shapes, options.jit_compile)
    check_no_others(traced.program, options)
    check_stages(traced.program.all_stages(), len(devices))
    splitting = replace(splitting, notes=(*splitting.notes, *variables_elsewhere(traced), *notes))
    # (shards that take turns on a device would all have to wait for each other before each gather)
    program, state = program_of(traced, find_state, options.micro_batches == 1)
    return traced, plan_for(program, splitting, options, devices, home, state)


def plan_for(
    program: Program, splitting: Splitting, options: Options, devices: Sequence[str], home: str, state: State
) -> Plan:
    """Decide what of a program runs where, given how its inputs are split."""
    if isinstance(splitting.batch, Size) and not program.batch_is_unknown:
        splitting = splitting.whole()
    stages = stages_asked(options, devices)
    heads = devices if stages is None else stages.heads
    return plan_program(
        program,
        mesh=mesh_of(heads, splitting.batch, options.weights, options.micro_batches),
        home=home,
        input_layouts=splitting.layouts,
        state=state,
        strict=options.strict,
        random=options.random,
        schedule=options.schedule or "",
        stages=stages,
        jit_compile=options.jit_compile,
        bucket_bytes=options.bucket_bytes,
        notes=splitting.notes,
    )
