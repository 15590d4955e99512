"""The options of `parallelize`: what users ask, handed on whole to all that is planned for a function."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from graphsplit.core.device_mesh import STAGE_AXIS, MeshAxes
from graphsplit.core.devices import names_of_devices, resolve_devices
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.planning import option_checks
from graphsplit.planning.amounts import count_text
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.recomputation import Recompute
from graphsplit.planning.schedule.automatic_stages import Beginnings
from graphsplit.planning.tuning import Tuning, tuning_asked

DevicesLike = int | str | Sequence[str] | None
Split: TypeAlias = "int | Mapping[Any, Split] | Sequence[Split] | None"  # nested as the arguments are


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `parallelize`, in their order, checked. What is said here in a line is there at length.

    Attributes:
      devices: how many devices, or their names.
      mesh: the devices as a mesh of named axes.
      split: the axis along which batched arguments are split.
      shares: how much of the batch each device gets, where that is unequal.
      variables: where variables are stored that have no layout yet.
      micro_batches: parts of each device's rows.
      stages: parts into which the function is cut, each on a device of its own.
      schedule: the order in which micro-batches go through stages.
      recompute: activations that are recomputed instead of stored.
      jit_compile: let XLA compile what each device computes between two moves.
      strict: fail if work on the batch would run on one device.
      plan: search for the fastest plan.
      memory: how much each device may hold.
      tuning: what few need, by name.
      lays_out: whether an automatic choice may lay variables out; else they stay as they lie.
      devices_argument: how the user calls `devices`, for messages: `on_device` and models have other names for it.

    Raises:
      ArgumentError: for options that cannot be meant or contradict each other, whatever the function is.
    """

    devices: DevicesLike = None
    mesh: MeshAxes = MeshAxes()  # noqa: RUF009  # frozen
    split: Split = 0
    shares: Sequence[float] | None = None
    variables: Any = None
    micro_batches: int = 1
    stages: int | Beginnings | None = None
    schedule: str | None = None
    recompute: Recompute = None
    jit_compile: bool = False
    strict: bool = False
    plan: str | Machine | None = None
    memory: float | None = None
    tuning: Tuning = field(default_factory=Tuning)

    lays_out: bool = True
    devices_argument: str = "devices"

    def __post_init__(self) -> None:
        self._set(tuning=tuning_asked(self.tuning))
        option_checks.check_strict(self.strict)
        option_checks.check_flag("jit_compile", self.jit_compile)
        option_checks.check_micro_batches(self.micro_batches)
        option_checks.check_schedule(self.schedule)
        if isinstance(self.stages, (list, tuple)) and all(isinstance(name, str) for name in self.stages or [0]):
            self._set(stages=Beginnings(tuple(dict.fromkeys(self.stages))))
        option_checks.check_stages(self.stages)
        self._set(
            recompute=option_checks.recompute_asked(self.recompute),
            shares=option_checks.shares_asked(self.shares),
            memory=option_checks.parse_memory(self.memory),
            plan=option_checks.plan_asked(self.plan),
            devices=tuple(self.devices) if isinstance(self.devices, list) else self.devices,
        )
        for name in ("micro_batches", "stages"):
            if isinstance(value := getattr(self, name), np.integer):
                self._set(**{name: int(value)})
        mesh = self.mesh.asked if self.mesh.stages else None
        staged = {"schedule": self.schedule, "stages": self.stages, "mesh": mesh}
        asked = next((f"{name}={value!r}" for name, value in staged.items() if value), "")
        if asked and self.tuning["random"] == "independent":
            raise ArgumentError(
                f"{asked} with tuning={{'random': 'independent'}}: stages have one device's numbers. Leave out random."
            )
        if self.recompute is not None and self.jit_compile:
            raise UnsupportedError(
                f"recompute={self.recompute!r} with jit_compile=True: XLA merges equal computations, so nothing "
                "would be recomputed. Use one or the other."
            )
        self._check_devices()
        if self.shares is not None and self.stages is None:  # (those of pipelines are known with their devices)
            count = self.mesh.rows if self.mesh else self.count
            if count is not None and count != len(self.shares):
                raise ArgumentError(option_checks.shares_message(self.shares, count))
        if self.is_automatic:
            self._check_leaves_open()
        if self.mesh.stages or (self.mesh and self.stages):
            self._agree_on_stages()

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def is_automatic(self) -> bool:
        """Whether a plan is searched for: by `memory` or `plan`."""
        return self.plan is not None or self.memory is not None

    @property
    def asks_for_plan(self) -> str:
        """The option that lets a plan be searched for, as users write it."""
        asked = self.machine.name if self.machine is not None else self.plan
        return f"memory={int(self.memory or 0)}" if asked is None else f"plan={asked!r}"

    @property
    def machine(self) -> Machine | None:
        """The machine by whose speed plans are compared; None for the devices at hand."""
        return self.plan if isinstance(self.plan, Machine) else None

    def as_given(self) -> Options:
        """Return the options without those that let a plan be searched for."""
        return replace(self, plan=None, memory=None)

    @property
    def asked(self) -> DevicesLike:
        """The devices that are asked for, or how many."""
        return self.mesh.count if self.devices is None else self.devices

    @property
    def count(self) -> int | None:
        """How many devices are asked for; None for all there are."""
        asked = [self.asked] if isinstance(self.asked, str) else self.asked
        return asked if asked is None or isinstance(asked, int) else len(asked)

    def _agree_on_stages(self) -> None:
        """Let the axis of stages and `stages` say the same: the stages, each on a mesh of the other axes.

        Raises:
          ArgumentError: if they disagree.
        """
        asked = self.stages.count if isinstance(self.stages, Beginnings) else self.stages
        mesh, is_interleaved = self.mesh, self.schedule == "interleaved"
        if is_interleaved and not mesh.stages:
            raise ArgumentError(
                f"mesh={mesh.asked!r} with schedule='interleaved': say on how many groups of devices the stages take "
                f"turns, mesh={ {STAGE_AXIS: 2, **mesh.asked}!r}."
            )
        if not is_interleaved and asked and mesh.stages not in (0, asked):
            raise ArgumentError(
                f"mesh={mesh.asked!r} has {count_text(mesh.stages, 'stage')}, and stages={self.stages} "
                f"{'is' if asked == 1 else 'are'} {asked}. Give the same number, or leave out stages."
            )
        self._set(
            mesh=mesh if mesh.stages else replace(mesh, stages=asked or 0, stage_at=0),
            stages=self.stages or mesh.stages,
        )

    def _check_devices(self) -> None:
        """Check what can be checked before TensorFlow starts: numbers and spellings, not existence."""
        devices = self.devices
        if isinstance(devices, (str, tuple)):
            names_of_devices(devices)
        elif devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
            resolve_devices(devices)

    def _check_leaves_open(self) -> None:
        """Raise `ArgumentError` if something is given that an automatic choice does not go together with."""
        device = self.tuning["default_device"]
        default = [f"tuning={ {'default_device': device}!r}"] if device else []
        names = ("shares",) if self.stages is not None or self.mesh.stages else ("shares", "schedule")
        clashes = [*[f"{name}={value!r}" for name in names if (value := getattr(self, name))], *default]
        if self.variables not in (None, "auto"):
            raise ArgumentError(
                f"{self.asks_for_plan} with variables={self.variables!r}: it chooses where variables are that have no "
                "layout yet. Give them one before, by gs.set_variable_layout, or leave out variables."
            )
        if clashes:
            raise ArgumentError(
                f"{self.asks_for_plan} with {', '.join(clashes)}: it compares plans with equal shares, with the first "
                "device as default device, and with stages that it cuts. Leave out one or the other."
            )
