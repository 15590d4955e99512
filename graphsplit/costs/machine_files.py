"""Machines as small TOML files: read, checked as a whole, found by name, and written.

A figure comes with where it is from: each table has a `source`, in words.
"""

from __future__ import annotations

import difflib
import importlib.resources
import itertools
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphsplit.core.errors import ArgumentError, bullet_list
from graphsplit.costs.families import FAMILIES
from graphsplit.costs.machine import Device, Host, Link, Machine
from graphsplit.costs.sample_files import read_samples, write_samples, wrong_samples
from graphsplit.costs.toml_text import line_of, parse, to_toml

_NUMBERS_OF = ("device.matrix_flops_per_s", "device.vector_flops_per_s", "device.attainable")
_BY_FAMILY = ("device.attainable", "device.curves", "host.slowdown_of")
_INNER = (*_NUMBERS_OF, *_BY_FAMILY)
_TABLES: dict[str, dict[str, type]] = {
    "": {"name": str, "devices": int, "calibrated": bool},
    "device": {
        "name": str,
        "kind": str,
        "memory_bytes": float,
        "bytes_per_s": float,
        "launch_s": float,
        "overhead_s": float,
        "source": str,
    },
    "link": {"name": str, "bytes_per_s": float, "latency_s": float, "shared": bool, "copies": bool, "source": str},
    "network": {"name": str, "bytes_per_s": float, "latency_s": float, "source": str},
    "host": {
        "threads": int,
        "threads_per_device": int,
        "slowdown": list,
        "call_s": float,
        "device_call_s": float,
        "argument_s": float,
        "wake_s": float,
        "source": str,
    },
}
_OPTIONAL = {
    *("calibrated", "launch_s", "overhead_s", "shared", "copies", "threads_per_device", "slowdown"),
    *("call_s", "device_call_s", "argument_s", "wake_s"),
}
_OPTIONAL_TABLES = {"network", "host"}
_MAY_BE_ZERO = {
    *("launch_s", "overhead_s", "latency_s"),
    *("call_s", "device_call_s", "argument_s", "wake_s"),
}
_NAME = re.compile(r"^(?:(?P<hosts>\d+)x)??(?:(?P<devices>\d+)x)?(?P<base>[^\d].*)$")


@dataclass(frozen=True)
class _File:
    """A machine file: what it says, and where it says what."""

    path: str
    text: str
    content: Mapping[str, Any]

    def wrong(self, table: str, key: str, what: str) -> str:
        """Return a line of a message: file, line, key, and what is wrong there."""
        line = line_of(self.text, table, key)
        place = f"{table}.{key}" if table and key else table or key
        return f"{self.path}, line {line}: {place} {what}" if line else f"{self.path}: {place} {what}"


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
    numbers = {name: getattr(device, name) for name in _numbers("device")}
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
            **vars(host),
            "slowdown": list(host.slowdown),
            "source": machine.sources.get("host", "unknown"),
            "slowdown_of": {family: list(times) for family, times in host.slowdown_of.items()},
        },
        "samples": write_samples(device.samples),
    }
    if machine.network is not None:
        network = {name: getattr(machine.network, name) for name in ("name", "bytes_per_s", "latency_s")}
        content["network"] = {**network, "source": machine.sources.get("network", "unknown")}
    return to_toml({name: value for name, value in content.items() if value != []})


def _by_name(asked: str) -> Machine:
    known = known_machines()
    if asked in known:
        return known[asked]
    parts = asked.split("x")
    counts = [int(part) for part in parts[: next((i for i, p in enumerate(parts) if not p.isdecimal()), len(parts))]]
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
    file = _File(path, text, parse(path, text))
    samples = [f"{path}: {what}" for what in wrong_samples(file.content.get("samples", []))]
    problems = [*_unknown(file), *_missing(file), *_impossible(file), *samples]
    if problems:
        raise ArgumentError(f"The machine file has figures that cannot be:\n{bullet_list(problems)}")
    content = file.content
    device, link, network = content["device"], content["link"], content.get("network")
    return Machine(
        name=content["name"],
        device=Device(
            name=device["name"],
            kind=device["kind"],
            matrix_flops_per_s=_floats(device["matrix_flops_per_s"]),
            vector_flops_per_s=_floats(device["vector_flops_per_s"]),
            attainable=_floats(device.get("attainable", {})),
            **_floats({name: device[name] for name in _numbers("device") if name in device}),
            curves={
                name: tuple([(float(a), float(b)) for a, b in curve])
                for name, curve in device.get("curves", {}).items()
            },
            samples=read_samples(content.get("samples", ())),
        ),
        devices=content["devices"],
        link=_link(link),
        network=_link(network) if network else None,
        host=_host(content.get("host", {})),
        sources={name: table["source"] for name, table in content.items() if isinstance(table, dict)},
        file=path,
        calibrated=content.get("calibrated", False),
    )


def _numbers(table: str) -> list[str]:
    return [name for name, kind in _TABLES[table].items() if kind is float]


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


def _unknown(file: _File) -> list[str]:
    """Return what is in a file that nobody reads: a misspelt figure would count as missing elsewhere."""
    found = []
    for table, keys in _TABLES.items():
        own = file.content if not table else file.content.get(table, {})
        inner = {name.partition(".")[2] for name in _INNER if name.startswith(f"{table}.")} if table else ()
        known = {*keys, *inner, *([*_TABLES, "samples"] if not table else ())}
        for key in own if isinstance(own, dict) else ():
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                found.append(file.wrong(table, key, "is not known" + (f"; did you mean {near[0]}?" if near else "")))
    for inside in _BY_FAMILY:
        for name in _within(file.content, inside):
            if name not in (*FAMILIES, "bytes"):
                found.append(file.wrong(inside, name, f"is no family; there are {', '.join((*FAMILIES, 'bytes'))}"))
    return found


def _within(content: Mapping[str, Any], inside: str) -> Mapping[str, Any]:
    """Return a table in a table, `device.curves`; empty if there is none."""
    table, _, name = inside.partition(".")
    outer = content.get(table, {})
    found = outer.get(name, {}) if isinstance(outer, dict) else {}
    return found if isinstance(found, dict) else {}


def _missing(file: _File) -> list[str]:
    found = []
    for table, keys in _TABLES.items():
        if table and table not in file.content:
            if table not in _OPTIONAL_TABLES:
                found.append(file.wrong(table, "", "is missing"))
            continue
        own = file.content[table] if table else file.content
        if not isinstance(own, dict):
            found.append(file.wrong(table, "", f"is a table, got {own!r}"))
            continue
        found += [file.wrong(table, key, "is missing") for key in keys if key not in own and key not in _OPTIONAL]
    device = file.content.get("device")
    rates = _NUMBERS_OF[:2] if isinstance(device, dict) else ()
    for name in rates:
        if not file.content["device"].get(name.partition(".")[2]):
            found.append(file.wrong(name, "", "is missing: floating-point operations a second, by dtype"))
    return found


def _impossible(file: _File) -> list[str]:
    found = []
    for table, keys in _TABLES.items():
        own = file.content.get(table, {}) if table else file.content
        for key, kind in keys.items() if isinstance(own, dict) else ():
            if key in own and (what := _why_not(key, own[key], kind)):
                found.append(file.wrong(table, key, what))
    found_device = file.content.get("device")
    device = found_device if isinstance(found_device, dict) else {}
    for name in _NUMBERS_OF:
        numbers = device.get(name.partition(".")[2], {})
        found += [file.wrong(name, k, what) for k, v in numbers.items() if (what := _why_not(k, v, float))]
        if name.endswith("attainable"):
            more = [k for k, v in numbers.items() if isinstance(v, (int, float)) and v > 1]
            found += [file.wrong(name, k, f"is a share of the peak, at most 1, got {numbers[k]!r}") for k in more]
    for name, curve in _within(file.content, "device.curves").items():
        if not _is_curve(curve):
            found.append(
                file.wrong("device.curves", name, "is a list of [amount, rate], amounts growing, all positive")
            )
    for name, times in _within(file.content, "host.slowdown_of").items():
        if what := _why_not(name, times, list):
            found.append(file.wrong("host.slowdown_of", name, what))
    return found


def _is_curve(curve: Any) -> bool:
    pairs = isinstance(curve, list) and curve and all(isinstance(p, list) and len(p) == 2 for p in curve)
    if not pairs or any(_why_not("", value, float) for pair in curve for value in pair):
        return False
    return all(a[0] < b[0] for a, b in itertools.pairwise(curve))


def _why_not(key: str, value: Any, kind: type) -> str:
    """Return why a value cannot be what a key says, "" if it can."""
    if kind is str:
        wrong = not isinstance(value, str) or not value
        if key == "kind" and not wrong and value not in ("CPU", "GPU"):
            return f'is "CPU" or "GPU", got {value!r}'
        return f"is a text, got {value!r}" if wrong else ""
    if kind is bool:
        return "" if isinstance(value, bool) else f"is true or false, got {value!r}"
    if kind is list:
        good = isinstance(value, list) and value and not any(_why_not("", entry, float) for entry in value)
        return "" if good else f"is a list of positive numbers, got {value!r}"
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int) or math.isnan(value):
        return f"is a {'whole ' if kind is int else ''}number, got {value!r}"
    if value < 0 or (value == 0 and key not in _MAY_BE_ZERO):
        return f"is {'at least 0' if key in _MAY_BE_ZERO else 'positive'}, got {value!r}"
    if math.isinf(value) and key not in ("bytes_per_s",):
        return f"is finite, got {value!r}"
    return ""
