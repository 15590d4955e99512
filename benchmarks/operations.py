"""What each device runs in a training step: operations and sends in TensorFlow's partition graphs.

python -m benchmarks.operations [--kind gpu --memory-mb 12000] [--devices 4] [--workload transformer] [--small]

"auto" and "home" are layouts of variables; MirroredStrategy stands beside them. The first device should not have more
to do than the others: they would wait for it.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from collections.abc import Iterable
from typing import Any

from benchmarks.gpus import make_devices
from benchmarks.partitions import SENDS
from benchmarks.workloads import WORKLOADS, workload

WAYS = {"layout_auto": "auto", "graphsplit": "home", "mirrored": "MirroredStrategy"}
_FREE = frozenset({"Const", "Identity", "IdentityN", "NoOp", "VarHandleOp", "Placeholder", "_Arg", "_Retval"})
_RECEIVES = frozenset({"_Recv", "_HostRecv"})


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--memory-mb", type=int, help="of each logical GPU")
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--workload", choices=WORKLOADS, default="transformer")
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args()
    devices = make_devices(options.devices, options.kind, options.memory_mb)
    from benchmarks.contestants import make
    from graphsplit.core.tensorflow_internals import partition_graphs

    for name, layout in WAYS.items():
        contestant = make(name, workload(options.workload, options.small), "training", devices)
        with partition_graphs() as graphs:
            contestant.first_call()
        operations, sends = counted(graphs)
        own = [operations[device] for device in devices]
        print(f"{options.workload}, {layout}: operations of {', '.join(devices)}: {', '.join(map(str, own))}; ", end="")
        print(f"the first {own[0] / statistics.median(own[1:]):.2f} x the others; ", end="")
        print(f"sends {', '.join(str(sends[device]) for device in devices)}", flush=True)


def counted(graphs: Iterable[Any]) -> tuple[Counter[str], Counter[str]]:
    """Return how many operations that do something each device runs, and how many tensors it sends."""
    operations, sends = Counter[str](), Counter[str]()
    for node in (node for graph in graphs for node in graph.node):
        device = node.device.rpartition("device:")[2]
        if node.op in SENDS:
            sends[device] += 1
        elif node.op not in _FREE | _RECEIVES:
            operations[device] += 1
    return operations, sends


if __name__ == "__main__":
    main()
