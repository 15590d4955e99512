"""The functions that loops and branches call, as programs, and what is known of what they are given.

TensorFlow says nothing of sizes behind a loop that was traced with unknown ones, nor of what is in its lists. A
loop is read with the sizes that it begins with, and those that it no longer has after an iteration are dropped.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from graphsplit.core.polynomials import Polynomial, SizesAt, Symbol
from graphsplit.core.protos import constant_value, functions_named
from graphsplit.core.sizes import Shape, agreed, are_same, has_sizes, shape_at, with_sizes, without_sizes
from graphsplit.program.graph.function_calls import function_graph, function_names, inline_calls
from graphsplit.program.program import Op, Program, Provenance
from graphsplit.program.reading.flat_graphs import Elements, FlatGraph, KnownBefore, Labels
from graphsplit.program.reading.shape_inference import Findings, InferenceError
from graphsplit.program.reading.trip_counts import origin
from graphsplit.program.stages import stage_calls

ITEM = {"TensorListFromTensor": 0, "TensorListPushBack": 1, "TensorListSetItem": 2}
"""Ops that put something into a list, and the operand that it is."""


@dataclass(frozen=True)
class KnownArguments:
    """What is known of the arguments of a function.

    Attributes:
      shapes: of each.
      elements: of those that are lists, by number: the dtype and shape of what they hold.
      held: of lists that hold the same integers over and over: those.
      kept: lists that a loop leaves as long as they are.
      empty: lists that hold nothing yet: all their elements are what a loop puts into them.
      counts: of lists, how many elements they have, where that is known.
      constants: of arguments of branches that are known integers, `Const` nodes: the branches read those instead.
    """

    shapes: Sequence[Shape | None]
    elements: Mapping[int, Elements] = field(default_factory=dict)
    held: Mapping[int, np.ndarray] = field(default_factory=dict)
    kept: frozenset[int] = frozenset()
    empty: frozenset[int] = frozenset()
    counts: Mapping[int, int] = field(default_factory=dict)
    constants: Mapping[int, Any] = field(default_factory=dict)

    def holds(self, arguments: KnownArguments, point: SizesAt) -> bool:
        """Return whether all that is known here of any sizes is so of what is given, if the sizes are these."""
        shapes = [*zip(self.shapes, arguments.shapes, strict=True)]
        shapes += [(shape, arguments.elements.get(i, (dtype, None))[1]) for i, (dtype, shape) in self.elements.items()]
        value_pairs = [(value, arguments.held.get(i)) for i, value in self.held.items()]
        return (
            all(_says_no_more(shape_at(shape, point), other) for shape, other in shapes)
            and all(other is not None and _at(value, point) == _at(other, point) for value, other in value_pairs)
            and all(Polynomial.of(count).at(point) == arguments.counts.get(i) for i, count in self.counts.items())
            and all(arguments.constants.get(i) == node for i, node in self.constants.items())
            and (self.kept, self.empty) == (arguments.kept, arguments.empty)
        )


Memo = dict[Any, tuple[Program, KnownArguments, Findings]]
"""Functions that were read: what is known of their arguments, and what was found in them."""


class Bodies:
    """Reads functions, each once for what is known of its arguments.

    Args:
      build: `build_program`.
      library, versions: of the graph.
      symbols: the unknown sizes of the program.
      memo: what was read before, of this graph or of others: functions are told apart by all that they consist of.
      provenances: what says where their operations come from, by their names.
      point: what sizes are, in a program that is for some only.
    """

    def __init__(
        self,
        build: Callable[..., Program],
        library: Any,
        versions: Any,
        symbols: tuple[Symbol, ...],
        memo: Memo,
        provenances: Mapping[str, Callable[[str], Provenance]],
        point: SizesAt | None = None,
    ):
        self._build = build
        self._library = {function.signature.name: function for function in library.function}
        self._versions = versions
        self._symbols = symbols
        self._memo = memo
        self._provenances = provenances
        self._point = point
        self._digests: dict[str, bytes] = {}

    def of_branches(self, node: Any, arguments: KnownArguments) -> tuple[dict[str, Program], list[Shape | None]]:
        """Return the programs that a branch or call chooses among, and the shapes in which their results agree."""
        bodies = {name: self._of_branch(name, arguments) for name in function_names(node)}
        results = [[body.shape(tensor) for tensor in body.outputs] for body in bodies.values()]
        return bodies, [agreed(shapes) for shapes in zip(*results, strict=True)]

    def _of_branch(self, name: str, arguments: KnownArguments) -> Program:
        """Return the program of a branch; of one that does not fit what it is given, for arguments of any shape.

        Such a branch is not taken: which one is may follow from the shapes. TensorFlow says so when it infers its.
        """
        try:
            return self._read(name, arguments)
        except InferenceError:
            return self._read(name, KnownArguments([None] * len(arguments.shapes), arguments.elements))

    def of_loop(
        self, node: Any, arguments: KnownArguments, out_shapes: Sequence[Shape | None]
    ) -> tuple[dict[str, Program], KnownArguments]:
        """Return the programs of a loop's condition and body, and what is known of what all iterations are given.

        That has sizes that follow from unknown ones where it has them before, and still has after an iteration. A list
        has the elements that the body puts into it.
        """
        condition, body_name = function_names(node)
        shapes = [with_sizes(shape, hint) for shape, hint in zip(out_shapes, arguments.shapes, strict=True)]
        counts = {i: arguments.counts[i] for i in _passed_on(self._library[body_name]) if i in arguments.counts}
        carried = KnownArguments(shapes, arguments.elements, arguments.held, empty=arguments.empty, counts=counts)
        while True:
            body = self._read(body_name, carried)
            after = [body.shape(tensor) for tensor in body.outputs]
            same = [agreed([s, a]) if has_sizes(s) else s for s, a in zip(carried.shapes, after, strict=True)]
            put = {i: (dtype, _elements(body, i, carried)) for i, (dtype, _) in carried.elements.items()}
            if all(map(are_same, same, carried.shapes)) and _are_elements_same(put, carried.elements):
                break
            carried = replace(carried, shapes=same, elements=put)
        pushed = {i: value for i in carried.elements if (value := _pushed(body, i)) is not None}
        kept = frozenset(i for i in carried.elements if _is_as_long(body, i))
        programs = {condition: self._read(condition, carried), body_name: body}
        return programs, KnownArguments(carried.shapes, carried.elements, pushed, kept)

    def _read(self, name: str, arguments: KnownArguments) -> Program:
        key = self._digest(name), self._symbols, repr(arguments)
        if key not in self._memo:
            findings: list[Findings] = []
            program = self._program(self._library[name], arguments, self._found_before(key[0], arguments), findings)
            self._memo[key] = program, arguments, findings[-1]
        return self._memo[key][0]

    def _found_before(self, digest: bytes, arguments: KnownArguments) -> Findings:
        """Return what was found in a function for all sizes, if what was known of its arguments then still is so."""
        if self._point is not None:
            for (other_digest, symbols, _), (_, known_arguments, findings) in reversed(self._memo.items()):
                if other_digest == digest and symbols and known_arguments.holds(arguments, self._point):
                    return findings
        return Findings()

    def _digest(self, name: str) -> bytes:
        """Return what tells a function from every other: its content, and that of all functions that it calls."""
        if name not in self._digests:
            function = self._library[name]
            digest = hashlib.sha256(function.SerializeToString(deterministic=True))
            for called in functions_named(function.node_def, self._library):
                digest.update(self._digest(called))
            self._digests[name] = digest.digest()
        return self._digests[name]

    def _program(self, function: Any, arguments: KnownArguments, before: Findings, findings: list[Findings]) -> Program:
        shapes = [without_sizes(shape) for shape in arguments.shapes]
        graph, outputs = function_graph(function, self._library.values(), self._versions, shapes, arguments.constants)
        calls = stage_calls(graph)
        effects = [f"^{name}" for name in function.control_ret.values()]
        nodes, references = inline_calls(graph, [*outputs, *effects])
        names = [argument.name for argument in function.signature.input_arg]
        flat = FlatGraph(
            nodes=nodes,
            inputs=names,
            outputs=references[: len(outputs)],
            effects=[reference[1:] for reference in references[len(outputs) :]],
            library=graph.library,
            versions=self._versions,
        )
        known_before = KnownBefore(
            resources={names[i]: elements for i, elements in arguments.elements.items()},
            shapes=dict(zip(names, arguments.shapes, strict=True)),
            symbols=self._symbols,
            held={names[i]: value for i, value in arguments.held.items()},
            counts={names[i]: count for i, count in arguments.counts.items()},
            findings=before,
            point=self._point,
        )
        provenance = self._provenances.get(function.signature.name)
        labels = Labels(input_names=names, calls=calls, provenance=provenance, provenances=self._provenances)
        return self._build(flat, known_before, labels, self._memo, findings)


def _says_no_more(shape: Shape | None, other: Shape | None) -> bool:
    """Return whether another shape has all sizes that a shape has."""
    if shape is None:
        return True
    pairs = zip(shape, other or (), strict=False)
    return other is not None and len(shape) == len(other) and all(a is None or a == b for a, b in pairs)


def _at(value: np.ndarray, point: SizesAt) -> list[int]:
    """Return integers that follow from sizes, if these are so."""
    return [Polynomial.of(entry).at(point) for entry in value.flat]


def _passed_on(function: Any) -> list[int]:
    """Return which arguments of a loop's body each iteration hands on as they are."""
    results = [function.ret[result.name] for result in function.signature.output_arg]
    return [i for i, argument in enumerate(function.signature.input_arg) if results[i] == argument.name]


def _are_elements_same(before: Mapping[int, Elements], after: Mapping[int, Elements]) -> bool:
    """Return whether lists hold the same (those of the same numbers, of which nothing but shapes can differ)."""
    return all(are_same(shape, after[i][1]) for i, (_, shape) in before.items())


def _elements(body: Program, i: int, carried: KnownArguments) -> Shape | None:
    """Return the shape of the elements of the list that a loop carries as number `i`, after an iteration."""
    shape, put = carried.elements[i][1], _put_into(body, i)
    if shape is None and i in carried.empty and has_sizes(put):
        return put
    return with_sizes(shape, put)


def _put_into(body: Program, i: int) -> Shape | None:
    """Return the shape of what the body of a loop puts into the list that it carries as number `i`."""
    op = _last_change(body, i)
    return op.in_shapes[ITEM[op.type]] if op.type in ITEM else None


def _pushed(body: Program, i: int) -> np.ndarray | None:
    """Return the integers that an iteration adds to the list that a loop carries as number `i`, if they are known."""
    op = _last_change(body, i)
    if op.type != "TensorListPushBack" or op.inputs[0].op != body.inputs[i]:
        return None
    pushed_op = body.ops[op.inputs[1].op]
    if not pushed_op.is_constant or not pushed_op.out_dtypes[0].is_integer:
        return None
    return constant_value(pushed_op.node) if pushed_op.yields is None else pushed_op.yields


def _is_as_long(body: Program, i: int) -> bool:
    """Return whether the list that a loop carries as number `i` has as many elements after an iteration as before."""
    op = _last_change(body, i)
    lists = op.inputs if op.type == "AddN" else op.inputs[: op.type == "TensorListSetItem"]  # (one length is added)
    return not grows(op) and body.inputs[i] in [op.index, *[origin(body, tensor).op for tensor in lists]]


def grows(op: Op) -> bool:
    """Return whether an operation makes a list longer where it puts something behind its end."""
    return bool(op.attr("resize_if_index_out_of_bounds").b)


def _last_change(body: Program, i: int) -> Op:
    last: Op = body.ops[origin(body, body.outputs[i]).op]
    return last
