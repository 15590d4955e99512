"""Owners: on which device whole values are made. Arithmetic for a variable runs where the variable is.

What only leads to changes of one device's variables belongs to that device: an optimizer's momentum never travels.
What serves several devices (a global norm), or nobody, runs where most of what it reads already is, or on the default
device. On a device that only holds variables, the host of GPUs, also runs what serves another one and makes no more
than it reads there: of the slots in the host's memory none is sent, but the update that follows from them.

Arguments belong to the device on which the caller has them. There they are cut, and nothing else runs for their sake.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence, Set

import tensorflow as tf

from graphsplit.core.devices import task_of
from graphsplit.core.layouts import Layout, Partial, Replicate, is_whole
from graphsplit.planning.places import Owners, Places
from graphsplit.planning.propagation.groups import find_groups
from graphsplit.planning.propagation.shared_numbers import shared_numbers
from graphsplit.planning.state import State
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor

_CALLBACKS = frozenset({"PyFunc", "PyFuncStateless", "EagerPyFunc", "Print", "PrintV2"})
_HERE = "/device:CPU:0"
_FEW = 256  # bytes: for so few nothing runs elsewhere (they are counters, and never laid out)
_MORE = 8  # and an eighth of what is read there may be sent more: a rate, for instance


def find_owners(
    program: Program, steps: Sequence[Step], places: Places, state: State, input_devices: Sequence[str] = ()
) -> Owners:
    """Return where whole values are made.

    Args:
      program, steps: what runs, and how.
      places: of its shards, columns and stages.
      state: where lives what the program does not compute.
      input_devices: where each argument lies that the caller gives; empty if all are on the default device.
    """
    mesh, default_device = places.mesh, places.default_device
    pinned, lying, groups = _pinned(program, state, default_device), _lying(program, input_devices), {}
    groups = find_groups(program, steps, state, mesh.few_bytes > 0)
    if (
        not groups
        and not program.stages
        and not mesh.columns
        and all(d in (default_device, "") for d in pinned.values())
    ):
        pinned |= lying
        return Owners(tuple([pinned.get(op.index, default_device) for op in program.ops]))
    return _OwnerFinder(program, steps, places, pinned, lying, groups).owners()


def _lying(program: Program, input_devices: Sequence[str]) -> dict[int, str]:
    """Return where arguments lie, by position. Left out are handles and lists, which not every device may have."""
    input_places = zip(program.inputs, input_devices, strict=False)  # (what gradients are given besides comes last)
    return {i: device for i, device in input_places if program.ops[i].out_dtypes[0] not in (tf.resource, tf.variant)}


def _pinned(program: Program, state: State, default_device: str) -> dict[int, str]:
    """Return the ops that must run on one device: those that touch a variable or table, which cannot be sent.

    So must those that a program gives a place, for a copy of a variable.

    A loop or branch may touch several, on several devices: it runs where most of them are. (TensorFlow
    has a step counter of int32 on the host, where everything else is on a GPU.)

    And what calls back into Python, or prints, does so in this process, where the default device may be a worker: there
    it would find no such function, and nobody who reads.
    """
    device_by_op = {op.index: op.device for op in program.ops if op.device}
    is_away = task_of(default_device) is not None
    handle_devices = {op.index: state.devices[op.name] for op in program.ops if op.name in state.devices}
    handle_devices |= {i: device_by_op[i] for i in program.captures if i in device_by_op}
    for op in program.ops:
        if is_away and _calls_back(op):
            device_by_op[op.index] = _HERE
            continue
        if op.index in handle_devices:
            device_by_op[op.index] = handle_devices[op.index]
            continue
        if handles_read := dict.fromkeys([tensor.op for tensor in op.inputs if tensor.op in handle_devices]):
            touched = Counter(handle_devices[i] for i in handles_read)
            device_by_op[op.index] = max(touched, key=lambda device: (touched[device], device == default_device))
    return device_by_op


def _calls_back(op: Op) -> bool:
    return op.type in _CALLBACKS or any(_calls_back(inner) for body in op.bodies.values() for inner in body.ops)


class _OwnerFinder:
    def __init__(
        self,
        program: Program,
        steps: Sequence[Step],
        places: Places,
        pinned: Mapping[int, str],
        lying: Mapping[int, str],
        groups: Mapping[int, Replicate],
    ):
        self._program = program
        self._places = places
        self._mesh = places.mesh
        self._steps = steps
        self._default_device = places.default_device
        self._pinned = pinned
        self._lying = lying
        self._groups = groups

    def owners(self) -> Owners:
        of_ops: list[str] = []
        gathered: dict[Tensor, str] = {}
        for op in self._program.ops:
            of_ops.append(self._lying.get(op.index) or self._device(op, of_ops, gathered))
            group = self._groups.get(op.index)
            if group is not None:
                of_ops[-1] = group.nearest(self._default_device)
            shards = self._steps[op.index].shards
            for k in range(len(op.out_shapes) if shards and not self._steps[op.index].once else 0):
                assert shards is not None
                if not is_whole(shards.gives[k]):
                    gathered[Tensor(op.index, k)] = self._where_gathered(op, Tensor(op.index, k), shards.gives[k])
        shared = self._shared(of_ops, gathered)
        of_ops = [shared[i].nearest(self._default_device) if i in shared else device for i, device in enumerate(of_ops)]
        return Owners(tuple(of_ops), gathered, {**self._groups, **shared})

    def _shared(self, of_ops: Sequence[str], gathered: Mapping[Tensor, str]) -> dict[int, Replicate]:
        """Return what each of several owners computes; see `shared_numbers`. What has copies is with each of them."""
        if not self._mesh.exchange_bytes or self._mesh.columns or self._program.stages:
            return {}
        places = dict(gathered)
        for op in self._program.ops:
            if self._steps[op.index].once and not op.is_constant and op.index not in self._groups:
                places.update({Tensor(op.index, k): of_ops[op.index] for k in range(len(op.out_shapes))})
        shared_ops = shared_numbers(self._program, self._steps, places, self._served, self._mesh.exchange_bytes)
        return {i: group for i, group in shared_ops.items() if i not in self._groups}

    @functools.cached_property
    def _readers(self) -> dict[Tensor, list[int]]:
        """Those that read a tensor whole and run once."""
        readers: dict[Tensor, list[int]] = {}
        for op in self._program.ops:
            for tensor in dict.fromkeys(op.inputs) if self._steps[op.index].once else ():
                readers.setdefault(tensor, []).append(op.index)
        return readers

    @functools.cached_property
    def _served(self) -> list[frozenset[str]]:
        """For each op the devices of what it leads to: variables, stages, or the default device for what is returned.

        A reader that makes much less of it (a norm, whether all numbers are finite) may lead to all devices. It does
        not count if all others lead to one.
        """
        returned = {tensor.op for tensor in self._program.outputs}
        served: list[frozenset[str]] = [frozenset()] * len(self._program.ops)
        of_large = list(served)  # without such readers
        for op in reversed(self._program.ops):
            fixed = self._fixed_devices(op)
            if fixed is not None:
                served[op.index] = of_large[op.index] = fixed
                continue
            readers = [i for k in range(len(op.out_shapes)) for i in self._readers.get(Tensor(op.index, k), ())]
            returning = frozenset([self._default_device] if op.index in returned else [])
            served[op.index] = self._near(op, returning.union(*[served[i] for i in readers]))
            large = [of_large[i] for i in readers if self._counts(op, self._program.ops[i])]
            of_large[op.index] = self._near(op, returning.union(*large)) if large else frozenset()
            if len(served[op.index]) > 1 and len(of_large[op.index]) == 1:
                served[op.index] = of_large[op.index]
        return served

    def _fixed_devices(self, op: Op) -> frozenset[str] | None:
        """Return where an op runs whoever reads it; None if that depends on its readers."""
        if op.index in self._groups:
            return frozenset(self._groups[op.index].devices)
        own_place = self._own_place(op)
        return None if own_place is None else frozenset([own_place or self._default_device])

    def _counts(self, op: Op, reader: Op) -> bool:
        """Return whether a reader has a place of its own, or makes about as much as the op: more than an eighth."""
        is_large = sum(reader.out_bytes) * _MORE > max(op.out_bytes, default=0)
        return is_large or self._fixed_devices(reader) is not None

    def _near(self, op: Op, served: frozenset[str]) -> frozenset[str]:
        """Return those devices that an operation may run on: one of a column stays in it, in whichever stage."""
        column, number = self._places.column(op), op.provenance.column
        if not column or number is None:
            return served
        stages = () if op.stage else self._program.stages
        columns = [column, *[stage.column(number, len(self._mesh.columns)) for stage in stages]]
        return served.intersection([d for column_devices in columns for d in column_devices]) or frozenset(
            [column_devices[0] for column_devices in columns]
        )

    def _own_place(self, op: Op) -> str | None:
        """Return where an op runs whoever reads it: beside its variable, in its stage."""
        if op.index in self._pinned:
            return self._pinned[op.index]
        touches = tf.resource in (*map(self._program.dtype, op.inputs), *op.out_dtypes)
        return None if touches else next(iter(self._places.of_stage(op)), None)

    def _device(self, op: Op, of_ops: Sequence[str], gathered: Mapping[Tensor, str]) -> str:
        own_place = self._own_place(op)
        if own_place is not None:
            return own_place
        for_rows = self._steps[op.index].for_rows
        if for_rows and not for_rows.adds:
            return of_ops[for_rows.table.op]
        usual = next(iter(self._places.column(op)), self._default_device)
        votes = {usual: 0}
        for tensor in dict.fromkeys(op.inputs):
            if not self._program.ops[tensor.op].is_constant:
                made_on = self._default_device if tensor.op in self._lying else of_ops[tensor.op]
                device = gathered.get(tensor, made_on) or usual
                votes[device] = votes.get(device, 0) + self._program.bytes(tensor)
        allowed_devices = self._near(op, frozenset(votes))
        may = [device for device in votes if device in allowed_devices]
        most = max(may, key=lambda device: (votes[device], device == usual))
        if len(self._served[op.index]) != 1:
            return most
        [device] = self._served[op.index]
        extra_bytes = sum(op.out_bytes) + votes.get(device, 0) - votes[most]  # to be sent, if it does not run there
        is_cheap = votes[most] > _FEW and votes[most] >= _MORE * extra_bytes
        return most if most not in self._computing and is_cheap else device

    @functools.cached_property
    def _computing(self) -> Set[str]:
        return self._places.computing(self._program)

    def _where_gathered(self, op: Op, tensor: Tensor, layout: Layout) -> str:
        """Return where a tensor is put together: sums in their stage or column, others where most of them are owned."""
        if isinstance(layout, Partial) and (of_stage := self._places.of_stage(op)):
            return of_stage[0]
        sums = [d for i in self._readers.get(tensor, ()) if i in self._groups for d in self._groups[i].sums]
        if sums:
            return sums[0]
        column = self._places.column(op) if isinstance(layout, Partial) else ()
        usual = column[0] if column else self._default_device
        votes: dict[str, int] = {}
        for reader in self._readers.get(tensor, ()):
            if len(self._served[reader]) == 1:
                [device] = self._served[reader]
                votes[device] = votes.get(device, 0) + 1
        if tensor in self._program.outputs:
            votes[self._default_device] = votes.get(self._default_device, 0) + 1
        may = [device for device in votes if not column or device in column]
        return max(may, key=lambda device: (votes[device], device == usual), default=usual)
