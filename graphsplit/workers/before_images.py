"""Before-images: a graph over several machines keeps what its variables were, so that a failed step can be undone.

On each device, before anything is written there, the values of all variables that the graph writes are kept in
variables of their own, and a counter goes up; writes wait for that. A kept value shares the memory of the variable
until that is written. So whoever finds the counter gone up after a failure knows that the kept values are of that step,
and one that has not gone up says that nothing was written there. (As in the undo logs of databases.)

Reading the values from outside before each step instead costs another round of messages; and without waiting for it,
some of the values that were read would be those of after the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.core.protos.graphdefs import constant_node, inputs_of, make_node, source_of, with_inputs
from graphsplit.core.tensorflow_internals import is_read
from graphsplit.program.graph.graph import Graph

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
    """Let a graph keep the values that variables have before it writes them."""
    new: list[Any] = []
    kept: dict[str, str] = {}
    devices = sorted({variable.device for variable in written})
    scopes = {device: f"{_SCOPE}/{number}" for number, device in enumerate(devices)}
    for k, (variable, dtype) in enumerate(zip(written, dtypes, strict=True)):
        scope, device = scopes[variable.device], variable.device
        place, value = f"{scope}/kept_{k}", f"{scope}/value_{k}"
        new += [_handle(place, device), make_node(value, "ReadVariableOp", [variable.name], device, dtype=dtype)]
        new.append(make_node(f"{scope}/keep_{k}", "AssignVariableOp", [place, value], device, dtype=dtype))
        kept[variable.name] = place
    for device, scope in scopes.items():
        one = constant_node(f"{scope}/one", np.array(1, np.int64), tf.int64, device)
        done = [f"^{scope}/keep_{k}" for k, variable in enumerate(written) if variable.device == device]
        inputs = [f"{scope}/counter", one.name, *done]
        count = make_node(f"{scope}/count", "AssignAddVariableOp", inputs, device, dtype=tf.int64)
        new += [one, _handle(f"{scope}/counter", device), count]
    waits = {variable.name: f"^{scopes[variable.device]}/count" for variable in written}
    inputs = [*kept.values(), *[f"{scope}/counter" for scope in scopes.values()]]
    return RecordingGraph([*[_waiting(node, waits) for node in nodes], *new], inputs, devices)


def _waiting(node: Any, waits: dict[str, str]) -> Any:
    """Return a node that waits before it writes, if it does."""
    controls = dict.fromkeys(waits[source] for source in _sources(node) if source in waits and not is_read(node.op))
    return with_inputs(node, [*node.input, *controls]) if controls else node


def _sources(node: Any) -> list[str]:
    return list(map(source_of, inputs_of(node)[0]))


def _handle(name: str, device: str) -> Any:
    return make_node(name, "Placeholder", [], device, dtype=tf.resource)
