"""How plans, graphs and first calls grow with the number of devices: ResNet50 under a layout.

python -m benchmarks.many_devices [--devices 8,16,32,64] [--layout sharded] [--workload resnet50] [--rows 64] [--runs]

The batch is the same for all. Each number of devices has a process of its own. Planned and emitted is for GPUs that
need not be here; `--runs` takes logical CPU devices instead, and makes the first call, too (64 of them under "sharded"
take 6 GB). Seconds are those of a processor, and memory is the process' largest resident size.
"""

from __future__ import annotations

import argparse
import resource
import time
from typing import Any

from benchmarks.processes import in_a_process
from benchmarks.workloads import WORKLOADS


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="8,16,32,64")
    parser.add_argument("--layout", default="sharded")
    parser.add_argument("--workload", choices=WORKLOADS, default="resnet50")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--runs", action="store_true", help="make the first call, on logical CPU devices")
    options = parser.parse_args()
    first: dict[str, float] = {}
    for count in map(int, options.devices.split(",")):
        arguments = options.workload, options.layout, count, options.rows, options.runs
        found = in_a_process(grown, *arguments)
        first = first or found
        cells = [f"{name} {value:,.1f} ({value / first[name]:.2f})" for name, value in found.items()]
        print(f"{count} devices: {', '.join(cells)}", flush=True)


def grown(workload_name: str, layout: str, count: int, rows: int, runs: bool) -> dict[str, Any]:
    """Return what a training step on so many devices takes until its first result; runs in a process of its own."""
    import graphsplit as gs

    if runs:
        gs.use_logical_devices(count)
    import tensorflow as tf

    from benchmarks.chains import sends_in
    from benchmarks.steps import make_parts, single_device_step
    from benchmarks.workloads import data, workload
    from graphsplit.emission import emit
    from graphsplit.planning.device_bytes import traffic

    own = workload(workload_name, small=False, batch=rows)
    step = single_device_step(make_parts(own), "training")
    arguments: list[Any] = [tf.constant(array) for array in data(own, rows)]
    if not runs:
        arguments = [tf.TensorSpec.from_tensor(argument) for argument in arguments]
    devices = [f"{'CPU' if runs else 'GPU'}:{k}" for k in range(count)]
    began = time.process_time()
    parallel = gs.parallelize(step, devices=devices, variables=layout)
    plan = parallel.plan(*arguments)
    planned = time.process_time()
    graph = emit(plan)
    emitted = time.process_time()
    _, sent, received = traffic(plan).busiest
    found = {
        "parts of variables": float(len(plan.program.captures)),
        "nodes": float(len(graph.nodes)),
        "sends": float(sends_in(graph)),
        "exchanges": float(len(plan.longest_chain)),
        "busiest MB": (sent + received) / 1e6,
        "plan s": planned - began,
        "emit s": emitted - planned,
    }
    if runs:
        begin = time.process_time()
        float(parallel(*arguments))
        found["first call s"] = planned - began + time.process_time() - begin
    return {**found, "GB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6}


if __name__ == "__main__":
    main()
