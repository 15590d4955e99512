"""The benchmark suite runs, measures what it says, and reports it. How fast anything is, is not asserted."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorflow as tf

import graphsplit as gs
from benchmarks import workers
from benchmarks.__main__ import choose_cells
from benchmarks.__main__ import run as run_cells
from benchmarks.communication import Traffic, planned_traffic, transfers_in_graph
from benchmarks.goals import broken_goals, met_goals
from benchmarks.layouts import count
from benchmarks.links import LinksError, linked, started
from benchmarks.overlap import overlap_in
from benchmarks.partitions import busiest
from benchmarks.phases import PHASES
from benchmarks.planning import synthetic_program, synthetic_speed
from benchmarks.results import CONTESTANTS, Record, Results
from benchmarks.runner import Settings
from benchmarks.steps import make_parts, single_device_step
from benchmarks.workloads import MODES, WORKLOADS, data, workload
from graphsplit.inspect.recorded import OpEvent
from graphsplit.inspect.records import PlacedOp, Transfer
from graphsplit.planning.device_bytes import traffic
from tests.helpers.layout_cases import deep_step

ROOT = Path(__file__).parent.parent


def run(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.mark.long
def test_a_tiny_run(tmp_path: Path):
    path = tmp_path / "tiny.json"
    few = ("--rounds", 2, "--round-seconds", 0.01, "--small", "--batch", 6, "--planning-ops", 100)
    chosen = ("--workloads", "polyfit", "--devices", 2, "--contestants", "plain,graphsplit")
    run("benchmarks", *few, *chosen, "--output", path)
    results = Results.load(path)
    cell = ("polyfit", "training", 2)
    plain, split = results.find(*cell, "plain"), results.find(*cell, "graphsplit")
    assert plain
    assert split
    assert split.check == pytest.approx(plain.check, rel=1e-5)
    for record in (plain, split):
        assert len(record.step_s) == 2
        assert sum(s for part, s in record.first_s.items() if part != "total") == pytest.approx(record.first_s["total"])
    assert all(split.first_s[part] > 0 for part in ("trace", "plan", "emit", "register"))
    assert split.graph["communication"]["transfers_in_graph"] > 0
    assert split.graph["nodes"] > plain.graph["nodes"]
    assert results.planning[0]["sharded_operations"] > 50
    page = tmp_path / "performance.md"
    run("benchmarks.report", path, page)
    assert "| polyfit | training |" in page.read_text()
    assert "| polyfit | training | 2 | graphsplit |" in (tmp_path / "performance_rows.md").read_text()


def test_phases_watch_what_exists():
    assert all(callable(getattr(module, name)) for module, name in PHASES.values())


def test_a_run_ends_in_time(tmp_path: Path):
    cells = choose_cells("full", [], list(MODES), [])
    assert [cell.devices for cell in cells] == sorted([1, 2, 4, 8] * 16)  # 9 workloads, 7 of them forward, too
    assert len(set(cells)) == len(cells)
    results = Results({}, {})
    assert run_cells(results, cells, ["graphsplit"], Settings(), tmp_path / "late.json", end=0.0) == cells
    assert not results.records


@pytest.mark.sampled(2)
@pytest.mark.parametrize("exchange_bytes", [0, 1 << 19])
@pytest.mark.parametrize("name", ["mlp_bn", "transformer"])
def test_traffic_of_the_plan_is_that_of_the_graph(name: str, exchange_bytes: int):
    found = workload(name, small=True, batch=7)
    parts = make_parts(found)
    tuning = {"exchange_bytes": exchange_bytes}
    step = gs.parallelize(single_device_step(parts, "training"), devices=3, tuning=tuning)
    arguments = data(found, 7)
    planned = sum(planned_traffic(step.plan(*arguments)).values(), Traffic())
    assert planned.transfers == transfers_in_graph(step.graph_def(*arguments))


@pytest.mark.long
@pytest.mark.parametrize("name", WORKLOADS)
def test_every_workload_has_data_for_its_network(name: str):
    found = workload(name, small=True)
    x, y = data(found, 2)
    assert len(x) == len(y) == 2
    assert make_parts(found).model(x).shape[0] == 2


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("layout", "least"), [("home", 2), ("mirrored", 4 / 3), ("sharded", 2)])
def test_bytes_in_partitions_are_those_of_the_plan(layout: str, least: float):
    """Of P bytes of weights on 3 devices: `N - 1`, `2 (N - 1)/N` and `3 (N - 1)/N` times as many, and few others.

    (Of sharded ones the last two need not be put together again.)
    """
    weights = [tf.Variable(tf.ones((90, 90)), name=f"weight_{k}") for k in range(6)]
    gs.set_variable_layout(weights, layout, 3)
    step = gs.parallelize(deep_step(weights), devices=3)
    x = tf.ones((7, 90))
    sent, received = busiest(step, x)
    _, *planned = traffic(step.plan(x)).busiest
    size = 6 * 90 * 90 * 4
    assert 0.8 * least <= max(sent, received) / size <= 1.05 * least
    assert max(planned) == pytest.approx(max(sent, received), rel=0.01)


def test_links_leave_nothing_behind():
    before = socket.if_nameindex()
    with contextlib.ExitStack() as stack:
        try:
            names = stack.enter_context(linked(2, 1000))
        except LinksError as error:
            pytest.skip(str(error))
        assert len({name for _, name in socket.if_nameindex()} - {name for _, name in before}) == 5
        address, name = list(names.items())[1]
        command = ["-c", f"import socket; print(socket.create_server(('{address}', 0)).getsockname())"]
        made = stack.enter_context(started(name, command))
        assert address in made.stdout.readline()
    assert socket.if_nameindex() == before


@pytest.mark.parametrize(("read_s", "hidden"), [(2.0, 1.0), (4.0, 0.5), (9.0, 0.0)])
def test_what_the_backward_pass_hides_is_over_when_it_ends(read_s: float, hidden: float):
    """Of a timeline in which the first product takes a second and the second one two, on a link of 4 s a gradient."""
    ops = [
        PlacedOp("shard_1/early", "Conv2DBackpropFilter", shard=1, backward=True),
        PlacedOp("shard_1/late", "MatMul", shard=1, backward=True),
        PlacedOp("shard_0/late", "MatMul", shard=0, backward=True),
        PlacedOp("sum", "AddN", role="reduce"),
        PlacedOp("graphsplit/bucket/join", "ConcatV2", role="reduce"),
    ]
    times = [
        ("shard_1/early", "B", 0.0, 1.0),
        ("graphsplit/bucket/join", "B", 1.0, 0.0),
        ("shard_1/late", "B", 1.0, 1.0),
    ]
    times += [("shard_0/late", "A", 0.0, 2.0), ("sum", "A", read_s, 0.1)]
    events = [OpEvent(name, "", device, start, length, 0) for name, device, start, length in times]
    sent = [Transfer(ops[k].name, 0, "B", "A", 250_000, ("sum",)) for k in (0, 4)]
    placement = SimpleNamespace(ops={op.name: op for op in ops}, transfers=sent)
    found = overlap_in(SimpleNamespace(events=events, placement=placement), mbit=1)
    assert found.backward_s == 2.0
    assert found.link_s == 4.0
    assert found.hidden == hidden
    assert found.at_best == 0.5
    assert (found.buckets, found.full) == (1, 1)


def test_synthetic_programs_are_sharded():
    assert len(synthetic_program(600).ops) == pytest.approx(600, abs=6)
    assert synthetic_speed(600, 4)["sharded_operations"] > 590 - 4 - 100


def test_a_slow_run_breaks_goals():
    records = [
        Record("polyfit", "training", 2, name, 8, 1, step_s=[s, s], first_s={"total": 1.0})
        for name, s in (("plain", 1.0), ("mirrored", 2.0), ("graphsplit", 1.5))
    ]
    for record in records:
        record.graph = {"planning": {"plan_us_per_op": 10.0}}
    results = Results({}, {}, records)
    assert [str(goal) for goal in broken_goals(results)] == [
        "polyfit training on 2 devices: step as a multiple of plain's: 1.50, goal 1.3 or less"
    ]
    assert len(met_goals(results)) == 2


def test_many_devices_are_compared_with_eight():
    records = [
        Record("resnet50", "training", n, "graphsplit", batch, first_s={"total": s})
        for n, batch, s in ((8, 64, 4.0), (64, 64, 12.0))
    ]
    for record in records:
        record.graph = {"planning": {"plan_us_per_op": 10.0}}
    assert [str(goal) for goal in broken_goals(Results({}, {}, records))] == [
        "resnet50 training on 64 devices, 64 rows: first call as a multiple of that on 8: 3.00, goal 2 or less"
    ]
    records[0].batch = 16
    assert not broken_goals(Results({}, {}, records))


@pytest.mark.long
def test_a_tiny_run_of_packing():
    run("benchmarks.packing", "--devices", 2, "--vectors", 4, "--rounds", 1)


@pytest.mark.long
def test_a_tiny_run_of_layouts():
    few = ("--devices", 2, "--small", "--rounds", 1, "--ways", "graphsplit,layout_sharded", "--steps-only")
    run("benchmarks.layouts", "--workload", "mlp", *few)
    found = count("mlp", True, "sharded, not again", ["CPU:0", "CPU:1"])
    assert 1 < found["sent"] / found["weights"] < 1.5  # (rows of the batch, too)
    run("benchmarks.layouts_over_workers", "--workers", 2, "--width", 64, "--depth", 2, "--rounds", 1)


@pytest.mark.long
def test_a_tiny_run_of_fit_and_of_operations():
    printed = run("benchmarks.keras_fit", "--network", "mlp", "--small", "--seconds", 1)
    assert len(re.findall(r"^mlp, [\w, ]+: first batch [\d.]+ s, loss \d\.\d{5}$", printed, re.MULTILINE)) == 5
    assert len(re.findall(r"^mlp, .* ms a batch, \d+\.\d\d x plain, by default; ", printed, re.MULTILINE)) == 5
    printed = run("benchmarks.operations", "--workload", "mlp", "--small", "--devices", 2)
    assert re.findall(r"^mlp, (\w+): operations of CPU:0, CPU:1: ", printed, re.MULTILINE) == [
        *("auto", "home", "MirroredStrategy")
    ]


@pytest.mark.long
def test_all_that_fit_have_one_loss(tmp_path: Path):
    """They see the same batch. JAX draws other weights, and is left out where it is not installed."""
    few = ("--rounds", 2, "--fit-round-seconds", 0.05, "--small", "--batch", 8, "--planning-ops", 100)
    path = tmp_path / "fit.json"
    run("benchmarks", "--full", *few, "--workloads", "mlp", "--modes", "fit", "--devices", 2, "--output", path)
    records = {record.contestant: record for record in Results.load(path).records}
    measured = {name: record for name, record in records.items() if not record.skipped}
    assert set(records) == set(CONTESTANTS)
    assert set(records) - set(measured) <= {"jax"}
    for record in measured.values():
        assert record.contestant == "jax" or record.check == pytest.approx(records["plain"].check, rel=1e-5)
        assert len(record.step_s) == 2
        assert record.peak_bytes > 1e8


@pytest.mark.long
def test_a_tiny_run_of_workers():
    printed = run("benchmarks.workers", "--workers", 2, "--widths", 32, "--rows", 8, "--rounds", 1)
    said, _, head, *lines = printed.splitlines()
    assert said.startswith("8 rows, 4 layers, 1 rounds, ")
    assert head == (
        "| processes | weights | logical devices of one process | workers | workers, mirrored "
        "| MultiWorkerMirroredStrategy |"
    )
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[:2] for row in cells] == [["---", "---"], ["2", "0.0 MB"]]
    assert all(re.fullmatch(r"\d+\.\d ms \(\d+\.\d\d\)", cell) for row in cells[1:] for cell in row[2:])


def test_a_row_of_workers():
    found = {"local": [0.010, 0.020, 0.030], "workers": [0.020, 0.030, 0.090]}
    assert workers.row(3, 512, found) == "| 3 | 4.2 MB | 20.0 ms (1.00) | 30.0 ms (2.00) |"
    workers.check({"local": 0.25, "workers": 0.25, "strategy": 0.5})
    with pytest.raises(SystemExit, match=r"do not compute the same; .* first step: \{'local': 0\.25, 'w"):
        workers.check({"local": 0.25, "workers": 0.26})


@pytest.mark.long
def test_micro_batches_and_pipelines_against_the_whole():
    run("benchmarks.microbatches", "--small", "--models", "mlp", "--counts", "1,2", "--rounds", 1)
    run("benchmarks.pipelines", "--schedules", "1f1b", "--counts", 2, "--rows", 16, "--rounds", 1)
    run("benchmarks.pipelines", "--schedules", "1f1b", "--counts", 2, "--rows", 16, "--rounds", 1, "--cut")


@pytest.mark.long
def test_stages_of_a_small_network():
    run("benchmarks.stages", "--networks", "unet", "--stages", 2, "--small")


@pytest.mark.long
def test_a_tiny_run_of_serving(tmp_path: Path):
    path = tmp_path / "serving.json"
    few = ("--rows", "1,3", "--devices", "1,2", "--growth", "1,3", "--rounds", 2, "--model", "dense")
    run("benchmarks.serving", *few, "--output", path)
    found = json.loads(path.read_text())
    assert [(r["rows"], r["devices"]) for r in found["requests"]] == [(1, 0), (1, 1), (1, 2), (3, 0), (3, 1), (3, 2)]
    assert all(len(r["latency_s"]) == 2 and min(r["latency_s"]) > 0 for r in found["requests"])
    assert [g["devices"] for g in found["growth"]] == [0, 1, 2, 3]
