"""The processes of `benchmarks.prediction`: one calibrates, others predict a step and measure it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

import graphsplit as gs
from benchmarks.steps import make_parts, single_device_step
from benchmarks.workloads import data, workload
from graphsplit.costs.machine_files import read_machine
from graphsplit.prediction import timing
from graphsplit.prediction.buffers import most_together

_THREADS = 1
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
    """Write the file of the machine: two devices, so that it is known how they slow each other down."""
    from graphsplit.costs.machine_files import machine_text

    start(2)
    found = gs.calibrate()
    Path(path).write_text(machine_text(found))
    return {"overhead_s": found.device.overhead_s}


def calibrate(name: str, mode: str, small: bool, path: str, calibrated: str) -> dict[str, Any]:
    """Write the file of the machine with a workload's operations, as one device with one thread takes them."""
    from graphsplit.api.calibration import measure_function
    from graphsplit.costs.machine_files import machine_text

    start(1)
    _, step, arguments = step_of(name, mode, small)
    found = measure_function(read_machine(path), step, arguments, micro_batches=_PARTS)
    Path(calibrated).write_text(machine_text(found))
    return {"overhead_s": found.device.overhead_s}


def cells(asked: Sequence[dict[str, Any]], small: bool, calibrated: str, least_s: float) -> list[dict[str, Any]]:
    """Predict plans of one step for one number of devices, and measure them in turns.

    They are measured at the speed that the machine had when it was calibrated: the speed of one that is shared with
    others changes by a third from one minute to the next. So a reference is timed in turns with the steps.
    """
    count = asked[0]["devices"]
    start(count)
    steps = [_Step(cell, small, calibrated) for cell in asked]
    reference = timing.reference("/device:CPU:0")
    seconds, beside_s = timing.usual_seconds_of_calls([step.run for step in steps], reference, least_s * len(steps))
    slower = beside_s / read_machine(calibrated).host.reference_s
    return [
        {
            **step.predicted,
            "measured_s": now_s / slower,
            "now_s": now_s,
            "slower": slower,
            "measured_bytes": step_bytes(step.run),
            "load": os.getloadavg()[0],
        }
        for step, now_s in zip(steps, seconds, strict=True)
    ]


class _Step:
    """A step in one of its plans, with variables of its own, and what is predicted of it."""

    def __init__(self, asked: dict[str, Any], small: bool, calibrated: str):
        count = asked["devices"]
        parts, step, self._arguments = step_of(asked["workload"], asked["mode"], small)
        if asked["layout"] != "home":
            gs.set_variable_layout([parts.model, parts.optimizer], asked["layout"], devices=count)
        self._parts = parts  # (variables live as long as their objects)
        self._split = gs.parallelize(step, devices=count, micro_batches=asked["micro_batches"])
        plan_s = _seconds(lambda: self._split.plan(*self._arguments))
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


def _seconds(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


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
    command, *given = sys.argv[1:]
    if command == "machine":
        print(json.dumps(machine(given[0])))
    elif command == "calibrate":
        print(json.dumps(calibrate(given[0], given[1], given[2] == "True", given[3], given[4])))
    else:
        print(json.dumps(cells(json.loads(given[0]), given[1] == "True", given[2], float(given[3]))))
