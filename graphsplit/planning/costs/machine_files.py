"""Machines as small TOML files: read, checked as a whole, found by name, and written.

A figure comes with where it is from: each table has a `source`, in words.
"""

from __future__ import annotations

import difflib
import importlib.resources
import itertools
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphsplit.core.requirements import needed
from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.planning.costs.machine import Device, Host, Link, Machine, Sample
from graphsplit.planning.costs.machine_schema import parse, problems_of
from graphsplit.planning.costs.work import Work

_WORK = ("family", "dtype", "flops", "bytes")  # of a sample
_TABLES = ("device", "link", "host", "host_link", "network")
_COUNTS = ("threads", "threads_per_device")


def machine(machine: str | os.PathLike[str] | Machine, option: str = "machine") -> Machine:
    """Return a machine by name, or out of a file.

    Args:
      machine: `"8xH100-SXM5"`: so many of these devices on one host; `"4x8xH100-SXM5"`: so many such hosts; the name of
        a box, `"dgx-a100"`; or the path of a TOML file.
      option: what the user said it by, for messages; `plan` may be "auto" as well.

    Raises:
      ArgumentError: for a name that is not known (the nearest ones are said), or a file with missing, unknown or
        impossible figures (all of them are named, with their lines).

    >>> machine("2x8xA100-SXM4-80GB").most_devices
    16
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, (str, os.PathLike)):
        auto = "" if option == "machine" else "'auto', "
        raise ArgumentError(f"{option} takes {auto}the name of a machine or the path of a file, got {machine!r}.")
    name_or_path = os.fspath(machine)
    if name_or_path.endswith(".toml"):
        if not os.path.isfile(name_or_path):
            raise ArgumentError(f"{option}={name_or_path!r}: there is no such file in {os.getcwd()!r}.")
        return read_machine(name_or_path)
    unknown = (
        f"There is no machine {name_or_path!r}"
        if option == "machine"
        else f"{option}={name_or_path!r} is neither 'auto' nor a machine"
    )
    return _by_name(name_or_path, unknown)


def known_machines() -> dict[str, Machine]:
    """Return the machines that come along, by name, boxes by their own."""
    folder = importlib.resources.files("graphsplit.planning.costs") / "machines"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    machines = (_read(file.name, file.read_text("utf-8"), is_ours=True) for file in files)  # (a test checks them)
    return {machine.name: machine for machine in machines}


def read_machine(path: str) -> Machine:
    """Return the machine that a file describes.

    Raises:
      ArgumentError: if it is no TOML, or figures are missing, not known or impossible.
    """
    try:
        text = Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The machine file {path!r} cannot be read: {error}") from error
    return _read(path, text)


def machine_text(machine: Machine) -> str:
    """Return a machine as the text of a file that `read_machine` reads."""
    content: dict[str, Any] = {"name": machine.name, "devices": machine.devices, "calibrated": machine.calibrated}
    for name in _TABLES:
        if (table := getattr(machine, name)) is not None:
            figures = {key: value for key, value in vars(table).items() if value is not None and key != "samples"}
            content[name] = {**figures, "source": machine.sources.get(name, "unknown")}
    for key in ("shared", "copies") if machine.network is not None else ():
        del content["network"][key]  # (hosts share no network, and have no memory in common)
    content["samples"] = [
        {"key": key, "seconds": sample.seconds, **{name: getattr(sample.work, name) for name in _WORK}}
        for key, sample in machine.device.samples.items()
    ]
    return str(needed("tomli_w", "machines", "Writing a machine file").dumps(content))


def _by_name(wanted_name: str, unknown: str) -> Machine:
    machines = known_machines()
    if wanted_name in machines:
        return machines[wanted_name]
    parts = wanted_name.split("x")
    counts = [int(part) for part in itertools.takewhile(re.compile("[0-9]{1,9}").fullmatch, parts)]
    base = "x".join(parts[len(counts) :])
    known_machine = next((m for m in machines.values() if base in (m.name, m.device.name)), None)
    if known_machine is None or len(counts) > (1 if base in machines else 2) or 0 in counts:
        names = [*machines, *(f"{m.devices}x{m.device.name}" for m in machines.values())]
        begin = [name for name in names if wanted_name and name.startswith(wanted_name)]
        nearest = begin or difflib.get_close_matches(wanted_name, names, 3, 0.5)
        raise ArgumentError(
            f"{unknown}. {'Nearest are' if nearest else 'There are'} {', '.join(map(repr, nearest or machines))}; "
            "`graphsplit machines` lists all. "
            "A file of your own ends in .toml; `graphsplit calibrate -o here.toml` writes one for the one at hand."
        )
    if base in machines:
        return known_machine.cluster(counts[0]) if counts else known_machine
    devices = counts[-1] if counts else 1
    if devices > known_machine.devices:
        hosts = -(-devices // known_machine.devices)
        raise ArgumentError(
            f"{unknown}: {known_machine.name} has {known_machine.devices} {known_machine.device.name} on a host. "
            f"{hosts} of these hosts are {hosts}x{known_machine.devices}x{known_machine.device.name}."
        )
    single = replace(known_machine, devices=devices, name=f"{devices}x{known_machine.device.name}")
    return single.cluster(counts[0]) if len(counts) == 2 else single


def _read(path: str, text: str, is_ours: bool = False) -> Machine:
    content = parse(path, text)
    if problems := [] if is_ours else problems_of(path, text, content):
        raise ArgumentError(f"The machine file has figures that cannot be:\n{bullet_list(problems)}")
    tables = {name: _values(content[name]) for name in _TABLES if name in content}
    links: dict[str, Any] = {name: Link(**table) for name, table in tables.items() if name not in ("device", "host")}
    samples = {
        sample["key"]: Sample(Work(*[sample[name] for name in _WORK]), float(sample["seconds"]))
        for sample in content.get("samples", ())
    }
    return Machine(
        name=content["name"],
        devices=content["devices"],
        device=Device(**tables["device"], samples=samples),
        host=Host(**tables.get("host", {})),
        **links,
        sources={name: content[name]["source"] for name in _TABLES if name in content},
        file=path,
        calibrated=content.get("calibrated", False),
    )


def _values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a table says as a machine has it: counts, and other numbers as such, whole or not; tuples."""

    def as_had(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: as_had(entry) for name, entry in value.items()}
        if isinstance(value, list):
            return tuple(map(as_had, value))
        return float(value) if isinstance(value, int) and not isinstance(value, bool) else value

    return {name: value if name in _COUNTS else as_had(value) for name, value in table.items() if name != "source"}
