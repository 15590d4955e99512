"""What may stand in a machine file: a schema (draft 4 of jsonschema), and what is wrong with a file that differs.

Nothing of TensorFlow is imported: a shell that completes names of files asks.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from graphsplit.core.requirements import needed
from graphsplit.errors import ArgumentError
from graphsplit.planning.costs.families import FAMILIES

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MOST = sys.float_info.max
_TEXT = {"type": "string", "minLength": 1, "description": "a text"}
_FLAG = {"type": "boolean", "description": "true or false"}
_COUNT = {"type": "integer", "minimum": 1, "maximum": 1_000_000, "description": "a whole number from 1 to 1,000,000"}
_AMOUNT = {"type": "number", "minimum": 0, "maximum": _MOST, "description": "a finite number of at least 0"}
_ABOVE_0 = {"type": "number", "minimum": 0, "exclusiveMinimum": True}
_RATE = {**_ABOVE_0, "description": "a positive number"}
_POSITIVE = {**_ABOVE_0, "maximum": _MOST, "description": "a positive, finite number"}
_SHARE = {**_ABOVE_0, "maximum": 1, "description": "a share of the peak, more than 0 and at most 1"}
_TIMES = {"type": "array", "minItems": 1, "items": _POSITIVE, "description": "a list of positive numbers"}
_BY_DTYPE = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": _POSITIVE,
    "description": "floating-point operations a second, by dtype",
}
_CURVE = {
    "type": "array",
    "minItems": 1,
    "items": {"type": "array", "minItems": 2, "maxItems": 2, "items": _POSITIVE},
    "description": "a list of [amount, rate], all positive",
}


def _table(required: Mapping[str, Any], optional: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "required": [*required],
        "properties": {**required, **optional},
        "additionalProperties": False,
        "description": "a table",
    }


def _by_family(schema: Mapping[str, Any]) -> dict[str, Any]:
    return _table({}, dict.fromkeys((*FAMILIES, "bytes"), schema))


_LINK = {"name": _TEXT, "bytes_per_s": _RATE, "latency_s": _AMOUNT}
_SAMPLE = _table(
    {"key": _TEXT, "seconds": _AMOUNT, "family": _TEXT, "dtype": {"type": "string", "description": "a text"}}
    | {"flops": _AMOUNT, "bytes": _AMOUNT},
    {},
)
_DEVICE = _table(
    {"name": _TEXT, "kind": {"enum": ["CPU", "GPU"], "description": '"CPU" or "GPU"'}, "memory_bytes": _POSITIVE}
    | {"bytes_per_s": _POSITIVE, "source": _TEXT, "matrix_flops_per_s": _BY_DTYPE, "vector_flops_per_s": _BY_DTYPE},
    {"launch_s": _AMOUNT, "overhead_s": _AMOUNT, "attainable": _by_family(_SHARE), "curves": _by_family(_CURVE)},
)
_HOST = _table(
    {"threads": _COUNT, "source": _TEXT},
    {"threads_per_device": _COUNT, "slowdown": _TIMES, "slowdown_of": _by_family(_TIMES)}
    | dict.fromkeys(("call_s", "device_call_s", "argument_s"), _AMOUNT)
    | dict.fromkeys(("bytes_per_s", "flops_per_s"), _POSITIVE),
)
_BETWEEN = _table({**_LINK, "source": _TEXT}, {"shared": _FLAG, "copies": _FLAG})
_MACHINE = _table(
    {"name": _TEXT, "devices": _COUNT, "device": _DEVICE, "link": _BETWEEN},
    {
        "calibrated": _FLAG,
        "network": _table({**_LINK, "bytes_per_s": _POSITIVE, "source": _TEXT}, {}),
        "host": _HOST,
        "host_link": _BETWEEN,
    }
    | {"samples": {"type": "array", "items": {"type": "object"}, "description": "tables, [[samples]]"}},
)


def _faults(schema: Mapping[str, Any], content: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the table, the key and what is wrong with it, of all that does not follow a schema.

    >>> next(_faults(_SAMPLE, {"key": 3}))
    ('', 'seconds', 'is missing')
    """
    jsonschema = needed("jsonschema", "machines", "A machine file of your own")
    for error in jsonschema.Draft4Validator(schema).iter_errors(content):
        names = list(itertools.takewhile(lambda part: isinstance(part, str), error.absolute_path))
        if error.validator == "required":
            missing = [key for key in error.validator_value if key not in error.instance]
            yield from ((".".join(names), key, "is missing") for key in missing)
        elif error.validator == "additionalProperties" and not error.validator_value:
            properties = error.schema["properties"]
            for key in error.instance.keys() - properties:
                nearest = difflib.get_close_matches(key, properties, 1)
                other = f"did you mean {nearest[0]}?" if nearest else f"there are {', '.join(properties)}"
                yield ".".join(names), key, f"is not known; {other}"
        else:
            value, schema_of_value = content, schema
            for name in names:
                value, schema_of_value = (
                    value[name],
                    schema_of_value.get("properties", {}).get(name) or schema_of_value["additionalProperties"],
                )
            yield ".".join(names[:-1]), names[-1], f"is {schema_of_value['description']}, got {value!r}"


def parse(path: str, text: str) -> dict[str, Any]:
    """Return what a file says.

    Raises:
      ArgumentError: if it is no TOML, or none that Python reads; the message has the line.
    """
    try:
        content: dict[str, Any] = tomllib.loads(text, parse_float=_float)
    except (ValueError, RecursionError) as error:  # (numbers of thousands of digits; a thousand lists in each other)
        raise ArgumentError(f"{path} is no TOML file: {error}") from error
    return content


def _float(text: str) -> Any:
    """Return a number; what is none, `nan`, as a text."""
    return text if text.endswith("nan") else float(text)


def _line_of(text: str, table: str, key: str) -> int:
    """Return the number of the line on which a key of a table stands, else that of the table; 0 if neither does."""
    table_line, current = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        head = re.match(r"^\s*\[+\s*([^\]]+?)\s*\]+", line)
        if head:
            current = ".".join(part.strip().strip("\"'") for part in head[1].split("."))
            table_line = table_line or (number if current in (table, f"{table}.{key}".lstrip(".")) else 0)
        elif (
            current == table
            and (key_in_line := re.match(r"^\s*([^=#]+?)\s*=", line))
            and key_in_line[1].strip("\"'") == key
        ):
            return number
    return table_line


def problems_of(path: str, text: str, content: Mapping[str, Any]) -> list[str]:
    """Return all that is wrong with a file, each with its line, key, and what is wrong there."""
    problems = []
    for table, key, what in _faults(_MACHINE, content):
        line = _line_of(text, table, key)
        place = f"{table}.{key}" if table else key
        problems.append((line, f"{path}, line {line}: {place} {what}" if line else f"{path}: {place} {what}"))
    if problems:
        return [problem for _, problem in sorted(set(problems))]  # (each missing key is said for all of its table)
    for family, curve in content["device"].get("curves", {}).items():
        if any(a[0] >= b[0] for a, b in itertools.pairwise(curve)):
            line = _line_of(text, "device.curves", family)
            problems.append((line, f"{path}, line {line}: device.curves.{family}: amounts grow, got {curve!r}"))
    for number, sample in enumerate(content.get("samples", ()), 1):
        wrong = [f"{path}: samples, entry {number}: {key} {what}" for _, key, what in _faults(_SAMPLE, sample)]
        problems += [(number, problem) for problem in wrong]
    return [problem for _, problem in problems]
