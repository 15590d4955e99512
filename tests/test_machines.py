"""Machine files: read, checked, found by name, written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.protos import make_node
from graphsplit.planning.costs.families import FAMILIES
from graphsplit.planning.costs.machine import Device, Host, Link, Machine, Sample
from graphsplit.planning.costs.machine_files import known_machines, machine, machine_text, read_machine
from graphsplit.planning.costs.machine_schema import parse, problems_of
from graphsplit.planning.costs.seconds import Costs, sample_key
from graphsplit.planning.costs.work import Work, bytes_of, work_of
from tests.helpers.messages import raises

GOOD = """\
name = "box"
devices = 2
[device]
name = "B1"
kind = "GPU"
memory_bytes = 8e9
bytes_per_s = 1e11
source = "a data sheet"
[device.matrix_flops_per_s]
float32 = 1e13
[device.vector_flops_per_s]
float32 = 1e12
[device.attainable]
matmul = 0.5
[link]
name = "a cable"
bytes_per_s = 1e9
latency_s = 1e-5
source = "a data sheet"
"""


def written(folder: Path, text: str) -> str:
    path = folder / "box.toml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("name", known_machines())
def test_machines_that_come_along_have_sources(name: str):
    found = known_machines()[name]
    text = machine_text(found)  # of what comes along nothing is checked when it is read
    assert problems_of(name, text, parse(name, text)) == []
    assert all(found.sources[table] for table in ("device", "link", "host"))
    assert (found.network is None) == ("network" not in found.sources)
    assert set(found.device.attainable) <= {*FAMILIES, "bytes"}
    if found.device.kind == "GPU":
        assert "data sheet" in found.sources["device"]


@pytest.mark.parametrize("name", ["V100", "A100", "H100", "H200", "L4", "T4"])
def test_boxes_that_are_asked_for(name: str):
    assert any(found.device.name.startswith(name) for found in known_machines().values())


def test_names_of_machines():
    assert machine("dgx-a100").most_devices == 8
    assert machine("4xA100-SXM4-80GB").most_devices == 4
    assert machine("A100-SXM4-80GB").most_devices == 1
    cluster = machine("4x8xH100-SXM5")
    assert (cluster.hosts, cluster.most_devices, cluster.name) == (4, 32, "4x8xH100-SXM5")
    assert machine("2xdgx-h100").most_devices == 16
    assert cluster.names(9)[-1] == "/job:worker/replica:0/task:1/device:GPU:0"
    assert [cluster.host_of(name) for name in cluster.names(9)][7:] == [0, 1]
    assert machine(cluster) is cluster


def test_unknown_machines_are_told_the_nearest():
    with raises(
        gs.errors.ArgumentError,
        "There is no machine 'dgx-b100'. Nearest are 'dgx-h100', 'dgx-a100', 'dgx-h200'; `graphsplit machines` lists "
        "all. A file of your own ends in .toml; `graphsplit calibrate -o here.toml` writes one for the one at hand.",
    ):
        machine("dgx-b100")
    with pytest.raises(
        gs.errors.ArgumentError, match=r"There is no machine 'rtx4090'\. There are 'dgx-a100-40gb', .*'cpu';"
    ):
        machine("rtx4090")
    with raises(
        gs.errors.ArgumentError,
        "There is no machine '16xH100-SXM5': dgx-h100 has 8 H100-SXM5 on a host. 2 of these hosts are 2x8xH100-SXM5.",
    ):
        machine("16xH100-SXM5")
    with raises(gs.errors.ArgumentError, "machine takes the name of a machine or the path of a file, got 8."):
        machine(8)  # type: ignore[arg-type]


def test_more_devices_than_a_machine_has():
    with raises(
        gs.errors.ArgumentError,
        "devices=9: the machine 'dgx-h100' has 8. Choose fewer, or a cluster of 2 hosts: 2x8xH100-SXM5.",
    ):
        machine("dgx-h100").names(9)
    with raises(
        gs.errors.ArgumentError,
        "devices=5: the machine 't4-box' has 4. Choose fewer; its file has no [network] by which hosts are joined "
        "into a cluster.",
    ):
        machine("t4-box").names(5)


def test_a_file_is_read(tmp_path: Path):
    found = machine(written(tmp_path, GOOD))
    assert found.name == "box"
    assert found.device.matrix_flops_per_s == {"float32": 1e13}
    assert found.link == Link("a cable", 1e9, 1e-5)
    assert not found.calibrated


def test_all_that_is_wrong_with_a_file_is_named(tmp_path: Path):
    wrong = GOOD.replace("devices = 2", "devices = -2").replace('kind = "GPU"', 'kind = "TPU"')
    wrong = wrong.replace("bytes_per_s = 1e11", "bytes_per_sec = 1e11").replace("matmul = 0.5", "matmul = 1.5")
    path = written(tmp_path, wrong.replace("latency_s = 1e-5\n", ""))
    with raises(
        gs.errors.ArgumentError,
        "The machine file has figures that cannot be:\n"
        f"  - {path}, line 2: devices is a whole number from 1 to 1,000,000, got -2\n"
        f"  - {path}, line 3: device.bytes_per_s is missing\n"
        f'  - {path}, line 5: device.kind is "CPU" or "GPU", got \'TPU\'\n'
        f"  - {path}, line 7: device.bytes_per_sec is not known; did you mean bytes_per_s?\n"
        f"  - {path}, line 14: device.attainable.matmul is a share of the peak, more than 0 and at most 1, got 1.5\n"
        f"  - {path}, line 15: link.latency_s is missing",
    ):
        machine(path)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("[link]", "link.matmul is not known; there are name, bytes_per_s, latency_s, source, shared, copies"),
        ("[host]\nthreads = 2.5", "host.threads is a whole number from 1 to 1,000,000, got 2.5"),
        (f"[host]\nthreads = {10**20}", f"host.threads is a whole number from 1 to 1,000,000, got {10**20}"),
        ("[host]\nthreads.a = 1", "host.threads is a whole number from 1 to 1,000,000, got {'a': 1}"),
        ("[network]\nbytes_per_s = inf", "network.bytes_per_s is a positive, finite number, got inf"),
        ("[host]\nthreads = true", "host.threads is a whole number from 1 to 1,000,000, got True"),
        ("[host]\ncall_s = nan", "host.call_s is a finite number of at least 0, got 'nan'"),
        ("[host]\ncall_s = inf", "host.call_s is a finite number of at least 0, got inf"),
        ("[host]\nslowdown = [1.0, 0]", "host.slowdown is a list of positive numbers, got [1.0, 0]"),
        ("[host]\nbytes_per_s = 0", "host.bytes_per_s is a positive, finite number, got 0"),
        ("[host]\nflop_per_s = 1", "host.flop_per_s is not known; did you mean flops_per_s?"),
        ("[host_link]\nbytes_per_s = 1", "host_link.name is missing"),
        ("[device.curves]\nmatmul = [[2, 1], [1, 1]]", "device.curves.matmul: amounts grow, got [[2, 1], [1, 1]]"),
        ("[device.curves]\nmatmul = [[2, 1, 3]]", "device.curves.matmul is a list of [amount, rate], all positive, "),
        ("[device.curves]\nmatmul = []", "device.curves.matmul is a list of [amount, rate], all positive, got []"),
        ("[[samples]]\nkey = 'a'", "samples, entry 1: seconds is missing"),
    ],
)
def test_a_figure_that_cannot_be(tmp_path: Path, line: str, what: str):
    if line == "[link]":
        text = GOOD.replace("[link]", "[link]\nmatmul = 1")
    else:
        host = "threads = 2\nsource = 'here'" if "threads" not in line else "source = 'here'"
        text = f"{GOOD}{line}\n{host if '[host]' in line else ''}\n"
    with pytest.raises(gs.errors.ArgumentError) as caught:
        machine(written(tmp_path, text))
    assert what in str(caught.value)


def test_a_file_that_is_no_toml(tmp_path: Path):
    path = written(tmp_path, "name = ")
    with raises(gs.errors.ArgumentError, f"{path} is no TOML file: Invalid value (at end of document)"):
        machine(path)


def test_what_is_written_is_read_again(tmp_path: Path):
    device = Device(
        "core",
        "CPU",
        {"float32": 1e11},
        {"float32": 1e10},
        1e10,
        8e9,
        overhead_s=2e-6,
        curves={"matmul": ((1e6, 1e10), (1e9, 5e10)), "input gradient": ((1e6, 1e10),)},
        samples={'Relu "x" float32[2]': Sample(Work("elementwise", "float32", 2.0, 16.0), 1e-6)},
    )
    link = Link("memory", float("inf"), 1e-6, shared=True, copies=False)
    sources = dict.fromkeys(("device", "link", "host"), "measured")
    before = Machine("here", device, 4, link, host=Host(2, 1, (1.0, 1.25), 1e-4), sources=sources, calibrated=True)
    after = read_machine(written(tmp_path, machine_text(before)))
    assert (after.device, after.link, after.host, after.calibrated) == (device, link, before.host, True)
    assert after.host_link is after.host_device is None
    host, own = Host(2, bytes_per_s=5e10, flops_per_s=2e12), Link("a bus", 1e10, 1e-5)
    after = read_machine(written(tmp_path, machine_text(replace(before, host=host, host_link=own))))
    assert (after.host, after.host_link) == (host, own)


SIMPLE = Device("d", "GPU", {"float32": 1e12}, {"float32": 1e11}, 1e10, 1e9, {"matmul": 0.5, "bytes": 0.5}, 1e-6, 2e-6)


def test_a_roofline():
    costs = Costs(SIMPLE)
    assert costs.seconds(Work("matmul", "float32", 1e9, 8.0)) == pytest.approx(2e-6 + 1e9 / 5e11)
    assert costs.seconds(Work("elementwise", "float32", 10.0, 1e6)) == pytest.approx(2e-6 + 1e6 / 5e9)
    assert costs.seconds(Work("free")) == 0
    slow = Device("d", "GPU", {"float32": 1e12}, {"float32": 1e11}, 1e10, 1e9, launch_s=1e-3)
    assert Costs(slow).seconds(Work("matmul", "float32", 1.0, 8.0)) == 1e-3


def test_numbers_without_a_figure():
    with raises(
        gs.errors.ArgumentError,
        "The machine's d has no figure for float64, and the function computes with it. Add float64 under "
        "[device.vector_flops_per_s] and [device.matrix_flops_per_s] to a file of your own.",
    ):
        Costs(SIMPLE).seconds(Work("matmul", "float64", 1e9, 8.0))


def test_what_was_measured_counts_first():
    work = Work("elementwise", "float32", 10.0, 1e6)
    device = Device("d", "CPU", {"float32": 1e12}, {"float32": 1e11}, 1e10, 1e9, samples={"Relu a": Sample(work, 5e-3)})
    costs = Costs(device)
    assert costs.seconds(work, "Relu a") == 5e-3
    assert costs.seconds(work.times(2), "Relu b") == pytest.approx(1e-2 - 1e-6)  # all of it that is work, twice
    assert costs.seconds(work, "Tanh a") == 1e6 / 1e10
    assert costs.sampled == {"Relu a"}
    assert costs.estimated == {"Relu b", "Tanh a"}


def test_sizes_that_are_not_known_never_count_as_nothing():
    unknown = ((None, 8), tf.float32)
    assert bytes_of(unknown) == 32
    assert bytes_of(unknown, 100) == 3200
    least = work_of("Relu", lambda _: None, [unknown], [unknown])
    assert (least.flops, least.bytes, least.is_least) == (8, 64, True)
    given = work_of("Relu", lambda _: None, [unknown], [unknown], 100)
    assert (given.flops, given.bytes, given.is_least) == (800, 6400, False)
    assert bytes_of((None, tf.float64)) == 8


def test_operations_that_differ_have_other_keys():
    tensor = ((2, 3), tf.float32)
    keys = {
        sample_key(make_node("y", "MatMul", ["a", "b"], T=tf.float32, transpose_a=t), [tensor, tensor], [other])
        for t in (True, False)
        for other in (tensor, ((3, 3), tf.float32))
    }
    assert len(keys) == 4


@pytest.mark.parametrize("content", ["a = " + "[" * 5000, f"devices = {'9' * 5000}"], ids=["nested", "digits"])
def test_files_that_python_does_not_read(content: str, tmp_path: Path) -> None:
    file = tmp_path / "here.toml"
    file.write_text(content)
    with pytest.raises(gs.errors.ArgumentError, match=re.escape(f"{file} is no TOML file: ")):
        machine(str(file))


@pytest.mark.parametrize("name", ["9" * 5000 + "xH100-SXM5", "\u00b2xH100-SXM5"], ids=["digits", "power"])
def test_counts_that_are_none(name: str) -> None:
    with pytest.raises(gs.errors.ArgumentError, match="There is no machine"):
        machine(name)
