"""Planning: Program + devices -> Plan. One pass forward, one pass back, no TensorFlow op is made.

Forward, every op gets its natural layout: rows flow from the sharded arguments through the rules. Backward, from what
the function returns and changes, every op learns in which layouts it is read. What nobody reads is dropped; what is
whole and is read in pieces is made in pieces where that moves fewer bytes; every other change of layout becomes one
reshard.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from graphsplit.core.errors import CheckError, StrictError, bullet_list
from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.layouts import REPLICATE, Layout, Replicate, Shard
from graphsplit.planning.backward_propagation import Backward
from graphsplit.planning.bucketing import find_packs
from graphsplit.planning.control_flow import Mesh
from graphsplit.planning.forward_propagation import Forward
from graphsplit.planning.plan import Plan
from graphsplit.planning.scheduling import find_order
from graphsplit.planning.steps import Reshard
from graphsplit.program.program import Op, Program


@collection_paused()
def plan_program(
    program: Program,
    *,
    devices: Sequence[str],
    rows: Sequence[int],
    home: str,
    input_layouts: Sequence[Layout],
    strict: bool = False,
    random: str = "exact",
    notes: Sequence[str] = (),
    positions: Sequence[int] = (),
) -> Plan:
    """Decide where every operation runs.

    Args:
      program: the traced function.
      devices, rows: the device and number of rows of each shard; every shard has at least one row.
      home: the device of whole operations.
      input_layouts: `Shard` or `Replicate` for each argument.
      strict: raise `StrictError` if an operation that carries the batch would run at home.
      random: `"exact"` or `"independent"`.
      positions: which of the devices asked for each shard has.

    Raises:
      StrictError: see `strict`.
    """

    def plan_bodies(op: Op, layouts: Sequence[Layout]) -> dict[str, Plan]:
        """Plan what a loop or branch at home does in each turn, as if its functions were whole programs."""
        if "Call" in op.type:
            return {}  # compiled by XLA, for one device
        given = [layout if isinstance(layout, Shard) else REPLICATE for layout in layouts]
        given = given if "While" in op.type else given[1:]
        stage = program.stages.of(op.name)
        own_home = stage.home if stage else home
        own = [stage.device(positions[d] if positions else d) for d in range(len(rows))] if stage else devices
        return {
            name: plan_program(
                body, devices=own, rows=rows, home=own_home, input_layouts=given, random=random, positions=positions
            )
            for name, body in op.bodies.items()
        }

    mesh = Mesh(tuple(devices), tuple(rows), random)
    kept_home: dict[int, str] = {}
    while True:
        natural = Forward(program, input_layouts, mesh.answer, program.outputs, kept_home, batch=sum(rows))
        backward = Backward(
            program,
            natural,
            (REPLICATE,) * len(program.outputs),
            independent=random == "independent",
            plan_bodies=plan_bodies,
        )
        impossible = _impossible(program, backward)
        if not impossible:
            break
        if impossible.keys() <= kept_home.keys():
            raise CheckError(f"Lists cannot be placed: {sorted(program.ops[i].name for i in impossible)}.")
        kept_home.update(impossible)
    reshards = tuple(reversed(backward.reshards))
    plan = Plan(
        program=program,
        devices=tuple(devices),
        rows=tuple(rows),
        home=home,
        input_layouts=tuple(input_layouts),
        steps=tuple(backward.steps),
        reshards=reshards,
        packs=find_packs(program, backward.steps, reshards) if len(devices) > 1 else (),
        order=find_order(program, backward.steps) if len(devices) > 1 else {},
        notes=(*notes, *_notes_on_stages(program, backward)),
        random=random,
        positions=tuple(positions),
    )
    if strict and plan.stayed_home:
        raise StrictError(_strict_message(plan))
    return plan


def _strict_message(plan: Plan) -> str:
    lines = []
    for op, reason in plan.stayed_home:
        where = plan.program.locate(op.name)
        gathered = plan.size_text(plan.gathered(op))
        lines.append(f"{op.type} {op.name!r}{f' at {where}' if where else ''}: {gathered} gathered; {reason}")
    return (
        "strict=True, but these operations carry rows of the batch and would run at home:\n"
        f"{bullet_list(lines)}\n"
        "Rewrite them row by row, keep their argument whole with split={...: None}, or drop strict=True."
    )


def _notes_on_stages(program: Program, backward: Backward) -> list[str]:
    """Say which stages cannot have their devices: those inside loops and branches that every shard runs by itself."""
    notes = []
    for op, step in zip(program.ops, backward.steps, strict=True):
        bodies = step.shards.bodies if step.shards else {}
        for stage in dict.fromkeys(stage for body in bodies.values() for stage in body.program.all_stages()):
            notes.append(f"{stage} is called inside {op.type} {op.name!r}, which every shard runs on its own device")
    return notes


def _impossible(program: Program, backward: Backward) -> dict[int, str]:
    """Return the ops that must stay at home because lists cannot be gathered or cut: they are opaque to other ops."""
    found = {}
    for reshard in backward.reshards:
        tensor = reshard.tensor
        if program.ops[tensor.op].out_dtypes[tensor.index] != tf.variant:
            continue
        if not isinstance(reshard.source, Replicate):
            found[tensor.op] = "its list is read whole" + _by_whom(program, backward, reshard)
            continue
        for op, step in zip(program.ops, backward.steps, strict=True):
            if step.shards and (tensor, reshard.target) in zip(op.inputs, step.shards.wants, strict=True):
                found[op.index] = "its list is made whole"
    return found


def _by_whom(program: Program, backward: Backward, reshard: Reshard) -> str:
    for op, step in zip(program.ops, backward.steps, strict=True):
        if step.home and step.reason and reshard.tensor in op.inputs:
            return f" by {op.type}: {step.reason}"
    return ""
