"""The first line of a plan: how much runs on the shards, what is sent, and which of these a step waits for.

Times come from a model of one machine, and are only compared with each other.
"""

from __future__ import annotations

from graphsplit.planning.amounts import count_text, format_bytes, size_text
from graphsplit.planning.burdens import NO_WORK
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.device_bytes import Traffic
from graphsplit.planning.work_shares import Shares, balance_of, computing_devices, devices_of_shards
from graphsplit.program.reading.trip_counts import times_run

_LINK_BYTES_PER_S = 1e10  # PCIe 4: between GPUs of one machine without faster links
_LAUNCH_S = 5e-6  # to start a kernel from the host


def headline(plan: Decisions, shares: Shares, sends: Traffic) -> str:
    """Return the line.

    Args:
      plan: which.
      shares: what of it runs on the shards.
      sends: what its devices send.
    """
    if not plan.mesh.shards:
        return "Plan: nothing is sharded"
    where = f"{count_text(len(devices_of_shards(plan)), 'device')}{_balance_text(plan, shares)}"
    amounts = f"{_alone_text(plan, shares)}{_sent_text(plan, sends)}{_limit_text(plan, shares, sends)}"
    work = sharded_text(shares) if is_divided(plan) else sharded_text(shares).replace("sharded", "in one shard,")
    return f"Plan: {work} on {where}, {amounts}"


def is_divided(plan: Decisions) -> bool:
    """Return whether work on the batch is divided at all: among devices, or into turns of one."""
    return plan.mesh.shards > 1 or len(devices_of_shards(plan)) > 1


def _balance_text(plan: Decisions, shares: Shares) -> str:
    devices = computing_devices(plan)
    is_counted = len(devices) > 1 and shares.flops and not shares.are_most
    return f", balance {balance_of(shares, devices):.2f}" if is_counted else ""


def _alone_text(plan: Decisions, shares: Shares) -> str:
    """Say how many operations work on the batch on one device and have FLOPs, or a reason of their own."""
    following = [op for cause in shares.causes if cause.counts for op in (cause.op, *cause.followers)]
    count = len({id(op) for op in (*[op for op, _ in plan.unsharded_ops], *following)})
    runs = "operation on the batch runs" if count == 1 else "operations on the batch run"
    return f"{count} {runs} on one device, " if count else ""


def sharded_text(shares: Shares) -> str:
    """Return how much of the work is sharded."""
    if not shares.flops:
        return "no FLOPs"
    return f"{'at most ' * shares.are_most}{100 * shares.sharded_flops / shares.flops:.4g} % of the FLOPs sharded"


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
    shards = plan.mesh.shards
    largest = max([plan.mesh.share(d) for d in range(shards)], default=1.0)
    through = max(map(max, sends.through.values()), default=0)
    launched = _launched(plan)
    return {
        "arithmetic on the shards": shares.sharded_seconds * largest,
        "arithmetic on one device": shares.seconds - shares.sharded_seconds,
        "communication": through / _LINK_BYTES_PER_S,
        "launching operations": launched * _LAUNCH_S,
    }


def _launched(plan: Decisions) -> int:
    """Return how many operations a device starts in a call, in each iteration of a loop that runs once again."""
    count = 0
    for op, step in zip(plan.program.ops, plan.steps, strict=True):
        count += op.type not in NO_WORK and bool(step.once or step.shards)
        count += (times_run(op) or 1) * sum(map(_launched, step.bodies.values()))
    return count
