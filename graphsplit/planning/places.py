"""Places: on which device an operation runs, and a value is. Whoever wants to know asks them.

What runs once belongs to an owner. What shards run is on the devices of its stage, of its column, or else the shards'.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from graphsplit.core.hosts import host_name
from graphsplit.core.layouts import Layout, Replicate, SingleDevice, group_of
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.steps import Step
from graphsplit.program.graph.function_calls import function_names
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.stages import Stage


@dataclass(frozen=True)
class Owners:
    """Devices of whole values.

    Attributes:
      of_ops: the device on which each op runs, if it runs once; "" beside its variable, wherever a loader puts that. Of
        a group it is one.
      of_tensors: where tensors are made whole that the shards have in pieces, if not on the default device.
      groups: of ops that run once on each of several devices, by position, how their results lie.
    """

    of_ops: tuple[str, ...] = ()
    of_tensors: Mapping[Tensor, str] = field(default_factory=dict)
    groups: Mapping[int, Replicate] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """Where operations run and values are.

    Attributes:
      mesh: the shards.
      default_device: the device of whole values that belong to nobody.
      owners: the devices of the others; nothing runs once before they are known.
    """

    mesh: Mesh
    default_device: str
    owners: Owners = field(default_factory=Owners)

    # What runs once

    def once(self, op: Op) -> tuple[str, ...]:
        """Return the devices on which an operation runs that runs once: on each of a group, if it has one."""
        if op.index in self.owners.groups:
            return self.owners.groups[op.index].devices
        return (self.owners.of_ops[op.index] or self.default_device,)

    def is_anywhere(self, op: Op) -> bool:
        """Return whether an operation that runs once is beside its variable, wherever a loader puts that."""
        return not self.owners.of_ops[op.index]

    def layout(self, op: Op) -> SingleDevice | Replicate:
        """Return how what an operation makes that runs once lies, and what it reads."""
        return self.owners.groups.get(op.index) or SingleDevice(self.owners.of_ops[op.index])

    def whole(self, tensor: Tensor) -> SingleDevice:
        """Return where pieces of a tensor are put together."""
        return SingleDevice(self.owners.of_tensors.get(tensor, self.default_device))

    @property
    def all_once(self) -> set[str]:
        """The devices of all operations that run once."""
        in_groups = [device for group in self.owners.groups.values() for device in group.devices]
        return {*[device or self.default_device for device in self.owners.of_ops], *in_groups}

    # What shards run

    def on(self, op: Op, d: int) -> str:
        """Return the device on which shard `d` runs an operation: that of its stage and column, or the shard's own."""
        devices = self.of_stage(op) or self.column(op)
        return devices[self.mesh.positions[d] % len(devices)] if devices else self.mesh.devices[d]

    def on_shards(self, op: Op) -> Sequence[str]:
        """Return the device on which each shard runs an operation; see `on`."""
        devices = self.of_stage(op) or self.column(op)
        return [devices[p % len(devices)] for p in self.mesh.positions] if devices else self.mesh.devices

    def having(self, op: Op, layout: Layout) -> Sequence[str]:
        """Return the devices that have what an operation makes in a layout: one, those of a group, or of each shard."""
        if isinstance(layout, SingleDevice):
            return (layout.device or self.default_device,)
        return group_of(layout) or self.on_shards(op)

    def of_stage(self, op: Op) -> tuple[str, ...]:
        """Return the devices that its stage has for an operation, by position, or one for all; empty if it has none."""
        stage = self._stage(op)
        return stage.column(op.provenance.column or 0, max(len(self.mesh.columns), 1)) if stage else ()

    def _stage(self, op: Op) -> Stage | None:
        """Return the stage that has devices of its own for an operation.

        There is none along another axis, planned for all stages alike, nor in what runs where what calls it does.
        """
        return None if self.mesh.axis or "" in self.mesh.devices else op.stage

    def column(self, op: Op) -> tuple[str, ...]:
        """Return the devices of the column of an operation, by position; empty for one that is in no column."""
        number = op.provenance.column
        return () if number is None or not self.mesh.columns else self.of_stage(op) or self.mesh.columns[number]

    def within(self, op: Op) -> Places:
        """Return the places of what a loop or branch calls: of one in a stage, those that the stage has."""
        stage, count = self._stage(op), len(self.mesh.columns)
        if stage is None:
            return Places(self.mesh, self.default_device)
        columns = tuple([stage.column(number, count) for number in range(count)])
        return Places(replace(self.mesh, devices=tuple(self.on_shards(op)), columns=columns), self.of_stage(op)[0])

    def passed(self, op: Op, d: int | None, device: str) -> tuple[list[str], list[str]]:
        """Return where the values are that a loop or branch takes, and those that it returns: each in its column.

        Args:
          op: the loop or branch.
          d: the shard that runs it, or None if it runs once.
          device: where it runs; what is in no column is there.
        """
        body, inside = op.bodies[function_names(op.node)[-1]], self.within(op)
        position = 0 if d is None else self.mesh.positions[d]

        def place(i: int) -> str:
            column = inside.column(body.ops[i])
            return column[position % len(column)] if column else device

        return [place(i) for i in body.inputs], [place(tensor.op) for tensor in body.outputs]

    # Devices

    def running(self, op: Op, step: Step) -> set[str]:
        """Return the devices on which an operation runs: once, on the shards, or both."""
        return {*(self.once(op) if step.once else ()), *(self.on_shards(op) if step.shards else ())}

    def computing(self, program: Program) -> Set[str]:
        """Return the devices that do more than hold variables: the default one, those of shards, stages, columns."""
        of_stages = [device for stage in program.stages for device in stage.devices]
        return {self.default_device, *self.mesh.devices, *of_stages, *itertools.chain(*self.mesh.columns)}

    def nearest_shard(self, device: str) -> int:
        """Return the shard whose copy a device reads of what all shards have: its own, or one of its host.

        Of shards that may have no rows, it is the first, which always has some.

        >>> mesh = Mesh(("/task:0/device:CPU:0", "/task:1/device:CPU:0"), (1, 1), (2, 1), (0, 1))
        >>> Places(mesh, "").nearest_shard("/task:1/device:CPU:7")
        1
        """
        if device in self.mesh.devices and self.mesh.rows:
            return self.mesh.devices.index(device)
        hosts = map(host_name, self.mesh.devices if self.mesh.rows else ())
        return next((d for d, host in enumerate(hosts) if host == host_name(device)), 0)

    def axes_between(self, device: str, other: str) -> list[str]:
        """Return the axes along which two devices of columns differ; all other axes than the batch's if none does.

        >>> mesh = Mesh(columns=(("a",), ("b",), ("c",), ("d",)), others=(("model", 2), ("expert", 2)))
        >>> places = Places(mesh, "a")
        >>> places.axes_between("a", "c"), places.axes_between("a", "d")
        (['model'], ['model', 'expert'])
        """
        along, axes = self._along_axes, [name for name, _ in self.mesh.others]
        pairs = zip(axes, along.get(device, ()), along.get(other, ()), strict=False)
        return [name for name, a, b in pairs if a != b] or axes

    @functools.cached_property
    def _along_axes(self) -> dict[str, tuple[int, ...]]:
        """The number of each device along each of the other axes."""
        numbers = itertools.product(*[range(size) for _, size in self.mesh.others])
        pairs = zip(numbers, self.mesh.columns, strict=True)
        return {device: numbers_along for numbers_along, column in pairs for device in column}
