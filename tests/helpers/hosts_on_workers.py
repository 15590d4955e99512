"""Two worker processes on loopback, with two CPU devices each: what `test_hosts.py` runs in a process of its own.

A process must connect to a cluster before TensorFlow starts. It prints what it found, as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import tensorflow as tf

HOSTS, EACH = 2, 2
CLIENT = "CPU:0"
DEVICES = [f"/job:worker/replica:0/task:{task}/device:CPU:{k}" for task in range(HOSTS) for k in range(EACH)]


def main() -> None:
    import graphsplit as gs

    with gs.workers.LocalWorkers(HOSTS, devices=EACH) as workers:
        gs.connect(workers)
        ways = {"home": at_home, "bits": by_layout, "unknown": with_unknown_rows, "outside": outside, "mapped": mapped}
        print(json.dumps({name: way() for name, way in ways.items()}))


def training(device: str) -> tuple[Callable[[tf.Tensor], tf.Tensor], list[tf.Variable]]:
    from tests.helpers.layout_cases import deep_step, numbers

    with tf.device(device):
        weights = [tf.Variable(0.1 * numbers(40, 40, seed=k), name=f"weight_{k}") for k in range(3)]
    return deep_step(weights), weights


def inputs() -> tf.Tensor:
    from tests.helpers.layout_cases import numbers

    return numbers(10, 40, seed=9)


def difference(actual: tf.Tensor, expected: tf.Tensor) -> float:
    """Return the largest difference, relative to the largest entry."""
    return float(tf.reduce_max(tf.abs(actual - expected)) / tf.reduce_max(tf.abs(expected)))


def differences(step: Any, weights: list[tf.Variable], calls: list[int]) -> float:
    """Return by how much results and weights differ at most from those of the function itself, called with rows."""
    plain, expected = training(CLIENT)
    x, found = inputs(), []
    for rows in calls:
        found.append(difference(step(x[:rows]), plain(x[:rows])))
    for a, b in zip(weights, expected, strict=True):
        found.append(difference(tf.convert_to_tensor(a), tf.convert_to_tensor(b)))
    return max(found)


def at_home() -> dict[str, Any]:
    """Train variables of the client, and count what TensorFlow's own partitions send between hosts."""
    import graphsplit as gs
    from graphsplit.core.hosts import host_name
    from graphsplit.core.tensorflow_internals import partition_graphs
    from graphsplit.planning.device_bytes import traffic

    step, weights = training(CLIENT)
    parallel = gs.parallelize(step, devices=DEVICES)
    with partition_graphs() as graphs:
        most = differences(parallel, weights, [10])
    plan = parallel.plan(inputs())
    sent: dict[str, None] = {}
    for node in (node for graph in graphs for node in graph.node if node.op == "_Send"):
        pair = [node.attr[f"{end}_device"].s.decode() for end in ("send", "recv")]
        if host_name(pair[0]) != host_name(pair[1]):
            sent[f"{node.input[0]} to {pair[1]}"] = None
    notes = list(plan.notes)
    return {
        "difference": most,
        "home": plan.default_device,
        "notes": notes,
        "between": traffic(plan).between_hosts,
        "sent": list(sent),
    }


def by_layout() -> dict[str, Any]:
    """Train with variables of each layout; return the differences, and whether all have the same bits."""
    import graphsplit as gs

    found, values = {}, []
    for layout in ("home", "replicated", "sharded"):
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
    return max([difference(a, b) for a, b in zip(*found, strict=True)])


def mapped() -> float:
    """Return the difference of results for many batches, of which the next travels while one computes."""
    import graphsplit as gs

    (step, _), (plain, _) = training(DEVICES[0]), training(CLIENT)
    batches = [inputs()[:rows] for rows in (10, 7, 10)]
    results = gs.parallelize(step, devices=DEVICES).map(batches)
    return max([difference(a, plain(batch)) for a, batch in zip(results, batches, strict=True)])


if __name__ == "__main__":
    main()
