"""`graphsplit inspect`: the placement of a function or SavedModel, from the command line."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.decorators import parallelize
from graphsplit.cli.targets import (
    by_position,
    check_not_split,
    check_specs,
    cpus_of_model,
    example,
    example_rows,
    load_target,
    parse_spec,
    users_code,
)
from graphsplit.core.devices import use_logical_devices
from graphsplit.core.errors import ArgumentError
from graphsplit.core.gpus.logical_gpus import has_gpus
from graphsplit.core.progress import phase
from graphsplit.core.structures import spec_text
from graphsplit.core.tensorflow_internals import eager_context_started
from graphsplit.placement.builders import placement_of
from graphsplit.placement.recorded.timeline import timeline_of

_NO_WORK = {"Const", "Identity", "NoOp", "Placeholder"}


def inspect(
    target: str,
    *,
    specs: Sequence[str] = (),
    devices: int | Sequence[str] | None = None,
    actual: bool = False,
    signature: str = "serving_default",
    outputs: Sequence[str] = (),
    timeline: str | None = None,
) -> None:
    """Print where every operation runs, and the warnings; write pictures.

    Args:
      target: the directory of a SavedModel, or `module:function`.
      specs: the arguments, `float32[64,784]`; `?` for a size that is not known.
      devices: split the function over that many devices, GPUs if there are any, else logical CPU devices; or over
        these, which need not be here if it is not run.
      actual: run it once, on random numbers.
      signature: which one, for a SavedModel.
      outputs: files to write; their suffix chooses the form.
      timeline: file for the timeline of one step, `.json`.

    Raises:
      ArgumentError: if something is not understood or does not exist, or the function cannot be traced.
      StorageError: if a file cannot be written.
    """
    _make_devices(target, devices)
    given = [parse_spec(text) for text in specs]
    with phase(f"loading {target}"):
        fn, declared = load_target(target, signature)
    if given or not declared:
        check_specs(target, fn, declared, given)
    if declared and devices is not None:
        check_not_split(target, fn)
    needs_values = actual or timeline is not None
    specified = given or list(declared.values() if needs_values or devices is not None else ())
    if not given and (rows := example_rows(list(declared.values()))) is not None:
        specified = rows
        print(f"Bytes and FLOPs are those of {', '.join(map(spec_text, rows))}; --spec says otherwise.")
    if declared and (specified or devices is not None):
        fn = by_position(fn, list(declared), f"{target} ({signature})")
    if devices is not None and not isinstance(fn, ParallelFunction):
        fn = parallelize(fn, devices=devices)
    arguments: list[Any] = [example(spec) for spec in specified] if needs_values else list(specified)
    doing = "Running" if actual else "Tracing"
    with phase(doing.lower()), users_code(f"{doing} {target!r}"):
        placement = placement_of(fn, *arguments, actual=actual)
    if {op.type for op in placement.ops.values()} <= _NO_WORK:
        raise ArgumentError(f"{target!r} computes nothing with TensorFlow: there is nothing to place.")
    print(placement)
    for path in outputs:
        with phase(f"writing {path}"):
            placement.save(path)
    if timeline is not None:
        with phase("recording a step"), users_code(f"Running {target!r}"):
            recorded = timeline_of(fn, *arguments)
        recorded.save(timeline)
        print(recorded)


def _make_devices(target: str, devices: int | Sequence[str] | None) -> None:
    """Make logical CPU devices where there are no GPUs: those that are asked for, or that a SavedModel names."""
    if eager_context_started() or has_gpus():
        return
    count = devices if isinstance(devices, int) else 1
    if devices is None and os.path.isdir(target):
        count = cpus_of_model(target)
    if isinstance(devices, int) or count > 1:
        use_logical_devices(count)
