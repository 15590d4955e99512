"""`python -m benchmarks --gpu` and `python -m benchmarks.choices`, as far as a machine without a GPU shows them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import tensorflow as tf
import typer

from benchmarks import display, fitting
from benchmarks.__main__ import choose_cells
from benchmarks.choices import Way, choices, compiled, emit_pairwise, measure
from benchmarks.gpus import memory_of_each, peak_bytes, reset_peaks
from benchmarks.report import every_row, page
from benchmarks.results import Record, Results
from benchmarks.steps import make_parts, single_device_step
from benchmarks.workloads import data, workload
from graphsplit.emission import emit
from tests.helpers import fake_nvidia_smi
from tests.helpers.law import assert_close

ROOT = Path(__file__).parent.parent
DEVICES = ["CPU:0", "CPU:1", "CPU:2"]
WAYS = {f"{choice}: {name}": way for choice, ways in choices("CPU:4").items() for name, way in ways.items()}


def refused(devices: int, contestants: list[str]) -> str:
    with pytest.raises(typer.BadParameter) as caught:
        memory_of_each(devices, contestants)
    return str(caught.value)


def test_contestants_share_the_memory_of_the_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    three = ["plain", "mirrored", "graphsplit"]
    fake_nvidia_smi.install(monkeypatch, tmp_path, "0, NVIDIA L4, 10000, 570\n")
    assert memory_of_each(4, three) == 1000  # nine logical GPUs in 9000 MiB
    assert memory_of_each(1, three) is None
    fake_nvidia_smi.install(monkeypatch, tmp_path, "".join(f"{i}, NVIDIA L4, 10000, 570\n" for i in range(2)))
    assert memory_of_each(4, three) == 1800  # one, two and two on the fuller of the two GPUs
    assert memory_of_each(2, three) is None
    fake_nvidia_smi.install(monkeypatch, tmp_path, "0, NVIDIA GB10, [N/A], 580\n")
    assert refused(4, three) == "the driver does not tell a GPU's memory; say what each gets, --memory-mb 2000"
    fake_nvidia_smi.remove(monkeypatch, tmp_path / "nothing")
    assert refused(1, three) == (
        "no GPU to measure on, there is no nvidia-smi here, which comes with NVIDIA's driver; `graphsplit doctor` says "
        "what it finds"
    )


def test_peaks_of_gpus_only(monkeypatch: pytest.MonkeyPatch):
    held = {"GPU:0": 5, "GPU:1": 7}
    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"current": 0, "peak": held[device]})
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", lambda device: held.update({device: 1}))
    assert peak_bytes(["GPU:0", "GPU:1"]) == {"GPU:0": 5, "GPU:1": 7}
    reset_peaks(["CPU:0", "GPU:1"])
    assert peak_bytes(["CPU:0", "GPU:0", "GPU:1"]) == {"GPU:0": 5, "GPU:1": 1}


def test_cells_of_the_gpu_form():
    cells = choose_cells("gpu", [], [], [])
    assert Counter(cell.devices for cell in cells) == {1: 16, 2: 16, 4: 16}
    assert [str(cell) for cell in choose_cells("gpu", ["mlp"], ["training"], [8])] == ["mlp training, 8 devices"]


def test_the_page_of_a_gpu(tmp_path: Path):
    records = [
        Record("mlp", "training", 2, name, 8, 1, step_s=[s, s], first_s={"total": 1.0}, gpu_peak_bytes=peaks)
        for name, s, peaks in (
            ("plain", 2.0, {"GPU:0": 9_000_000}),
            ("graphsplit", 1.0, {"GPU:0": 5_000_000, "GPU:1": 6_000_000}),
        )
    ]
    records[1].graph = {
        "planning": {"operations": 3, "plan_us_per_op": 10.0, "emit_us_per_node": 10.0},
        "bytes": 1,
        "communication": {
            "total": {"transfers": 1, "transfer_bytes": 8},
            "bound": {"transfers": 1, "transfer_bytes": 8},
            "kinds": {},
            "transfers_in_graph": 1,
        },
    }
    records[1].first_s.update(dict.fromkeys(display.FIRST_CALL_PARTS, 1.0))
    settings = {"kind": "gpu", "form": "gpu", "small": False, "rounds": 2, "round_s": 0.5, "memory_mb": 3000}
    environment = {"gpus": ["NVIDIA H200, compute capability 9.0", "driver 570"], "cores": 16, "commit": "abc"}
    text = page(Results(environment, settings, records), "gpu.json", "rows.md", [])
    assert "`python -m benchmarks --gpu` runs" in text
    assert "Every row of every contestant is in `rows.md`." in text
    assert (
        "Devices are GPUs: NVIDIA H200, compute capability 9.0; driver 570. Each is divided into logical GPUs of 3000 "
        "MiB: kernels, placement and memory are those\nof real devices, links between devices are not"
    ) in text
    assert "| workload | mode | N = 2 |\n| --- | --- | --- |\n| mlp | training | 1000 / 2000: 0.50 |" in text
    assert "processes that exchange nothing" not in text.split("## ", 1)[1].split("## How it was measured")[0]
    assert (
        "The most that tensors took on a GPU from the first call on "
        "(`tf.config.experimental.get_memory_info`):\n\n"
        "| workload | mode | N | contestant | largest MB | MB on each GPU |\n"
        "| --- | --- | --- | --- | --- | --- |\n| mlp | training | 2 | plain | 9 | 9 |\n"
        "| mlp | training | 2 | graphsplit | 6 | 5, 6 |\n"
    ) in text
    assert "What to expect on GPUs" not in every_row(Results(environment, settings, records), "gpu.json")
    settings.update(kind="cpu", memory_mb=None)
    text = every_row(Results(environment, settings, records), "cpu.json")
    assert "What to expect on GPUs" in text
    assert "| mlp | training | 2 | graphsplit | 1000 ±0% | 0.50x |" in text


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if "vectors" in name else []) for name in WAYS]
)
def test_every_way_computes_the_same(name: str):
    found = workload("mlp_bn", small=True, batch=7)
    arguments = [tf.constant(array) for array in data(found, 7)]
    plain = tf.function(single_device_step(make_parts(found), "training"))
    assert_close([plain(*arguments), plain(*arguments)][1], compiled(found, DEVICES, WAYS[name])(), tolerance=1e-4)


@pytest.mark.long
def test_ways_are_other_ways():
    import graphsplit as gs
    from graphsplit.planning.communication import bucketing

    found = workload("transformer", small=True, batch=7)
    arguments = [tf.constant(array) for array in data(found, 7)]

    def plan() -> gs.inspect.Plan:
        return gs.parallelize(single_device_step(make_parts(found), "training"), devices=DEVICES).plan(*arguments)

    usual = plan()
    kinds, pairwise = (Counter(n.op for n in graph.nodes) for graph in (emit(usual), emit_pairwise(usual)))
    assert kinds["AddN"] > pairwise["AddN"]
    assert pairwise["AddV2"] - kinds["AddV2"] == 2 * (kinds["AddN"] - pairwise["AddN"])  # of three parts each
    assert usual.buckets
    with WAYS["packing: nothing"].held():
        assert bucketing.SMALL_BYTES == 0
        assert not plan().buckets
    assert bucketing.SMALL_BYTES > 0


@pytest.mark.long
def test_ratios():
    found = workload("mlp_bn", small=True, batch=7)
    ratios = measure(found, DEVICES[:2], {"the same": Way()}, rounds=1, steps=1)
    assert list(ratios) == ["the same"]
    assert ratios["the same"] > 0


@pytest.mark.long
@pytest.mark.parametrize("name", fitting.WAYS)
def test_every_way_to_fit_is_another_one_with_the_same_loss(name: str):
    devices = [f"CPU:{d}" for d in range(1, 5)]
    loss, text = fitting.measured(fitting.WAYS[name], devices, 1, small=True)
    plain, whole = fitting.measured(fitting.WAYS["as it is"], devices, 1, small=True)
    assert abs(loss - plain) <= 1e-5 * plain
    assert ("0.1 MB on the host" in text) == ("host" in name)
    assert ("0.2 MB of variables on a device" in text) == (name in ("as it is", "recompute"))
    assert (" MB sent" in text) == (name != "as it is")
    assert "0.2 MB of variables on a device, 0.0 MB on the host" in whole


@pytest.mark.long
def test_a_tiny_run_of_choices(tmp_path: Path):
    path = tmp_path / "choices.json"
    few = ("--small", "--workload", "mlp_bn", "--devices", "2", "--rounds", "1", "--steps", "1", "--output", str(path))
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.choices", *few], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(path.read_text())["ratios"]
    assert {f"{choice}: {way}" for choice, ways in found.items() for way in ways} == set(WAYS)
    assert "Not measured here" in done.stdout
