"""The timeline of a step, and `graphsplit inspect`."""

from __future__ import annotations

import json

import pytest
import tensorflow as tf
from typer.testing import CliRunner

import graphsplit as gs
from graphsplit.cli import app
from graphsplit.cli.targets import example, parse_spec
from graphsplit.core.tensorflow_internals import parse_profile
from graphsplit.inspect import Edge, PlacedOp, Placement, Timeline
from graphsplit.inspect.recorded import OpEvent, Recorded, missing_in, read_events

WEIGHTS = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])


def product(x):
    """What `graphsplit inspect` looks at below."""
    return tf.nn.relu(x @ WEIGHTS)


@pytest.fixture
def by_hand():
    cpu, gpu = "/device:CPU:0", "/device:GPU:0"
    events = (
        OpEvent("a", "MatMul", gpu, 0.0, 0.004, 1),
        OpEvent("b", "Relu", gpu, 0.002, 0.004, 2),
        OpEvent("c", "AddN", cpu, 0.008, 0.002, 3),
    )
    ops = [PlacedOp("a", "MatMul", gpu), PlacedOp("c", "AddN", cpu)]
    return Timeline("step", events, Placement(ops, [Edge("a", "c", 0, 4000, "float32")]))


def test_busy_share_is_that_of_the_union(by_hand):
    assert by_hand.duration_s == pytest.approx(0.010)
    assert by_hand.busy == pytest.approx({"/device:CPU:0": 0.2, "/device:GPU:0": 0.6})
    assert by_hand.slowest(1)[0].name == "a"
    assert "GPU:0 -> CPU:0  4.0 kB moved" in str(by_hand)


def test_chrome_trace(by_hand, tmp_path):
    by_hand.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["CPU:0", "GPU:0"]
    [first, *_] = [e for e in events if e["ph"] == "X"]
    assert (first["name"], first["ts"], first["dur"], first["args"]) == ("MatMul", 0.0, 4000.0, {"op": "a"})

    assert [(e["name"], e["pid"], e["tid"]) for e in events if e["ph"] == "X"] == [  # a row for each thread
        ("MatMul", 1, 1),
        ("Relu", 1, 2),
        ("AddN", 0, 3),
    ]


@pytest.mark.parametrize("suffix", [".html", ".png", ".txt", ""])
def test_other_suffixes(by_hand, suffix):
    with pytest.raises(
        gs.errors.ArgumentError, match=rf"^'t{suffix}': a timeline is written as .json, which ui.perfetto.dev"
    ):
        by_hand.save(f"t{suffix}")


def test_a_recorded_step():
    w = tf.Variable(tf.ones([32, 16]))
    count = tf.Variable(0)

    def step(x):
        count.assign_add(1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ w))
        w.assign_sub(tape.gradient(loss, w))
        return loss

    timeline = gs.inspect.timeline(gs.parallelize(step, devices=3), tf.random.normal([12, 32]))
    assert count.numpy() == 0
    products = {(e.name, e.device) for e in timeline.events if "MatMul" in e.type}
    assert {(f"shard_{d}/matmul", f"/device:CPU:{d}") for d in range(3)} <= products
    assert all(0 < share <= 1 for share in timeline.busy.values())
    assert set(timeline.busy) == {"/device:CPU:0", "/device:CPU:1", "/device:CPU:2"}
    for d in (1, 2):  # four rows and the weights there; the weights' gradient and the loss back
        assert timeline.moved_bytes["/device:CPU:0", f"/device:CPU:{d}"] == 4 * 32 * 4 + 32 * 16 * 4
        assert timeline.moved_bytes[f"/device:CPU:{d}", "/device:CPU:0"] == 32 * 16 * 4 + 4


@pytest.mark.parametrize("rows", [6, 5])
def test_what_was_fused_sends_what_it_stands_for(rows):
    """oneDNN computes the gradients of a convolution's filter and bias together, in one operation with two results."""
    kernel, bias = tf.Variable(tf.ones([3, 3, 3, 16])), tf.Variable(tf.ones([16]))

    def step(x):
        with tf.GradientTape() as tape:
            y = tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, kernel, 1, "SAME"), bias))
            loss = tf.reduce_mean(y**2)
        gradients = tape.gradient(loss, [kernel, bias])
        for variable, gradient in zip([kernel, bias], gradients, strict=True):
            variable.assign_sub(gradient)
        return loss

    function, x = gs.parallelize(step, devices=2), tf.random.normal([rows, 8, 8, 3])
    timeline = gs.inspect.timeline(function, x)
    planned = {(t.source_device, t.target_device): 0 for t in function.placement(x).transfers}
    for transfer in function.placement(x).transfers:
        planned[transfer.source_device, transfer.target_device] += transfer.bytes
    assert timeline.moved_bytes == planned
    placement = function.placement(x, actual=True)
    assert sum(transfer.bytes for transfer in placement.transfers) == sum(planned.values())
    for kind in ("Conv2D", "BiasAdd", "Conv2DBackpropFilter", "BiasAddGrad"):
        assert [op.device for op in placement.select(kind) if op.ran] == ["/device:CPU:0", "/device:CPU:1"], kind


class Recording:
    """An `XSpace` as the profiler writes it on a GPU machine, made by hand; times in microseconds."""

    def __init__(self):
        self.space = parse_profile(b"")

    def event(self, plane, line, name, begin, duration, **stats):
        planes = {p.name: p for p in self.space.planes}
        plane = planes.get(plane) or self.space.planes.add(name=plane)
        lines = {own.name: own for own in plane.lines}
        line = lines.get(line) or plane.lines.add(name=line, timestamp_ns=1000)
        number = len(plane.event_metadata) + 1
        plane.event_metadata[number].name = name
        event = line.events.add(metadata_id=number, offset_ps=begin * 10**6, duration_ps=duration * 10**6)
        for key, value in stats.items():
            names, texts = len(plane.stat_metadata) + 1, len(plane.stat_metadata) + 2
            plane.stat_metadata[names].name, plane.stat_metadata[texts].name = key, value
            event.stats.add(metadata_id=names, ref_value=texts)


@pytest.fixture
def one_gpu():
    """A product on each of two logical GPUs of one GPU, and a copy from one to the other."""
    recording, gpu, first, second = Recording(), "/device:GPU:0", "Stream #14(Compute)", "Stream #18(Compute,Memcpy)"
    for d in range(2):
        recording.event("/host:CPU", f"tf_Compute/{d}", f"shard_{d}/MatMul:MatMul", d, 1)
    recording.event("/host:CPU", "tf_Compute/0", "hash:StringToHashBucketFast", 3, 1)
    recording.event(gpu, first, "gemm_kernel", 2, 4, tf_op="shard_0/MatMul:MatMul")
    recording.event(gpu, second, "MemcpyD2D", 3, 1, memcpy_details="size:64", tf_op="hash:_Recv")
    recording.event(gpu, second, "gemm_kernel", 4, 4, tf_op="shard_1/MatMul:MatMul")
    recording.event(gpu, second, "nameless_kernel", 8, 1)
    recording.event(gpu, "TensorFlow Ops", "MatMul", 2, 6, tf_op="shard_0/MatMul:MatMul")
    recording.event(gpu, "TensorFlow Name Scope", "shard_0", 2, 6)
    recording.event(gpu, "Steps", "1", 2, 6)
    graph = tf.compat.v1.GraphDef()
    for d in range(2):
        graph.node.add(name=f"shard_{d}/MatMul", op="MatMul", device=f"/job:localhost/replica:0/task:0/device:GPU:{d}")
    graph.node.add(name="hash", op="StringToHashBucketFast", device="/job:localhost/replica:0/task:0/device:CPU:0")
    return [Recorded(recording.space)], [graph]


def test_streams_count_and_launches_and_summaries_do_not(one_gpu):
    events = read_events(*one_gpu)
    assert [(e.type, e.name, e.device) for e in events] == [
        ("MatMul", "shard_0/MatMul", "/device:GPU:0"),
        ("StringToHashBucketFast", "hash", "/device:CPU:0"),
        ("MemcpyD2D", "hash", "/device:GPU:1"),
        ("MatMul", "shard_1/MatMul", "/device:GPU:1"),
        ("kernel", "nameless_kernel", "/device:GPU:1"),
    ]
    assert [event.copied for event in events] == [False, False, True, False, False]
    assert [round(event.start_s * 1e6) for event in events] == [0, 1, 1, 2, 6]
    assert missing_in(one_gpu[0], events, one_gpu[1]) == []


def test_copies_are_told_apart(one_gpu):
    events = read_events(*one_gpu)
    timeline = Timeline("step", tuple(events), Placement([], []))
    assert str(timeline) == (
        "Timeline of step: 5 executions in 0.01 ms\n"
        "  CPU:0  busy 14%\n"
        "  GPU:0  busy 57%\n"
        "  GPU:1  busy 86%, copying 14%\n"
        "     0.004 ms  MatMul on GPU:0  shard_0/MatMul\n"
        "     0.004 ms  MatMul on GPU:1  shard_1/MatMul\n"
        "     0.001 ms  StringToHashBucketFast on CPU:0  hash\n"
        "     0.001 ms  MemcpyD2D on GPU:1  hash\n"
        "     0.001 ms  kernel on GPU:1  nameless_kernel"
    )
    kinds = [e["cat"] for e in timeline.chrome_trace()["traceEvents"] if e["ph"] == "X"]
    assert kinds == ["operation", "operation", "copy", "operation", "operation"]


def test_a_recording_without_streams_says_so(one_gpu):
    recordings, graphs = one_gpu
    del recordings[0].space.planes[1]
    events = read_events(recordings, graphs)
    assert [(e.type, e.device) for e in events][:2] == [("MatMul", "/device:GPU:0"), ("MatMul", "/device:GPU:1")]
    [missing] = missing_in(recordings, events, graphs)
    assert missing == (
        "no stream of a GPU was recorded, so the times on GPUs are launch times on the host. The profiler needs "
        "CUPTI and the right to use it: https://developer.nvidia.com/ERR_NVGPUCTRPERM"
    )
    assert missing_in(recordings, events, []) == []
    assert str(Timeline("step", (), Placement([], []), "half of it is missing")) == (
        "Timeline of step: 0 executions in 0.00 ms\n  note: half of it is missing"
    )


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        ("float32[64,784]", tf.TensorSpec([64, 784])),
        ("int64[]", tf.TensorSpec([], tf.int64)),
        (" bool[?, 3] ", tf.TensorSpec([None, 3], tf.bool)),
    ],
)
def test_specs(text, spec):
    assert parse_spec(text) == spec


@pytest.mark.parametrize("text", ["float32", "float31[2]", "float32[a]", "[3]"])
def test_specs_that_are_none(text):
    with pytest.raises(gs.errors.ArgumentError, match="is not understood; write it like"):
        parse_spec(text)


def test_examples_fit():
    assert example(tf.TensorSpec([2, 3], tf.float16)).shape == (2, 3)
    assert example(tf.TensorSpec([2], tf.string)).dtype == tf.string
    with pytest.raises(gs.errors.ArgumentError, match="a size that is not known; name all sizes"):
        example(tf.TensorSpec([None]))


def inspect(*arguments):
    return CliRunner().invoke(app, ["inspect", *map(str, arguments)])


def test_inspect_a_function(tmp_path):
    out, trace = tmp_path / "out.html", tmp_path / "trace.json"
    target = "tests.test_placement_timeline:product"
    ran = inspect(target, "--spec", "float32[8,3]", "--devices", 2, "--actual", "-o", out, "--timeline", trace)
    assert ran.exit_code == 0, ran.output
    assert "Placement (actual) of product" in ran.output
    assert "a shard has 4 rows" in ran.output
    assert out.read_text().startswith("<!doctype html>")
    assert json.loads(trace.read_text())["traceEvents"]
    assert [line for line in ran.output.splitlines() if line.startswith("Written")] == [
        f"Written: {path}" for path in (out, trace)
    ]


def test_inspect_a_saved_model(tmp_path):
    model = tf.keras.Sequential([tf.keras.Input((5,)), tf.keras.layers.Dense(3)])
    model.export(str(tmp_path / "model"), verbose=False)
    ran = inspect(tmp_path / "model")
    assert ran.exit_code == 0, ran.output
    assert "Placement (requested)" in ran.output
    ran = inspect(tmp_path / "model", "--spec", "float32[9,5]", "--devices", 3, "--actual")
    assert ran.exit_code == 0, ran.output
    assert "rows of the batch on the shards: 3, 3, 3" in ran.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "neither the directory of a SavedModel nor of the form module:function"),
        (["no_such_module:f"], "there is no module 'no_such_module'"),
        (["tests.test_placement_timeline:nothing"], "has no attribute 'nothing'"),
    ],
)
def test_inspect_says_what_is_wrong(arguments, message):
    ran = inspect(*arguments)
    assert ran.exit_code == 2
    assert message in " ".join(ran.output.split())
