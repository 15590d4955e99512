"""Reading a graph into a Program: shapes inferred, shape arithmetic folded, bodies of loops and branches included."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.batch_sizes import (
    STAND_IN,
    WITNESSES,
    Rows,
    Shape,
    as_linear,
    has_rows,
    is_symbolic,
    joined_shapes,
    linear,
    per_row,
    values_at,
    without_rows,
)
from graphsplit.collecting import collection_paused
from graphsplit.folding import FOLDABLE, fold
from graphsplit.graphdefs import (
    constant_node,
    constant_value,
    function_graph,
    inline_calls,
    make_node,
    split_reference,
)
from graphsplit.hoisting import CONTROL_FLOW, function_names
from graphsplit.programs import ROWS_CONSTANT, Op, Program, Tensor, is_stateful
from graphsplit.shape_inference import ELEMENT_SHAPE, HELPER, Findings, Value, import_for_shapes
from graphsplit.stages import Stages, stages_of
from graphsplit.tensorflow_internals import resource_value

_NO_BODIES: dict[str, Any] = {}


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
    resources: Mapping[str, tuple[tf.DType, Shape | None]],
    inlined_from: tf.Graph | None = None,
    given_shapes: Mapping[str, Shape | None] | None = None,
    seeds: int = 0,
    batch_is_unknown: bool = False,
    held: Mapping[str, np.ndarray] | None = None,
    memo: dict[Any, Program] | None = None,
    notes: Sequence[str] = (),
    locate: Callable[[str], str] = lambda _: "",
    stages: Stages = Stages(),  # noqa: B008  # frozen
) -> Program:
    """Return the program of a flat graph: shapes inferred, integer arithmetic on shapes folded to constants.

    Args:
      nodes: the `NodeDef`s, calls inlined, in any order.
      inputs, captures: names of placeholder nodes.
      outputs: references (`node:0`) of the returned tensors.
      effects: names of nodes that must run.
      resources: for captured variables, what they hold, without which no shape behind a read is known.
      inlined_from: the graph that the nodes were, before calls were inlined. It knows shapes that were set by hand.
      given_shapes: of inputs, by name, where they say more than the placeholders do: multiples of an unknown batch.
      seeds: how many of the inputs, the last, are gradients of outputs.
      batch_is_unknown: whether this is part of a program with a batch of unknown size.
      held: for inputs that are lists of integers known beforehand, each of their elements alike: that element.
      memo: functions that were read before, with what was known of their arguments.
      stages: the stages among the calls that were inlined.

    Raises:
      ValueError: if shapes cannot be inferred for every number of rows.
    """
    given = {name: shape for name, shape in (given_shapes or {}).items() if has_rows(shape)}
    unknown = bool(given) or batch_is_unknown
    by_name, hints = {node.name: node for node in nodes}, _known_outputs(inlined_from)
    known = Findings()
    memo = {} if memo is None else memo
    while True:
        cases = [
            import_for_shapes(nodes, versions, resources, given, known, rows)
            for rows in (WITNESSES if unknown else WITNESSES[-1:])
        ]
        reader = _Reader(by_name, hints, library, versions, resources, unknown, held or {}, memo)
        for operations in zip(*[graph.get_operations() for graph in cases], strict=True):
            reader.read(operations)
        if not unknown or reader.found == known:
            break
        known = reader.found  # what is behind a loop is only known when the loop is
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
        batch_is_unknown=unknown,
        notes=tuple(notes),
        locate=locate,
        stages=stages,
    )


def build_for_any_batch(
    build: Callable[..., Program], given_shapes: Mapping[str, Shape | None], notes: Sequence[str]
) -> Program:
    """Return the program for every number of rows; if shapes do not follow for all, one in which no axis is a batch.

    Args:
      build: `build_program` with its other arguments.
      given_shapes, notes: see there.
    """
    try:
        return build(given_shapes=given_shapes, notes=tuple(notes))
    except ValueError as error:
        if not any(map(has_rows, given_shapes.values())):
            raise
        reason = str(error).strip().split("\n")[0]
        note = f"shapes do not follow for every batch size, so everything runs at home: {reason}"
        return build(notes=(*notes, note))


_ITEM = {"TensorListFromTensor": 0, "TensorListPushBack": 1, "TensorListSetItem": 2}
_ON_LISTS = frozenset({*ELEMENT_SHAPE, *_ITEM, "Identity"})
_ITEM_BYTES: dict[tf.DType, int] = {}


def _item_bytes(dtype: tf.DType) -> int:
    if dtype not in _ITEM_BYTES:
        sized = dtype not in (tf.string, tf.resource, tf.variant)
        _ITEM_BYTES[dtype] = int(dtype.size) if sized else (0 if dtype != tf.string else 16)
    return _ITEM_BYTES[dtype]


def _known_outputs(graph: tf.Graph | None) -> dict[str, list[tf.Tensor]]:
    operations = graph.get_operations() if graph is not None else []
    return {operation.name: list(operation.outputs) for operation in operations}


class _Reader:
    """Reads operations one by one, in order, and replaces those whose integer values are known by constants."""

    def __init__(
        self,
        nodes: Mapping[str, Any],
        known_outputs: Mapping[str, Sequence[tf.Tensor]],
        library: Any,
        versions: Any,
        resources: Mapping[str, tuple[tf.DType, Shape | None]],
        unknown: bool,
        held: Mapping[str, np.ndarray],
        memo: dict[Any, Program],
    ):
        self._known_outputs = known_outputs
        self._library = {function.signature.name: function for function in library.function}
        self._versions = versions
        self._resources = resources
        self._unknown = unknown
        self._memo = memo
        self._held_by_inputs = held
        self._held: dict[Tensor, np.ndarray] = {}  # of lists whose elements are all the same known integers: those
        self._elements: dict[Tensor, tuple[tf.DType, Shape | None]] = {}  # of lists: what they hold
        self.ops: list[Op] = []
        self.positions: dict[str, int] = {}
        self._nodes = nodes
        self._known: dict[Tensor, np.ndarray] = {}
        self.found = Findings()
        self._symbols: dict[Tensor, np.ndarray] = {}  # of those known: values that depend on the number of rows
        self._replaced: dict[Tensor, Tensor] = {}  # outputs of an op with several, each now a constant of its own

    def tensor(self, reference: str) -> Tensor:
        """Return the tensor that a reference of the original graph means."""
        name, index = split_reference(reference)
        tensor = Tensor(self.positions[name], index)
        return self._replaced.get(tensor, tensor)

    def read(self, cases: Sequence[tf.Operation]) -> None:
        """Append an operation to the program, given its shapes for one or several numbers of rows."""
        operation = cases[-1]
        if HELPER in operation.name:
            return
        node = self._nodes[operation.name]
        inputs = tuple([self.tensor(reference) for reference in node.input if reference[0] != "^"])
        dtypes = [output.dtype for output in operation.outputs]
        hints = self._known_outputs.get(operation.name, ())
        shapes = []
        for k, output in enumerate(operation.outputs):
            hint = hints[k] if k < len(hints) and hints[k].dtype == output.dtype else None  # (hoisting changes dtypes)
            shape = joined_shapes([_shape(case.outputs[k].shape) for case in cases])
            shapes.append(shape if hint is None else _merged(shape, hint.shape))
            if output.dtype == tf.variant:
                self._read_elements(Tensor(len(self.ops), k), cases, k, hint)
        sizes = [_bytes(dtype, shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
        if node.op == "Squeeze" and not node.attr["squeeze_dims"].list.i and inputs:
            node = _with_squeezed_axes(node, self.ops[inputs[0].op].out_shapes[inputs[0].index])
        if node.op == "EnsureShape" and _is_known(self.ops[inputs[0].op].out_shapes[inputs[0].index], shapes[0]):
            node = make_node(node.name, "Identity", node.input, T=dtypes[0])  # which names no size of the whole
        op = Op(
            index=len(self.ops),
            name=operation.name,
            type=node.op,
            inputs=inputs,
            controls=tuple([self.positions[reference[1:]] for reference in node.input if reference[0] == "^"]),
            node=node,
            in_shapes=tuple([self.ops[t.op].out_shapes[t.index] for t in inputs]),
            out_shapes=tuple(shapes),
            out_dtypes=tuple(dtypes),
            out_bytes=tuple(sizes),
            constants={i: self._known[t] for i, t in enumerate(inputs) if t in self._known},
            per_row={i: per_row(self._symbols[t]) for i, t in enumerate(inputs) if t in self._symbols},
            stateful=is_stateful(node.op),
            bodies=self._bodies(node, inputs, shapes) if node.op in CONTROL_FLOW else _NO_BODIES,
        )
        self.positions[op.name] = op.index
        if op.name in self._held_by_inputs:
            self._held[Tensor(op.index, 0)] = self._held_by_inputs[op.name]
        if op.type in _ON_LISTS:
            self._refine_elements(op)
        symbols = {i: self._symbols[t] for i, t in enumerate(inputs) if t in self._symbols}
        values = fold(op, symbols) if op.type in FOLDABLE and not op.controls else None
        if op.type == "VariableShape":
            values = self._shape_of_variable(op)
        elif op.type == "TensorListElementShape":
            values = self._shape_of_elements(op)
        if op.type == "TensorListPopBack" and inputs[0] in self._held:
            self._pop(op, self._held[inputs[0]])
        elif values is None:
            self.ops.append(op)
            if op.type == "Const" and op.out_dtypes[0].is_integer and op.out_bytes[0] <= 8192:
                self._known[Tensor(op.index, 0)] = constant_value(op.node)
        elif len(values) == 1:
            self._append_constant(op.name, values[0], op, 0)
        else:
            self.ops.append(op)  # keeps its place for whoever waits for it; nobody reads it
            for index, value in enumerate(values):
                self._append_value(op, index, value)

    def _pop(self, op: Op, value: np.ndarray) -> None:
        """Append the op that takes the last element off a list; that element is known."""
        self.ops.append(op)
        self._held[Tensor(op.index, 0)] = value
        self._append_value(op, 1, value)

    def _append_value(self, op: Op, output: int, value: np.ndarray) -> None:
        """Append a constant in place of one of several outputs."""
        self._replaced[Tensor(op.index, output)] = Tensor(len(self.ops), 0)
        self._append_constant(f"{op.name}/value_{output}", value, op, output)
        found = Value(op.out_dtypes[output], value.shape, _ints(values_at(value, 0)), _ints(per_row(value)))
        self.found.values[f"{op.name}:{output}" if output else op.name] = found

    def _shape_of_variable(self, op: Op) -> list[np.ndarray] | None:
        held = self._resources.get(self.ops[op.inputs[0].op].name)
        if held is None or held[1] is None or None in held[1]:
            return None
        return [np.array(held[1], op.out_dtypes[0].as_numpy_dtype)]

    def _shape_of_elements(self, op: Op) -> list[np.ndarray] | None:
        held = self._elements.get(op.inputs[0])
        if held is None or held[1] is None:
            return None
        return [np.array([-1 if size is None else as_linear(size) for size in held[1]], object)]

    def _bodies(self, node: Any, inputs: Sequence[Tensor], out_shapes: Sequence[Shape | None]) -> Mapping[str, Program]:
        """Return the programs of the functions that a loop or branch calls."""
        before = CONTROL_FLOW[node.op][2]
        given = [self.ops[t.op].out_shapes[t.index] for t in inputs[before:]]
        elements = {i: self._elements[t] for i, t in enumerate(inputs[before:]) if t in self._elements}
        if "While" in node.op:
            return self._bodies_of_loop(node, inputs, out_shapes)
        bodies = {name: self._body(self._library[name], given, elements, {}) for name in function_names(node)}
        if any(body.batch_is_unknown for body in bodies.values()) and "output_shapes" in node.attr:
            results = [[body.shape(tensor) for tensor in body.outputs] for body in bodies.values()]
            self._find(node.name, out_shapes, [_agreed(shapes) for shapes in zip(*results, strict=True)])
        return bodies

    def _bodies_of_loop(
        self, node: Any, inputs: Sequence[Tensor], out_shapes: Sequence[Shape | None]
    ) -> Mapping[str, Program]:
        """Return the programs of a loop's condition and body.

        What it carries has multiples of an unknown batch where it has them before, and still has after a turn. A list
        has the elements that the body puts into it.
        """
        condition, body_name = function_names(node)
        given = [self.ops[t.op].out_shapes[t.index] for t in inputs]
        elements = {i: self._elements[t] for i, t in enumerate(inputs) if t in self._elements}
        held = {i: self._held[t] for i, t in enumerate(inputs) if t in self._held} if self._unknown else {}
        shapes = [_with_rows(shape, hint) for shape, hint in zip(out_shapes, given, strict=True)]
        while True:
            body = self._body(self._library[body_name], shapes, elements, held)
            after = [body.shape(tensor) for tensor in body.outputs]
            kept = [_agreed([s, a]) if has_rows(s) else s for s, a in zip(shapes, after, strict=True)]
            put = {i: (dtype, _with_rows(shape, _put_into(body, i))) for i, (dtype, shape) in elements.items()}
            if kept == shapes and put == elements:
                break
            shapes, elements = kept, put
        self._find(node.name, out_shapes, shapes)
        for i, (_, shape) in elements.items():
            maker = self.ops[inputs[i].op]
            if has_rows(shape) and maker.type in ELEMENT_SHAPE:
                self.found.elements[maker.name] = shape
            carried = Tensor(len(self.ops), i)
            if has_rows(shape) or carried not in self._elements:  # a loop that was inlined has no hints
                self._elements[carried] = elements[i]
            if self._unknown and maker.type == "EmptyTensorList" and (pushed := _pushed(body, i)) is not None:
                self._held[Tensor(len(self.ops), i)] = pushed
        return {
            name: body if name == body_name else self._body(self._library[name], shapes, elements, held)
            for name in (condition, body_name)
        }

    def _refine_elements(self, op: Op) -> None:
        """Note the elements of a list that something of more rows is put into, is made from a tensor, or is read."""
        given = op.inputs[0] if op.inputs else None
        held = [t for t in (Tensor(op.index, 0), given) if t in self._elements]
        if not held:
            return
        dtype, shape = self._elements[held[0]]
        if given in self._elements:
            shape = _with_rows(shape, self._elements[given][1])
        if op.type in _ITEM:
            item = op.in_shapes[_ITEM[op.type]]
            shape = _with_rows(shape, item and item[1:] if op.type == "TensorListFromTensor" else item)
        if op.out_dtypes[0] == tf.variant:
            self._elements[Tensor(op.index, 0)] = dtype, shape
        if op.type in ELEMENT_SHAPE and has_rows(shape):
            self.found.elements[op.name] = shape

    def _find(self, name: str, inferred: Sequence[Shape | None], found: Sequence[Shape | None]) -> None:
        shapes = tuple([_with_rows(shape, hint) for shape, hint in zip(inferred, found, strict=True)])
        if any(map(has_rows, shapes)):
            self.found.outputs[name] = shapes

    def _read_elements(self, tensor: Tensor, cases: Sequence[tf.Operation], k: int, original: tf.Tensor | None) -> None:
        found = [held for case in cases if (held := resource_value(case.outputs[k])) is not None]
        if found:
            dtype, shape = found[0][0], joined_shapes([_shape(held[1]) for held in found])
        elif original is not None and (held := resource_value(original)) is not None:
            dtype, shape = held[0], _shape(held[1])
        else:
            return
        if dtype != tf.variant:
            self._elements[tensor] = dtype, shape

    def _body(
        self,
        function: Any,
        shapes: Sequence[Shape | None],
        elements: Mapping[int, tuple[tf.DType, Shape | None]],
        held: Mapping[int, np.ndarray],
    ) -> Program:
        key = function.signature.name, repr(shapes), repr(elements), repr(held)
        if key not in self._memo:
            self._memo[key] = self._read_body(function, shapes, elements, held)
        return self._memo[key]

    def _read_body(
        self,
        function: Any,
        shapes: Sequence[Shape | None],
        elements: Mapping[int, tuple[tf.DType, Shape | None]],
        held: Mapping[int, np.ndarray],
    ) -> Program:
        known = [without_rows(shape) for shape in shapes]
        graph, outputs = function_graph(function, self._library.values(), self._versions, known)
        stages = stages_of(graph)
        effects = [f"^{name}" for name in function.control_ret.values()]
        nodes, references = inline_calls(graph, [*outputs, *effects])
        names = [argument.name for argument in function.signature.input_arg]
        return build_program(
            nodes,
            inputs=names,
            input_names=names,
            captures=(),
            outputs=references[: len(outputs)],
            effects=[reference[1:] for reference in references[len(outputs) :]],
            library=graph.library,
            versions=self._versions,
            resources={names[i]: held for i, held in elements.items()},
            given_shapes=dict(zip(names, shapes, strict=True)),
            batch_is_unknown=self._unknown,
            held={names[i]: value for i, value in held.items()},
            memo=self._memo,
            stages=stages,
        )

    def _append_constant(self, name: str, value: np.ndarray, op: Op, output: int) -> None:
        dtype, size = op.out_dtypes[output], op.out_bytes[output]
        tensor, kind = Tensor(len(self.ops), 0), "Const"
        if is_symbolic(value):
            node, kind = constant_node(name, values_at(value, 0), dtype), ROWS_CONSTANT
            node.op = kind
            node.attr["per_row"].tensor.CopyFrom(tf.make_tensor_proto(per_row(value), dtype, value.shape))
            self._symbols[tensor], value = value, values_at(value, STAND_IN)
        else:
            value = np.asarray(value, dtype.as_numpy_dtype)
            node = constant_node(name, value, dtype)
        self.ops.append(
            Op(tensor.op, name, kind, (), (), node, (), (value.shape,), (dtype,), (size,), {}, stateful=False)
        )
        self._known[tensor] = value


def _ints(values: np.ndarray) -> tuple[int, ...]:
    return tuple(int(value) for value in values.flat)


def _shape(known: tf.TensorShape) -> Shape | None:
    return None if known.rank is None else tuple(known)


def _with_rows(shape: Shape | None, hint: Shape | None) -> Shape | None:
    """Return a shape whose unknown sizes are those of `hint` where that has multiples of an unknown batch."""
    if shape is None or hint is None or len(shape) != len(hint):
        return shape
    return tuple([h if s is None and isinstance(h, Rows) else s for s, h in zip(shape, hint, strict=True)])


def _agreed(shapes: Sequence[Shape | None]) -> Shape | None:
    """Return the sizes in which shapes agree."""
    first = shapes[0]
    if any(shape is None or first is None or len(shape) != len(first) for shape in shapes):
        return None
    return tuple([sizes[0] if len(set(sizes)) == 1 else None for sizes in zip(*[s or () for s in shapes], strict=True)])


def _put_into(body: Program, i: int) -> Shape | None:
    """Return the shape of what the body of a loop puts into the list that it carries as number `i`."""
    op = _last_change(body, i)
    return op.in_shapes[_ITEM[op.type]] if op.type in _ITEM else None


def _pushed(body: Program, i: int) -> np.ndarray | None:
    """Return the integers that each turn of a loop adds to the list that it carries as number `i`, if it is known."""
    op = _last_change(body, i)
    if op.type != "TensorListPushBack" or body.ops[op.inputs[0].op].index != body.inputs[i]:
        return None
    item = body.ops[op.inputs[1].op]
    if not item.is_constant or not item.out_dtypes[0].is_integer:
        return None
    rest = constant_value(item.node)
    return linear(rest, tf.make_ndarray(item.node.attr["per_row"].tensor)) if item.type == ROWS_CONSTANT else rest


def _last_change(body: Program, i: int) -> Op:
    tensor = body.outputs[i]
    while body.ops[tensor.op].type == "Identity":
        tensor = body.ops[tensor.op].inputs[0]
    return body.ops[tensor.op]


def _merged(shape: Shape | None, hint: tf.TensorShape) -> Shape | None:
    """Return a shape with the sizes that only a hint knows."""
    if shape is None or hint.rank is None:
        return _shape(hint) if shape is None else shape
    return tuple([known if size is None else size for size, known in zip(shape, hint, strict=True)])


def _is_known(before: Shape | None, ensured: Shape | None) -> bool:
    return before is not None and None not in before and before == ensured


def _with_squeezed_axes(node: Any, shape: Shape | None) -> Any:
    """Return a `Squeeze` that names its axes: on a device with one row, the batch is not among them."""
    if shape is None or None in shape or has_rows(shape):
        return node
    copy = tf.compat.v1.NodeDef()
    copy.CopyFrom(node)
    copy.attr["squeeze_dims"].list.i.extend(i for i, size in enumerate(shape) if size == 1)
    return copy


def _bytes(dtype: tf.DType, shape: Shape | None) -> int:
    if shape is None or None in shape:
        return 0
    size = _item_bytes(dtype)
    for dim in shape:
        size *= dim or 0
    return size
