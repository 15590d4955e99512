"""Digests of functions as TensorFlow's runtime is given them, in which no name counts.

Two functions have one digest if their nodes can be paired so that pairs have the same type, device, attributes and
constants, read the same of the same pairs in the same order, wait for the same pairs, and call functions of one
digest. The converse holds but for nodes that neither what they read nor what reads them tells apart: those count as
interchangeable.
"""

from __future__ import annotations

import graphlib
import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf

# Attributes that are names, numbers that TensorFlow counts up in a process, or options of that.
NAMES = (
    "_class",
    "_gradient_op_type",
    "_user_specified_name",
    "config_proto",  # options of the process, set by whoever ran before
    "container",
    "debug_name",
    "shared_name",
    "tensor_array_name",
)


def digest_of(function: Any, library: Iterable[Any]) -> str:
    """Return the digest of a `FunctionDef`, those that it calls included, in 16 hexadecimal digits."""
    return _Digests(library).of_function(function).hex()[:16]


def reached(function: Any, library: Iterable[Any]) -> list[Any]:
    """Return a `FunctionDef` and all that it calls, and these call."""
    by_name = {other.signature.name: other for other in library}
    found = {function.signature.name: function}
    waiting = [function]
    while waiting:
        for node in waiting.pop().node_def:
            for name in {node.op, *_called(node)} & by_name.keys() - found.keys():
                found[name] = by_name[name]
                waiting.append(by_name[name])
    return list(found.values())


class _Digests:
    """Digests by a library of functions; each of them is computed once."""

    def __init__(self, library: Iterable[Any]):
        self._functions = {function.signature.name: function for function in library}
        self._known: dict[str, bytes] = {}

    def of_function(self, function: Any) -> bytes:
        """Return the digest of a function: of its nodes, as a set, and of what it takes, returns and must run.

        Nodes are labelled by all that they read, from the arguments on, then by all that reads that, from the results
        back, and then forward again, so that equal nodes with different readers are told apart by other readers, too.
        """
        arguments = {a.name: _hash("argument", k, a.type) for k, a in enumerate(function.signature.input_arg)}
        nodes = {node.name: node for node in function.node_def}
        reads = {name: [_reference(r) for r in node.input] for name, node in nodes.items()}
        sources = {name: {source for source, _ in read} & nodes.keys() for name, read in reads.items()}
        order = list(graphlib.TopologicalSorter(sources).static_order())
        results = [_reference(function.ret[result.name]) for result in function.signature.output_arg]
        effects = sorted(function.control_ret.values())

        labels = dict(arguments)
        own = {name: self._own(node) for name, node in nodes.items()}
        _label_forward(order, reads, own, labels)
        readers: dict[str, list[bytes]] = defaultdict(list)
        for k, (name, output) in enumerate(results):
            readers[name].append(_hash("result", k, output))
        for name in effects:
            readers[name].append(_hash("effect"))
        for name in reversed(order):
            labels[name] = _hash(labels[name], *sorted(readers[name]))
            for k, (source, output) in enumerate(reads[name]):
                place = -1 if output == "^" else k
                readers[source].append(_hash("read", labels[name], place, output))
        _label_forward(order, reads, {name: labels[name] for name in order}, labels)
        return _hash(
            function.signature.is_stateful,
            *[argument.type for argument in function.signature.input_arg],
            *self._attributes(function.attr),
            *[_hash(k, *self._attributes(function.arg_attr[k].attr)) for k in sorted(function.arg_attr)],
            *sorted(labels[name] for name in order),
            *[_hash(labels[name], output) for name, output in results],
            *sorted(labels[name] for name in effects),
        )

    def _own(self, node: Any) -> bytes:
        """Return the digest of a node apart from what it reads."""
        kind = self._of_called(node.op) if node.op in self._functions else node.op
        return _hash(kind, node.device, *self._attributes(node.attr))

    def _attributes(self, attributes: Mapping[str, Any]) -> list[bytes]:
        return [_hash(key, self._value(attributes[key])) for key in sorted(attributes) if key not in NAMES]

    def _value(self, value: Any) -> bytes:
        kind = value.WhichOneof("value")
        if kind == "func":
            return _hash(self._of_called(value.func.name), *self._attributes(value.func.attr))
        if kind == "list" and value.list.func:
            return _hash(*[_hash(self._of_called(f.name), *self._attributes(f.attr)) for f in value.list.func])
        if kind == "tensor":
            array = tf.make_ndarray(value.tensor)
            content = repr(array.tolist()) if array.dtype == object else array.tobytes()
            return _hash(value.tensor.dtype, array.shape, content)
        if kind == "s" and value.s.decode(errors="replace") in self._functions:
            return self._of_called(value.s.decode())
        return bytes(value.SerializeToString(deterministic=True))

    def _of_called(self, name: str) -> bytes:
        if name not in self._known:
            self._known[name] = self.of_function(self._functions[name])
        return self._known[name]


def _label_forward(
    order: Iterable[str],
    reads: Mapping[str, Iterable[tuple[str, str]]],
    own: Mapping[str, bytes],
    labels: dict[str, bytes],
) -> None:
    """Label nodes by what they are and by the labels of what they read, in order, and wait for."""
    for name in order:
        data = [_hash(labels[source], output) for source, output in reads[name] if output != "^"]
        controls = sorted(labels[source] for source, output in reads[name] if output == "^")
        labels[name] = _hash(own[name], "reads", *data, "waits", *controls)


def _called(node: Any) -> set[str]:
    found = {node.op}
    for value in node.attr.values():
        found |= {value.func.name, value.s.decode(errors="replace"), *[f.name for f in value.list.func]}
    return found


def _reference(reference: str) -> tuple[str, str]:
    """Return the node or argument that a reference of a function body names, and which of its outputs; `^` if none."""
    if reference[0] == "^":
        return reference[1:], "^"
    name, _, output = reference.partition(":")
    return name, output


def _hash(*parts: Any) -> bytes:
    """Return a digest of parts, in order; each is told from the next."""
    result = hashlib.sha256()
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode()
        result.update(f"{type(part).__name__}{len(content)}:".encode() + content)
    return result.digest()
