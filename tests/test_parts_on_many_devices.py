"""Variables on many devices: in as many parts as equal shares need, and not in one for each device."""

from __future__ import annotations

import numpy as np
import pytest

import graphsplit as gs
from benchmarks.chains import sends_in
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.variables import partitioning
from graphsplit.planning.variables.partitioning import FEWEST_PARTS, PART_BYTES, Held, shares
from tests.helpers.law import rows
from tests.helpers.parts_on_many_devices import WIDTH, assert_law_in_fewer_parts, network
from tests.helpers.processes import ROOT, python


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("slots", [0, 2])
def test_shares_of_many_devices_are_equal(seed: int, slots: int) -> None:
    rng = np.random.default_rng(seed)
    devices = int(rng.integers(9, 65))
    shapes = [tuple(map(int, rng.integers(64, 600, 2))) for _ in range(int(rng.integers(5, 60)))]
    variables = [Held(f"v{k}", shape, 4) for k, shape in enumerate(shapes)]
    more = [Held(f"m{n}_{k}", shape, 4, k) for n in range(slots) for k, shape in enumerate(shapes)]
    found = [share for share in shares([*variables, *more], devices) if share is not None]
    assert found == found[: len(shapes)] * (slots + 1)  # slots are with their variables
    load = [0] * devices
    for variable, share in zip(variables, found, strict=False):
        assert len(set(share.devices)) == share.cut.parts == len(share.devices)
        assert share.cut.parts == 1 or share.cut.parts >= min(FEWEST_PARTS, devices)
        for d, length in zip(share.devices, share.cut.lengths, strict=True):
            load[d] += variable.bytes // share.cut.length * length
    mean = sum(load) / devices
    entry_bytes = max(variable.bytes // share.cut.length for variable, share in zip(variables, found, strict=False))
    assert max(load) <= 4 / 3 * mean + entry_bytes


def test_as_many_parts_as_equal_shares_need() -> None:
    def parts(variables: list[Held], devices: int) -> list[int]:
        return [share.cut.parts for share in shares(variables, devices) if share is not None]

    alike = [Held(f"v{k}", (512, 256), 4) for k in range(16)]
    assert parts(alike, 8) == [8] * 16
    assert parts(alike, 24) == [FEWEST_PARTS] * 16  # each is two thirds of a share of one and a half
    assert parts(alike, 64) == [12] * 16  # each is four shares, and a part at most a third of one
    assert parts(alike[:1], 64) == [64]
    assert parts([Held("large", (4096, 512), 4), *alike], 10) == [10, *[1] * 16]
    assert parts([Held(f"v{k}", (4096, 2560), 4) for k in range(64)], 64) == [40] * 64  # of PART_BYTES
    assert 40 * PART_BYTES == 4096 * 2560 * 4
    assert parts([Held(f"v{k}", (3, 1000, 4), 4) for k in range(16)], 16) == [FEWEST_PARTS] * 16


def test_parts_are_on_devices_of_all_hosts() -> None:
    """Devices are numbered host by host: eight of each."""
    found = shares([Held(f"v{k}", (512, 256), 4) for k in range(16)], 16)
    for share in found:
        assert share is not None
        assert [sum(d // 8 == host for d in share.devices) for host in range(2)] == [4, 4]


@pytest.mark.parametrize("fewest", [2, 3])
def test_the_law_in_fewer_parts(fewest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioning, "FEWEST_PARTS", fewest)
    assert_law_in_fewer_parts(5, [11, 3])


def test_the_law_on_sixteen_devices() -> None:
    done = python("-m", "tests.helpers.parts_on_many_devices", "16", cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]


def test_fewer_parts_are_fewer_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned() -> tuple[int, int]:
        plan = gs.parallelize(network(5)[0], devices=5).plan(rows(11, WIDTH))
        graph = emit(plan)
        check_emitted(plan, graph)
        return len(plan.program.captures), sends_in(graph)

    parts, sends = planned()
    monkeypatch.setattr(partitioning, "FEWEST_PARTS", 2)
    fewer_parts, fewer_sends = planned()
    assert (fewer_parts, fewer_sends) < (parts, sends)
    assert fewer_sends < 0.9 * sends
