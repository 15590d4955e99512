"""Stages: parts of a traced function with devices of their own.

Stages are cut automatically, operation by operation (`planning.schedule.automatic_stages`), or given by `on_device`.
Such a stage is traced as a call of a function whose name says which devices were asked for. TensorFlow derives the
names of a call's backward functions from that of its forward function, whatever tape or gradient makes them. So the
calls of a graph tell, before they are inlined, which operations belong to which stage, forward and backward alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graphsplit.core import structures
from graphsplit.core.devices import short_name
from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.program.graph.function_calls import CALL_TYPES

_MARK = "on_devices_{}x_{}"
_BACKWARD = "__backward_"  # how TensorFlow names backward functions
_MARKED = re.compile(r"on_devices_([0-9a-f]+)x_(\w*?)_\d+")


@dataclass(frozen=True)
class Stage:
    """What a user gave devices of its own.

    Attributes:
      name: of the function or layer.
      devices: one for every shard, or one for all shards. On a mesh of several columns row by row: shard by shard, and
        of each shard one for every column.
      begins: the layer at which it was asked to begin; "" if nobody said where.
    """

    name: str
    devices: tuple[str, ...]
    begins: str = ""

    @property
    def default_device(self) -> str:
        """The device of the stage's whole operations and of the variables that it makes."""
        return self.devices[0]

    def column(self, number: int, columns: int) -> tuple[str, ...]:
        """Return its devices in one of so many columns, by position; a single one is for all."""
        return self.devices[number::columns] if len(self.devices) > 1 else self.devices

    def __str__(self) -> str:
        return f"{self.name} on {', '.join(map(short_name, self.devices))}"


@dataclass(frozen=True)
class StageCalls:
    """The calls of stages in a graph: an operation that is inlined from `call` is named `call/...`.

    Attributes:
      stages: the stage of each call.
      backward: those calls that run backward.
    """

    stages: Mapping[str, Stage] = field(default_factory=dict)
    backward: frozenset[str] = frozenset()

    def of(self, name: str) -> Stage | None:
        """Return the innermost stage that the operation of this name belongs to."""
        return next((self.stages[call] for call in _around(name) if call in self.stages), None) if self.stages else None

    def is_backward(self, name: str) -> bool:
        """Return whether the operation of this name belongs to a call that runs backward."""
        return bool(self.backward) and any(call in self.backward for call in _around(name))

    def asked(self, node: Any) -> bool:
        """Return whether a node names its own stage's device: so does what was traced for a stage."""
        stage = self.of(node.name)
        return stage is not None and node.device == stage.default_device


def _around(name: str) -> Iterator[str]:
    """Yield a name and the calls that it is inside of, the innermost first."""
    while name:
        yield name
        name = name.rpartition("/")[0]


def check_stages(stages: Iterable[Stage], count: int) -> None:
    """Raise `ArgumentError` unless every stage can run with a function on `count` devices."""
    wrong = [f"{stage}: {len(stage.devices)} devices" for stage in stages if len(stage.devices) not in (1, count)]
    if wrong:
        raise ArgumentError(
            f"The function runs on {count} device{'s' if count != 1 else ''}, but on_device gives stages of it other "
            f"numbers of devices:\n{bullet_list(wrong)}\n"
            "Give a stage one device for each device of the function, or a single one for all shards."
        )


def marked(fn: Callable[..., Any], name: str, devices: Sequence[str]) -> Callable[..., Any]:
    """Return `fn` as a function that can only be called while a graph is built, where it leaves a stage's mark.

    Variables that `fn` makes are made on the first of `devices`.
    """
    label = _MARK.format("\n".join(devices).encode().hex(), re.sub(r"\W", "_", name).strip("_"))

    def run(*args: Any, **kwargs: Any) -> Any:
        results: list[structures.Tree] = []
        take_apart = tf.autograph.experimental.do_not_convert(lambda result: _take_apart(result, results))

        def call(*args: Any, **kwargs: Any) -> Any:
            return take_apart(fn(*args, **kwargs))

        call.__name__ = label
        with tf.device(devices[0]):
            tensors = tf.function(call)(*args, **kwargs)
        return structures.unflatten(results[-1], tensors)

    placed: Callable[..., Any] = tf.autograph.experimental.do_not_convert(run)
    return placed


def _take_apart(result: Any, results: list[structures.Tree]) -> list[tf.Tensor]:
    tensors, tree = structures.flatten(result)
    results.append(tree)
    return tensors


def stage_calls(graph: Any) -> StageCalls:
    """Return the calls of stages in a `GraphDef` that is not inlined yet."""
    library = {function.signature.name: function for function in graph.library.function}
    calls: dict[str, Stage] = {}
    backward: set[str] = set()
    if any(_MARKED.search(name) for name in library):
        _collect(graph.node, "", library, calls, backward)
    return StageCalls(calls, frozenset(backward))


def _collect(
    nodes: Sequence[Any], prefix: str, library: Mapping[str, Any], calls: dict[str, Stage], backward: set[str]
) -> None:
    for node in nodes:
        name = node.attr["f"].func.name if node.op in CALL_TYPES else node.op
        if name not in library:
            continue
        if match := _MARKED.search(name):
            calls[prefix + node.name] = Stage(match[2], tuple(bytes.fromhex(match[1]).decode().split("\n")))
            backward.update([prefix + node.name] if _BACKWARD in name else ())
        _collect(library[name].node_def, f"{prefix}{node.name}/", library, calls, backward)
