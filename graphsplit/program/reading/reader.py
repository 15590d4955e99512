"""Reading a graph into a Program: shapes inferred, shape arithmetic folded, bodies of loops and branches included."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.polynomials import Symbol
from graphsplit.core.protos import constant_value
from graphsplit.core.sizes import (
    ROWS,
    Shape,
    as_exact,
    has_sizes,
    point_of,
    shape_at,
    symbols_in,
    witnesses,
)
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import Op, Program
from graphsplit.program.reading.flat_graphs import Elements, FlatGraph, KnownBefore, Labels
from graphsplit.program.reading.function_bodies import Bodies, Memo
from graphsplit.program.reading.operation_reader import OperationReader
from graphsplit.program.reading.shape_inference import Findings, InferenceError, Integers, import_for_shapes
from graphsplit.program.stages import Stage, StageCalls

_MOST = 64  # entries of a constant of sizes
_LARGEST_SIZE = 10_000_000  # a larger number means no end


@collection_paused()
def build_program(
    graph: FlatGraph,
    known: KnownBefore,
    labels: Labels,
    memo: Memo | None = None,
    findings: list[Findings] | None = None,
) -> Program:
    """Return the program of a flat graph: shapes inferred, integer arithmetic on shapes folded to constants.

    Args:
      graph: what is read.
      known: what is known of it.
      labels: what the program says of itself.
      memo: functions that were read before, with what was known of their arguments; those read now are added.
      findings: takes what was found.

    Raises:
      InferenceError: if shapes cannot be inferred for all sizes.
    """
    point = known.point
    shapes = {name: shape for name, shape in known.shapes.items() if has_sizes(shape) or point is not None}
    symbols = known.symbols or symbols_in([*shapes.values(), *known.values.values()])
    arrays = {
        name: np.array([*map(as_exact, value)], object if has_sizes(value) else np.int64)
        for name, value in known.values.items()
    }
    given_values = {(name, 0): Integers.of(tf.int64, value) for name, value in arrays.items()}
    by_name, hints = {node.name: node for node in graph.nodes}, _known_outputs(known.inlined_from)
    sizes = symbols, _largest_number(graph.nodes, known.resources) if symbols and point is None else 0
    memo = {} if memo is None else memo
    bodies = Bodies(build_program, graph.library, graph.versions, symbols, memo, labels.provenances, point)

    def make_reader() -> OperationReader:
        of_inputs, so_far = (known.held, known.counts, arrays), known.findings
        carried = {} if point is None else {key: shape_at(shape, point) for key, shape in so_far.carried.items()}
        return OperationReader(
            by_name, hints, known.resources, *of_inputs, carried, bodies, sizes, labels.calls, labels.provenance
        )

    def infer(so_far: Findings) -> Any:
        points = witnesses(*sizes) if point is None else [point]
        so_far = so_far.joined(Findings(values=given_values))
        so_far = so_far if point is None else replace(so_far, doubted={})
        return [
            import_for_shapes(graph.nodes, graph.versions, known.resources, shapes, so_far, point) for point in points
        ]

    if known.results is not None:
        reader = make_reader()
        for name, results in known.results.items():
            reader.read_as(name, [shape for shape, _ in results], [dtype for _, dtype in results])
    else:
        reader, last = _read_until_known(graph.nodes, make_reader, infer, known.findings)
        if findings is not None:
            findings.append(last)
    return Program(
        ops=tuple(reader.ops),
        inputs=tuple(reader.positions[name] for name in graph.inputs),
        input_names=tuple(labels.input_names),
        captures=tuple(reader.positions[name] for name in graph.captures),
        outputs=tuple(reader.tensor(reference) for reference in graph.outputs),
        effects=tuple(dict.fromkeys(reader.positions[name] for name in graph.effects)),
        library=graph.library,
        versions=graph.versions,
        seeds=labels.seeds,
        symbols=symbols,
        notes=tuple(labels.notes),
        locate=labels.locate,
        stages=_in_order(reader.ops, labels.calls),
    )


def _read_until_known(
    nodes: Sequence[Any],
    make_reader: Callable[[], OperationReader],
    infer: Callable[[Findings], Sequence[Sequence[tf.Operation]]],
    prior: Findings = Findings(),  # noqa: B008  # frozen
) -> tuple[OperationReader, Findings]:
    """Read operations again and again, until nothing more is found: what is behind a loop is only known when that is.

    Args:
      nodes: of the graph.
      make_reader: begins anew.
      infer: returns the operations with shapes, for each choice of sizes.
      prior: what is known beforehand. TensorFlow decides whether that fits.
    """
    assumed = prior
    while True:
        try:
            cases = infer(assumed)
        except InferenceError:
            doubted = Findings(_claims(nodes))
            if assumed != prior or prior == doubted:
                raise
            prior = assumed = Findings() if prior != Findings() else doubted
            continue
        reader = make_reader()
        for operations in zip(*cases, strict=True):
            reader.read(operations)
        findings = prior.joined(reader.found)
        if findings == assumed:
            return reader, assumed
        assumed = findings


def _largest_number(nodes: Sequence[Any], resources: Mapping[str, Elements]) -> int:
    """Return the largest number of a graph with which a size may be compared: the end of a slice, rows of a table."""
    types = {dtype.as_datatype_enum for dtype in (tf.int32, tf.int64)}
    constants = [node for node in nodes if node.op == "Const" and node.attr["dtype"].type in types]
    is_short = [math.prod([dim.size for dim in n.attr["value"].tensor.tensor_shape.dim]) <= _MOST for n in constants]
    numbers = [np.max(constant_value(n), initial=0) for n, short in zip(constants, is_short, strict=True) if short]
    sizes = [size for _, shape in resources.values() for size in shape or () if type(size) is int]
    return max([int(n) for n in (*numbers, *sizes) if n <= _LARGEST_SIZE], default=0)


def _in_order(ops: Sequence[Op], calls: StageCalls) -> tuple[Stage, ...]:
    """Return stages as they are first called forward; last those of which nothing forward is left."""
    forward = [op.stage for op in ops if op.stage is not None and not op.provenance.backward]
    return tuple(dict.fromkeys([*forward, *calls.stages.values()]))


def _claims(nodes: Sequence[Any]) -> dict[str, tuple[Shape | None, ...]]:
    """Return the branches and loops that name shapes of their results, with nothing said of these.

    Where one is differentiated, TensorFlow names what the first branch's results would have, and what an iteration
    would: which another branch does not, nor a loop that never iterates.
    """
    counts = {n.name: len(n.attr["output_shapes"].list.shape) for n in nodes if n.op in CONTROL_FLOW}
    return {name: (None,) * count for name, count in counts.items() if count}


def _known_outputs(graph: tf.Graph | None) -> dict[str, list[tf.Tensor]]:
    operations = graph.get_operations() if graph is not None else []
    return {operation.name: list(operation.outputs) for operation in operations}


def build_for_any_batch(graph: FlatGraph, known: KnownBefore, labels: Labels, memo: Memo) -> Program:
    """Return the program for all sizes; if shapes do not follow for all, one that leaves some of them open.

    Args:
      graph, known, labels, memo: see `build_program`.
    """
    open_shapes, notes = dict(known.shapes), list(labels.notes)
    while True:
        try:
            present = set(symbols_in(list(open_shapes.values())))
            values = {name: value for name, value in known.values.items() if present.issuperset(symbols_in([value]))}
            known_now = replace(known, shapes=open_shapes, values=values)
            return build_program(graph, known_now, replace(labels, notes=tuple(notes)), memo)
        except ValueError as error:
            symbols = symbols_in(list(open_shapes.values()))
            if not symbols:
                raise
            reason = str(error).strip().split("\n")[0]
            lengths = [symbol for symbol in symbols if symbol != ROWS]
            if lengths:  # perhaps they are not as independent as they seem
                last = max(lengths, key=lambda symbol: symbol.stand_in)
                open_shapes = {name: _without(shape, last) for name, shape in open_shapes.items()}
                notes.append(f"shapes do not follow for every {last.name}: {reason}")
            else:
                open_shapes = {}
                notes.append(f"shapes do not follow for every batch size, so everything runs on one device: {reason}")


def build_for_sizes(
    graph: FlatGraph,
    known: KnownBefore,
    labels: Labels,
    memo: Memo,
    sizes: Mapping[str, Shape | None],
    values: Mapping[str, Shape],
) -> Program:
    """Return the program for calls of some sizes, of a function that was traced without knowing them.

    It is read for all sizes first: what is behind loops, and in lists, follows from sizes that were open to TensorFlow.
    Then it is read again, where that has its numbers.

    Args:
      graph, known, labels, memo: see `build_program`, for all sizes.
      sizes: the shapes of the same inputs in these calls.
      values: those of inputs that are shapes, in these calls.
    """
    points, findings = (point_of(known.shapes, sizes), point_of(known.values, values)), [Findings()]
    point = {symbol: size for some_sizes in points for symbol, size in (some_sizes or {}).items()}
    if point and None not in points and known.shapes:
        with contextlib.suppress(InferenceError):  # (what does not follow for all sizes may do for these)
            build_program(graph, known, labels, memo, findings)
    known_now = replace(known, shapes=sizes, values=values, findings=findings[-1], point=point)
    return build_program(graph, known_now, labels, memo)


def _without(shape: Shape | None, symbol: Symbol) -> Shape | None:
    """Return a shape in which nothing is said of a size."""
    return shape and tuple([None if symbol in symbols_in([(size,)]) else size for size in shape])
