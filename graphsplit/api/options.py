"""The options of `parallelize`, and what can be checked of them before TensorFlow starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from graphsplit.api.automatic_choice import Automatic
from graphsplit.core.device_mesh import STAGE_AXIS, MeshAxes
from graphsplit.core.devices import canonical_name, names_of_devices, resolve_devices
from graphsplit.errors import ArgumentError
from graphsplit.planning.amounts import count_text
from graphsplit.planning.options import PlanOptions
from graphsplit.planning.schedule.automatic_stages import Beginnings

DevicesLike = int | str | Sequence[str] | None
Split: TypeAlias = "int | Mapping[Any, Split] | Sequence[Split] | None"  # nested as the arguments are


@dataclass(frozen=True, kw_only=True)
class Options(PlanOptions):
    """The options of `parallelize`; see there for each. What they mean for a plan is the base class.

    Attributes:
      automatic: what `memory=` and `plan="auto"` choose.
      devices_argument: how the user calls `devices`, for messages: `on_device` and models have other names for it.

    Raises:
      ArgumentError: for options that cannot be meant or contradict each other, whatever the function is.
    """

    devices: DevicesLike = None
    mesh: MeshAxes = MeshAxes()  # noqa: RUF009  # frozen
    split: Split = 0
    home: str | None = None
    reduce_retracing: bool = False
    automatic: Automatic | None = None
    devices_argument: str = "devices"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("reduce_retracing", self.reduce_retracing)
        if isinstance(self.devices, list):
            object.__setattr__(self, "devices", tuple(self.devices))
        self._check_devices()
        if self.weights is not None and self.stages is None:  # (those of pipelines are known with their devices)
            count = self.mesh.rows if self.mesh else self.count
            if count is not None and count != len(self.weights):
                raise ArgumentError(weights_message(self.weights, count))
        if self.automatic is not None:
            self._check_leaves_open(self.automatic)
        if self.mesh.stages or (self.mesh.others and self.stages):
            self._agree_on_stages()

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
        object.__setattr__(self, "mesh", mesh if mesh.stages else replace(mesh, stages=asked or 0, stage_at=0))
        object.__setattr__(self, "stages", self.stages or mesh.stages)

    def _given(self, *names: str) -> str:
        """Return those of some options that are given, as users write them."""
        return ", ".join([f"{name}={value!r}" for name in names if (value := getattr(self, name))])

    def _check_devices(self) -> None:
        """Check what can be checked before TensorFlow starts: numbers and spellings, not existence."""
        devices = self.devices
        if isinstance(devices, (str, tuple)):
            names_of_devices(devices)
        elif devices is not None and (isinstance(devices, bool) or not isinstance(devices, int) or devices < 1):
            resolve_devices(devices)
        if self.home is not None:
            canonical_name(self.home, "home")

    def _check_leaves_open(self, automatic: Automatic) -> None:
        """Raise `ArgumentError` if something is given that an automatic choice does not go together with."""
        clashes = f"mesh={self.mesh.asked!r}" if self.mesh.stages else ""
        if clashes := clashes or self._given("stages", "weights", "schedule", "home"):
            [(name, value)] = automatic.given.items()
            raise ArgumentError(
                f"{name}={value!r} with {clashes}: it compares plans with equal shares, with the first "
                "device as default device, and with stages that it cuts. Leave out one or the other."
            )


def check_flag(name: str, value: object) -> None:
    """Raise `ArgumentError` unless an option is True or False: `"no"` would count as True."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} is True or False, got {value!r}.")


def weights_message(weights: Sequence[float], count: int, what: str = "device") -> str:
    """Say that there are other numbers of weights and devices, or pipelines."""
    several = count_text(count, what)
    return f"weights={list(weights)} has {len(weights)} entries for {several}; give one for each {what}."


def quiet(_: str) -> None:
    """Say nothing about what is being done, where nobody asked for progress."""
