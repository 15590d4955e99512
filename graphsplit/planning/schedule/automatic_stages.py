"""Automatic stages: a program cut into parts of equal time, each with devices of its own.

Units are forward operations in the order in which they were traced, each with the backward operations that
differentiate it; stages are consecutive ones. The result is what `on_device` leaves behind, operation by operation:
all that follows, schedules, checks and charts, cannot tell the difference.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from graphsplit.core.patterns import scopes_fitting, scopes_of
from graphsplit.errors import ArgumentError, CheckError, bullet_list
from graphsplit.planning.amounts import format_bytes
from graphsplit.planning.costs.families import family_of
from graphsplit.planning.costs.seconds import seconds_of
from graphsplit.planning.costs.work import data_in
from graphsplit.planning.mesh import Mesh
from graphsplit.planning.schedule.chains import Chain, Room, Sent, cut
from graphsplit.planning.schedule.gradient_pairs import backward_ops, pair, sources_of
from graphsplit.planning.schedule.scheduling import COSTLY
from graphsplit.planning.steps import Step
from graphsplit.program.program import Op, Program, Tensor
from graphsplit.program.stages import Stage


@dataclass(frozen=True, eq=False)
class StageUnits:
    """The units of a program.

    Attributes:
      program: see there.
      work: positions of what takes time forward and depends on data, on the shards or not.
      forward, backward: positions of the operations on the shards.
      of: the number of the unit of each of them.
      seconds: of each unit.
    """

    program: Program
    work: Sequence[int]
    forward: Sequence[int]
    backward: Set[int]
    of: Mapping[int, int]
    seconds: Sequence[float]

    @property
    def most_stages(self) -> int:
        """Into how many stages they can be cut."""
        return sum(second > 0 for second in self.seconds)

    def tensors(self) -> dict[Tensor, list[int]]:
        """Return the operations that have to do with each tensor that is made on the shards: its maker, its readers."""
        ops_by_tensor: dict[Tensor, list[int]] = {}
        for i in sorted(self.of):
            for tensor in dict.fromkeys(self.program.ops[i].inputs):
                if tensor.op in self.of:
                    ops_by_tensor.setdefault(tensor, [tensor.op]).append(i)
        return ops_by_tensor

    def chain(self) -> Chain:
        """Return the units as a chain."""
        size, sent, kept_bytes, weights = len(self.forward), [], [0] * len(self.forward), [0] * len(self.forward)
        for tensor, concerned in self.tensors().items():
            units, count = [self.of[i] for i in concerned], self.program.bytes(tensor)
            sent.append(Sent(min(units), max(units), count))
            if tensor.op not in self.backward and not self.backward.isdisjoint(concerned):
                kept_bytes[self.of[tensor.op]] += count
        counted: set[Tensor] = set()
        for k, i in enumerate(self.forward):
            new = {t for t in self.program.ops[i].inputs if t.op not in self.of} - counted
            weights[k] = sum(map(self.program.bytes, new))
            counted |= new
        seams = tuple([self._seam(k) for k in range(size)])
        return Chain(tuple(self.seconds), tuple(sent), tuple(weights), tuple(kept_bytes), seams)

    def _seam(self, k: int) -> int:
        """Return how little a unit is the beginning of something: of a layer, of a product with weights."""
        op, op_before = self.program.ops[self.forward[k]], self.program.ops[self.forward[k - 1]]
        same = op.name.rpartition("/")[0] == op_before.name.rpartition("/")[0]
        return same + (family_of(op.type) not in COSTLY)


def stage_units(program: Program, steps: Sequence[Step], batch: int) -> StageUnits:
    """Return the units of a program.

    Args:
      program, steps: what runs where.
      batch: the number of rows.
    """
    sharded = [op.index for op in program.ops if steps[op.index].shards]
    all_backward = backward_ops(program, set(sharded))
    backward = {i for i in sharded if i in all_backward}
    live = [op for op, step in zip(program.ops, steps, strict=True) if step.shards or step.once]
    has_data = data_in(program, batch)
    work = [
        op.index for op in live if has_data[op.index] and op.index not in all_backward and seconds_of(program, op) > 0
    ]
    forward = [i for i in sharded if i not in all_backward]
    of = {i: k for k, i in enumerate(forward)} | dict(pair(program, forward, backward) if forward else {})
    seconds = [0.0] * len(forward)
    for i, k in of.items():
        seconds[k] += seconds_of(program, program.ops[i])
    return StageUnits(program, work, forward, backward, of, seconds)


@dataclass(frozen=True)
class Beginnings:
    """Where stages begin, all but the first.

    Attributes:
      names: as the user says it: patterns of names of layers.
      operations: for each the regular expression for the names of what these layers compute, and those of all layers
        behind them, in order: a Dropout computes nothing while predicting, and then the stage begins with the next.
        None until the function is traced, whose scopes are its layers.
    """

    names: tuple[str, ...]
    operations: tuple[tuple[str, ...], ...] = ()

    @classmethod
    def at(cls, fitting: Mapping[str, Sequence[str]], layers: Sequence[str], form: str) -> Beginnings:
        """Return the beginnings at those layers that fit patterns.

        Args:
          fitting: the layers by the patterns.
          layers: all of them, in order.
          form: of the regular expression, with `{}` for the layers.
        """
        first = {pattern: layers.index(fitting_layers[0]) for pattern, fitting_layers in fitting.items()}
        in_order = sorted(first, key=lambda pattern: first[pattern])
        operations = []
        for pattern in in_order:
            later_layers = [[name] for name in layers[first[pattern] + 1 :] if name not in fitting[pattern]]
            operations.append(
                tuple([form.format("|".join(map(re.escape, o))) for o in [fitting[pattern], *later_layers]])
            )
        return cls(tuple(in_order), tuple(operations))

    @property
    def count(self) -> int:
        """The number of stages."""
        return len(self.names) + 1

    def __str__(self) -> str:
        return repr(list(self.names))


@dataclass(frozen=True)
class StagesAsked:
    """What stages a user asked for.

    Attributes:
      devices: of each stage, one for each pipeline.
      begins: where they begin; None for stages of equal time.
      memory: bytes of the smallest device; None if that is not known.
      on_mesh: whether they are an axis of a mesh. Then the function is cut before its variables are laid out, which lie
        on the devices of their stage, and before what other axes make of it, which stays in its stage.
    """

    devices: tuple[tuple[str, ...], ...]
    begins: Beginnings | None = None
    memory: int | None = None
    on_mesh: bool = False

    @property
    def heads(self) -> tuple[str, ...]:
        """The device of the first stage in each pipeline."""
        return self.devices[0]


@dataclass(frozen=True)
class StageStart:
    """A stage, and why it is where it is.

    Attributes:
      stage: its name and devices.
      first: the position of the operation at which it begins.
      share: of the time of all stages.
      received: the tensors that it is sent by other stages.
    """

    stage: Stage
    first: int
    share: float
    received: tuple[Tensor, ...]

    @property
    def asked(self) -> str:
        """The layer at which it was asked to begin; "" if it was put where times are equal."""
        return self.stage.begins


@dataclass(frozen=True)
class StageStarts:
    """All stages into which a program was cut.

    Attributes:
      asked: what the user asked for.
      stages: the stages in order; empty where nothing is split.
    """

    asked: StagesAsked
    stages: tuple[StageStart, ...] = ()

    @property
    def balance(self) -> float:
        """The time of the slowest stage, as a multiple of the mean."""
        return max((stage.share for stage in self.stages), default=1.0) * max(len(self.stages), 1)


def start_stages(
    program: Program, steps: Sequence[Step], mesh: Mesh, stages_asked: StagesAsked, schedule: str
) -> Program:
    """Return the program with its stages.

    There are none where nothing is split. Gradients from outside may have less to cut than the function, and so has a
    batch of which less runs on the shards: one row of a recurrent network. They are cut into fewer stages.

    Raises:
      ArgumentError: if it cannot be cut into so many stages.
    """
    if not mesh.shards:
        return program
    units = stage_units(program, steps, mesh.batch)
    may_be_fewer = program.seeds or len(units.work) >= len(stages_asked.devices)
    devices = stages_asked.devices[: units.most_stages] if may_be_fewer else stages_asked.devices
    if not devices:
        return program
    if (begins := stages_asked.begins) is not None:
        if not begins.operations:
            scopes = list(dict.fromkeys(scope for op in program.ops for scope in scopes_of(op.name)))
            begins = Beginnings.at(scopes_fitting(f"stages={begins}", begins.names, scopes), scopes, "^({})/")
        starts = _asked_starts(units, begins)
        idle = set(begins.names).difference(starts.values())
        called = ["", *begins.names]
        devices = tuple(
            [
                stage_devices
                for stage_devices, name in zip(stages_asked.devices, called, strict=True)
                if name not in idle
            ]
        )
    else:
        starts = _equal_starts(units, len(devices), stages_asked, mesh, schedule)
    stages = [
        Stage(str(k), stage_devices, name)
        for k, (stage_devices, name) in enumerate(zip(devices, starts.values(), strict=True))
    ]
    number = {i: sum(k >= start for start in starts) - 1 for i, k in units.of.items()}
    ops = list(program.ops)
    for i, s in number.items():
        provenance = replace(ops[i].provenance, stage=stages[s], backward=i in units.backward)
        ops[i] = replace(ops[i], provenance=provenance)
    return replace(program, ops=tuple(ops), stages=tuple(stages))


def _equal_starts(
    units: StageUnits, count: int, stages_asked: StagesAsked, mesh: Mesh, schedule: str
) -> dict[int, str]:
    """Return the units at which stages of equal time begin."""
    chain = units.chain()
    if units.most_stages < count:
        raise ArgumentError(
            f"stages={count}: the function has {len(units.work)} forward operations with work, and each stage "
            "needs at least one. Choose fewer stages."
        )
    room = _room(units, count, stages_asked, mesh, schedule)
    starts = cut(chain, count, room)
    if starts is None:
        assert room is not None
        needed = sum(chain.weights) + sum(chain.kept) * max(room.alive)
        raise ArgumentError(
            f"stages={count}: no cut lets each stage fit into the {format_bytes(round(room.bytes))} available on "
            f"its device; together they need {format_bytes(round(needed))}. Choose more stages, more micro_batches, "
            "or schedule='1f1b', which keeps fewer of them alive."
        )
    return dict.fromkeys(starts, "")


def _room(units: StageUnits, count: int, stages_asked: StagesAsked, mesh: Mesh, schedule: str) -> Room | None:
    """Return the memory of each stage; None where that is not known, or how many rows there are."""
    if stages_asked.memory is None or units.program.symbols:
        return None
    return Room(
        stages_asked.memory * len(set(stages_asked.devices)) / len(stages_asked.devices), _alive(count, mesh, schedule)
    )


def _alive(count: int, mesh: Mesh, schedule: str) -> tuple[float, ...]:
    """Return which share of the batch each stage keeps at a time, at most."""
    turns = max(mesh.positions.count(position) for position in mesh.positions)
    together = {"": 1, "gpipe": turns}.get(schedule)
    return tuple([(together or min(count - stage, turns)) / mesh.shards for stage in range(count)])


def _asked_starts(units: StageUnits, begins: Beginnings) -> dict[int, str]:
    """Return the units at which the user wants stages to begin, and how each was asked for.

    Those are missing of whose layers, and of all behind them, nothing runs that another stage does not begin with.
    """
    names = [units.program.ops[i].name for i in units.work]
    name_by_start: dict[int, str] = {0: ""}  # among all work; some of it may run once
    wrong = []
    for name, layers in zip(begins.names, begins.operations, strict=True):
        of_layers = ((layer, w) for layer in layers for w, op_name in enumerate(names) if re.search(layer, op_name))
        layer, start = next(of_layers, ("", -1))
        if start >= 0 and start not in name_by_start:
            name_by_start[start] = name
        elif layer == layers[0]:
            other = (
                repr(name_by_start[start])
                if name_by_start[start]
                else "the function, with which the first stage begins"
            )
            wrong.append(f"{name!r} begins with {other}")
    if wrong:
        raise ArgumentError(
            f"stages={begins}: each stage needs a beginning of its own.\n{bullet_list(wrong)}\n"
            "Name layers at which new stages begin, behind the first one."
        )
    starts: dict[int, str] = {}
    for start, name in sorted(name_by_start.items()):
        k = bisect.bisect_left(units.forward, units.work[start]) if name else 0
        if any(units.seconds[k:]):
            starts.setdefault(k, name)
    return starts


def with_all_in_stages(program: Program, steps: Sequence[Step]) -> Program:
    """Return a program that was cut first, with a stage for what layouts of variables and other axes have added to it.

    On the shards it belongs to the stage that it follows, or else to the first that reads it. So does what follows from
    variables alone, wherever it runs.
    """
    ops, sharded = list(program.ops), {op.index for op in program.ops if steps[op.index].shards}
    from_variables = set(program.captures)
    first_reader: dict[int, Op] = {}

    def place(op: Op) -> int:
        return _place(op, program.stages)

    def join(i: int, other: Op) -> None:
        provenance = other.provenance
        ops[i] = replace(
            ops[i], provenance=replace(ops[i].provenance, stage=provenance.stage, backward=provenance.backward)
        )

    for op in program.ops:
        sources = sources_of(op, sharded)
        staged_sources = [ops[i] for i in sources if ops[i].stage]
        if op.index in sharded and not op.stage and staged_sources:
            join(op.index, max(staged_sources, key=place))
        elif not op.stage and sources and all(i in from_variables or ops[i].is_constant for i in sources):
            from_variables.add(op.index)
    for i in sorted(sharded | from_variables - {*program.captures}, reverse=True):
        if not ops[i].stage and i in first_reader:
            join(i, first_reader[i])
        for source in sources_of(ops[i], sharded) if ops[i].stage else ():
            first_reader[source] = min(ops[i], first_reader.get(source, ops[i]), key=place)
    return replace(program, ops=tuple(ops))


def _place(op: Op, stages: Sequence[Stage]) -> int:
    """Return the place of an operation of a stage on the way through all stages and back."""
    assert op.stage is not None
    number = stages.index(op.stage)
    return 2 * len(stages) - 1 - number if op.provenance.backward else number


def cuts_of(program: Program, steps: Sequence[Step], stages_asked: StagesAsked) -> StageStarts:
    """Return the stages of a program that was cut, with what each does and is sent."""
    sharded = [op for op in program.ops if steps[op.index].shards]
    ops_of_stage = {stage: [op for op in sharded if op.stage == stage] for stage in program.stages}
    seconds = {stage: sum(seconds_of(program, op) for op in ops) for stage, ops in ops_of_stage.items()}
    total = sum(seconds.values()) or 1.0
    stage_of = {op.index: op.stage for op in sharded if op.stage}

    def cut(stage: Stage) -> StageStart:
        operands = dict.fromkeys([tensor for op in ops_of_stage[stage] for tensor in op.inputs])
        received = tuple([tensor for tensor in operands if stage_of.get(tensor.op, stage) != stage])
        first = next(op.index for op in ops_of_stage[stage] if not op.provenance.backward)
        return StageStart(stage, first, seconds[stage] / total, received)

    return StageStarts(stages_asked, tuple(map(cut, program.stages)))


def check_stage_starts(program: Program, steps: Sequence[Step], cuts: StageStarts) -> None:
    """Raise `CheckError` unless what runs on the shards is of one stage each, and follows only from those before it."""
    stages, sharded = program.stages, {i for i, step in enumerate(steps) if step.shards}
    place: dict[int, int] = {}
    for op in program.ops:
        place_before = max([place[i] for i in sources_of(op, sharded) if i in place], default=-1)
        stage = op.stage
        if steps[op.index].shards and cuts.stages:
            if stage not in stages:
                raise CheckError(f"{op.name!r} runs on the shards and is of no stage.")
            place[op.index] = _place(op, stages)
        if place_before > place.get(op.index, place_before):
            raise CheckError(f"{op.name!r} of stage {stage} follows from a later stage.")
        if place_before >= 0:
            place.setdefault(op.index, place_before)
