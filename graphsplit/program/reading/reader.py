"""Reading a graph into a Program: shapes inferred, shape arithmetic folded, bodies of loops and branches included."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.polynomials import Point, Symbol
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
from graphsplit.program.program import Locate, Op, Program, Provenance
from graphsplit.program.reading.function_bodies import Bodies, Elements, Memo
from graphsplit.program.reading.operation_reader import OperationReader
from graphsplit.program.reading.shape_inference import Findings, InferenceError, Integers, import_for_shapes
from graphsplit.program.stages import Stage, StageCalls

_MOST = 64  # entries of a constant of sizes
_LARGEST_SIZE = 10_000_000  # a larger number means no end


@collection_paused()
def build_program(
    nodes: Sequence[Any],
    *,
    inputs: Sequence[str],
    input_names: Sequence[str],
    captures: Sequence[str],
    outputs: Sequence[str],
    effects: Sequence[str],
    library: Any,
    versions: Any,
    resources: Mapping[str, Elements],
    inlined_from: tf.Graph | None = None,
    given_shapes: Mapping[str, Shape | None] | None = None,
    seeds: int = 0,
    symbols: tuple[Symbol, ...] = (),
    held: Mapping[str, np.ndarray] | None = None,
    counts: Mapping[str, int] | None = None,
    values: Mapping[str, Shape] = MappingProxyType({}),
    memo: Memo | None = None,
    before: Findings = Findings(),  # noqa: B008  # frozen
    point: Point | None = None,
    found: list[Findings] | None = None,
    notes: Sequence[str] = (),
    locate: Locate = lambda _: (),
    calls: StageCalls = StageCalls(),  # noqa: B008  # frozen
    shapes: Mapping[str, Sequence[tuple[Shape | None, tf.DType]]] | None = None,
    provenance: Callable[[str], Provenance] | None = None,
    provenances: Mapping[str, Callable[[str], Provenance]] = MappingProxyType({}),
) -> Program:
    """Return the program of a flat graph: shapes inferred, integer arithmetic on shapes folded to constants.

    Args:
      nodes: the `NodeDef`s, calls inlined, in any order.
      inputs, captures: names of placeholder nodes.
      outputs: references (`node:0`) of the returned tensors.
      effects: names of nodes that must run.
      resources: for captured variables, what they hold, without which no shape behind a read is known.
      inlined_from: the graph that the nodes were, before calls were inlined. It knows shapes that were set by hand.
      given_shapes: of inputs, by name, where they say more than the placeholders do: what follows from unknown sizes.
      seeds: how many of the inputs, the last, are gradients of outputs.
      symbols: the unknown sizes of the program that this is a part of.
      held: for inputs that are lists of integers known beforehand, each of their elements alike: that element.
      counts: for inputs that are lists: how many elements they have, where that is known.
      values: of inputs that are shapes, where they are known, or follow from unknown sizes.
      memo: functions that were read before, with what was known of their arguments; those read now are added.
      before: what was found beforehand, for all sizes.
      point: what these sizes are, in a program that is for some only: all given shapes are numbers then.
      found: takes what was found.
      calls: those of stages among the calls that were inlined.
      shapes: shape and dtype of all that each node makes, by name, each behind what it reads: where they are known,
        TensorFlow is not asked.
      provenance: says where an operation comes from, given its name; None for what the name says.
      provenances: the same for operations in functions, by the functions' names.

    Raises:
      InferenceError: if shapes cannot be inferred for all sizes.
    """
    given = {name: shape for name, shape in (given_shapes or {}).items() if has_sizes(shape) or point is not None}
    symbols = symbols or symbols_in([*given.values(), *values.values()])
    arrays = {
        name: np.array([*map(as_exact, value)], object if has_sizes(value) else np.int64)
        for name, value in values.items()
    }
    given_values = {(name, 0): Integers.of(tf.int64, value) for name, value in arrays.items()}
    by_name, hints = {node.name: node for node in nodes}, _known_outputs(inlined_from)
    sizes = symbols, _largest_number(nodes, resources) if symbols and point is None else 0
    bodies = Bodies(build_program, library, versions, symbols, {} if memo is None else memo, provenances, point)

    def make_reader() -> OperationReader:
        of_inputs = held or {}, counts or {}, arrays
        carried = {} if point is None else {key: shape_at(shape, point) for key, shape in before.carried.items()}
        return OperationReader(by_name, hints, resources, *of_inputs, carried, bodies, sizes, calls, provenance)

    def infer(known: Findings) -> Any:
        points = witnesses(*sizes) if point is None else [point]
        known = known.joined(Findings(values=given_values))
        known = known if point is None else replace(known, doubted={})
        return [import_for_shapes(nodes, versions, resources, given, known, point) for point in points]

    if shapes is not None:
        reader = make_reader()
        for name, made in shapes.items():
            reader.read_as(name, [shape for shape, _ in made], [dtype for _, dtype in made])
    else:
        reader, known = _read_until_known(nodes, make_reader, infer, before)
        if found is not None:
            found.append(known)
    return Program(
        ops=tuple(reader.ops),
        inputs=tuple(reader.positions[name] for name in inputs),
        input_names=tuple(input_names),
        captures=tuple(reader.positions[name] for name in captures),
        outputs=tuple(reader.tensor(reference) for reference in outputs),
        effects=tuple(dict.fromkeys(reader.positions[name] for name in effects)),
        library=library,
        versions=versions,
        seeds=seeds,
        symbols=symbols,
        notes=tuple(notes),
        locate=locate,
        stages=_in_order(reader.ops, calls),
    )


def _read_until_known(
    nodes: Sequence[Any],
    make_reader: Callable[[], OperationReader],
    infer: Callable[[Findings], Sequence[Sequence[tf.Operation]]],
    before: Findings = Findings(),  # noqa: B008  # frozen
) -> tuple[OperationReader, Findings]:
    """Read operations again and again, until nothing more is found: what is behind a loop is only known when that is.

    Args:
      nodes: see `build_program`.
      make_reader: begins anew.
      infer: returns the operations with shapes, for each choice of sizes.
      before: what is known beforehand. TensorFlow decides whether that fits.
    """
    known = before
    while True:
        try:
            cases = infer(known)
        except InferenceError:
            doubted = Findings(_claims(nodes))
            if known != before or before == doubted:
                raise
            before = known = Findings() if before != Findings() else doubted
            continue
        reader = make_reader()
        for operations in zip(*cases, strict=True):
            reader.read(operations)
        findings = before.joined(reader.found)
        if findings == known:
            return reader, known
        known = findings


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

    Where one is differentiated, TensorFlow names what the first branch's results would have, and what a turn would:
    which another branch does not, nor a loop that never turns.
    """
    counts = {n.name: len(n.attr["output_shapes"].list.shape) for n in nodes if n.op in CONTROL_FLOW}
    return {name: (None,) * count for name, count in counts.items() if count}


def _known_outputs(graph: tf.Graph | None) -> dict[str, list[tf.Tensor]]:
    operations = graph.get_operations() if graph is not None else []
    return {operation.name: list(operation.outputs) for operation in operations}


def build_for_any_batch(
    build: Callable[..., Program],
    given_shapes: Mapping[str, Shape | None],
    notes: Sequence[str],
    values: Mapping[str, Shape] = MappingProxyType({}),
) -> Program:
    """Return the program for all sizes; if shapes do not follow for all, one that leaves some of them open.

    Args:
      build: `build_program` with its other arguments.
      given_shapes, notes, values: see there.
    """
    open_shapes = dict(given_shapes)
    notes = list(notes)
    while True:
        try:
            known = set(symbols_in(list(open_shapes.values())))
            open_values = {name: value for name, value in values.items() if known.issuperset(symbols_in([value]))}
            return build(given_shapes=open_shapes, values=open_values, notes=tuple(notes))
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
    build: Callable[..., Program],
    given_shapes: Mapping[str, Shape | None],
    sizes: Mapping[str, Shape | None],
    values: Mapping[str, Shape],
    open_values: Mapping[str, Shape],
) -> Program:
    """Return the program for calls of some sizes, of a function that was traced without knowing them.

    It is read for all sizes first: what is behind loops, and in lists, follows from sizes that were open to TensorFlow.
    Then it is read again, where that has its numbers.

    Args:
      build: see `build_for_any_batch`.
      given_shapes: see there.
      sizes: the shapes of the same inputs in these calls.
      values: see `build_program`, in these calls.
      open_values: the same for all sizes.
    """
    points, found = (point_of(given_shapes, sizes), point_of(open_values, values)), [Findings()]
    point = {symbol: size for own in points for symbol, size in (own or {}).items()}
    if point and None not in points and given_shapes:
        with contextlib.suppress(InferenceError):  # (what does not follow for all sizes may do for these)
            build(given_shapes=given_shapes, values=open_values, found=found)
    return build(given_shapes=sizes, values=values, before=found[-1], point=point)


def _without(shape: Shape | None, symbol: Symbol) -> Shape | None:
    """Return a shape in which nothing is said of a size."""
    return shape and tuple([None if symbol in symbols_in([(size,)]) else size for size in shape])
