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

import tomli_w

from graphsplit.core.errors import ArgumentError, bullet_list
from graphsplit.costs.machine import Device, Host, Link, Machine, Sample
from graphsplit.costs.machine_schema import parse, problems_of
from graphsplit.costs.work import Work

_WORK = ("family", "dtype", "flops", "bytes")  # of a sample
_NUMBERS = ("memory_bytes", "bytes_per_s", "launch_s", "overhead_s")  # of a device


def machine(machine: str | os.PathLike[str] | Machine) -> Machine:
    """Return a machine by name, or out of a file.

    Args:
      machine: `"8xH100-SXM5"`: so many of these devices on one host; `"4x8xH100-SXM5"`: so many such hosts; the name of
        a box, `"dgx-a100"`; or the path of a TOML file.

    Raises:
      ArgumentError: for a name that is not known (the nearest ones are said), or a file with missing, unknown or
        impossible figures (all of them are named, with their lines).

    >>> machine("2x8xA100-SXM4-80GB").most_devices
    16
    """
    if isinstance(machine, Machine):
        return machine
    if not isinstance(machine, (str, os.PathLike)):
        raise ArgumentError(f"machine takes the name of a machine or the path of a file, got {machine!r}.")
    asked = os.fspath(machine)
    if asked.endswith(".toml"):
        if not os.path.isfile(asked):
            raise ArgumentError(f"machine={asked!r}: there is no such file in {os.getcwd()!r}.")
        return read_machine(asked)
    return _by_name(asked)


def known_machines() -> dict[str, Machine]:
    """Return the machines that come along, by name, boxes by their own."""
    folder = importlib.resources.files("graphsplit.costs") / "machines"
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".toml")), key=lambda file: file.name)
    found = (_read(file.name, file.read_text("utf-8")) for file in files)
    return {machine.name: machine for machine in found}


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
    device, host = machine.device, machine.host
    numbers = {name: getattr(device, name) for name in _NUMBERS}
    content: dict[str, Any] = {
        "name": machine.name,
        "devices": machine.devices,
        "calibrated": machine.calibrated,
        "device": {
            "name": device.name,
            "kind": device.kind,
            **numbers,
            "source": machine.sources.get("device", "unknown"),
            "matrix_flops_per_s": dict(device.matrix_flops_per_s),
            "vector_flops_per_s": dict(device.vector_flops_per_s),
            "attainable": dict(device.attainable),
            "curves": {family: [list(point) for point in curve] for family, curve in device.curves.items()},
        },
        "link": {**vars(machine.link), "source": machine.sources.get("link", "unknown")},
        "host": {
            **{name: value for name, value in vars(host).items() if value is not None},
            "slowdown": list(host.slowdown),
            "source": machine.sources.get("host", "unknown"),
            "slowdown_of": {family: list(times) for family, times in host.slowdown_of.items()},
        },
        "samples": [
            {"key": key, "seconds": sample.seconds, **{name: getattr(sample.work, name) for name in _WORK}}
            for key, sample in device.samples.items()
        ],
    }
    if machine.host_link is not None:
        content["host_link"] = {**vars(machine.host_link), "source": machine.sources.get("host_link", "unknown")}
    if machine.network is not None:
        network = {name: getattr(machine.network, name) for name in ("name", "bytes_per_s", "latency_s")}
        content["network"] = {**network, "source": machine.sources.get("network", "unknown")}
    return tomli_w.dumps(content)


def _by_name(asked: str) -> Machine:
    known = known_machines()
    if asked in known:
        return known[asked]
    parts = asked.split("x")
    counts = [int(part) for part in itertools.takewhile(re.compile("[0-9]{1,9}").fullmatch, parts)]
    base = "x".join(parts[len(counts) :])
    own = next((m for m in known.values() if base in (m.name, m.device.name)), None)
    if own is None or len(counts) > (1 if base in known else 2) or 0 in counts:
        names = [*known, *(f"{m.devices}x{m.device.name}" for m in known.values())]
        begin = [name for name in names if asked and name.startswith(asked)]
        near = begin or difflib.get_close_matches(asked, names, 3, 0.4) or list(known)
        raise ArgumentError(
            f"There is no machine {asked!r}. Nearest are {', '.join(map(repr, near))}; `graphsplit machines` lists "
            "all. "
            "A file of your own ends in .toml; `graphsplit calibrate -o here.toml` writes one for the one at hand."
        )
    if base in known:
        return own.cluster(counts[0]) if counts else own
    devices = counts[-1] if counts else 1
    if devices > own.devices:
        hosts = -(-devices // own.devices)
        raise ArgumentError(
            f"There is no machine {asked!r}: {own.name} has {own.devices} {own.device.name} on a host. "
            f"{hosts} of these hosts are {hosts}x{own.devices}x{own.device.name}."
        )
    single = replace(own, devices=devices, name=f"{devices}x{own.device.name}")
    return single.cluster(counts[0]) if len(counts) == 2 else single


def _read(path: str, text: str) -> Machine:
    content = parse(path, text)
    if problems := problems_of(path, text, content):
        raise ArgumentError(f"The machine file has figures that cannot be:\n{bullet_list(problems)}")
    device, link, network = content["device"], content["link"], content.get("network")
    return Machine(
        name=content["name"],
        device=Device(
            name=device["name"],
            kind=device["kind"],
            matrix_flops_per_s=_floats(device["matrix_flops_per_s"]),
            vector_flops_per_s=_floats(device["vector_flops_per_s"]),
            attainable=_floats(device.get("attainable", {})),
            **_floats({name: device[name] for name in _NUMBERS if name in device}),
            curves={
                name: tuple([(float(a), float(b)) for a, b in curve])
                for name, curve in device.get("curves", {}).items()
            },
            samples={
                own["key"]: Sample(Work(*[own[name] for name in _WORK]), float(own["seconds"]))
                for own in content.get("samples", ())
            },
        ),
        devices=content["devices"],
        link=_link(link),
        network=_link(network) if network else None,
        host=_host(content.get("host", {})),
        host_link=_link(content["host_link"]) if "host_link" in content else None,
        sources={name: table["source"] for name, table in content.items() if isinstance(table, dict)},
        file=path,
        calibrated=content.get("calibrated", False),
    )


def _floats(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


def _link(table: Mapping[str, Any]) -> Link:
    numbers = _floats({name: table[name] for name in ("bytes_per_s", "latency_s")})
    return Link(table["name"], **numbers, shared=table.get("shared", False), copies=table.get("copies", True))


def _host(table: Mapping[str, Any]) -> Host:
    values = {name: value for name, value in table.items() if name != "source"}
    values["slowdown"] = tuple(map(float, values.get("slowdown", (1.0,))))
    values["slowdown_of"] = {family: tuple(map(float, times)) for family, times in table.get("slowdown_of", {}).items()}
    return Host(**values)
