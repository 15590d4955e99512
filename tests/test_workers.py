"""Several machines: worker processes on loopback, each group of cases in one client process of its own.

The cases are in `helpers/worker_cases.py`; what needs no workers is here.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core import addresses
from graphsplit.core.devices import canonical_name, short_name, task_of
from graphsplit.core.protos import make_node
from graphsplit.workers.cluster import ask_all
from graphsplit.workers.undo_log import record, written_variables
from tests.helpers.processes import python
from tests.helpers.worker_cases import GROUPS

ROOT = Path(__file__).parent.parent
QUIET = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "group",
    [
        pytest.param("calls", marks=pytest.mark.timeout(950)),
        pytest.param("more", marks=[pytest.mark.timeout(950), pytest.mark.long]),
        pytest.param("lost", marks=[pytest.mark.timeout(950), pytest.mark.long]),
        pytest.param("pairs", marks=[pytest.mark.timeout(950), pytest.mark.long]),
        pytest.param("meshes", marks=[pytest.mark.timeout(950), pytest.mark.long]),
        pytest.param("often", marks=[pytest.mark.timeout(3100), pytest.mark.long]),
    ],
)
def test_over_worker_processes(group: str):
    limit = 3000 if group == "often" else 900
    ran = python("-m", "tests.helpers.worker_cases", group, cwd=ROOT, timeout=limit)
    assert ran.returncode == 0, ran.stderr[-3000:]
    said = json.loads(ran.stdout.strip().splitlines()[-1])
    assert sorted(said) == sorted(GROUPS[group])
    wrong = {name: trace for name, trace in said.items() if trace}
    assert not wrong, "\n".join(f"{name}:\n{trace}" for name, trace in wrong.items())


@pytest.mark.long
@pytest.mark.timeout(1900)
def test_what_is_about_results_runs_unchanged_on_workers():
    """The cases of other files, their numbers of devices being those of three worker processes."""
    files = ["test_effects_and_plans", "test_gradients", "test_branches", "test_prefetching", "test_training"]
    # (these look at names of devices, or how one row on a device that is not home is sharded)
    others = "not plan_prints and not every_emitted and not residuals_stay and not metrics_and_counters"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", others, *[f"tests/{file}.py" for file in files]]
    environment = {**QUIET, "GRAPHSPLIT_TEST_WORKERS": "3"}
    ran = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1800)
    assert ran.returncode == 0, ran.stdout[-3000:]


def test_names_of_devices():
    name = "/job:worker/replica:0/task:1/device:GPU:0"
    assert canonical_name("/job:worker/task:1/gpu:0") == canonical_name("worker:1/GPU:0") == name
    assert short_name(name) == "worker:1/GPU:0"
    assert task_of(name) == ("worker", 1)
    assert task_of(canonical_name("/job:localhost/task:0/GPU:0")) is None


@pytest.mark.parametrize(
    "wrong",
    [
        *("10.0.0.1", ":2222", "10.0.0.1:0", "10.0.0.1:99999", "grpc://a:2222", "a:\u00b2", "a:1,b:2", "a b:1"),
        *("::1:2222", "[::1:1", "\0:1", 5, None),
    ],
)
def test_what_is_no_address(wrong: object):
    with pytest.raises(gs.errors.ArgumentError) as raised:
        gs.connect([wrong])
    assert str(raised.value) == f"{wrong!r} is not the address of a worker; write it like '10.0.0.1:2222'."


def test_lists_of_workers():
    with pytest.raises(gs.errors.ArgumentError) as raised:
        gs.connect("10.0.0.1:2222")
    assert str(raised.value) == "connect takes a list of addresses, ['10.0.0.1:2222'], got '10.0.0.1:2222'."
    for workers in ([], ["a:1", "a:1"]):
        with pytest.raises(gs.errors.ArgumentError) as raised:
            gs.connect(workers)
        assert str(raised.value) == f"connect takes one or more workers, each once; got {workers}."


def test_cluster_resolvers():
    spec = tf.train.ClusterSpec({"chief": ["a:1"], "worker": ["b:1", "c:1"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, task_type="chief", task_id=0)
    assert addresses.worker_addresses(resolver) == (["b:1", "c:1"], "a:1")  # the chief is this process
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec)
    assert addresses.worker_addresses(resolver) == (["a:1", "b:1", "c:1"], None)
    alone = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0
    )
    with pytest.raises(gs.errors.ArgumentError, match="SimpleClusterResolver knows of no workers but this process"):
        addresses.worker_addresses(alone)


def test_after_variables_were_made():
    variable = tf.Variable(1.0, name="early")
    with pytest.raises(gs.errors.UnsupportedError) as raised:
        gs.connect(["127.0.0.1:9"])
    assert str(raised.value).startswith("connect was called after variables were made (")
    assert str(raised.value).endswith("Call it first in the program, before any tensor, variable or model is made.")
    del variable


def test_a_worker_that_does_not_answer():
    script = (
        "import graphsplit as gs\n"
        "try:\n    gs.connect(['127.0.0.1:9'], timeout_s=0.5)\nexcept gs.errors.DeviceError as error:\n    print(error)"
    )
    ran = python("-c", script)
    assert ran.stdout == (
        "These workers did not answer within 0.5 s:\n  - 127.0.0.1:9\nStart each with `graphsplit worker --port ...` "
        "and see that this machine may reach the port; timeout_s=... waits longer.\n"
    ), ran.stderr


def test_resilient_without_workers():
    step = gs.parallelize(lambda x: x, devices=2)
    with pytest.raises(gs.errors.UnsupportedError, match=r"call graphsplit\.connect first"):
        gs.workers.resilient(step)
    with pytest.raises(gs.errors.ArgumentError, match="resilient takes a function that parallelize returned, got"):
        gs.workers.resilient(lambda x: x)
    with pytest.raises(gs.errors.ArgumentError, match=r"on_lost must be 'survivors', .*, got 'wait'"):
        gs.workers.resilient(step, on_lost="wait")


@pytest.mark.long
def test_batches_are_kept_only_since_a_checkpoint(tmp_path: Path):
    """Without one no call can be made again, so nobody needs what it was given."""
    weight = tf.Variable(tf.ones(3))
    step = gs.parallelize(lambda x: tf.reduce_sum(x * weight, 1), devices=2)
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(weight=weight), str(tmp_path), 1)
    cluster: Any = SimpleNamespace(health=lambda: SimpleNamespace(lost=()))
    resilient: Any = gs.workers.Resilient(step, cluster, manager)

    def given() -> weakref.ref[Any]:
        batch = tf.ones((4, 3)) * 2.0
        assert resilient(batch).shape == (4,)
        return weakref.ref(batch)

    before = given()
    gc.collect()
    assert before() is None
    resilient.save()
    since = given()
    gc.collect()
    assert since() is not None
    resilient.save()
    given()  # by the next call the batches before that checkpoint are gone
    gc.collect()
    assert since() is None


@pytest.mark.parametrize(
    ("options", "lost", "devices", "mesh", "shares"),
    [
        ({}, [1], [0, 2, 3], {}, None),
        ({"shares": [4, 3, 2, 1]}, [1, 2], [0, 3], {}, [4, 1]),
        ({"mesh": {"data": 4}}, [1], [0, 2, 3], {"data": 3}, None),
        ({"mesh": {"batch": 2, "model": 2}, "shares": [2, 1]}, [0], [1, 2], {"batch": 1, "model": 2}, [1]),
        ({"mesh": {"model": 2, "batch": 2}}, [3], [0, 2], {"model": 2, "batch": 1}, None),
        ({"mesh": {"stage": 2, "batch": 2}}, [0], [2, 1], {"stage": 2, "batch": 1}, None),
        ({"stages": 2, "shares": [2, 1]}, [0, 1], [2, 3], {}, [1]),
        ({"mesh": {"model": 4}}, [1], [], None, None),
        ({"mesh": {"expert": 2, "model": 2}}, [1], [], None, None),
        ({"stages": 4}, [1], [], None, None),
    ],
)
def test_rows_that_are_left(options: Any, lost: list[int], devices: list[int], mesh: Any, shares: list[float] | None):
    names = [canonical_name(f"worker:{task}/CPU:0") for task in range(4)]
    step = gs.parallelize(lambda x: x, devices=names, **options)
    resilient: Any = gs.workers.Resilient(step, SimpleNamespace(), None)  # type: ignore[arg-type]
    resilient._lost.update(lost)
    assert resilient.devices == tuple([names[k] for k in devices])
    if devices:
        left = resilient._function()._options
        assert (left.mesh.asked, left.shares and [*left.shares]) == (mesh, shares)


@pytest.mark.parametrize("number", [0, True, 1.5])
def test_numbers_of_local_workers(number: object):
    with pytest.raises(gs.errors.ArgumentError) as raised:
        gs.workers.LocalWorkers(number)  # type: ignore[arg-type]
    assert str(raised.value) == f"LocalWorkers: count must be a whole number of at least 1, got {number!r}."


def test_a_port_in_use_and_a_public_address(monkeypatch: pytest.MonkeyPatch):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(gs.errors.DeviceError) as raised:
            addresses.check_port(port, insecure=True)
        assert str(raised.value) == (f"Port {port} is in use here. Choose another --port, or end what listens there.")
    [port] = addresses.free_ports(1)
    monkeypatch.setattr(addresses, "public_addresses", lambda: ["8.8.8.8"])
    with pytest.raises(
        gs.errors.UnsupportedError, match=r"^This machine has a public address, 8\.8\.8\.8\. .*--insecure"
    ):
        addresses.check_port(port, insecure=False)
    addresses.check_port(port, insecure=True)
    with pytest.raises(
        gs.errors.UnsupportedError, match=r"^This machine has a public address, 8\.8\.8\.8\. .*insecure=True"
    ):
        gs.workers.LocalWorkers(1)


def test_addresses_of_this_machine():
    assert "127.0.0.1" in addresses.own_addresses()
    assert "127.0.0.1" not in addresses.public_addresses()
    assert addresses.address_towards("127.0.0.1:2222").startswith("127.0.0.1:")


@pytest.mark.long
def test_a_worker_ends_cleanly():
    [port] = addresses.free_ports(1)
    command = [sys.executable, "-m", "graphsplit.cli", "worker", "--port", str(port), "--insecure"]
    worker = subprocess.Popen(command, env=QUIET, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert worker.stdout is not None
        assert f"127.0.0.1:{port}" in worker.stdout.readline()
        end = time.monotonic() + 100
        while addresses.is_free(port):
            assert time.monotonic() < end
            time.sleep(0.05)
        worker.send_signal(signal.SIGTERM)
        out, err = worker.communicate(timeout=100)
    finally:
        worker.kill()
    assert worker.returncode == 0
    assert out == "graphsplit worker: ended\n"
    assert err.startswith("Warning: TensorFlow's server listens on all interfaces, without passwords"), err


@pytest.mark.long
def test_a_running_worker_is_restarted(monkeypatch: pytest.MonkeyPatch):
    """The new process starts once the old one has left the port."""
    monkeypatch.setattr(addresses, "public_addresses", lambda: ["8.8.8.8"])  # (it may, with insecure=True)
    with gs.workers.LocalWorkers(1, insecure=True) as workers:
        found: set[int] = set()
        for number in range(3):
            if number:
                workers.restart(0)
            end = time.monotonic() + 100
            while (status := ask_all(workers.addresses, 2.0)[0]) is None or status.incarnation in found:
                assert time.monotonic() < end
            found.add(status.incarnation)


LOSES_ONE = """
import sys
import tensorflow as tf, graphsplit as gs
workers = gs.workers.LocalWorkers(2)
gs.connect(workers)
mesh = {"batch": len(gs.available_devices())}  # of the batch's axis alone, it is as many devices as there are
step = gs.workers.resilient(gs.parallelize(lambda x: tf.reduce_sum(x * x), mesh=mesh))
step(tf.ones((4, 2)))
workers.kill(1)
print("lost", file=sys.stderr, flush=True)
assert float(step(tf.ones((4, 2)))) == 8.0
"""


@pytest.mark.long
@pytest.mark.parametrize("level", ["0", "3"])
def test_what_tensorflow_writes_of_a_lost_worker_is_announced(level: str):
    environment = {**QUIET, "TF_CPP_MIN_LOG_LEVEL": level}
    ran = subprocess.run(
        [sys.executable, "-c", LOSES_ONE], env=environment, capture_output=True, text=True, timeout=240
    )
    assert ran.returncode == 0, ran.stderr
    logged = [line for line in ran.stderr.partition("lost\n")[2].splitlines() if line[:1] == "E"]
    assert bool(logged) == (level == "0"), ran.stderr
    page = " ".join((ROOT / "docs" / "several_machines.md").read_text("utf-8").split())
    for line in logged:
        said = line.partition("] ")[2]
        assert any(f"`{said[:end]}`" in page for end in range(len(said))), line
    assert "`TF_CPP_MIN_LOG_LEVEL=3`" in page


def test_what_is_kept_before_it_is_written():
    here, there = "/device:CPU:0", "/job:worker/replica:0/task:0/device:CPU:0"
    nodes = [
        make_node("v", "Placeholder", [], here, dtype=tf.resource),
        make_node("r", "Placeholder", [], here, dtype=tf.resource),
        make_node("w", "Placeholder", [], there, dtype=tf.resource),
        make_node("x", "Placeholder", [], here, dtype=tf.float32),
        make_node("read", "ReadVariableOp", ["r"], here, dtype=tf.float32),
        make_node("add", "AssignAddVariableOp", ["v", "x"], here, dtype=tf.float32),
        make_node("assign", "AssignVariableOp", ["w", "read"], there, dtype=tf.float32),
    ]
    written = written_variables(nodes, ["v", "r", "w", "x"])
    assert [(w.argument, w.name, w.device) for w in written] == [(0, "v", here), (2, "w", there)]
    recorded = record(nodes, written, [tf.float32, tf.float32])
    by_name = {node.name: node for node in recorded.nodes}
    assert recorded.devices == [here, there]
    assert [by_name[name].device for name in recorded.inputs] == [here, there, here, there]
    for name, device in {"add": here, "assign": there}.items():
        [wait] = [reference[1:] for reference in by_name[name].input if reference[0] == "^"]
        counts = by_name[wait]
        assert (counts.op, counts.device) == ("AssignAddVariableOp", device)
        [kept] = [by_name[reference[1:]] for reference in counts.input if reference[0] == "^"]
        assert (kept.op, kept.device) == ("AssignVariableOp", device)
        assert by_name[kept.input[1]].input[0] == ("v" if name == "add" else "w")
    assert [r for r in by_name["read"].input if r[0] == "^"] == []
