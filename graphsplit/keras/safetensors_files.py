"""Weights from files of safetensors, as Hugging Face has them: read by slices, a few bytes at a time."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import tensorflow as tf

from graphsplit.api.layouts.variable_layouts import variables_of
from graphsplit.core.patterns import fits
from graphsplit.core.requirements import needed
from graphsplit.core.variables.parted_variables import name_of
from graphsplit.errors import ArgumentError, GraphsplitError, bullet_list

SUFFIXES = (".safetensors", ".safetensors.index.json")
_AT_A_TIME = 1 << 24  # bytes that are read at once
_SHOWN = 20  # names in an error

TensorSource: TypeAlias = str | tuple[str, Sequence[int]]
"""The name of a tensor; or that and the order in which the variable has the tensor's axes, as numpy transposes."""
Names: TypeAlias = Mapping[str, TensorSource] | Callable[[str], TensorSource]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, as the variable has it that takes it.

    Attributes:
      path, name: where it is.
      axes: which axis of the tensor each axis is; None: they are the tensor's.
    """

    path: Path
    name: str
    axes: tuple[int, ...] | None = None

    @cached_property
    def _stored(self) -> tuple[tuple[int, ...], np.dtype[Any]]:
        with _opened(self.path) as file:
            tensor = file.get_slice(self.name)
            shape = tuple(tensor.get_shape())
            return shape, (tensor[0:0] if shape else file.get_tensor(self.name)).dtype

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its dtype."""
        return self._stored[1]

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, of transposed axes."""
        stored = self._stored[0]
        return tuple([stored[axis] for axis in self.axes]) if self.axes is not None else stored

    def read_direct(self, memory: np.ndarray[Any, Any], where: tuple[slice, ...]) -> None:
        """Read the entries of these slices into memory; of the file a few bytes are held at a time."""
        axes = self.axes if self.axes is not None else tuple(range(len(where)))
        into, at = memory.transpose(np.argsort(axes)), tuple([where[axes.index(axis)] for axis in range(len(axes))])
        if not at:
            with _opened(self.path) as file:
                memory[...] = file.get_tensor(self.name)
            return
        rows = max(1, _AT_A_TIME // max(1, math.prod(into.shape[1:]) * self.dtype.itemsize))
        for first in range(0, len(into), rows):
            chosen = (slice(at[0].start + first, min(at[0].start + first + rows, at[0].stop)), *at[1:])
            with _opened(self.path) as file:  # (what was read stays mapped until the file is closed)
                into[first : first + rows] = file.get_slice(self.name)[chosen]

    def __getitem__(self, where: tuple[slice | list[int], ...]) -> np.ndarray[Any, Any]:
        """Return entries, of which one axis may have a list: what lies between them is read, too."""
        around = [index if isinstance(index, slice) else slice(min(index), max(index) + 1) for index in where]
        entries: np.ndarray[Any, Any] = np.empty([index.stop - index.start for index in around], self.dtype)
        self.read_direct(entries, tuple(around))
        inside: list[Any] = [slice(None)] * len(where)
        for axis, index in enumerate(where):
            if not isinstance(index, slice):
                inside[axis] = [k - around[axis].start for k in index]
        return np.asarray(entries[tuple(inside)])


def stored_tensors(path: str) -> dict[str, Path]:
    """Return the file of each tensor, by its name.

    Args:
      path: of a file of safetensors, or of an index of several as Hugging Face writes it.
    """
    if not path.endswith(SUFFIXES[1]):
        with _opened(Path(path)) as file:
            return dict.fromkeys(file.keys(), Path(path))
    with readable(path):
        files = json.loads(Path(path).read_text("utf-8"))["weight_map"]
        file_by_name = {name: Path(path).parent / file for name, file in files.items()}
    if missing := sorted({str(file) for file in file_by_name.values() if not file.exists()}):
        raise ArgumentError(f"The index {path} names files that are not there:\n{bullet_list(missing)}")
    return file_by_name


def sources_of(
    target: Any, path: str, names: Names | None, ignore: Sequence[str]
) -> list[tuple[tf.Variable, StoredTensor]]:
    """Return which tensor each variable of a target takes; see `load_weights`."""
    files, ignore = stored_tensors(path), [ignore] if isinstance(ignore, str) else ignore
    variables = variables_of(list(target.weights) if hasattr(target, "weights") else target)
    named = [(name_of(variable), variable) for variable in variables]
    named = [pair for pair in named if not any(fits(pair[0], pattern) for pattern in ignore)]
    wrong, taken_tensors, taken = [], [], set()
    for name, count in Counter(name for name, _ in named).items():
        if count > 1:
            wrong.append(f"{name}: {count} variables have this name; load each in a call of its own")
    for name, variable in named:
        source = _source(name, names)
        called, axes = source if isinstance(source, tuple) else (source, None)
        if called not in files:
            wrong.append(f"{name}: no tensor {called!r}" if called else f"{name}: names has none for it")
            continue
        tensor = StoredTensor(files[called], called, None if axes is None else tuple(axes))
        stored = tensor._stored[0]
        taken.add(called)
        if axes is not None and sorted(axes) != list(range(len(stored))):
            wrong.append(f"{name}: {tuple(axes)} is no order of the axes of {called!r}, which has shape {stored}")
        elif tensor.shape != tuple(variable.shape):
            wrong.append(f"{name}: shape {tuple(variable.shape)}, and {called!r} gives {tensor.shape}")
        elif _kind(tensor.dtype) != _kind(variable.dtype):
            wrong.append(f"{name}: {variable.dtype.name}, and {called!r} is {tensor.dtype}")
        taken_tensors.append((variable, tensor))
    untaken = [name for name in files if name not in taken and not any(fits(name, pattern) for pattern in ignore)]
    wrong += [f"tensor {name!r}: no variable takes it" for name in sorted(untaken)]
    if wrong:
        raise ArgumentError(
            f"Variables of the target and tensors of {path} do not fit together:\n{bullet_list(wrong, _SHOWN)}\n"
            "Say names={variable: tensor}, or a function of a variable's name; (tensor, (1, 0)) transposes it. "
            "What ignore=['pattern', ...] fits is left out."
        )
    return taken_tensors


def _kind(dtype: Any) -> tuple[bool, bool, bool, bool]:
    """Return what numbers a dtype has; those of one kind are cast to each other."""
    tf_dtype = tf.as_dtype(dtype)
    return tf_dtype.is_floating, tf_dtype.is_integer, tf_dtype.is_complex, tf_dtype.is_bool


def _source(name: str, names: Names | None) -> TensorSource:
    if names is None:
        return name
    return names.get(name, "") if isinstance(names, Mapping) else names(name)


def _opened(path: Path) -> Any:
    safe_open = needed("safetensors", "safetensors", f"Reading {path}").safe_open
    with readable(path):
        return safe_open(str(path), "np")


@contextlib.contextmanager
def readable(path: str | os.PathLike[str]) -> Iterator[None]:
    """Say which file it is, if one that is opened or read is damaged, or is not what it is taken for."""
    try:
        yield
    except GraphsplitError:
        raise
    except Exception as error:  # each library has its own
        raise ArgumentError(f"{os.fspath(path)} cannot be read as weights: {error or type(error).__name__}") from error
