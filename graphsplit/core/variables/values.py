"""Values of variables that are several: taken apart and put together, and their gradients; and tensors on the host.

A host tensor shares its memory with the entries of an array or file: they are there once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from graphsplit.core.layouts import Cut, MeshDivision, Replicate


def pieces_of(value: tf.Tensor, division: MeshDivision) -> Iterator[tf.Tensor]:
    """Yield what each part has of a value; each is cut off when it is asked for.

    >>> import tensorflow as tf
    >>> from graphsplit.core.layouts import Cut
    >>> [piece.numpy().tolist() for piece in pieces_of(tf.range(5), Cut(0, 5, 2))]
    [[0, 1, 2], [3, 4]]
    """
    if isinstance(division, Replicate):
        yield from [value] * division.parts
    elif isinstance(division, Cut):
        axis = division.axis
        for blocks in division.ranges:
            whole = division.parts == 1
            yield (
                value
                if whole
                else _joined([_slice(value, axis, entries.start, len(entries)) for entries in blocks], axis)
            )
    else:
        for row, column in zip(division.rows, pieces_of(value, division.columns), strict=True):
            yield from pieces_of(column, row)


def whole_of(values: Iterable[tf.Tensor | None], division: MeshDivision) -> tf.Tensor | None:
    """Return the value whose parts these are; None if a part is missing of which there is no copy.

    Of copies no more are asked for than the first that is there.
    """
    if isinstance(division, Replicate):
        return next((value for value in values if value is not None), None)
    values = list(values)
    if isinstance(division, Cut):
        present = [value for value in values if value is not None]
        if len(present) < len(values):
            return None
        axis, cut = division.axis, division.ranges
        if division.blocks > 1 and len(present) > 1:
            by_part = [tf.split(part, list(map(len, ranges)), axis) for part, ranges in zip(present, cut, strict=True)]
            in_order = [pieces[k] for k in range(division.blocks) for pieces in by_part]
            return _joined(in_order, axis)
        return _joined(present, axis)
    columns = [
        whole_of(row_values, rows) for row_values, rows in zip(_by_column(values, division), division.rows, strict=True)
    ]
    return whole_of(columns, division.columns)


def gradient_of(values: Sequence[tf.Tensor], gradients: Sequence[Any], division: MeshDivision) -> tf.Tensor | None:
    """Return the gradient by a variable, given those by its parts, some of which may be None."""
    if len(gradients) == 1 or all(gradient is None for gradient in gradients):
        return gradients[0]
    if isinstance(division, Replicate):
        return tf.add_n([tf.convert_to_tensor(gradient) for gradient in gradients if gradient is not None])
    if isinstance(division, Cut):
        pairs = zip(values, gradients, strict=True)
        return whole_of([tf.zeros_like(v) if g is None else tf.convert_to_tensor(g) for v, g in pairs], division)
    grouped = list(zip(_by_column(values, division), _by_column(gradients, division), division.rows, strict=True))
    wholes = [whole_of(row_values, rows) for row_values, _, rows in grouped]
    return gradient_of(wholes, [gradient_of(*group) for group in grouped], division.columns)


def _by_column(values: Sequence[Any], division: Any) -> list[Sequence[Any]]:
    pairs = zip(division.firsts, division.rows, strict=True)
    return [values[first : first + row.parts] for first, row in pairs]


def _joined(pieces: Sequence[tf.Tensor], axis: int) -> tf.Tensor:
    return tf.concat(pieces, axis) if len(pieces) > 1 else pieces[0]


def _slice(value: tf.Tensor, axis: int, first: int, length: int) -> tf.Tensor:
    begin = [first if k == axis else 0 for k in range(value.shape.rank)]
    size = [length if k == axis else -1 for k in range(value.shape.rank)]
    return tf.slice(value, begin, size)


_ALIGNMENT = 64  # bytes; TensorFlow's kernels count on it


def host_tensor(array: Any, at: Sequence[Sequence[int]], dtype: tf.DType) -> tf.Tensor:
    """Return some entries of an array in the host's memory.

    They are read into the tensor's own memory. (`tf.convert_to_tensor` copies an array, and what it copied once more.)

    Args:
      array: it, or what stands for one in a file, read by slices (by `read_direct`, as those of h5py have, if it can).
      at: which entries, along each axis; a range, or a list along one of them.
      dtype: of the tensor.
    """
    where = indices_of(at)
    is_cast = array.dtype != dtype.as_numpy_dtype
    if not dtype.size or (is_cast and not (dtype.is_floating and tf.as_dtype(array.dtype).is_floating)):
        with tf.device("CPU:0"):
            return tf.convert_to_tensor(np.asarray(array[where]), dtype)
    copied = _aligned(list(map(len, at)), np.dtype(dtype.as_numpy_dtype))
    if (
        copied.size
        and not is_cast
        and hasattr(array, "read_direct")
        and all(isinstance(index, slice) for index in where)
    ):
        array.read_direct(copied, where)
    elif copied.size:
        copied[...] = array[where]
    return _as_tensor(copied, dtype)


def _aligned(shape: Sequence[int], kind: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    aligned: np.ndarray[Any, np.dtype[Any]] = memory[first : first + size].view(kind).reshape(shape)
    return aligned


def _as_tensor(array: np.ndarray[Any, np.dtype[Any]], dtype: tf.DType) -> tf.Tensor:
    """Return a tensor in the memory of an aligned array; for unusual dtypes a copy."""
    take = tf.experimental.dlpack.from_dlpack
    with tf.device("CPU:0"):
        if array.size and array.dtype.isbuiltin == 1 and array.dtype.kind in "fiu":
            return take(array.__dlpack__())
        if array.size and dtype == tf.bfloat16:  # (which numpy does not hand on)
            return tf.bitcast(take(array.view(np.uint16).__dlpack__()), dtype)
        return tf.convert_to_tensor(array, dtype)


def indices_of(at: Sequence[Sequence[int]]) -> tuple[slice | list[int], ...]:
    """Return what numpy and h5py take for some entries along each axis: slices, and lists of numbers."""
    return tuple(
        [slice(numbers.start, numbers.stop) if isinstance(numbers, range) else list(numbers) for numbers in at]
    )
