"""Before-images: a graph over several machines keeps what its variables were, so that a failed step can be undone.

On each device, before anything is written there, the values of all variables that the graph writes are kept in
variables of their own, and a counter goes up; writes wait for that. A kept value shares the memory of the variable
until that is written. So whoever finds the counter gone up after a failure knows that the kept values are of that step,
and one that has not gone up says that nothing was written there. (As in the undo logs of databases.)

Reading the values from outside before each step instead costs another round of messages; and without waiting for it,
some of the values that were read would be those of after the step.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.protos.graphdefs import constant_node, inputs_of, make_node, source_of, with_inputs
from graphsplit.core.tensorflow_internals import is_read
from graphsplit.graph.graph import Graph

_SCOPE = "graphsplit_before"


class Written(NamedTuple):
    """A variable that a graph writes.

    Attributes:
      argument: the position of its handle among the inputs.
      name: of the placeholder.
      device: where it lives.
    """

    argument: int
    name: str
    device: str


class RecordingGraph(NamedTuple):
    """A graph that keeps before-images.

    Attributes:
      nodes: of the graph.
      inputs: placeholders of what it takes besides: a handle for each kept value, then one of a counter for each
        device.
      devices: of the counters.
    """

    nodes: list[Any]
    inputs: list[str]
    devices: list[str]


def written_variables(nodes: Sequence[Any], inputs: Sequence[str]) -> list[Written]:
    """Return the variables that a graph may write: whose handles something takes that does not only read."""
    by_name = Graph(nodes)
    handles = {name for name in inputs if by_name[name].attr["dtype"].type == tf.resource.as_datatype_enum}
    written = {source for node in nodes for source in _sources(node) if source in handles and not is_read(node.op)}
    return [Written(k, name, by_name[name].device) for k, name in enumerate(inputs) if name in written]


def record(nodes: Sequence[Any], written: Sequence[Written], dtypes: Sequence[tf.DType]) -> RecordingGraph:
    """Let a graph keep the values that variables have before it writes them.

    Args:
      nodes: of the graph.
      written: the variables.
      dtypes: of their values.
    """
    new: list[Any] = []
    kept: list[str] = []
    ready: dict[str, str] = {}
    for device, group in itertools.groupby(
        sorted(zip(written, dtypes, strict=True), key=lambda pair: pair[0].device), key=lambda pair: pair[0].device
    ):
        scope, done = f"{_SCOPE}/{len(ready)}", []
        for k, (variable, dtype) in enumerate(group):
            place, value = f"{scope}/kept_{k}", f"{scope}/value_{k}"
            new += [_handle(place, device), make_node(value, "ReadVariableOp", [variable.name], device, dtype=dtype)]
            new.append(make_node(f"{scope}/keep_{k}", "AssignVariableOp", [place, value], device, dtype=dtype))
            kept.append(place)
            done.append(f"^{scope}/keep_{k}")
        one = constant_node(f"{scope}/one", np.array(1, np.int64), tf.int64, device)
        counter = _handle(f"{scope}/counter", device)
        count = make_node(
            f"{scope}/count", "AssignAddVariableOp", [counter.name, one.name, *done], device, dtype=tf.int64
        )
        new += [one, counter, count]
        ready[device] = f"^{count.name}"
    waits = {variable.name: ready[variable.device] for variable in written}
    order = sorted(written, key=lambda variable: variable.device)
    position = {variable.name: place for variable, place in zip(order, kept, strict=True)}
    counters = [f"{control[1:].rpartition('/')[0]}/counter" for control in ready.values()]
    own = [position[variable.name] for variable in written]
    return RecordingGraph([*[_waiting(node, waits) for node in nodes], *new], [*own, *counters], list(ready))


def _waiting(node: Any, waits: dict[str, str]) -> Any:
    """Return a node that waits before it writes, if it does."""
    controls = dict.fromkeys(waits[source] for source in _sources(node) if source in waits and not is_read(node.op))
    return with_inputs(node, [*node.input, *controls]) if controls else node


def _sources(node: Any) -> list[str]:
    return list(map(source_of, inputs_of(node)[0]))


def _handle(name: str, device: str) -> Any:
    return make_node(name, "Placeholder", [], device, dtype=tf.resource)
