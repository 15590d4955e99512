"""The processes of `benchmarks.prediction`: one calibrates, others predict a step and measure it."""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

import graphsplit as gs
from benchmarks.steps import make_parts, single_device_step
from benchmarks.workloads import data, workload

_THREADS = 1


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


def calibrate(name: str, mode: str, small: bool, machine: str, calibrated: str) -> dict[str, Any]:
    """Write the file of the machine, once, and that with a workload's operations."""
    from graphsplit.api.calibration import measure_function
    from graphsplit.costs.machine_files import machine_text, read_machine

    if not Path(machine).exists():
        start(2)
        Path(machine).write_text(machine_text(gs.calibrate()))
    else:
        start(1)
    _, step, arguments = step_of(name, mode, small)
    found = measure_function(read_machine(machine), step, arguments)
    Path(calibrated).write_text(machine_text(found))
    return {"overhead_s": found.device.overhead_s}


def cell(asked: dict[str, Any], small: bool, calibrated: str, rounds: int) -> dict[str, Any]:
    """Predict a step and measure it."""
    count = asked["devices"]
    start(count)
    parts, step, arguments = step_of(asked["workload"], asked["mode"], small)
    if asked["layout"] != "home":
        gs.set_variable_layout([parts.model, parts.optimizer], asked["layout"], devices=count)
    split = gs.parallelize(step, devices=count, micro_batches=asked["micro_batches"])
    plan_s = _seconds(lambda: split.plan(*arguments))
    began = time.perf_counter()
    prediction = gs.predict(split, *arguments, machine=calibrated, devices=count)
    predict_s = time.perf_counter() - began
    before = _peak_bytes()
    _wait(split(*arguments))
    _wait(split(*arguments))
    peak = _peak_bytes()
    times = []
    for _ in range(rounds):
        times.append(_round(split, arguments))
    return {
        "predicted_s": prediction.step_s,
        "measured_s": statistics.median(times),
        "fastest_s": min(times),
        "predicted_bytes": sum(memory.live_bytes for memory in prediction.memory.values()),
        "measured_bytes": peak - before,
        "plan_s": plan_s,
        "predict_s": predict_s,
        "load": os.getloadavg()[0],
        "grappler_s": grappler_s(split.graph_def(*arguments)),
    }


def _round(split: Any, arguments: list[tf.Tensor], least_s: float = 0.2) -> float:
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < least_s or not steps:
        _wait(split(*arguments))
        steps += 1
    return (time.perf_counter() - began) / steps


def grappler_s(graph_def: Any) -> float | None:
    """Return what the simulator in TensorFlow's own wheel predicts for the same graph; None if it cannot say."""
    from tensorflow.core.protobuf import device_properties_pb2
    from tensorflow.python.grappler import cluster, item

    names = sorted({node.device for node in graph_def.node if node.device})
    properties = device_properties_pb2.DeviceProperties(type="CPU", frequency=2500, num_cores=1, bandwidth=10_000_000)
    named = [device_properties_pb2.NamedDevice(name=_full(name), properties=properties) for name in names]
    graph = tf.compat.v1.GraphDef()
    graph.CopyFrom(graph_def)
    for node in graph.node:
        node.device = _full(node.device) if node.device else ""
    meta = tf.compat.v1.MetaGraphDef(graph_def=graph)
    ends = _ends(graph)
    meta.collection_def["train_op"].node_list.value.extend(ends)
    try:
        with tf.Graph().as_default():
            _, seconds, _ = cluster.Cluster(devices=named).MeasureCosts(item.Item(meta))
    except (ValueError, tf.errors.OpError, RuntimeError):  # a resource without a variable, a device it does not know
        return None
    return float(seconds) if np.isfinite(seconds) else None


def _ends(graph: Any) -> list[str]:
    read = {reference.lstrip("^").partition(":")[0] for node in graph.node for reference in node.input}
    return [node.name for node in graph.node if node.name not in read and node.op != "Const"]


def _full(name: str) -> str:
    return name if name.startswith("/job") else f"/job:localhost/replica:0/task:0{name}"


def _wait(result: Any) -> None:
    for tensor in tf.nest.flatten(result):
        tensor.numpy()


def _seconds(action: Any) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    command, *given = sys.argv[1:]
    if command == "calibrate":
        print(json.dumps(calibrate(given[0], given[1], given[2] == "True", given[3], given[4])))
    else:
        print(json.dumps(cell(json.loads(given[0]), given[1] == "True", given[2], int(given[3]))))
