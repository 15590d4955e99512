"""What users ask of a plan, beside the devices: handed on whole to all that is planned for a function."""

from __future__ import annotations

from dataclasses import dataclass

from graphsplit.planning.automatic_stages import StagesAsked


@dataclass(frozen=True)
class Asked:
    """What users ask of a plan.

    Attributes:
      strict: raise `StrictError` if work on the batch would run at home; or a number, the largest share of the
        floating-point operations that may.
      random: `"exact"`: shards draw the numbers of one device; `"independent"`: numbers of their own.
      schedule: the kind of schedule by which shards go through stages; "" for none.
      stages: into which the program is to be cut, if any.
      jit_compile: whether XLA compiles what a shard, or home, computes between two moves; `"auto"`: what it can.
      bucket_bytes: see `find_buckets`.
    """

    strict: bool | float = False
    random: str = "exact"
    schedule: str = ""
    stages: StagesAsked | None = None
    jit_compile: bool | str = False
    bucket_bytes: int | None = None
