"""What planning asks of the options of `parallelize`, which `api/options` checks."""

from __future__ import annotations

from dataclasses import dataclass

from graphsplit.core.device_mesh import MeshAxes
from graphsplit.planning.schedule.recomputation import Recompute


@dataclass(frozen=True, kw_only=True)
class PlanningOptions:
    """What is asked of a plan, as `parallelize` has it.

    Attributes:
      bucket_bytes: small gradients travel together in at most so many bytes; None chooses.
      recompute: activations that are recomputed instead of stored.
      schedule: the order in which micro-batches go through stages.
      jit_compile: let XLA compile what each device computes between two moves.
      strict: fail if work on the batch would run on one device.
      in_stages: whether stages are asked for.
      has_layouts: whether a layout of variables is asked for.
      axes: the named axes of the devices, for texts.
    """

    bucket_bytes: int | None = None
    recompute: Recompute = None
    schedule: str | None = None
    jit_compile: bool = False
    strict: bool = False
    in_stages: bool = False
    has_layouts: bool = False
    axes: MeshAxes = MeshAxes()  # noqa: RUF009  # frozen
