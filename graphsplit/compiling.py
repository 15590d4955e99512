"""From a function and options to a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from graphsplit import structures
from graphsplit.devices import canonical_name, resolve_devices
from graphsplit.errors import ArgumentError
from graphsplit.planning import plan_program
from graphsplit.plans import Plan
from graphsplit.programs import Program
from graphsplit.sizes import Size
from graphsplit.splitting import Split, Splitting, argument_paths, resolve_split
from graphsplit.stages import check_stages
from graphsplit.staging import variables_elsewhere
from graphsplit.tracing import Trace, trace

DevicesLike = int | str | Sequence[str] | None


@dataclass(frozen=True)
class Options:
    """The options of `parallelize`, checked as far as they can be without starting TensorFlow."""

    devices: DevicesLike = None
    split: Split = 0
    home: str | None = None
    weights: tuple[float, ...] | None = None
    strict: bool = False
    random: str = "exact"
    reduce_retracing: bool = False


def trace_and_plan(
    fn: Callable[..., Any],
    call: structures.Tree,
    arguments: structures.Branch,
    options: Options,
    devices: Sequence[str],
    home: str,
) -> tuple[Trace, Plan]:
    """Trace `fn` for one structure of arguments, and decide what runs where.

    Args:
      fn: called as the structure `call` of `(args, kwargs)` says.
      call: see there.
      arguments: the same leaves by the names under which users know them.
      options: all but the devices are taken from here.
      devices, home: full names. They need not exist here.
    """
    splitting = resolve_split(options.split, arguments)  # what does not fit is said before the user's code runs
    names = [path for path, _ in argument_paths(arguments)]
    traced = trace(fn, call, names, splitting.shapes)
    check_stages(traced.program.all_stages(), len(devices))
    splitting = replace(splitting, notes=(*splitting.notes, *variables_elsewhere(traced)))
    return traced, plan_for(traced.program, splitting, options, devices, home)


def plan_for(program: Program, splitting: Splitting, options: Options, devices: Sequence[str], home: str) -> Plan:
    """Decide what of a program runs where, given how its inputs are split."""
    if isinstance(splitting.batch, Size) and not program.batch_is_unknown:
        splitting = splitting.whole()
    rows = splitting.rows(options.weights or (1,) * len(devices))
    used = [d for d, count in enumerate(rows) if count]
    return plan_program(
        program,
        devices=[devices[d] for d in used],
        rows=[rows[d] for d in used],
        home=home,
        input_layouts=splitting.layouts,
        strict=options.strict,
        random=options.random,
        notes=splitting.notes,
        positions=used,
    )


def check_devices(options: Options) -> None:
    """Check what can be checked before TensorFlow starts: numbers and spellings, not existence."""
    devices, home = options.devices, options.home
    if isinstance(devices, (str, tuple)):
        names = [devices] if isinstance(devices, str) else list(devices)
        canonical = [canonical_name(name) for name in names]
        if not canonical or len(set(canonical)) != len(canonical):
            resolve_devices(names)
    elif devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
        resolve_devices(devices)
    if home is not None:
        canonical_name(home, "home")


def check_weights(options: Options) -> None:
    """Check shares of the batch against each other, and against the devices if those are listed."""
    weights, devices = options.weights, options.devices
    if weights is None:
        return
    if not all(isinstance(w, (int, float)) and w >= 0 for w in weights) or not sum(weights) > 0:
        raise ArgumentError(f"weights={list(weights)}: weights are numbers of at least 0, and not all of them 0.")
    count = devices if isinstance(devices, int) else len(devices) if isinstance(devices, tuple) else len(weights)
    if count != len(weights):
        raise ArgumentError(weights_message(weights, count))


def weights_message(weights: Sequence[float], count: int) -> str:
    """Say that there are other numbers of weights and devices."""
    return f"weights={list(weights)} has {len(weights)} entries for {count} devices; give one for each device."
