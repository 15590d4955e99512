"""Two worker processes on loopback, with two CPU devices each: what `test_hosts.py` runs in a process of its own.

A process must connect to a cluster before TensorFlow starts. It prints what it found, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

HOSTS, EACH = 2, 2
CLIENT = "/job:client/replica:0/task:0/device:CPU:0"
DEVICES = [f"/job:worker/replica:0/task:{task}/device:CPU:{k}" for task in range(HOSTS) for k in range(EACH)]

_WORKER = """
import json, sys, tensorflow as tf
cluster, index, devices = json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
config = tf.compat.v1.ConfigProto(device_count={"CPU": devices}, intra_op_parallelism_threads=1)
tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name="worker", task_index=index, config=config).join()
"""


def main() -> None:
    with connected():
        found = {"home": at_home(), "bits": by_layout(), "unknown": with_unknown_rows(), "outside": outside()}
        print(json.dumps(found))


@contextlib.contextmanager
def connected() -> Iterator[None]:
    """Start the workers, connect, and end them."""
    ports = _free_ports(HOSTS + 1)
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:-1]], "client": [f"127.0.0.1:{ports[-1]}"]}
    command = [sys.executable, "-c", _WORKER, json.dumps(cluster)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    started = [subprocess.Popen([*command, str(index), str(EACH)], env=environment) for index in range(HOSTS)]
    try:
        tf.config.experimental_connect_to_cluster(tf.train.ClusterSpec(cluster), job_name="client")
        yield
    finally:
        for process in started:
            process.kill()
        for process in started:
            process.wait()


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def training(device: str) -> tuple[Callable[[tf.Tensor], tf.Tensor], list[tf.Variable]]:
    from tests.helpers.layout_cases import deep_step, numbers

    with tf.device(device):
        weights = [tf.Variable(0.1 * numbers(40, 40, seed=k), name=f"weight_{k}") for k in range(3)]
    return deep_step(weights), weights


def inputs() -> tf.Tensor:
    from tests.helpers.layout_cases import numbers

    return numbers(10, 40, seed=9)


def differences(step: Any, weights: list[tf.Variable], calls: list[int]) -> float:
    """Return by how much results and weights differ at most from those of the function itself, after calls of rows."""
    plain, expected = training(CLIENT)
    x, found = inputs(), []
    for rows in calls:
        found.append(float(tf.abs(step(x[:rows]) - plain(x[:rows]))))
    for a, b in zip(weights, expected, strict=True):
        found.append(float(tf.reduce_max(tf.abs(tf.convert_to_tensor(a) - tf.convert_to_tensor(b)))))
    return max(found)


def at_home() -> dict[str, Any]:
    """Train variables of the client, and count what TensorFlow's own partitions send between hosts."""
    import graphsplit as gs
    from graphsplit.core.hosts import host_name
    from graphsplit.core.tensorflow_internals import partition_graphs
    from graphsplit.planning.traffic import traffic

    step, weights = training(CLIENT)
    parallel = gs.parallelize(step, devices=DEVICES)
    with partition_graphs() as graphs:
        difference = differences(parallel, weights, [10])
    plan = parallel.plan(inputs())
    sent: dict[str, None] = {}
    for node in (node for graph in graphs for node in graph.node if node.op == "_Send"):
        pair = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
        if host_name(pair[0]) != host_name(pair[1]):
            sent[f"{node.input[0]} to {pair[1]}"] = None
    notes = list(plan.notes)
    return {
        "difference": difference,
        "home": plan.home,
        "notes": notes,
        "between": traffic(plan).between_hosts,
        "sent": list(sent),
    }


def by_layout() -> dict[str, Any]:
    """Train with variables of each layout; return the differences, and whether all have the same bits."""
    import graphsplit as gs

    found, values = {}, []
    for layout in ("home", "mirrored", "sharded"):
        step, weights = training(DEVICES[0])
        gs.set_variable_layout(weights, layout, DEVICES)
        found[layout] = differences(gs.parallelize(step, devices=DEVICES), weights, [10, 7])
        values.append(b"".join([tf.convert_to_tensor(weight).numpy().tobytes() for weight in weights]))
    return {"differences": found, "alike": len(set(values)) == 1}


def with_unknown_rows() -> float:
    """Train with any number of rows, also fewer than devices."""
    import graphsplit as gs

    step, weights = training(DEVICES[0])
    function = tf.function(step, input_signature=[tf.TensorSpec((None, 40))])
    return differences(gs.parallelize(function, devices=DEVICES), weights, [10, 3, 2, 1])


def outside() -> float:
    """Return the difference of gradients of a tape around the call."""
    import graphsplit as gs

    _, weights = training(CLIENT)
    x = inputs()

    def apply(x: tf.Tensor) -> tf.Tensor:
        for weight in weights:
            x = tf.nn.tanh(x @ weight)
        return x

    found = []
    for function in (gs.parallelize(apply, devices=DEVICES), apply):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(function(x) ** 2)
        found.append(tape.gradient(loss, weights))
    return max([float(tf.reduce_max(tf.abs(a - b))) for a, b in zip(*found, strict=True)])


if __name__ == "__main__":
    main()
