"""What is folded while a program is read is what TensorFlow's kernels compute, for every op that is folded."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.polynomials import values_at
from graphsplit.core.protos import constant_value
from graphsplit.core.sizes import ROWS, Size, rows, shape_at
from graphsplit.program.program import SIZES
from graphsplit.program.reading import constant_folding
from graphsplit.program.reading.constant_folding import FOLDABLE
from graphsplit.program.reading.flat_graphs import FlatGraph, KnownBefore, Labels
from graphsplit.program.reading.reader import build_program
from tests.helpers.law import assert_close

TRIALS = 60
Sample = tuple[list[Any], dict[str, Any]]  # operands (a list among them: several), attributes
_DTYPES = (np.int32, np.int64)


def integers(rng: np.random.Generator, rank: int | None = None, low: int = -4, high: int = 5, dtype: Any = None) -> Any:
    """Return small integers of a small shape; some are empty, some have axes of size 1."""
    shape = rng.integers(0, 4, rng.integers(0, 3) if rank is None else rank)
    return rng.integers(low, high, shape).astype(dtype or _DTYPES[rng.integers(2)])


def broadcast(rng: np.random.Generator, count: int, nonzero: bool = False) -> list[np.ndarray]:
    """Return operands of an elementwise op, some axes of which are broadcast."""
    shape = rng.integers(0, 4, rng.integers(0, 3))
    dtype = _DTYPES[rng.integers(2)]

    def one() -> np.ndarray:
        own = [1 if rng.random() < 0.3 else size for size in shape][rng.integers(0, len(shape) + 1) :]
        values = rng.integers(-4, 5, own).astype(dtype)
        return np.where(values == 0, dtype(3), values) if nonzero else values

    return [one() for _ in range(count)]


def elementwise(count: int = 2, nonzero: bool = False) -> Callable[[np.random.Generator], Sample]:
    return lambda rng: (broadcast(rng, count, nonzero), {})


def broadcast_gradient(rng: np.random.Generator) -> Sample:
    whole = rng.choice([0, 1, 1, 2, 3], rng.integers(0, 4))
    dtype = _DTYPES[rng.integers(2)]
    shapes = [np.where(rng.random(whole.shape) < 0.3, 1, whole).astype(dtype) for _ in range(2)]
    if rng.random() < 0.3:
        shapes[1] = shapes[0]
    cut = rng.integers(2)
    shapes[cut] = shapes[cut][rng.integers(0, len(whole) + 1) if rng.random() < 0.5 else 0 :]
    return shapes, {}


def cast(rng: np.random.Generator) -> Sample:
    kinds = (np.bool_, np.int8, np.uint8, np.int32, np.int64)
    source, target = (kinds[rng.integers(len(kinds))] for _ in range(2))
    return [integers(rng, low=-300, high=300, dtype=source)], {"DstT": tf.as_dtype(target)}


def concat_offset(rng: np.random.Generator) -> Sample:
    rank, count = rng.integers(1, 4), rng.integers(2, 4)
    axis, shape = rng.integers(-rank, rank), rng.integers(0, 4, rank)
    shapes = []
    for _ in range(count):
        own = shape.copy()
        own[axis] = rng.integers(0, 4)
        shapes.append(own.astype(np.int32))
    return [np.int32(axis), shapes], {}


def concat(rng: np.random.Generator) -> Sample:
    offsets = concat_offset(rng)[0]
    dtype = _DTYPES[rng.integers(2)]
    return [[rng.integers(-9, 9, shape).astype(dtype) for shape in offsets[1]], offsets[0]], {}


def stitch(rng: np.random.Generator) -> Sample:
    cuts = np.array_split(rng.permutation(rng.integers(1, 6)), 2)
    indices = [cuts[0], rng.permutation(np.append(cuts[1], cuts[0][:1]))]  # one of them twice: the later one counts
    rest = rng.integers(1, 3, rng.integers(0, 2))
    data = [rng.integers(-9, 9, (len(cut), *rest)) for cut in indices]
    return [[cut.astype(np.int32) for cut in indices], data], {}


def equal(rng: np.random.Generator) -> Sample:
    if rng.random() < 0.2:
        return [np.arange(2), np.arange(3)], {"incompatible_shape_error": False}
    return broadcast(rng, 2), {}


def expand_dims(rng: np.random.Generator) -> Sample:
    x = integers(rng)
    return [x, np.int32(rng.integers(-x.ndim - 1, x.ndim + 1))], {}


def fill(rng: np.random.Generator) -> Sample:
    return [rng.integers(0, 4, rng.integers(0, 3)).astype(np.int32), integers(rng, 0)], {}


def gather(rng: np.random.Generator) -> Sample:
    batch = rng.integers(0, 2)
    shape = rng.integers(1, 4, rng.integers(1 + batch, 4))
    axis = rng.integers(batch, len(shape))
    lead = shape[:batch] if batch else []
    indices = rng.integers(0, shape[axis], (*lead, *rng.integers(0, 3, rng.integers(0, 2)))).astype(np.int32)
    named = axis - len(shape) if rng.random() < 0.5 else axis
    return [rng.integers(-9, 9, shape), indices, np.int32(named)], {"batch_dims": int(batch)}


def pack(rng: np.random.Generator) -> Sample:
    first = integers(rng)
    others = [rng.integers(-9, 9, first.shape).astype(first.dtype) for _ in range(rng.integers(0, 3))]
    return [[first, *others]], {"axis": int(rng.integers(-first.ndim - 1, first.ndim + 1))}


def of_range(rng: np.random.Generator) -> Sample:
    dtype = _DTYPES[rng.integers(2)]
    start, limit = sorted(rng.integers(-5, 6, 2))
    step = rng.integers(1, 4)
    return [dtype(v) for v in ((start, limit, step) if rng.random() < 0.5 else (limit, start, -step))], {}


def reduction(rng: np.random.Generator) -> Sample:
    x = integers(rng)
    axes = rng.permutation(x.ndim)[: rng.integers(0, x.ndim + 1)]
    axes = np.where(rng.random(axes.shape) < 0.5, axes - x.ndim, axes).astype(np.int32)
    return [x, axes[0] if len(axes) == 1 and rng.random() < 0.5 else axes], {"keep_dims": bool(rng.integers(2))}


def reshape(rng: np.random.Generator) -> Sample:
    x = integers(rng)
    target = rng.permutation([*x.shape, *[1] * rng.integers(0, 3)]).astype(np.int32)
    if target.size and (x.size or np.delete(target, 0).all()) and rng.random() < 0.5:
        target[0] = -1
    return [x, target], {}


def select(rng: np.random.Generator) -> Sample:
    x = integers(rng, rng.integers(0, 3))
    shape = [(), x.shape[:1], x.shape][rng.integers(3)]
    return [rng.random(shape) < 0.5, x, rng.integers(-9, 9, x.shape).astype(x.dtype)], {}


def select_v2(rng: np.random.Generator) -> Sample:
    condition, x, y = broadcast(rng, 3)
    return [condition > 0, x, y], {}


def truths(count: int) -> Callable[[np.random.Generator], Sample]:
    return lambda rng: ([operand > 0 for operand in broadcast(rng, count)], {})


def cumulation(rng: np.random.Generator) -> Sample:
    x = integers(rng, rng.integers(1, 3))
    return [x, np.int32(rng.integers(-x.ndim, x.ndim))], {name: rng.random() < 0.5 for name in ("exclusive", "reverse")}


def slice_(rng: np.random.Generator) -> Sample:
    x = integers(rng)
    begin = [rng.integers(0, size + 1) for size in x.shape]
    size = [-1 if rng.random() < 0.3 else rng.integers(0, s - b + 1) for s, b in zip(x.shape, begin, strict=True)]
    return [x, np.array(begin, np.int32), np.array(size, np.int32)], {}


def split(rng: np.random.Generator) -> Sample:
    x = integers(rng, rng.integers(1, 3))
    axis = int(rng.integers(-x.ndim, x.ndim))
    counts = [count for count in (1, 2, 3) if x.shape[axis] % count == 0]
    return [np.int32(axis), x], {"num_split": int(rng.choice(counts))}


def split_v(rng: np.random.Generator) -> Sample:
    x = integers(rng, rng.integers(1, 3))
    axis = int(rng.integers(-x.ndim, x.ndim))
    ends = np.sort(rng.integers(0, x.shape[axis] + 1, rng.integers(0, 3)))
    sizes = np.diff([0, *ends, x.shape[axis]]).astype(np.int32)
    if len(sizes) > 1 and rng.random() < 0.3:  # (a kernel refuses it of one piece)
        sizes[rng.integers(0, len(sizes))] = -1
    return [x, sizes, np.int32(axis)], {"num_split": len(sizes)}


def unpack(rng: np.random.Generator) -> Sample:
    x = integers(rng, rng.integers(1, 3))
    axis = int(rng.integers(-x.ndim, x.ndim))
    return [x], {"axis": axis, "num": x.shape[axis]}


def squeeze(rng: np.random.Generator) -> Sample:
    x = integers(rng)
    ones = [i if rng.random() < 0.5 else i - x.ndim for i, size in enumerate(x.shape) if size == 1]
    return [x], {"axis": ones[: rng.integers(0, len(ones) + 1)]}


def strided_slice(rng: np.random.Generator) -> Sample:
    x = integers(rng, rng.integers(1, 3))
    count = rng.integers(0, x.ndim + 1) if rng.random() < 0.3 else 1
    begin, end = rng.integers(-5, 6, (2, count)).astype(np.int32)
    strides = rng.choice([-2, -1, 1, 1, 2], count).astype(np.int32)
    masks = {f"{name}_mask": int(rng.integers(2)) for name in ("begin", "end")}
    if count and x.shape[0] and rng.random() < 0.3:
        begin[0], strides[0] = rng.integers(-x.shape[0], x.shape[0]), 1
        masks["shrink_axis_mask"] = 1
    elif count and rng.random() < 0.2:
        masks[["ellipsis_mask", "new_axis_mask"][rng.integers(2)]] = 1
    return [x, begin, end, strides], masks


def tile(rng: np.random.Generator) -> Sample:
    x = integers(rng)
    return [x, rng.integers(0, 3, x.ndim).astype(np.int32)], {}


def anything(rng: np.random.Generator) -> Sample:
    return [integers(rng)], {}


SAMPLERS: dict[str, Callable[[np.random.Generator], Sample]] = {
    "Add": elementwise(),
    "AddV2": elementwise(),
    "BroadcastGradientArgs": broadcast_gradient,
    "Cast": cast,
    "ConcatOffset": concat_offset,
    "ConcatV2": concat,
    "Cumsum": cumulation,
    "DynamicStitch": stitch,
    "Equal": equal,
    "ExpandDims": expand_dims,
    "Fill": fill,
    "FloorDiv": elementwise(nonzero=True),
    "FloorMod": elementwise(nonzero=True),
    "GatherV2": gather,
    "Greater": elementwise(),
    "GreaterEqual": elementwise(),
    "Identity": anything,
    "InvertPermutation": lambda rng: ([rng.permutation(rng.integers(0, 5)).astype(np.int32)], {}),
    "Less": elementwise(),
    "LessEqual": elementwise(),
    "LogicalAnd": truths(2),
    "LogicalNot": truths(1),
    "LogicalOr": truths(2),
    "Max": reduction,
    "Maximum": elementwise(),
    "Min": reduction,
    "Minimum": elementwise(),
    "Mul": elementwise(),
    "Neg": anything,
    "Pack": pack,
    "Prod": reduction,
    "Range": of_range,
    "Rank": anything,
    "Reshape": reshape,
    "Select": select,
    "SelectV2": select_v2,
    "Shape": anything,
    "ShapeN": lambda rng: ([[integers(rng, dtype=np.int32) for _ in range(2)]], {}),
    "Size": anything,
    "Slice": slice_,
    "Split": split,
    "SplitV": split_v,
    "Squeeze": squeeze,
    "StridedSlice": strided_slice,
    "Sub": elementwise(),
    "Sum": reduction,
    "Tile": tile,
    "Unpack": unpack,
}


def make(op_type: str, operands: list[Any], attributes: dict[str, Any]) -> list[tf.Tensor]:
    """Run or build exactly this op."""
    function = getattr(tf.raw_ops, op_type)
    if op_type == "Unpack":
        attributes = {"num": operands[0].shape[0], **attributes}
    result = function(**dict(zip(inspect.signature(function).parameters, operands, strict=False)), **attributes)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def folded(op_type: str, operands: list[Any], attributes: dict[str, Any]) -> list[np.ndarray | None]:
    """Return what an op on constants is folded to, None for an output that is not."""
    with tf.Graph().as_default() as graph:
        outputs = make(op_type, tf.nest.map_structure(constant, operands), attributes)
    program = read(graph, outputs, [], {})
    ops = [program.ops[tensor.op] for tensor in program.outputs]
    return [constant_value(op.node) if op.type == "Const" else None for op in ops]


def constant(value: np.ndarray) -> tf.Tensor:
    """Return a constant; truth values are known where they follow from integers."""
    return tf.raw_ops.Equal(x=np.int32(value), y=1) if np.asarray(value).dtype == bool else tf.constant(value)


def read(graph: tf.Graph, outputs: list[tf.Tensor], inputs: list[str], shapes: dict[str, Any]) -> Any:
    graph_def = graph.as_graph_def()
    flat = FlatGraph(
        nodes=graph_def.node,
        inputs=inputs,
        outputs=[tensor.name for tensor in outputs],
        library=graph_def.library,
        versions=graph_def.versions,
    )
    return build_program(flat, KnownBefore(shapes=shapes), Labels(input_names=inputs))


def fold_differs(op_type: str, trials: int = TRIALS) -> int:
    """Compare folds with kernels; return how many outputs were folded."""
    rng = np.random.default_rng(0)
    count = 0
    for _ in range(trials):
        operands, attributes = SAMPLERS[op_type](rng)
        wanted = make(op_type, tf.nest.map_structure(tf.constant, operands), attributes)
        for found, want in zip(folded(op_type, operands, attributes), wanted, strict=True):
            if found is not None:
                what = f"{op_type} of {operands} with {attributes}"
                assert found.dtype == want.dtype.as_numpy_dtype, what
                np.testing.assert_array_equal(found, want.numpy(), err_msg=what)
                assert found.shape == tuple(want.shape), what
                count += 1
    return count


@pytest.mark.sampled(6)
@pytest.mark.parametrize("op_type", sorted(FOLDABLE))
def test_folds_are_what_kernels_compute(op_type: str) -> None:
    assert fold_differs(op_type) > TRIALS // 4


def test_a_wrong_fold_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(constant_folding._FOLD, "Maximum", constant_folding._FOLD["Minimum"])
    with pytest.raises(AssertionError, match="Maximum of"):
        fold_differs("Maximum")


def sized(rng: np.random.Generator, rank: int) -> tuple[int, ...]:
    """Return a shape with axes of unknown size, of size 1 and of others."""
    return tuple([[1, 2, 3, rows(1), rows(2)][k] for k in rng.integers(0, 5, rank)])


# Ops on the shapes of two tensors of as many axes, a number that is no size, and the count of axes.
ON_SHAPES: dict[str, Callable[[Any, Any, int], list[Any]]] = {
    "AddV2": lambda a, b, n: [a, b],
    "BroadcastGradientArgs": lambda a, b, n: [a, b],
    "Cast": lambda a, b, n: [a],
    "ConcatV2": lambda a, b, n: [[a, b], 0],
    "ConcatOffset": lambda a, b, n: [n - 1, [a, b]],
    "Cumsum": lambda a, b, n: [a, 0],
    "DynamicStitch": lambda a, b, n: [[np.arange(n), np.arange(n, 2 * n)], [a, b]],
    "Equal": lambda a, b, n: [a, b],
    "ExpandDims": lambda a, b, n: [a, 0],
    "FloorDiv": lambda a, b, n: [a, 2],
    "FloorMod": lambda a, b, n: [a, 2],
    "GatherV2": lambda a, b, n: [a, np.arange(n)[::-1].copy(), 0],
    "Greater": lambda a, b, n: [a, b],
    "GreaterEqual": lambda a, b, n: [a, b],
    "Identity": lambda a, b, n: [a],
    "Less": lambda a, b, n: [a, b],
    "LessEqual": lambda a, b, n: [a, b],
    "LogicalAnd": lambda a, b, n: [tf.raw_ops.Less(x=a, y=b), tf.raw_ops.Greater(x=a, y=0)],
    "LogicalNot": lambda a, b, n: [tf.raw_ops.Less(x=a, y=b)],
    "LogicalOr": lambda a, b, n: [tf.raw_ops.Less(x=a, y=b), tf.raw_ops.Less(x=b, y=a)],
    "Max": lambda a, b, n: [a, 0],
    "Maximum": lambda a, b, n: [a, b],
    "Min": lambda a, b, n: [a, 0],
    "Minimum": lambda a, b, n: [a, b],
    "Mul": lambda a, b, n: [a, b],
    "Neg": lambda a, b, n: [a],
    "Pack": lambda a, b, n: [[a, b]],
    "Prod": lambda a, b, n: [a, 0],
    "Range": lambda a, b, n: [0, n, 1],
    "Reshape": lambda a, b, n: [a, [-1, 1]],
    "Select": lambda a, b, n: [tf.raw_ops.Equal(x=np.arange(n), y=1), a, b],
    "SelectV2": lambda a, b, n: [tf.raw_ops.Equal(x=np.arange(n), y=1), a, b],
    "Slice": lambda a, b, n: [a, [0], [n - 1]],
    "Split": lambda a, b, n: [0, tf.raw_ops.ConcatV2(values=[a, b], axis=0)],
    "SplitV": lambda a, b, n: [a, [n - 1, -1], 0],
    "StridedSlice": lambda a, b, n: [a, [-1], [n], [1]],
    "Sub": lambda a, b, n: [a, b],
    "Sum": lambda a, b, n: [a, 0],
    "Tile": lambda a, b, n: [a, [2]],
    "Unpack": lambda a, b, n: [a],
}
# The broadcast of one row to one: an axis more or less of size 1 is summed over.
FROM_TWO_ROWS = {"BroadcastGradientArgs"}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("op_type", sorted(ON_SHAPES))
def test_folds_hold_for_every_size(op_type: str) -> None:
    rng = np.random.default_rng(1)
    count = 0
    for _ in range(40):
        rank = int(rng.integers(1, 4))
        shapes = [sized(rng, rank), sized(rng, rank)]
        shapes[1] = tuple([b if 1 in (a, b) or rng.random() < 0.5 else a for a, b in zip(*shapes, strict=True)])
        try:
            outputs = on_shapes(op_type, shapes, rank)
        except ValueError:
            continue  # shapes that do not fit for every size
        for number in (2, 5) if op_type in FROM_TWO_ROWS else (1, 2, 5):
            point = {ROWS: number}
            values = [np.array(shape_at(shape, point), np.int32) for shape in shapes]
            try:
                wanted = make(op_type, ON_SHAPES[op_type](*values, rank), attributes_of(op_type))
            except tf.errors.InvalidArgumentError:
                assert not outputs, f"{op_type} of {shapes} was folded, and TensorFlow refuses it"
                continue
            for k, found in outputs.items():
                np.testing.assert_array_equal(values_at(found, point), wanted[k], err_msg=f"{op_type} of {shapes}")
                count += 1
    assert count


def attributes_of(op_type: str) -> dict[str, Any]:
    return {"Cast": {"DstT": tf.int64}, "Split": {"num_split": 2}, "SplitV": {"num_split": 2}}.get(op_type, {})


def on_shapes(op_type: str, shapes: list[Any], rank: int) -> dict[int, np.ndarray]:
    """Return what an op on the shapes of two tensors is folded to, by output."""
    names = ["x", "y"]
    with tf.Graph().as_default() as graph:
        known = [tuple([None if isinstance(size, Size) else size for size in shape]) for shape in shapes]
        tensors = [tf.compat.v1.placeholder(tf.float32, s, n) for s, n in zip(known, names, strict=True)]
        operands = ON_SHAPES[op_type](*[tf.raw_ops.Shape(input=t) for t in tensors], rank)
        outputs = make(op_type, operands, attributes_of(op_type))
    program = read(graph, outputs, names, dict(zip(names, shapes, strict=True)))
    found = {}
    for k, tensor in enumerate(program.outputs):
        op = program.ops[tensor.op]
        if op.type == SIZES:
            found[k] = op.yields
        elif op.type == "Const":
            found[k] = constant_value(op.node).astype(object)
    return found


BROADCASTING = [tf.math.xlogy, tf.math.xlog1py, tf.math.xdivy, tf.math.zeta, tf.math.igamma, tf.math.igammac]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shape", "unknown"),
    [*[(shape, False) for shape in [(6, 1), (1, 6), (1, 1), (6, 1, 2), (6, 3)]], ((6, 1), True), ((6, 1, 2), True)],
)
def test_gradients_along_axes_of_size_one(shape: tuple[int, ...], unknown: bool) -> None:
    """Of equal shapes nothing is broadcast, axes of size 1 neither: the gradient has the shape of its operand."""

    def f(x: tf.Tensor) -> list[tuple[tf.Tensor, tf.Tensor]]:
        found = []
        for function in BROADCASTING:
            with tf.GradientTape() as tape:
                tape.watch(x)
                others = tf.ones_like(x) * 2, tf.fill(shape[1:], tf.reduce_max(x))
                y = tf.reduce_sum(function(x + 1.5, others[0]) * function(x + 1.5, others[1]))
            gradient = tape.gradient(y, x)
            found.append((gradient, tf.reduce_sum(gradient * x)))
        return found

    x = tf.reshape(tf.range(1.0, np.prod(shape) + 1, dtype=tf.float64), shape)
    signature = [tf.TensorSpec((None, *shape[1:]), tf.float64)] if unknown else None
    for devices in (1, 3):
        parallel = gs.parallelize(tf.function(f, input_signature=signature), devices=devices)
        assert_close(parallel(x), f(x), f"{devices} devices")
