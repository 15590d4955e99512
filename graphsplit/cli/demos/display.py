"""What the demos share: devices to run on, progress, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

from graphsplit.core.devices import resolve_devices, use_logical_devices
from graphsplit.core.gpus.logical_gpus import count_gpus

Item = TypeVar("Item")
console = Console()


def demo_devices(count: int) -> tuple[str, ...]:
    """Return the first `count` GPUs, or, on a machine with fewer, that many new logical CPU devices."""
    gpus = count_gpus()
    if gpus >= count:
        return resolve_devices(count)
    if gpus:
        console.print(f"{count} logical CPU devices: there are fewer GPUs. `--devices {gpus}` takes those.")
    return resolve_devices(use_logical_devices(count))


def progress(items: Sequence[Item], what: str) -> Iterable[Item]:
    """Yield the items while a bar shows how far it is."""
    return track(items, description=what, console=console)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    made = Table(*columns, title=title, title_justify="left")
    for row in rows:
        made.add_row(*[str(cell) for cell in row])
    console.print(made)
