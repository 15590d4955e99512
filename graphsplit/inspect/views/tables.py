"""A placement as a table that fits a terminal."""

from __future__ import annotations

import re
from collections import Counter

from graphsplit.core.devices import short_name
from graphsplit.inspect.findings import find_warnings
from graphsplit.inspect.graph import PlacementGraph
from graphsplit.inspect.records import DeviceTotals
from graphsplit.planning.amounts import aligned, format_bytes, scaled

WIDTH = 100
_HEADERS = ("device", "ops", "FLOPs", "share", "parameters", "activations", "received", "sent")


def render(placement: PlacementGraph) -> str:
    """Return the table: devices, the largest transfers, what moved or is missing, warnings. Lines are <= 100 wide."""
    kind = "actual" if placement.actual else "requested"
    lines = [f"Placement ({kind}) of {placement.title}: {len(placement.ops)} operations"]
    lines += _device_table(list(placement.devices.values()))
    lines += _rows(placement)
    lines += _transfer_lines(placement)
    lines += _actual_lines(placement)
    lines += [f"  ! {warning}" for warning in find_warnings(placement)]
    return "\n".join(shorten(line) for line in lines)


def format_flops(count: int) -> str:
    """Return a number of FLOPs for people.

    >>> format_flops(4_040_000_000)
    '4.0 GFLOPs'
    """
    return scaled(count, "FLOPs", "kFLOPs", "MFLOPs", "GFLOPs", "TFLOPs", "PFLOPs")


def shorten(line: str, width: int = WIDTH) -> str:
    """Cut the middle out of a line that is too long."""
    if len(line) <= width:
        return line
    keep = width - 3
    return line[: keep * 2 // 3] + "..." + line[len(line) - keep // 3 :]


def _device_table(totals: list[DeviceTotals]) -> list[str]:
    everything = sum(t.flops for t in totals) or 1
    cells = [_HEADERS] + [
        (
            short_name(t.device) or "(any)",
            str(t.ops),
            format_flops(t.flops).removesuffix("FLOPs").strip() or "0",
            f"{t.flops / everything:.0%}",
            format_bytes(t.parameter_bytes),
            format_bytes(t.activation_bytes),
            format_bytes(t.received_bytes),
            format_bytes(t.sent_bytes),
        )
        for t in totals
    ]
    return [f"  {line}" for line in aligned(cells)]


def _rows(placement: PlacementGraph) -> list[str]:
    if len(placement.rows) < 2:
        return []
    shown = ", ".join(map(str, placement.rows[:16])) + (", ..." if len(placement.rows) > 16 else "")
    return [f"  rows of the batch on the shards: {shown}; balance {placement.balance:.2f}"]


def _transfer_lines(placement: PlacementGraph, most: int = 5) -> list[str]:
    transfers = placement.transfers
    if not transfers:
        return ["  no tensor crosses devices"]
    total = format_bytes(sum(t.bytes for t in transfers))
    lines = [f"  {len(transfers)} tensors cross devices, {total}:"]
    for t in transfers[:most]:
        route = f"{short_name(t.source_device)} -> {short_name(t.target_device)}"
        lines.append(f"    {format_bytes(t.bytes):>9}  {route}  {t.source}")
    return lines + ([f"    ... and {len(transfers) - most} more"] if len(transfers) > most else [])


def _actual_lines(placement: PlacementGraph, most: int = 6) -> list[str]:
    if not placement.actual:
        return []
    moved = placement.moved
    lines = [f"  ran elsewhere than asked: {len(moved)}"] if moved else ["  every operation ran where it was asked to"]
    for op in moved[:most]:
        route = f"{short_name(op.requested)} -> {short_name(op.actual)}"
        lines += [f"    {route}  {op.name}", f"      {op.reason}"]
    if len(moved) > most:
        lines.append(f"    ... and {len(moved) - most} more")
    why = Counter(re.split(r":| \(| into | to |,| by TensorFlow| with ", op.reason)[0] for op in placement.missing)
    if why:
        counted = "; ".join(f"{count} {reason}" for reason, count in why.most_common(4))
        lines.append(f"  not in the graph that ran: {sum(why.values())} ({counted})")
    return lines
