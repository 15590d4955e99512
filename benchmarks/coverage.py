"""`python -m benchmarks.coverage`: how much of a training step is sharded.

For every architecture, planned and not run; and for programs in the manner of well-known tutorials, run both ways.
"""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf
from rich.table import Table

import graphsplit as gs
from benchmarks import pages
from benchmarks.coverage_models import CLASSES, MODELS, Training, integers, numbers, supervised
from benchmarks.coverage_programs import Outcome, document, program_table, run_program
from benchmarks.display import console, progress
from benchmarks.environment import environment
from benchmarks.programs import PROGRAMS
from graphsplit.core.layouts import is_whole
from graphsplit.core.storage import forms

ROWS = 11  # a number that is no width of any network: see `summarize`


@dataclass(frozen=True)
class Coverage:
    """What the plan of one training step says.

    Attributes:
      ops: all live operations.
      carrying: those among them that carry rows of the batch, or parts of a sum over them.
      sharded: those that run on the shards.
      carrying_bytes, sharded_bytes: sizes of what those operations yield, for the whole batch.
      at_home: what carries the batch and runs at home: "count x type: reason".
      trace_s, plan_s: seconds to trace the step, and to plan it.
    """

    name: str
    ops: int
    carrying: int
    sharded: int
    carrying_bytes: int
    sharded_bytes: int
    at_home: tuple[str, ...]
    trace_s: float
    plan_s: float


def applications() -> dict[str, Callable[..., keras.Model]]:
    """Return every architecture in `keras.applications`, by name."""
    found = vars(keras.applications).items()
    return {name: value for name, value in sorted(found) if name[0].isupper() and callable(value)}


def application(name: str, side: int = 0) -> Training:
    """Return the training step of an architecture in `keras.applications` with random weights.

    Args:
      name: as in `applications()`.
      side: height and width of the images; by default the smallest that it takes.
    """
    make = applications()[name]
    options = {"weights": None, "classes": CLASSES, "classifier_activation": None}
    model = None
    for size in [side] if side else [32, 75, 224, 331]:
        try:
            model = make(input_shape=(size, size, 3), **options)
            break
        except ValueError:  # which sizes it takes, it says only in words
            continue
    if model is None:
        model = make(**options)
    return supervised(model, lambda rows: (numbers(rows, *model.input_shape[1:]), integers(CLASSES, rows)))


def measure(name: str, devices: int, rows: int = ROWS) -> Coverage:
    """Plan the training step of one model."""
    keras.backend.clear_session()
    training = MODELS[name]() if name in MODELS else application(name)
    arguments = training.inputs(rows)
    parallel = gs.parallelize(training.step, devices=devices)
    started = time.perf_counter()
    plan = parallel.plan(*arguments)
    first_s = time.perf_counter() - started
    plan_s = _planning_s(plan)
    plan.check()
    found = summarize(name, plan, first_s - plan_s, plan_s)
    gc.collect()
    return found


def summarize(name: str, plan: gs.inspect.Plan, trace_s: float = 0.0, plan_s: float = 0.0) -> Coverage:
    """Return what a plan covers.

    What comes after an operation that gathered rows at home runs at home too, and its inputs are whole, so the plan
    gives no reason for it: it counts as carrying the batch here if any size of its results is that of the whole batch.
    """
    sharded, home = [], []
    after: set[int] = set()
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        layouts = (*step.shards.wants, *step.shards.gives) if step.shards else ()
        if not all(map(is_whole, layouts)):
            sharded.append(op)
        elif step.once and step.reason and not step.bodies:
            home.append((op, step.reason))
            after.add(op.index)
        elif step.once and any(t.op in after for t in op.inputs) and _as_long_as_the_batch(op, plan.batch):
            after.add(op.index)
            home.append((op, "it follows one that runs on one device"))
    reasons = Counter(f"{op.type}: {reason}" for op, reason in home)
    sharded_bytes = sum(sum(op.out_bytes) for op in sharded)
    return Coverage(
        name=name,
        ops=len(plan.sharded_ops) + len(plan.ops_once),
        carrying=len(sharded) + len(home),
        sharded=len(sharded),
        carrying_bytes=sharded_bytes + sum(sum(op.out_bytes) for op, _ in home),
        sharded_bytes=sharded_bytes,
        at_home=tuple(f"{count} x {reason}" for reason, count in reasons.most_common()),
        trace_s=trace_s,
        plan_s=plan_s,
    )


def _as_long_as_the_batch(op: Any, batch: int) -> bool:
    return not op.stateful and any(size == batch for shape in op.out_shapes for size in shape or ())


def _planning_s(plan: gs.inspect.Plan) -> float:
    from graphsplit.planning.planner import plan_program

    started = time.perf_counter()
    plan_program(
        plan.program,
        mesh=plan.mesh,
        default_device=plan.default_device,
        input_layouts=plan.input_layouts,
        state=plan.state,
    )
    return time.perf_counter() - started


def table(found: list[Coverage]) -> Table:
    """Return the results for people."""
    made = Table("model", "ops", "carry", "ops sharded", "bytes sharded", "trace s", "plan s", "on one device, and why")
    for one in found:
        made.add_row(
            one.name,
            str(one.ops),
            str(one.carrying),
            _share(one.sharded, one.carrying),
            _share(one.sharded_bytes, one.carrying_bytes),
            f"{one.trace_s:.2f}",
            f"{one.plan_s:.2f}",
            "\n".join(one.at_home) or "nothing",
        )
    return made


def _share(part: int, whole: int) -> str:
    return "100 %" if part == whole else f"{100 * part / whole:.2f} %"


def main(
    names: Annotated[str, typer.Option(help="Comma-separated: names, or models, programs, applications.")] = "",
    devices: Annotated[int, typer.Option(min=1)] = 4,
    output: Annotated[Path | None, typer.Option(help="Also write JSON to this file.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Also write what became of the programs to this Markdown file.")
    ] = None,
) -> None:
    """Plan the training step of every architecture in keras.applications and of other networks; run programs."""
    groups = {"models": list(MODELS), "programs": list(PROGRAMS), "applications": list(applications())}
    known = [name for group in groups.values() for name in group]
    given = [name.strip() for name in names.split(",") if name.strip()] or list(groups)
    chosen = [name for one in given for name in groups.get(one, [one])]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        listed = ", ".join([*groups, *known])
        raise typer.BadParameter(f"{', '.join(unknown)}; known are {listed}.", param_hint="--names")
    for path in (output, page):
        if path is not None:
            forms.check(str(path))  # before it takes its time
    gs.use_logical_devices(devices + 1)
    tf.config.list_logical_devices()
    found: list[Coverage] = []
    outcomes: list[Outcome] = []
    with progress() as bar:
        task = bar.add_task("", total=len(chosen))
        for name in chosen:
            bar.update(task, description=name)
            if name in PROGRAMS:
                outcomes.append(run_program(name, devices))
                bar.print(f"{name}: {100 * outcomes[-1].share:.2f} % of FLOPs sharded")
            else:
                found.append(measure(name, devices))
                one = found[-1]
                bar.print(f"{name}: {_share(one.sharded, one.carrying)} of {one.carrying} operations sharded")
            bar.advance(task)
            if output:
                _write(output, found, outcomes)
    if page:
        others = pages.sections(page.read_text()) if page.exists() else ""  # (of tests/others)
        forms.write(str(page), f"{document(outcomes, devices)}\n{others}".encode())
    for results in (table(found) if found else None, program_table(outcomes) if outcomes else None):
        if results is not None:
            console.print(results)


def _write(path: Path, found: list[Coverage], outcomes: list[Outcome]) -> None:
    content: dict[str, Any] = {
        "environment": environment(),
        "rows": ROWS,
        "models": [asdict(one) for one in found],
        "programs": [asdict(one) for one in outcomes],
    }
    forms.write_json(str(path), content, indent=1)


if __name__ == "__main__":
    typer.run(main)
