"""The refusal: nothing fits. It says what comes closest, what takes the bytes, and what would help most."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NoReturn

from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.planning.amounts import count_text, format_bytes
from graphsplit.simulate.search.candidates import Candidate
from graphsplit.simulate.search.plan_search import Looked, Search

_LARGEST = 3
_MOST_TIMES = 8  # as many devices as there are: more are not tried


def refuse(search: Search) -> NoReturn:
    """Raise the error of a search in which nothing fits."""
    question = search.question
    count = len(search.looked)
    planned = {candidate: own for candidate, own in search.looked.items() if own.step_s < math.inf}
    least = min(planned, key=lambda candidate: planned[candidate].peak_bytes)
    found = planned[least]
    limit, devices = format_bytes(int(question.limit)), count_text(question.table.devices[0], "device")
    plain = min(planned, key=lambda candidate: (bool(candidate.mesh), planned[candidate].peak_bytes))
    helps = [
        _of_largest_part(search, least, found),
        _of_more_devices(search, plain),
    ]  # (large meshes are slow)
    raise ArgumentError(
        f"{question.title} does not fit: each device may hold {limit}. Of {count_text(count, 'plan')} for up to "
        f"{devices} the smallest, {least}, needs {format_bytes(found.peak_bytes)} on its fullest device:\n"
        f"{bullet_list(_parts(found))}\nWhat would help most:\n{bullet_list([text for text in helps if text])}"
    )


def _parts(found: Looked) -> list[str]:
    """Return of what the bytes of the fullest device consist, the most first."""
    memory = found.fullest
    alive = "activations and received tensors"
    if memory.largest:
        named = ", ".join(f"{name!r} {format_bytes(size)}" for name, size in memory.largest[:_LARGEST])
        alive = f"{alive}: {named}, ..."
    pairs = [(memory.state_bytes, "variables"), (memory.argument_bytes, "arguments"), (memory.live_bytes, alive)]
    return [f"{format_bytes(size)} {what}" for size, what in sorted(pairs, key=lambda pair: -pair[0]) if size]


def _of_largest_part(search: Search, least: Candidate, found: Looked) -> str:
    """Return what makes the largest part smaller."""
    memory, question = found.fullest, search.question
    grows = memory.live_bytes + memory.argument_bytes
    if memory.state_bytes > min(grows, question.limit):
        more = "" if least.layout == "sharded" else ", or sharded variables: set_variable_layout(..., 'sharded')"
        return f"smaller variables: of lower precision, or with an optimizer of fewer slots{more}"
    rows = int(question.rows * max(question.limit - memory.state_bytes, 0) / grows) if grows else 0
    return (
        f"a smaller batch: at most {count_text(rows, 'row')} instead of {question.rows}" if rows else "smaller layers"
    )


def _of_more_devices(search: Search, least: Candidate) -> str:
    """Return the smallest number of devices that would do, found by doubling and then by halving; "" for none."""
    question, each = search.question, least.columns
    few = many = question.table.devices[0] // each
    least = replace(least, layout=question.table.layouts[-1], stages=1, others=())
    while True:
        few, many = many, 2 * many
        is_there = question.machine.network is not None or many * each <= question.machine.most_devices
        if many * each > _MOST_TIMES * question.table.devices[0] or not is_there:
            return ""
        if _would(search, least, many):
            break
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _would(search, least, middle) else (middle, many)
    found = least.with_rows(many)
    return f"{many * each} devices: {found}, {format_bytes(search.looked[found].peak_bytes)} on each"


def _would(search: Search, least: Candidate, rows: int) -> bool:
    """Return whether so many devices, or rows of a mesh, would do; of n times as many each holds 1/n of the state."""
    more = least.with_rows(rows)
    if search.look_at(least).fullest.state_bytes * least.devices / more.devices > search.question.limit:
        return False
    return search.fits(more)
