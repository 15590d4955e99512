"""Reading operations one by one: what is known of their values is folded, bodies of loops and branches included."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.polynomials import Symbol, is_symbolic, values_planned
from graphsplit.core.protos import constant_node, constant_value, split_reference
from graphsplit.core.sizes import (
    Shape,
    Size,
    are_same,
    as_exact,
    confirmed,
    has_sizes,
    joined_shapes,
    merged,
    with_sizes,
)
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import SIZES, TAPES, Op, Program, Provenance, Tensor, is_repeatable, is_stateful
from graphsplit.program.reading.constant_folding import FOLDABLE, fold
from graphsplit.program.reading.flat_graphs import Elements
from graphsplit.program.reading.function_bodies import Bodies
from graphsplit.program.reading.node_simplification import SIMPLIFIED, is_known, simplified, untile
from graphsplit.program.reading.shape_inference import HELPER, Findings, Integers, known_shape, rows_made
from graphsplit.program.reading.tensor_lists import Lists
from graphsplit.program.reading.trip_counts import iterations_of, pushed_counters
from graphsplit.program.row_numbers import NUMBERED, InOrder, RowNumbers
from graphsplit.program.stages import StageCalls

_REDUCTIONS = frozenset({"Max", "Mean", "Min", "Prod", "Sum"})
_NO_BODIES: dict[str, Any] = {}


@functools.cache
def _item_bytes(dtype: tf.DType) -> int:
    sized = dtype not in (tf.string, tf.resource, tf.variant)
    return int(dtype.size) if sized else (0 if dtype != tf.string else 16)


class OperationReader:
    """Reads operations one by one, in order, and replaces those whose integer values are known by constants."""

    def __init__(
        self,
        nodes: Mapping[str, Any],
        known_outputs: Mapping[str, Sequence[tf.Tensor]],
        resources: Mapping[str, Elements],
        held_by_inputs: Mapping[str, np.ndarray],
        counts: Mapping[str, int],
        values: Mapping[str, np.ndarray],
        carried: Mapping[tuple[str, int], Shape | None],
        bodies: Bodies,
        sizes: tuple[tuple[Symbol, ...], int],
        calls: StageCalls,
        provenance: Callable[[str], Provenance] | None = None,
    ):
        self._calls = calls
        self._provenance = provenance or self._as_named
        self._known_outputs = known_outputs
        self._resources = resources
        self._read_bodies = bodies
        self._unknown, self._largest = sizes
        self._held_by_inputs = held_by_inputs
        self._counts_by_inputs = counts
        self._values_of_inputs = values
        self._carried = carried
        self.ops: list[Op] = []
        self.positions: dict[str, int] = {}
        self._nodes = nodes
        self._integers: dict[Tensor, np.ndarray] = {}
        self.found = Findings()
        self._lists = Lists(self.found)
        self._counting: dict[Tensor, InOrder] = {}  # lists that loops made, onto which each iteration pushed its number
        self._row_numbers = RowNumbers(self.ops, self._integers)
        self._guessed: set[Tensor] = set()  # what follows from unknown sizes, and no polynomial says how
        self._doubted: set[Tensor] = set()  # what follows from tensors of which too much was known
        self._symbols: dict[Tensor, np.ndarray] = {}  # of those integers: values that depend on the number of rows
        self._constants: dict[tuple[tf.DType, Shape, bytes], int] = {}
        self._replaced: dict[Tensor, Tensor] = {}  # outputs of an op with several, each now a constant of its own

    def tensor(self, reference: str) -> Tensor:
        """Return the tensor that a reference of the original graph means."""
        name, index = split_reference(reference)
        tensor = Tensor(self.positions[name], index)
        return self._replaced.get(tensor, tensor)

    def read(self, cases: Sequence[tf.Operation]) -> None:
        """Append an operation to the program, given its shapes for one or several choices of unknown sizes."""
        operation = cases[-1]
        if HELPER not in operation.name:
            self.read_as(operation.name, self._inferred(cases), [output.dtype for output in operation.outputs])
            if len(cases) > 1:
                self._doubt(cases)

    def _doubt(self, cases: Sequence[tf.Operation]) -> None:
        """Note of what TensorFlow knows more for each choice of sizes than is so for all of them.

        It would go on from numbers that are equal, or like a polynomial, by chance: those of max(a, b), or of a % 3.
        Only the first one is noted of what follows from each other: TensorFlow is asked again.
        """
        node = self._nodes[cases[-1].name]
        operands = {reference: self.tensor(reference) for reference in node.input if reference[0] != "^"}
        is_doubted = not self._doubted.isdisjoint(operands.values())
        for reference, tensor in operands.items():
            if tensor in self._guessed - self._doubted and (node.op == "Range" or self._dtype(tensor).is_integer):
                self.found.doubted[split_reference(reference)] = self._dtype(tensor), self._shape(tensor)
                is_doubted = True
        follows = any(tensor in self._guessed or tensor in self._symbols for tensor in operands.values())
        is_guess = follows and all(t in self._guessed or self.ops[t.op].is_constant for t in operands.values())
        for k, output in enumerate(cases[-1].outputs):
            tensor = self.tensor(f"{output.op.name}:{k}")
            shapes = [known_shape(case.outputs[k].shape) for case in cases]
            is_shaped = output.dtype not in (tf.variant, tf.resource)
            if is_guess and tensor not in self._integers:
                self._guessed.add(tensor)
            if not is_doubted and is_shaped and _says_more(shapes, self._shape(tensor)):
                self.found.doubted[output.op.name, k] = output.dtype, self._shape(tensor)
                self._doubted.add(tensor)
            elif is_doubted:
                self._doubted.add(tensor)

    def read_as(self, name: str, shapes: Sequence[Shape | None], dtypes: Sequence[tf.DType]) -> None:
        """Append an operation to the program, given what it makes."""
        node = self._nodes[name]
        inputs = self._inputs(node)
        if node.op in SIMPLIFIED and inputs:
            shapes_read, values_read = map(self._shape, inputs), map(self._integers.get, inputs)
            node = simplified(node, tuple(shapes_read), tuple(values_read), shapes, dtypes)
            inputs = self._inputs(node)
        first = shapes[0] if shapes else None
        count = rows_made(node, inputs, self.ops, self._value) if first and first[0] is None else None
        if first and count is not None:
            shapes = [(count, *first[1:]), *shapes[1:]]
            self.found.outputs[name] = tuple(shapes)
        op = Op(
            index=len(self.ops),
            name=name,
            type=node.op,
            inputs=inputs,
            controls=tuple([self.positions[reference[1:]] for reference in node.input if reference[0] == "^"]),
            node=node,
            in_shapes=tuple(map(self._shape, inputs)),
            out_shapes=tuple(shapes),
            out_dtypes=tuple(dtypes),
            out_bytes=tuple([_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]),
            constants={i: self._integers[t] for i, t in enumerate(inputs) if t in self._integers},
            symbols={i: self._symbols[t] for i, t in enumerate(inputs) if t in self._symbols},
            stateful=is_stateful(node.op) and not is_repeatable(node),
            bodies=self._bodies(node, inputs, shapes) if node.op in CONTROL_FLOW else _NO_BODIES,
            provenance=self._provenance(name),
        )
        self._row_numbers.note(op)
        if op.type in NUMBERED:
            op = replace(op, numbers=self._row_numbers.find(op))
        elif op.bodies:
            op = replace(op, numbers={i: self._counting[t] for i, t in enumerate(inputs) if t in self._counting})
        *earlier_ops, op = untile(op, self.ops)
        self.ops += earlier_ops
        self.positions[op.name] = op.index
        if op.name in self._held_by_inputs:
            self._lists.held[Tensor(op.index, 0)] = self._held_by_inputs[op.name]
        if op.name in self._counts_by_inputs:
            self._lists.counts[Tensor(op.index, 0)] = self._counts_by_inputs[op.name]
        self._lists.refine(op)
        self._append(op)

    def _as_named(self, name: str) -> Provenance:
        """Return what the name says that TensorFlow, or inlining, gave an operation."""
        is_gradient = not TAPES.isdisjoint(name.split("/"))
        return Provenance(name, self._calls.of(name), self._calls.is_backward(name), is_gradient)

    def _inferred(self, cases: Sequence[tf.Operation]) -> list[Shape | None]:
        """Return the shapes of an operation's outputs, and note what lists hold."""
        hints = self._known_outputs.get(cases[-1].name, ())
        shapes = []
        for k, output in enumerate(cases[-1].outputs):
            hint = hints[k] if k < len(hints) and hints[k].dtype == output.dtype else None  # (hoisting changes dtypes)
            shape = joined_shapes([known_shape(case.outputs[k].shape) for case in cases], self._unknown, self._largest)
            shapes.append(shape if hint is None else merged(shape, known_shape(hint.shape)))
            if output.dtype in (tf.variant, tf.resource):
                held_by_cases = [case.outputs[k] for case in cases]
                self._lists.infer(Tensor(len(self.ops), k), held_by_cases, hint, self._unknown, self._largest)
        return shapes

    def _inputs(self, node: Any) -> tuple[Tensor, ...]:
        return tuple([self.tensor(reference) for reference in node.input if reference[0] != "^"])

    def _value(self, tensor: Tensor) -> np.ndarray | None:
        """Return integers that are known, or follow from unknown sizes."""
        return self._symbols.get(tensor, self._integers.get(tensor))

    def _shape(self, tensor: Tensor) -> Shape | None:
        return self.ops[tensor.op].out_shapes[tensor.index]

    def _dtype(self, tensor: Tensor) -> tf.DType:
        return self.ops[tensor.op].out_dtypes[tensor.index]

    def _append(self, op: Op) -> None:
        """Append an operation, or constants in its place if its values are known."""
        values = self._values(op)
        if op.type == "TensorListPopBack" and op.inputs[0] in self._lists.held:
            self._pop(op, self._lists.held[op.inputs[0]])
        elif values is None:
            self.ops.append(op)
            self._read_through(op)
            self._read_iterations(op)
            if op.name in self._values_of_inputs:
                self._append_value(op, 0, self._values_of_inputs[op.name])
            if op.type == "Const" and op.out_dtypes[0].is_integer and op.out_bytes[0] <= 8192:
                self._integers[Tensor(op.index, 0)] = constant_value(op.node)
        elif len(values) == 1:
            self.positions[op.name] = self._constant(op.name, values[0], op, 0).op
        else:
            self.ops.append(op)  # keeps its place for whoever waits for it; nobody reads it
            for index, value in enumerate(values):
                self._append_value(op, index, value)

    def _values(self, op: Op) -> list[np.ndarray] | None:
        if op.type == "VariableShape":
            return self._shape_of_variable(op)
        if op.type == "TensorListElementShape":
            shape = self._lists.element_shape(op.inputs[0])
            return None if shape is None else [shape]
        if op.type == "TensorListLength":
            count = self._lists.counts.get(op.inputs[0])
            return None if count is None else [_entry(count, np.int32)]
        if op.type == "StridedSlice" and self.ops[op.inputs[0].op].type == "Shape":  # of sizes some are known, perhaps
            sizes = self._shape(self.ops[op.inputs[0].op].inputs[0])
            shape_array = np.array([as_exact(size) for size in sizes or ()], object)
            op = replace(op, constants={**op.constants, 0: shape_array}, symbols={0: shape_array}) if sizes else op
        return fold(op, op.symbols) if op.type in FOLDABLE and not op.controls else None

    def _read_through(self, op: Op) -> None:
        """Let the readers of an operation that changes nothing read what it reads."""
        if op.controls:
            return
        if op.type == "IdentityN":  # keeps all its inputs in memory until the last one is there
            self._replaced.update({Tensor(op.index, k): tensor for k, tensor in enumerate(op.inputs)})
        reduces_nothing = op.type in _REDUCTIONS and np.size(op.constants.get(1, 0)) == 0
        is_same = op.type == "Reshape" and is_known(op.in_shapes[0], op.out_shapes[0])
        if reduces_nothing or is_same or (op.type == "GatherV2" and self._row_numbers.takes_all(op)):
            self._replaced[Tensor(op.index, 0)] = op.inputs[0]

    def _read_iterations(self, op: Op) -> None:
        """Take what a loop counts for known once it ends, if that is known; and note which lists have the numbers."""
        iterations = iterations_of(op)
        if iterations is not None:
            for k in pushed_counters(op, iterations):
                self._counting[Tensor(op.index, k)] = InOrder(as_exact(iterations.number))
            for k in sorted(iterations.counters):
                self._append_value(op, k, _entry(iterations.number, op.out_dtypes[k].as_numpy_dtype))

    def _pop(self, op: Op, value: np.ndarray) -> None:
        """Append the op that takes the last element off a list; that element is known."""
        self.ops.append(op)
        self._lists.held[Tensor(op.index, 0)] = value
        self._append_value(op, 1, value)

    def _append_value(self, op: Op, output: int, value: np.ndarray) -> None:
        """Append a constant in place of one of several outputs."""
        name = f"{op.name}/value_{output}"
        while name in self._nodes:  # a program that is read again has those of its first reading
            name += "_"
        self._replaced[Tensor(op.index, output)] = self._constant(name, value, op, output)
        if self._unknown:
            self.found.values[op.name, output] = Integers.of(op.out_dtypes[output], value)

    def _shape_of_variable(self, op: Op) -> list[np.ndarray] | None:
        elements = self._resources.get(self.ops[op.inputs[0].op].name)
        if elements is None or elements[1] is None or None in elements[1]:
            return None
        return [np.array(elements[1], op.out_dtypes[0].as_numpy_dtype)]

    def _bodies(self, node: Any, inputs: Sequence[Tensor], out_shapes: Sequence[Shape | None]) -> Mapping[str, Program]:
        """Return the programs of the functions that a loop or branch calls, and note what they say of its results."""
        passed = inputs[CONTROL_FLOW[node.op].chooses :]
        arguments = self._lists.given(passed, [self.ops[t.op].out_shapes[t.index] for t in passed], self.ops)
        if not CONTROL_FLOW[node.op].loops:
            exact = {i: t for i, t in enumerate(passed) if t in self._integers and t not in self._symbols}
            constants = {i: self._constant_node(tensor) for i, tensor in exact.items()}
            programs, shapes = self._read_bodies.of_branches(node, replace(arguments, held={}, constants=constants))
            if "output_shapes" in node.attr:
                self._find_results(node, shapes)
            return programs
        lists = {
            i: (kind, merged(shape, self._carried.get((node.name, i))))
            for i, (kind, shape) in arguments.elements.items()
        }
        programs, carried = self._read_bodies.of_loop(node, replace(arguments, elements=lists), out_shapes)
        self._find(node.name, out_shapes, carried.shapes)
        self._lists.carry(node.name, carried, inputs, self.ops)
        return programs

    def _constant_node(self, tensor: Tensor) -> Any:
        dtype = self.ops[tensor.op].out_dtypes[tensor.index]
        return constant_node("", np.asarray(self._integers[tensor], dtype.as_numpy_dtype), dtype)

    def _find_results(self, node: Any, body_shapes: Sequence[Shape | None]) -> None:
        """Note the shapes of a branch's results, if the node does not name them as its bodies do.

        (TensorFlow rewrites a branch that is differentiated, and then names the shapes of the first body's results.)
        """
        named = [known_shape(tf.TensorShape(proto)) for proto in node.attr["output_shapes"].list.shape]
        hints = [known_shape(tensor.shape) for tensor in self._known_outputs.get(node.name, ())]
        hints += [None] * (len(body_shapes) - len(hints))
        shapes = tuple([confirmed(*claims) for claims in zip(named or body_shapes, body_shapes, hints, strict=True)])
        if not named or not all(map(are_same, shapes, named)):
            self.found.outputs[node.name] = shapes

    def _find(self, name: str, inferred: Sequence[Shape | None], known_shapes: Sequence[Shape | None]) -> None:
        shapes = tuple([with_sizes(shape, hint) for shape, hint in zip(inferred, known_shapes, strict=True)])
        if any(map(has_sizes, shapes)):
            self.found.outputs[name] = shapes

    def _constant(self, name: str, value: np.ndarray, op: Op, output: int) -> Tensor:
        """Return a constant of what an op's output is worth; equal ones are one."""
        dtype, size = op.out_dtypes[output], op.out_bytes[output]
        symbolic = is_symbolic(value)
        key = repr(value.tolist()).encode() if symbolic else np.asarray(value, dtype.as_numpy_dtype).tobytes()
        position = self._constants.setdefault((dtype, value.shape, key), len(self.ops))
        tensor, kind, yields = Tensor(position, 0), "Const", None
        if position < len(self.ops):
            return tensor
        if symbolic:
            yields, self._symbols[tensor], kind, value = value, value, SIZES, values_planned(value)
        node = constant_node(name, np.asarray(value, dtype.as_numpy_dtype), dtype)
        node.op = kind
        shape = value.shape
        self.ops.append(
            Op(
                *(position, name, kind, (), (), node, (), (shape,), (dtype,), (size,), {}),
                stateful=False,
                yields=yields,
                provenance=op.provenance,
            )
        )
        self._integers[tensor] = value
        return tensor


def _entry(number: int, dtype: Any) -> np.ndarray:
    """Return a number, or a size that follows from unknown ones, as an array without axes."""
    return np.array(as_exact(number), object if isinstance(number, Size) else dtype)


def _says_more(cases: Sequence[Shape | None], shape: Shape | None) -> bool:
    """Return whether each of some shapes has a size that another one leaves open."""
    if shape is None:
        return None not in cases
    return any(size is None and all(case and case[k] is not None for case in cases) for k, size in enumerate(shape))


def _bytes(dtype: tf.DType, shape: Shape | None) -> int:
    if shape is None or None in shape:
        return 0
    return _item_bytes(dtype) * math.prod(int(size or 0) for size in shape)
