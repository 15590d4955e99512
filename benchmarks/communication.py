"""What a plan sends between devices in one step, beside the least that any data-parallel step has to send."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from graphsplit.planning.plan import Plan


@dataclass(frozen=True)
class Traffic:
    """Messages between devices: how many, and their bytes."""

    transfers: int = 0
    transfer_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.transfers + other.transfers, self.transfer_bytes + other.transfer_bytes)


def communication_of(plan: Plan, graph: Any, model: Any, arguments: list[Any], mode: str) -> dict[str, Any]:
    """Return the step's traffic by kind, its sum, the lower bound, and the transfers counted in the emitted graph."""
    kinds = planned_traffic(plan)
    bound = lower_bound(plan, model, arguments, mode)
    return {
        "kinds": {kind: asdict(traffic) for kind, traffic in kinds.items()},
        "total": asdict(sum(kinds.values(), Traffic())),
        "bound": asdict(bound),
        "transfers_in_graph": transfers_in_graph(graph),
    }


def planned_traffic(plan: Plan) -> dict[str, Traffic]:
    """Return the traffic of the plan's moves, by kind. What is in a bucket is one transfer."""
    found: dict[str, Traffic] = {}
    for collective in plan.collectives:
        for move, (_, _, size) in collective.transfers():
            found[move.kind] = found.get(move.kind, Traffic()) + Traffic(1, size)
    return found


def lower_bound(plan: Plan, model: Any, arguments: list[Any], mode: str) -> Traffic:
    """Return the least traffic of a data-parallel step whose variables live at home, tensor by tensor.

    Every parameter goes to N-1 devices and its gradient comes back from them; their share of the inputs goes, and of
    the outputs comes. A forward step has no gradients. (BatchNormalization in training needs more: statistics of the
    whole batch, and their gradients.)
    """
    away = [d for d, device in enumerate(plan.devices) if device != plan.default_device]
    share = sum(plan.mesh.share(d) for d in away)
    training = mode == "training"
    used = model.trainable_variables if training else model.variables
    parameters = [_bytes(v.shape, v.dtype) for v in used if not str(v.dtype).startswith(("int", "uint"))]
    inputs = [_bytes(x.shape, x.dtype.name) for x in arguments]
    outputs = [plan.program.bytes(t) for t in plan.program.outputs]
    trips = len(away) * (2 if training else 1)
    total = Traffic(len(parameters) * trips, sum(parameters) * trips)
    total += Traffic(len(inputs) * len(away), round(sum(inputs) * share))
    whole_outputs = len(away) if training else share  # a loss is a sum over devices, predictions are rows
    return total + Traffic(len(outputs) * len(away), round(sum(outputs) * whole_outputs))


def _bytes(shape: Any, dtype: Any) -> int:
    size = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}[str(dtype)]
    for dim in shape:
        size *= int(dim)
    return size


def transfers_in_graph(graph: Any) -> int:
    """Return how many (tensor, reading device) pairs of an emitted graph cross devices, control edges left out."""
    device_of = {node.name: _device(node) for node in graph.node}
    pairs = set()
    for node in graph.node:
        for reference in node.input:
            if not reference.startswith("^") and device_of[reference.partition(":")[0]] != _device(node):
                pairs.add((reference.removesuffix(":0"), _device(node)))
    return len(pairs)


def _device(node: Any) -> str:
    """Return kind and number of a node's device; variables spell theirs with job and task."""
    return str(node.device).rpartition("device:")[2]
