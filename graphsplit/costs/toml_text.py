"""TOML as text: parsed, written, and searched for the line that says something."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any

from graphsplit.core.errors import ArgumentError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BARE = re.compile(r"^[A-Za-z0-9_-]+$")


def parse(path: str, text: str) -> dict[str, Any]:
    """Return what a file says.

    Raises:
      ArgumentError: if it is no TOML; the message has the line.
    """
    try:
        found: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{path} is no TOML file: {error}") from error
    return found


def line_of(text: str, table: str, key: str) -> int:
    r"""Return the number of the line on which a key of a table stands, else that of the table; 0 if neither does.

    >>> line_of("name = 'a'\n[device]\nkind = 'GPU'", "device", "kind")
    3
    """
    found, current = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"^\s*\[+\s*([^\]]+?)\s*\]+", line)
        if head:
            current = ".".join(part.strip().strip("\"'") for part in head[1].split("."))
            found = found or (number if current == table else 0)
        elif current == table and (own := re.match(r"^\s*([^=#]+?)\s*=", line)) and own[1].strip("\"'") == key:
            return number
    return found


def to_toml(content: Mapping[str, Any]) -> str:
    """Return a mapping of plain values, mappings and lists of mappings as TOML.

    >>> print(to_toml({"name": "a", "device": {"kind": "GPU"}}))
    name = "a"
    <BLANKLINE>
    [device]
    kind = "GPU"
    <BLANKLINE>
    """
    lines: list[str] = []
    _write(content, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write(content: Mapping[str, Any], table: str, lines: list[str]) -> None:
    tables = {key: value for key, value in content.items() if isinstance(value, Mapping)}
    several = {k: v for k, v in content.items() if isinstance(v, list) and v and isinstance(v[0], Mapping)}
    plain = {key: value for key, value in content.items() if key not in tables and key not in several}
    if table and (plain or not tables):
        lines += ["", f"[{table}]"]
    lines += [f"{_key(key)} = {_value(value)}" for key, value in plain.items()]
    for key, value in tables.items():
        _write(value, f"{table}.{_key(key)}" if table else _key(key), lines)
    for key, entries in several.items():
        for entry in entries:
            lines += ["", f"[[{_key(key)}]]", *(f"{_key(k)} = {_value(v)}" for k, v in entry.items())]


def _key(key: str) -> str:
    return key if _BARE.match(key) else json.dumps(key)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
