"""The first line of a plan: how much runs on the shards, what is sent, and which of these a step waits for.

Times come from a model of one machine, and are only compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphsplit.planning.amounts import count_text, format_bytes, size_text
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.shares import Shares
from graphsplit.planning.traffic import Traffic
from graphsplit.program.program import Op

_LINK_BYTES_PER_S = 1e10  # PCIe 4: between GPUs of one machine without faster links
_LAUNCH_S = 5e-6  # to start a kernel from the host
NO_WORK = frozenset({"Const", "Placeholder"})  # types of operations that nobody waits for


def headline(plan: Decisions, shares: Shares, sends: Traffic) -> str:
    """Return the line.

    Args:
      plan: which.
      shares: what of it runs on the shards.
      sends: what its devices send.
    """
    if not plan.mesh.shards:
        return "Plan: nothing is sharded"
    where = count_text(len(sharding_devices(plan)), "device")
    amounts = f"{_alone_text(plan, shares)}{_sent_text(plan, sends)}{_limit_text(plan, shares, sends)}"
    return f"Plan: {sharded_text(shares)} on {where}, {amounts}"


def sharding_devices(plan: Decisions) -> tuple[str, ...]:
    """Return the devices that run sharded operations: of shards, their columns and their stages."""
    found: dict[str, None] = {}
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        if step.shards:
            found.update(dict.fromkeys(device for one in _with_bodies(op) for device in plan.mesh.devices_of(one)))
        for body in step.bodies.values():
            found.update(dict.fromkeys(sharding_devices(body)))
    return tuple(found)


def _with_bodies(op: Op) -> Iterator[Op]:
    yield op
    for body in op.bodies.values():
        for inner in body.ops:
            yield from _with_bodies(inner)


def _alone_text(plan: Decisions, shares: Shares) -> str:
    """Say how many operations work on the batch on one device and have FLOPs, or a reason of their own."""
    following = [op for cause in shares.causes if cause.flops for op in (cause.op, *cause.followers)]
    count = len({id(op) for op in (*[op for op, _ in plan.stayed_home], *following)})
    runs = "operation on the batch runs" if count == 1 else "operations on the batch run"
    return f"{count} {runs} on one device, " if count else ""


def sharded_text(shares: Shares) -> str:
    """Return how much of the work is sharded."""
    if not shares.flops:
        return "no FLOPs"
    return f"{100 * shares.sharded_flops / shares.flops:.4g} % of the FLOPs sharded"


def _sent_text(plan: Decisions, sends: Traffic) -> str:
    if plan.program.symbols:
        moved = [move.tensor for collective in plan.collectives if collective.sends for move in collective.moves]
        return f"{size_text(plan.program, moved)} to send a step"
    return f"{format_bytes(sum(sends.sent.values()), is_least=bool(sends.unknown))} sent a step"


def _limit_text(plan: Decisions, shares: Shares, sends: Traffic) -> str:
    """Say what takes longest, of what follows one after the other; nothing where sizes are not known."""
    if plan.program.symbols or sends.unknown:
        return ""
    seconds = limits(plan, shares, sends)
    return f"; limited by {max(seconds, key=lambda what: seconds[what])}"


def limits(plan: Decisions, shares: Shares, sends: Traffic) -> dict[str, float]:
    """Return the modelled seconds of a step, by what takes them."""
    program, shards = plan.program, plan.mesh.shards
    largest = max([plan.mesh.share(d) for d in range(shards)], default=1.0)
    pairs = list(zip(program.ops, plan.steps, strict=True))
    through = max(map(max, sends.through.values()), default=0)
    launched = sum(op.type not in NO_WORK and bool(step.home or step.shards) for op, step in pairs)
    return {
        "arithmetic on the shards": shares.sharded_seconds * largest,
        "arithmetic on one device": shares.seconds - shares.sharded_seconds,
        "communication": through / _LINK_BYTES_PER_S,
        "launching operations": launched * _LAUNCH_S,
    }
