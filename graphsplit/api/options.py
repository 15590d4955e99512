"""The options of `parallelize`: what users ask, handed on whole to all that is planned for a function.

`tuning={...}` has what few need to set. What each option may be, for itself, is checked here, and texts become numbers.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypedDict

import numpy as np

from graphsplit.core.device_mesh import STAGE_AXIS, MeshAxes
from graphsplit.core.devices import canonical_name, names_of_devices, resolve_devices
from graphsplit.core.patterns import meant
from graphsplit.core.renamed import REMOVED
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.planning.amounts import count_text
from graphsplit.planning.costs.machine import Machine
from graphsplit.planning.costs.machine_files import machine as machine_of
from graphsplit.planning.planning_options import PlanningOptions
from graphsplit.planning.schedule.automatic_stages import Beginnings
from graphsplit.planning.schedule.recomputation import Recompute
from graphsplit.planning.schedule.schedules import KINDS

DevicesLike = int | str | Sequence[str] | None
Split: TypeAlias = "int | Mapping[Any, Split] | Sequence[Split] | None"  # nested as the arguments are


class Tuning(TypedDict, total=False):
    """The keys of `tuning={...}`, of `parallelize`.

    Attributes:
      bucket_bytes: small gradients travel together, in buckets of at most so many bytes, each as soon as it is full. 0
        lets each travel alone. None means 64 kB, and 512 kB between hosts.
      exchange_bytes: sums that shards wait for go from each shard to all others at once, if a device gets at most so
        many bytes of one in all; larger ones go through one device, as all do with 0. None means 512 kB between GPUs
        and between hosts, and 0 on logical devices of one CPU, where that is faster.
      default_device: the device for work that is not sharded, `"CPU:0"`. None means the first device; if devices or
        variables are on several hosts, the device with most bytes of variables. A variable is updated on its device,
        though.
      reduce_retracing: when calls differ in sizes only, trace once more with these sizes left open, as `tf.function`
        does, the batch size included. A `tf.function` that was made with `reduce_retracing=True` keeps it; one with an
        `input_signature` is traced like that at once.
    """

    bucket_bytes: int | None
    exchange_bytes: int | None
    default_device: str | None
    reduce_retracing: bool


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
        check_strict(self.strict)
        check_flag("jit_compile", self.jit_compile)
        check_micro_batches(self.micro_batches)
        check_schedule(self.schedule)
        if isinstance(self.stages, (list, tuple)) and all(isinstance(name, str) for name in self.stages or [0]):
            self._set(stages=Beginnings(tuple(dict.fromkeys(self.stages))))
        check_stages(self.stages)
        self._set(
            recompute=recompute_asked(self.recompute),
            shares=shares_asked(self.shares),
            memory=parse_memory(self.memory),
            plan=plan_asked(self.plan),
            devices=tuple(self.devices) if isinstance(self.devices, list) else self.devices,
        )
        for name in ("micro_batches", "stages"):
            if isinstance(value := getattr(self, name), np.integer):
                self._set(**{name: int(value)})
        if self.recompute is not None and self.jit_compile:
            raise UnsupportedError(
                f"recompute={self.recompute!r} with jit_compile=True: XLA merges equal computations, so nothing "
                "would be recomputed. Use one or the other."
            )
        self._check_devices()
        if self.shares is not None and self.stages is None:  # (those of pipelines are known with their devices)
            count = self.mesh.rows if self.mesh else self.count
            if count is not None and count != len(self.shares):
                raise ArgumentError(shares_message(self.shares, count))
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
        plan = self.machine.name if self.machine is not None else self.plan
        return f"memory={int(self.memory or 0)}" if plan is None else f"plan={plan!r}"

    @property
    def machine(self) -> Machine | None:
        """The machine by whose speed plans are compared; None for the devices at hand."""
        return self.plan if isinstance(self.plan, Machine) else None

    def as_given(self) -> Options:
        """Return the options without those that let a plan be searched for."""
        return replace(self, plan=None, memory=None)

    @property
    def of_planning(self) -> PlanningOptions:
        """What a plan is asked for."""
        return PlanningOptions(
            bucket_bytes=self.tuning["bucket_bytes"],
            recompute=self.recompute,
            schedule=self.schedule,
            jit_compile=self.jit_compile,
            strict=self.strict,
            in_stages=self.stages is not None,
            has_layouts=bool(self.variables),
            axes=self.mesh,
        )

    @property
    def asked(self) -> DevicesLike:
        """The devices that are asked for, or how many."""
        return self.mesh.count if self.devices is None else self.devices

    @property
    def count(self) -> int | None:
        """How many devices are asked for; None for all there are."""
        devices = [self.asked] if isinstance(self.asked, str) else self.asked
        return devices if devices is None or isinstance(devices, int) else len(devices)

    def _agree_on_stages(self) -> None:
        """Let the axis of stages and `stages` say the same: the stages, each on a mesh of the other axes.

        Raises:
          ArgumentError: if they disagree.
        """
        stage_count = self.stages.count if isinstance(self.stages, Beginnings) else self.stages
        mesh, is_interleaved = self.mesh, self.schedule == "interleaved"
        if is_interleaved and not mesh.stages:
            raise ArgumentError(
                f"mesh={mesh.asked!r} with schedule='interleaved': say on how many groups of devices the stages take "
                f"turns, mesh={ {STAGE_AXIS: 2, **mesh.asked}!r}."
            )
        if not is_interleaved and stage_count and mesh.stages not in (0, stage_count):
            raise ArgumentError(
                f"mesh={mesh.asked!r} has {count_text(mesh.stages, 'stage')}, and stages={self.stages} "
                f"{'is' if stage_count == 1 else 'are'} {stage_count}. Give the same number, or leave out stages."
            )
        self._set(
            mesh=mesh if mesh.stages else replace(mesh, stages=stage_count or 0, stage_at=0),
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


USUAL: Tuning = {
    "bucket_bytes": None,
    "exchange_bytes": None,
    "default_device": None,
    "reduce_retracing": False,
}
"""What holds for keys that are left out."""


def tuning_asked(tuning: object) -> Tuning:
    """Return all keys, checked.

    Raises:
      ArgumentError: for a key that there is not, or a value that cannot be meant.
    """
    if tuning is not None and not isinstance(tuning, Mapping):
        raise ArgumentError(f"tuning must map names to values, {{'reduce_retracing': True}}, got {tuning!r}.")
    for key in tuning or ():
        if key not in USUAL:
            instead = f" {REMOVED[key]}" if key in REMOVED else meant(key, USUAL)
            raise ArgumentError(f"tuning has no key {key!r}.{instead} It has {', '.join(map(repr, USUAL))}.")
    checked: Tuning = {**USUAL, **(tuning or {})}  # type: ignore[typeddict-item]  # (checked below)
    count, device = checked["bucket_bytes"], checked["default_device"]
    if count is not None and not is_count(count, 0):
        raise ArgumentError(
            f"bucket_bytes must be a number of bytes, at least 0, got {count!r}. Small gradients are sent together in "
            "buckets of at most that size; 0 sends each alone, None chooses."
        )
    exchange = checked["exchange_bytes"]
    if exchange is not None and not is_count(exchange, 0):
        raise ArgumentError(
            f"exchange_bytes must be a number of bytes, at least 0, got {exchange!r}. A sum that shards wait for goes "
            "from each to all others if a device gets at most so many bytes of it; 0 sends all through one device, "
            "None chooses."
        )
    if device is not None:
        canonical_name(device, "default_device")
    check_flag("reduce_retracing", checked["reduce_retracing"])
    return checked


_BYTES = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)B\s*$", re.IGNORECASE)
_UNITS = " KMGT"
_LEAST_BYTES = 1000  # a number below it is one of gigabytes, whose unit was forgotten


def check_flag(name: str, value: object) -> None:
    """Raise `ArgumentError` unless an option is True or False: `"no"` would count as True."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{name} must be True or False, got {value!r}.")


def check_micro_batches(count: object) -> None:
    """Raise `ArgumentError` unless it is a number of micro-batches."""
    if not is_count(count, 1):
        raise ArgumentError(
            f"micro_batches must be a whole number of at least 1, got {count!r}. Each device splits its rows into so "
            "many parts and computes one after the other; 1 computes all rows at once."
        )


def check_schedule(schedule: str | None) -> None:
    """Raise `ArgumentError` unless there is such a schedule."""
    if schedule is not None and schedule not in KINDS:
        schedules = ", ".join(map(repr, KINDS))
        raise ArgumentError(f"Unknown schedule {schedule!r}. Schedules: {schedules}, or None for no pipeline.")


def check_stages(stages: object) -> None:
    """Raise `ArgumentError` unless a function can be cut into so many stages."""
    if stages is not None and not isinstance(stages, Beginnings) and not is_count(stages, 1):
        raise ArgumentError(
            f"stages must be the number of pipeline stages, at least 1; or patterns of names of the layers at which "
            f"new stages begin, ['block4_*', 'block9_*']; or None for no stages. Got {stages!r}."
        )


def check_strict(strict: object) -> None:
    """Raise `ArgumentError` unless `strict` is True or False."""
    if not isinstance(strict, bool):
        raise ArgumentError(
            f"strict must be True or False, got {strict!r}. To require a share of the work, write: "
            "assert step.plan(x).balance > 0.9."
        )


def recompute_asked(recompute: object) -> Recompute:
    """Return what is to be recomputed, checked."""
    if recompute is None or recompute == "blocks":
        return recompute  # type: ignore[return-value]
    if isinstance(recompute, (list, tuple)) and recompute and all(isinstance(pattern, str) for pattern in recompute):
        return tuple(recompute)
    if _is_share(recompute) and 0 < float(recompute) <= 1:  # type: ignore[arg-type]
        return float(recompute)  # type: ignore[arg-type]
    raise ArgumentError(
        f"recompute must be 'blocks'; patterns of names of layers, ['block_*']; the share of the activations to "
        f"recompute, 0.5; or None, which stores all. Got {recompute!r}."
    )


def shares_asked(shares: Sequence[float] | None) -> tuple[float, ...] | None:
    """Return shares of the batch, checked; they are compared with the devices where these are known."""
    if shares is None:
        return None
    try:
        checked = tuple(shares)
    except TypeError as error:
        raise ArgumentError(f"shares must be a number for each device, [3, 1], got {shares!r}.") from error
    if not all(map(_is_share, checked)) or not sum(checked) > 0:
        raise ArgumentError(f"shares must be finite numbers of at least 0, not all of them 0, got {list(checked)}.")
    return checked


def shares_message(shares: Sequence[float], count: int, what: str = "device") -> str:
    """Say that there are other numbers of shares and devices, or pipelines."""
    several = count_text(count, what)
    return f"shares={list(shares)} has {len(shares)} entries for {several}; give one for each {what}."


def parse_memory(memory: object) -> float | None:
    """Return how many bytes `memory` says.

    >>> parse_memory("40GB"), parse_memory("2GiB"), parse_memory(1000)
    (40000000000.0, 2147483648.0, 1000.0)
    """
    if memory is None:
        return None
    memory_bytes = memory
    if match := _BYTES.match(memory) if isinstance(memory, str) else None:
        memory_bytes = float(match[1]) * (1024 if match[3] else 1000) ** _UNITS.index(match[2].upper() or " ")
    if (
        isinstance(memory_bytes, bool)
        or not isinstance(memory_bytes, (int, float, np.number))
        or not 0 < memory_bytes < float("inf")
    ):
        raise ArgumentError(
            f"memory must be the bytes that each device may hold, a number above 0, '40GB' or '40GiB', got {memory!r}."
        )
    if memory_bytes is memory and memory_bytes < _LEAST_BYTES:
        raise ArgumentError(f"memory={memory!r} is a number of bytes. Write memory='{memory}GB'.")
    return float(memory_bytes)


def plan_asked(plan: str | os.PathLike[str] | Machine | None) -> str | Machine | None:
    """Return "auto", the machine for which the fastest plan is searched, or None."""
    return plan if plan is None or plan == "auto" else machine_of(plan, "plan")


def is_count(value: object, least: int) -> bool:
    """Return whether it is a whole number of at least so much; numpy's are as good as Python's."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


def _is_share(weight: object) -> bool:
    """Return whether a weight is a number; numpy's are as good as Python's."""
    if isinstance(weight, bool) or not isinstance(weight, (int, float, np.integer, np.floating)):
        return False
    return math.isfinite(weight) and bool(weight >= 0)
