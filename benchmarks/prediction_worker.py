"""The processes of `benchmarks.prediction`: one calibrates, others predict a step and measure it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import graphsplit as gs
from benchmarks.steps import make_parts, single_device_step
from benchmarks.timing import took
from benchmarks.workloads import data, workload
from graphsplit.planning.costs.machine_files import read_machine
from graphsplit.simulate.measuring import timing
from graphsplit.simulate.prediction.buffers import Memory

_THREADS = 1
_MOST_DEVICES = 8
_PARTS = (1, 2, 4, 8, 16, 32)  # as many as devices times micro-batches
_NO_TIME_S = 1e30  # the simulator says that it failed by the largest number


def start(devices: int) -> None:
    """Make logical devices of one thread each; as many threads work as there are devices, or cores."""
    gs.use_logical_devices(max(devices, 2), threads_per_device=_THREADS)
    tf.config.threading.set_inter_op_parallelism_threads(min(devices, os.cpu_count() or 1))


def step_of(name: str, mode: str, small: bool) -> tuple[Any, Any, list[tf.Tensor]]:
    """Return the parts of a workload, its step, and its arguments."""
    found = workload(name, small)
    parts = make_parts(found)
    x, y = data(found, found.batch)
    arguments = [tf.constant(x), tf.constant(y)] if mode == "training" else [tf.constant(x)]
    return parts, single_device_step(parts, mode), arguments


def machine(path: str) -> dict[str, Any]:
    """Write the file of the machine: several devices, as it is measured how they slow each other down."""
    from graphsplit.planning.costs.machine_files import machine_text

    start(_MOST_DEVICES)
    found = gs.simulate.calibrate()
    Path(path).write_text(machine_text(found))
    return {"overhead_s": found.device.overhead_s}


def calibrate(name: str, mode: str, small: bool, path: str, calibrated: str) -> dict[str, Any]:
    """Write the file of the machine with a workload's operations, as one device with one thread takes them."""
    from graphsplit.planning.costs.machine_files import machine_text
    from graphsplit.simulate.calibration import measure_function

    start(1)
    _, step, arguments = step_of(name, mode, small)
    found = measure_function(read_machine(path), step, arguments, micro_batches=_PARTS)
    Path(calibrated).write_text(machine_text(found))
    return {"alone_s": gs.predict(step, *arguments, machine=found, devices=1).step_s}  # (as it was measured)


def cells(
    asked: Sequence[dict[str, Any]], small: bool, calibrated: str, least_s: float, alone_s: float
) -> list[dict[str, Any]]:
    """Predict plans of one step for one number of devices, and measure them in turns.

    They are measured at the speed that the machine had when it was calibrated: the speed of one that is shared with
    others changes by a third from one minute to the next. So the same step on one device, undivided, is timed in turns
    with them, in a process like the one that calibrated, where it took `alone_s`.
    """
    count, name, mode = asked[0]["devices"], asked[0]["workload"], asked[0]["mode"]
    start(count)
    steps = [_Step(cell, small, calibrated) for cell in asked]
    with _elsewhere(name, mode, small) as (reference, times):
        calls = [step.run for step in steps]
        relative, beside_s = timing.relative_seconds_of_calls(calls, reference, least_s * len(steps))
    seconds = [statistics.median(own) * beside_s for own in relative]
    slower = beside_s / (times * alone_s)
    return [
        {
            **step.predicted,
            "measured_s": now_s / slower,
            "now_s": now_s,
            "slower": slower,
            "alone_s": alone_s,
            "measured_bytes": step_bytes(step.run),
            "load": os.getloadavg()[0],
        }
        for step, now_s in zip(steps, seconds, strict=True)
    ]


@contextlib.contextmanager
def _elsewhere(name: str, mode: str, small: bool) -> Iterator[tuple[Callable[[], Any], int]]:
    """Return a call that runs a workload's step some times in another process; and how many times."""
    command = [sys.executable, "-m", "benchmarks.prediction_worker", name, mode, str(small)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        asked, answers = process.stdin, process.stdout

        def answer() -> int:
            line = answers.readline()
            if not line:
                raise RuntimeError(f"the process that runs {name} {mode} on its own has ended")
            return int(line)

        def call() -> None:
            asked.write("\n")
            answer()

        try:
            yield call, answer()
        finally:
            asked.close()  # (at the end of what it reads, it ends)


def serve(name: str, mode: str, small: bool) -> None:
    """Run a workload's undivided step some times whenever a line is read; write how many times, at first and then."""
    start(1)
    _, step, arguments = step_of(name, mode, small)
    called = functools.partial(gs.parallelize(step, devices=1), *arguments)

    def run() -> None:
        timing.numpy_of(called())

    run()
    times = timing.times_in_turn(run)
    print(times, flush=True)
    for _ in sys.stdin:
        for _ in range(times):
            run()
        print(times, flush=True)


class _Step:
    """A step in one of its plans, with variables of its own, and what is predicted of it."""

    def __init__(self, asked: dict[str, Any], small: bool, calibrated: str):
        count = asked["devices"]
        parts, step, self._arguments = step_of(asked["workload"], asked["mode"], small)
        if asked["layout"] != "home":
            gs.set_variable_layout([parts.model, parts.optimizer], asked["layout"], devices=count)
        self._parts = parts  # (variables live as long as their objects)
        self._split = gs.parallelize(step, devices=count, micro_batches=asked["micro_batches"])
        plan_s = took(lambda: self._split.plan(*self._arguments)).wall
        began = time.perf_counter()
        prediction = gs.predict(self._split, *self._arguments, machine=calibrated, devices=count)
        predict_s = time.perf_counter() - began
        self.run()
        self.predicted = {
            "predicted_s": prediction.step_s,
            "predicted_bytes": most_together(prediction.memory.values()),
            "plan_s": plan_s,
            "predict_s": predict_s,
            **grappler(self._split.graph_def(*self._arguments), prediction.plan),
        }

    def run(self) -> None:
        """Run the step until its results are there."""
        timing.numpy_of(self._split(*self._arguments))


def most_together(memories: Iterable[Memory]) -> int:
    """Return the most live bytes of several devices at a time: of logical ones, which share one memory.

    >>> a, b = Memory(live_bytes=8, steps=((0.0, 8), (1.0, 0))), Memory(live_bytes=4, steps=((1.0, 4), (2.0, 0)))
    >>> most_together([a, b])
    8
    """
    changes: list[tuple[float, int]] = []
    for memory in memories:
        before = 0
        for when, count in memory.steps:
            changes.append((when, count - before))
            before = count
    return max(itertools.accumulate([change for _, change in sorted(changes)]), default=0)


def grappler(graph_def: Any, plan: Any) -> dict[str, Any]:
    """Return what the simulator in TensorFlow's own wheel predicts for the same graph, or why it cannot say.

    Variables are made in the graph, of the shapes that they have: of a handle that is an argument it knows no shape,
    and whatever reads one would count as next to nothing.
    """
    from tensorflow.core.protobuf import device_properties_pb2
    from tensorflow.python.grappler import cluster, item

    names = sorted({node.device for node in graph_def.node if node.device})
    properties = device_properties_pb2.DeviceProperties(type="CPU", frequency=2500, num_cores=1, bandwidth=10_000_000)
    named = [device_properties_pb2.NamedDevice(name=_full(name), properties=properties) for name in names]
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(graph_def)
    for node in graph.node:
        node.device = _full(node.device) if node.device else ""
    _make_variables(graph, plan)
    meta = tf.compat.v1.MetaGraphDef(graph_def=graph)
    meta.collection_def["train_op"].node_list.value.extend(_ends(graph))
    try:
        with tf.Graph().as_default():
            _, seconds, _ = cluster.Cluster(devices=named).MeasureCosts(item.Item(meta))
    except (ValueError, tf.errors.OpError, RuntimeError) as error:  # a resource without a variable, ...
        return {"grappler_s": None, "grappler_says": str(error)[:300]}
    if not 0 < seconds < _NO_TIME_S:
        return {"grappler_s": None, "grappler_says": f"no time: {seconds}"}
    return {"grappler_s": float(seconds)}


def _make_variables(graph: Any, plan: Any) -> None:
    """Make variables of the placeholders of handles whose shapes the program tells where it reads them."""
    ops = plan.program.ops
    shapes = {
        ops[op.inputs[0].op].name: (op.out_shapes[0], op.out_dtypes[0])
        for op in ops
        if op.type == "ReadVariableOp" and op.out_shapes[0] is not None
    }
    for node in graph.node:
        if node.op == "Placeholder" and node.name in shapes:
            shape, dtype = shapes[node.name]
            node.op = "VarHandleOp"
            node.attr.clear()
            node.attr["dtype"].type = dtype.as_datatype_enum
            node.attr["shape"].shape.CopyFrom(tf.TensorShape([int(size) for size in shape]).as_proto())


def _ends(graph: Any) -> list[str]:
    read = {reference.lstrip("^").partition(":")[0] for node in graph.node for reference in node.input}
    return [node.name for node in graph.node if node.name not in read and node.op != "Const"]


def _full(name: str) -> str:
    return name if name.startswith("/job") else f"/job:localhost/replica:0/task:0{name}"


def step_bytes(step: Any) -> int:
    """Return the most bytes that a step holds at a time over what is held before; 0 where nobody counts them.

    All logical CPU devices have one allocator, which counts where TensorFlow is built with oneDNN, and counts no small
    pieces: networks of small tensors hold more. What the process holds says nothing of it: the allocator keeps what is
    free.
    """
    device = "CPU:0"
    try:
        tf.config.experimental.reset_memory_stats(device)
    except ValueError:  # "Cannot reset memory stats for device", of an allocator that does not count
        return 0
    before = tf.config.experimental.get_memory_info(device)["current"]
    step()
    return int(tf.config.experimental.get_memory_info(device)["peak"] - before)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], sys.argv[3] == "True")
