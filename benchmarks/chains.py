"""How often in a row devices wait for each other in a training step, network by network: `python -m benchmarks.chains`.

Nothing runs: the steps are planned for GPUs that need not be here, with `variables="auto"`, and what would be emitted
is counted. `--page` also writes `docs/generated/chains.md`.
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import tensorflow as tf

import graphsplit as gs
from benchmarks.chain_networks import NETWORKS, ROWS
from graphsplit.core.protos import inputs_of, source_of
from graphsplit.core.storage import forms
from graphsplit.emission import EmittedGraph, emit
from graphsplit.planning.device_bytes import traffic
from graphsplit.planning.tasks import SEND, Tasks, few_tasks_of

PAGE = Path(__file__).parent.parent / "docs" / "generated" / "chains.md"
DEVICES = 8
_FREE = frozenset({"Const", "Identity", "IdentityN", "NoOp", "Placeholder", "ReadVariableOp", "VarHandleOp"})
_HEAD = ("network", "longest chain", "sends", "busiest device: out, in", "operations: first, median, all", "nodes")
_ABOUT = """\
# Chains of exchanges

In a training step devices wait for each other: for what another one sends, or for its signal. Each exchange takes at
least the latency of a link, however few bytes it has, and exchanges that wait for each other add up. A plan counts the
longest such chain, `plan.longest_chain`, and [a prediction](../prediction.md) charges the latency along it.

`python -m benchmarks.chains --page` writes this page. Each network's training step is planned for {devices} GPUs with
`variables="auto"` and {rows} rows for each, at its usual size. Nothing runs: these are counts, and no measured times.
"""
_COLUMNS = """\
* **longest chain**: exchanges of which each waits for the one before it, and the layers that make most of them.
* **sends**: tensors and signals that go from one device to another, those of all devices together.
* **busiest device**: what goes out of and into the device through which most bytes go, without rows of arguments.
* **operations**: that compute or move something: of the first device, the median of the others, all devices together.
* **nodes**: of the emitted graph.
"""


@dataclass(frozen=True)
class Counts:
    """What a training step on several devices consists of.

    Attributes:
      name: of the network.
      chain: the longest chain of exchanges, for people.
      length: how many exchanges that is.
      sends: tensors and signals between devices.
      sent_bytes, received_bytes: of the busiest device, without rows of arguments.
      first, median, total: operations of the first device, of the median of the others, of all.
      nodes: of the emitted graph.
      seconds: of a processor to trace, plan and emit it. No part of the page.
    """

    name: str
    chain: str
    length: int
    sends: int
    sent_bytes: int
    received_bytes: int
    first: int
    median: int
    total: int
    nodes: int
    seconds: float = 0.0

    def row(self) -> str:
        """Return the line of the table."""
        size = f"{self.sent_bytes / 1e6:,.1f} MB, {self.received_bytes / 1e6:,.1f} MB"
        operations = f"{self.first:,}, {self.median:,}, {self.total:,}"
        cells = (self.name, self.chain, f"{self.sends:,}", size, operations, f"{self.nodes:,}")
        return f"| {' | '.join(cells)} |"


def measure(name: str, devices: int = DEVICES, layout: str = "auto") -> Counts:
    """Plan the training step of a network for so many GPUs, and count."""
    keras.backend.clear_session()
    began = time.process_time()
    step, arguments = NETWORKS[name](devices)
    plan = gs.parallelize(step, devices=[f"GPU:{k}" for k in range(devices)], variables=layout).plan(*arguments)
    graph = emit(plan)
    operations = operations_by_device(graph)
    first, *others = (operations[device] for device in plan.devices)
    few = few_tasks_of(plan)
    _, sent, received = traffic(plan, _without_arguments(plan, few)).busiest
    return Counts(
        name,
        str(plan.longest_chain),
        len(plan.longest_chain),
        sends_in(graph),
        sent,
        received,
        first,
        int(statistics.median(others)),
        operations.total(),
        len(graph.nodes),
        time.process_time() - began,
    )


def _without_arguments(plan: gs.inspect.Plan, found: Tasks) -> Tasks:
    """Return tasks of which those that send rows of arguments send nothing."""
    given = set(plan.program.inputs)
    tasks = [task._replace(bytes=(0,)) if task.kind == SEND and task.op in given else task for task in found.tasks]
    return replace(found, tasks=tuple(tasks))


def operations_by_device(graph: EmittedGraph) -> Counter[str]:
    """Return how many operations that compute or move something each device runs; a loop counts as one."""
    return Counter([node.device for node in graph.nodes if node.op not in _FREE])


def sends_in(graph: EmittedGraph) -> int:
    """Return how many nodes are read or waited for on other devices, each once for each of these."""
    devices = {node.name: node.device for node in graph.nodes}
    pairs = set[tuple[str, str]]()
    for node in graph.nodes:
        tensors, controls = inputs_of(node)
        pairs.update([(source_of(reference), node.device) for reference in (*tensors, *controls)])
    return sum(devices[source] != device for source, device in pairs)


def versions() -> str:
    """Return what the counts depend on besides: they are compared where these are the same."""
    return f"TensorFlow {tf.__version__}, Keras {keras.__version__}, {platform.system()} {platform.machine()}"


def page(found: Sequence[Counts], devices: int) -> str:
    """Return the page."""
    about = _ABOUT.format(devices=devices, rows=ROWS)
    return "\n".join([about, *table(found), "", _COLUMNS, f"Counted with {versions()}.", ""])


def table(found: Sequence[Counts]) -> list[str]:
    """Return the table as lines."""
    return [f"| {' | '.join(_HEAD)} |", "|---" * len(_HEAD) + "|", *[counts.row() for counts in found]]


def main(
    names: Annotated[str, typer.Option(help="Semicolon-separated; by default all.")] = "",
    devices: Annotated[int, typer.Option(min=2)] = DEVICES,
    layout: Annotated[str, typer.Option(help="Of the variables.")] = "auto",
    write: Annotated[bool, typer.Option("--page", help="Also write docs/generated/chains.md.")] = False,
) -> None:
    """Count the exchanges of training steps, and print a table."""
    chosen: list[Any] = [name.strip() for name in names.split(";") if name.strip()] or list(NETWORKS)
    unknown = [name for name in chosen if name not in NETWORKS]
    if unknown:
        raise typer.BadParameter(f"{', '.join(unknown)}; known are {'; '.join(NETWORKS)}.", param_hint="--names")
    if write and (names or devices != DEVICES or layout != "auto"):
        raise typer.BadParameter(
            "the page has all networks, on 8 devices; leave out the other options.", param_hint="--page"
        )
    if write:
        forms.check(str(PAGE))
    found = []
    print("\n".join(table([])), flush=True)
    for name in chosen:
        found.append(measure(name, devices, layout))
        print(f"{found[-1].row()} {found[-1].seconds:.0f} s", flush=True)
    if write:
        forms.write(str(PAGE), page(found, devices).encode())


if __name__ == "__main__":
    typer.run(main)
