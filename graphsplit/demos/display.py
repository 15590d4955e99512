"""What the demos share: devices to run on, progress, tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import tensorflow as tf
from rich.console import Console
from rich.progress import track
from rich.table import Table

from graphsplit.core.devices import resolve_devices, short_name, use_logical_devices
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


def show_devices() -> None:
    """Print the devices of this process, and how to have more."""
    physical = tf.config.list_physical_devices()
    rows = []
    for device in physical:
        details = tf.config.experimental.get_device_details(device) if device.device_type == "GPU" else {}
        rows.append([short_name(device.name.replace("/physical_device:", "/device:")), details.get("device_name", "")])
    table("Devices", ["device", "model"], rows)
    if not any(device.device_type == "GPU" for device in physical):
        console.print(
            "No GPU. graphsplit.use_logical_devices(4), called first in a program, makes four logical CPU devices; "
            "`graphsplit demo polyfit --devices 4` does so itself."
        )
