"""Contestants: four ways to run a workload's step, each ready to be called and timed in a process of its own."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

import graphsplit as gs
from benchmarks import phases
from benchmarks.communication import communication_of
from benchmarks.planning import program_speed
from benchmarks.steps import Parts, make_parts, single_device_step
from benchmarks.workloads import Workload, data


@dataclass
class Contestant:
    """A step that can be called.

    Attributes:
      step: runs one step and returns its result.
      trace: traces the step without running it, for contestants whose first call can be split there.
      describe: facts about the graph that runs, asked for after the first call.
      phases: seconds of the first call's known parts; filled by the first call.
    """

    step: Callable[[], Any]
    describe: Callable[[], dict[str, Any]]
    trace: Callable[[], Any] | None = None
    phases: dict[str, float] = field(default_factory=dict)

    def first_call(self) -> tuple[dict[str, float], Any]:
        """Run the first step; return the seconds of its parts, their sum being all it took, and its result."""
        start = time.perf_counter()
        if self.trace is not None:
            self.trace()
            self.phases["trace"] = time.perf_counter() - start
        result = numpy_of(self.step())
        total = time.perf_counter() - start
        return {**self.phases, "rest": total - sum(self.phases.values()), "total": total}, result

    def seconds(self, steps: int) -> float:
        """Return how long so many steps take."""
        start = time.perf_counter()
        for _ in range(steps):
            result = self.step()
        numpy_of(result)
        return time.perf_counter() - start


def numpy_of(result: Any) -> Any:
    """Wait for a result and return it as an array."""
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), result)


def make(name: str, found: Workload, mode: str, devices: list[str]) -> Contestant:
    """Return a contestant; its devices exist already."""
    arguments = [tf.constant(array) for array in data(found, found.batch)][: 2 if mode == "training" else 1]
    return _MAKERS[name](found, mode, devices, arguments)


def _function(step: Callable[..., Any], arguments: list[Any]) -> Contestant:
    function = tf.function(step)
    return Contestant(
        lambda: function(*arguments),
        lambda: _graph_size(function.get_concrete_function(*arguments)),
        lambda: function.get_concrete_function(*arguments),
    )


def _graph_size(concrete: Any) -> dict[str, Any]:
    graph = concrete.graph.as_graph_def()
    functions = sum(len(function.node_def) for function in graph.library.function)
    return {"nodes": len(graph.node) + functions, "bytes": graph.ByteSize()}


def _plain(found: Workload, mode: str, _: list[str], arguments: list[Any]) -> Contestant:
    return _function(single_device_step(make_parts(found), mode), arguments)


def _graphsplit(
    found: Workload, mode: str, devices: list[str], arguments: list[Any], layout: str = "home", **options: Any
) -> Contestant:
    parts = make_parts(found)
    if layout != "auto":
        gs.set_variable_layout([parts.model, parts.optimizer], layout, devices, **options)
    automatic = "auto" if layout == "auto" else None
    step = gs.parallelize(single_device_step(parts, mode), devices=devices, variables=automatic)

    def describe() -> dict[str, Any]:
        graph, plan = step.graph_def(*arguments), step.plan(*arguments)
        functions = sum(len(function.node_def) for function in graph.library.function)
        return {
            "nodes": len(graph.node) + functions,
            "bytes": graph.ByteSize(),
            "operations": len(plan.program.ops),
            "sharded_operations": len(plan.sharded_ops),
            "unsharded_ops": len(plan.unsharded_ops),
            "planning": program_speed(plan),
            "communication": communication_of(plan, graph, parts.model, arguments, mode),
        }

    contestant = Contestant(lambda: step(*arguments), describe)
    contestant.phases = phases.watch()
    return contestant


def _towers(found: Workload, mode: str, devices: list[str], arguments: list[Any]) -> Contestant:
    """The step re-traced for each device under `tf.device`, gradients averaged by hand."""
    parts, count = make_parts(found), len(devices)

    def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        losses, towers = [], []
        for device, own_x, own_y in zip(devices, _pieces(x, count), _pieces(y, count), strict=True):
            with tf.device(device):
                loss, gradients = parts.gradients(own_x, own_y)
            losses.append(loss)
            towers.append([tf.convert_to_tensor(gradient) for gradient in gradients])
        parts.apply([tf.add_n(own) / count for own in zip(*towers, strict=True)])
        return tf.add_n(losses) / count

    def predict(x: tf.Tensor) -> tf.Tensor:
        results = []
        for device, own_x in zip(devices, _pieces(x, count), strict=True):
            with tf.device(device):
                results.append(parts.model(own_x, training=False))
        return tf.concat(results, 0)

    return _function(train if mode == "training" else predict, arguments)


def _pieces(x: tf.Tensor, count: int) -> list[tf.Tensor]:
    rows = x.shape[0]
    return tf.split(x, [rows // count + (d < rows % count) for d in range(count)])


def _mirrored(found: Workload, mode: str, devices: list[str], arguments: list[Any]) -> Contestant:
    """`tf.distribute.MirroredStrategy`. Its batch is cut and distributed beforehand, which then costs it nothing."""
    strategy = tf.distribute.MirroredStrategy(devices)
    with strategy.scope():
        parts = make_parts(found)
    pieces = [_pieces(argument, len(devices)) for argument in arguments]
    per_replica = [
        strategy.experimental_distribute_values_from_function(
            lambda context, own=own: own[context.replica_id_in_sync_group]
        )
        for own in pieces
    ]
    train = _mirrored_training(strategy, parts, len(devices))

    def predict(x: Any) -> tf.Tensor:
        results = strategy.run(lambda own: parts.model(own, training=False), (x,))
        return tf.concat(strategy.experimental_local_results(results), 0)

    return _function(train if mode == "training" else predict, per_replica)


def _mirrored_training(strategy: Any, parts: Parts, count: int) -> Callable[..., Any]:
    def replica(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        loss, gradients = parts.gradients(x, y, 1 / count)
        parts.apply(gradients)  # Keras sums the gradients of the replicas here
        return loss

    def train(x: Any, y: Any) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.SUM, strategy.run(replica, (x, y)), axis=None)

    return train


_MAKERS = {
    "plain": _plain,
    "towers": _towers,
    "mirrored": _mirrored,
    "graphsplit": _graphsplit,
    "layout_mirrored": functools.partial(_graphsplit, layout="mirrored"),
    "layout_sharded": functools.partial(_graphsplit, layout="sharded"),
    "layout_auto": functools.partial(_graphsplit, layout="auto"),
    "layout_kept": functools.partial(_graphsplit, layout="sharded", reshard_after_forward=False),
}
