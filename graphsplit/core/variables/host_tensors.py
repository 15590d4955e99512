"""Tensors in the host's memory, with entries of arrays and files: they are there once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

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
    own = _aligned(list(map(len, at)), np.dtype(dtype.as_numpy_dtype))
    if own.size and not is_cast and hasattr(array, "read_direct") and all(isinstance(index, slice) for index in where):
        array.read_direct(own, where)
    elif own.size:
        own[...] = array[where]
    return _as_tensor(own, dtype)


def _aligned(shape: Sequence[int], kind: np.dtype[Any]) -> np.ndarray[Any, np.dtype[Any]]:
    size = int(np.prod(shape)) * kind.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    found: np.ndarray[Any, np.dtype[Any]] = memory[first : first + size].view(kind).reshape(shape)
    return found


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
    return tuple([slice(own.start, own.stop) if isinstance(own, range) else list(own) for own in at])
