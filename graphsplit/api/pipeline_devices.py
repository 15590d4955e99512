"""Which devices the stages have into which a function is cut: pipelines side by side, each with all stages."""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.api.options import Options
from graphsplit.core.errors import ArgumentError, bullet_list
from graphsplit.core.logical_gpus import gpu_memory_bytes
from graphsplit.planning.automatic_stages import Beginnings, StagesAsked
from graphsplit.program.program import Program


def stages_asked(options: Options, devices: Sequence[str]) -> StagesAsked | None:
    """Return the devices of each stage, one for each pipeline; None if no stages are asked for.

    Stages take the devices in order, pipeline after pipeline. Interleaved, they take all of them in turns.

    Raises:
      ArgumentError: if so many devices do not make whole pipelines.
    """
    if options.stages is None:
        return None
    begins = options.stages if isinstance(options.stages, Beginnings) else None
    count = options.stages if isinstance(options.stages, int) else options.stages.count
    if options.schedule == "interleaved":
        if count % len(devices) or count < 2 * len(devices):
            raise ArgumentError(
                f"stages={options.stages} with schedule='interleaved' on {_devices(len(devices))}: each device has "
                f"several stages, {2 * len(devices)}, {3 * len(devices)} or more altogether. Choose so many, or '1f1b'."
            )
        found: list[tuple[str, ...]] = [(devices[stage % len(devices)],) for stage in range(count)]
    else:
        if len(devices) % count:
            raise ArgumentError(
                f"stages={options.stages} on {_devices(len(devices))}: each of {count} stages has a device of its own "
                f"in each pipeline, so they need {count}, {2 * count} or more devices. Choose other devices or stages, "
                "or schedule='interleaved', which has several stages on each device."
            )
        found = [tuple(devices[stage::count]) for stage in range(count)]
    return StagesAsked(tuple(found), begins, gpu_memory_bytes(devices))


def _devices(count: int) -> str:
    return f"{count} device{'s' if count != 1 else ''}"


def check_no_others(program: Program, options: Options) -> None:
    """Raise `ArgumentError` if a function has stages of its own that is to be cut into stages."""
    own = program.all_stages()
    if options.stages is not None and own:
        raise ArgumentError(
            f"stages={options.stages} cuts the function into stages, and it has some that on_device made:\n"
            f"{bullet_list(list(map(str, own)))}\nDrop stages, or on_device."
        )
