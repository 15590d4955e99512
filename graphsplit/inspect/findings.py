"""Warnings: what in a placement is likely to disappoint, in plain sentences."""

from __future__ import annotations

from collections import Counter

from graphsplit.core.devices import short_name
from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.plans.advice import advice_on
from graphsplit.inspect.records import PlacedOp
from graphsplit.planning.amounts import count_text, format_bytes

FEW_ROWS = 8
MUCH_WORK = 0.6
LARGE_TRANSFER = 1_000_000


def find_warnings(placement: PlacementGraph) -> list[str]:
    """Return one sentence for each thing that stands out."""
    return [
        *_unequal_work(placement),
        *_few_rows(placement),
        *_gathered_once(placement),
        *_large_transfers(placement),
        *_scattered_gradients(placement),
        *_moved(placement),
        *_without_kernel(placement),
        *_unknown(placement),
    ]


def _unequal_work(placement: PlacementGraph) -> list[str]:
    total = sum(t.flops for t in placement.devices.values())
    count = len(placement.devices)
    if count < 2 or not total:
        return []
    busiest = max(placement.devices.values(), key=lambda t: t.flops)
    if any(op.device != busiest.device and _is_open(op) for op in placement.ops.values()):
        return []  # what is not known may be as much
    share = busiest.flops / total
    if share < max(MUCH_WORK, 1.5 / count):
        return []
    return [f"{share:.0%} of the FLOPs run on {short_name(busiest.device)}"]


def _few_rows(placement: PlacementGraph) -> list[str]:
    small = [rows for rows in placement.rows if rows < FEW_ROWS]
    if not small or len(placement.rows) < 2:
        return []
    return [f"a shard has {count_text(min(small), 'row')}: likely launch-bound"]


def _gathered_once(placement: PlacementGraph) -> list[str]:
    warnings = []
    for op in placement.unsharded_ops[:5]:
        where = f", called at {op.source}" if op.source else ""
        why = f"{op.unsharded_reason}; {advice_on(op.unsharded_reason)}"
        amount = f"{format_bytes(op.gathered_bytes)} gathered" if op.gathered_bytes else "rows gathered"
        warnings.append(f"{amount} on one device by {op.type}{where}: {why}")
    more = len(placement.unsharded_ops) - 5
    return warnings + (
        [f"{count_text(more, 'more operation')} on one device work on rows of the batch"] if more > 0 else []
    )


def _large_transfers(placement: PlacementGraph) -> list[str]:
    total = sum(t.bytes for t in placement.transfers)
    large = [t for t in placement.transfers if t.bytes >= LARGE_TRANSFER]
    if not large:
        return []
    first = large[0]
    return [
        f"{format_bytes(total)} move between devices, most of all {first.source} "
        f"({format_bytes(first.bytes)} from {short_name(first.source_device)} to {short_name(first.target_device)})"
    ]


def _scattered_gradients(placement: PlacementGraph) -> list[str]:
    wrong = [pair for pair in placement.gradients if not pair.colocated]
    if not wrong:
        return []
    where = Counter(short_name(pair.backward.device) for pair in wrong).most_common(1)[0][0]
    return [
        f"{len(wrong)} of {len(placement.gradients)} backward operations are not on the device of their forward "
        f"operation; most are on {where}, like {wrong[0].backward.name}"
    ]


def _moved(placement: PlacementGraph) -> list[str]:
    reasons: dict[str, list[str]] = {}
    for op in placement.moved:
        if not op.reason.startswith("has to run where"):  # expected: a variable is read where it lives
            reasons.setdefault(f"{short_name(op.requested)}: {op.reason}", []).append(op.name)
    warnings = []
    for reason, names in list(reasons.items())[:5]:
        them = names[0] + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        warnings.append(f"{them} asked for {reason}")
    return warnings


def _without_kernel(placement: PlacementGraph) -> list[str]:
    """Say what has to run on the host, before it has: afterwards it is among what moved."""
    kinds = Counter(op.type for op in placement.ops.values() if op.no_kernel and not op.actual)
    if not kinds:
        return []
    them = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(5)) + (", ..." if len(kinds) > 5 else "")
    return [f"no GPU kernel for {count_text(kinds.total(), 'operation')} on GPUs, which will run on the host: {them}"]


def _unknown(placement: PlacementGraph) -> list[str]:
    unknown = sum(map(_is_open, placement.ops.values()))
    if not unknown:
        return []
    return [
        f"sizes of {count_text(unknown, 'operation')} are not known before the run; their bytes and FLOPs count as 0"
    ]


def _is_open(op: PlacedOp) -> bool:
    """Return whether sizes of what an operation yields are not known."""
    is_open = any(shape is None or None in shape for shape in op.shapes)
    return is_open and "resource" not in op.dtypes and "variant" not in op.dtypes
