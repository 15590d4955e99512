"""Samples of a machine file: operations that were measured one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphsplit.costs.machine import Sample
from graphsplit.costs.work import Work

_KEYS = ("key", "seconds", "family", "dtype", "flops", "bytes")


def wrong_samples(entries: Any) -> list[str]:
    """Return what is wrong with the samples of a file, entry by entry."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        return [f"samples are tables, [[samples]], got {entries!r}"]
    found = []
    for number, entry in enumerate(entries, 1):
        missing = [key for key in _KEYS if key not in entry]
        numbers = [k for k in ("seconds", "flops", "bytes") if k in entry and not _is_amount(entry[k])]
        found += [f"samples, entry {number}: {key} is missing" for key in missing]
        found += [f"samples, entry {number}: {key} is a number of at least 0, got {entry[key]!r}" for key in numbers]
    return found


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf")


def read_samples(entries: Sequence[Mapping[str, Any]]) -> dict[str, Sample]:
    """Return what a file says of operations that were measured, by `sample_key`."""
    return {
        entry["key"]: Sample(
            Work(entry["family"], entry["dtype"], float(entry["flops"]), float(entry["bytes"])), float(entry["seconds"])
        )
        for entry in entries
    }


def write_samples(samples: Mapping[str, Sample]) -> list[dict[str, Any]]:
    """Return samples as they stand in a file."""
    return [
        {
            "key": key,
            "seconds": float(sample.seconds),
            "family": sample.work.family,
            "dtype": sample.work.dtype,
            "flops": float(sample.work.flops),
            "bytes": float(sample.work.bytes),
        }
        for key, sample in samples.items()
    ]
