"""What is in scope while a program is made: every value, computed eagerly, for one or for several batch sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from tests.fuzzing.program import OTHERS, ROWS, Dim, Input, Line, helper_names, size_of
from tests.fuzzing.shapes import SIZES, Bound, Dims, make, match

MOST_ENTRIES = 4000
MOST_INPUTS = 7
_OFTEN = 0.8  # how often an input is a variable where these are what is looked at
LARGEST = 1e4  # beyond, the sine of a rounding error is no small number any more
_FLOATS = {"bfloat16", "float16", "float32", "float64", "complex64", "complex128"}
_DTYPES = {"int8", "uint8", "int32", "uint32", "int64", "uint64", "bool", "string", *_FLOATS}


@dataclass(frozen=True)
class Kind:
    """A kind of operands: dtype, how an argument of it is made, and how it is made of what is in scope."""

    dtype: str
    values: str
    wrapped: str = "{}"
    variable: float = 0.0  # how often it is a variable


_NORMAL = "random.standard_normal({})"
_COMPLEX = "random.standard_normal({}) + 1j * random.standard_normal({})"
KINDS = {
    "f": Kind("float64", _NORMAL, variable=0.5),
    "w": Kind("float64", _NORMAL, variable=1.0),
    "p": Kind("float64", _NORMAL, "(tf.abs({}) + 0.5)"),
    "q": Kind("float64", _NORMAL, "tf.sigmoid({})"),
    "m": Kind("float64", _NORMAL, "(tf.abs({}) + 1.1)"),
    "spd": Kind(
        "float64",
        _NORMAL,
        "(tf.matmul({0}, {0}, transpose_b=True) + tf.linalg.diag(3.0 + 0.0 * {0}[..., 0]))",
    ),
    "F": Kind("float32", f"({_NORMAL}).astype('f')"),
    "Q": Kind("float32", f"({_NORMAL}).astype('f')", "tf.sigmoid({})"),
    "h": Kind("float16", f"({_NORMAL}).astype('e')"),
    "c": Kind("complex128", _COMPLEX),
    "C": Kind("complex64", f"({_COMPLEX}).astype('F')"),
    "i": Kind("int32", "random.integers(-4, 9, {}).astype('i')"),
    "l": Kind("int64", "random.integers(-4, 9, {})"),
    "n": Kind("int32", "random.integers(0, 9, {}).astype('i')", "(tf.abs({}) % 9 + 1)"),
    "u": Kind("uint8", "random.integers(0, 256, {}).astype('u1')"),
    "b": Kind("bool", "random.random({}) < 0.5"),
    "s": Kind("string", "random.choice(['a b', 'Cde', '', '12', 'a'], {})"),
    "ragged": Kind("ragged", f"tf.ragged.boolean_mask({_NORMAL}, random.random({{}}) < 0.6)"),
    "sparse": Kind("sparse", f"tf.sparse.from_dense({_NORMAL} * (random.random({{}}) < 0.6))"),
}


@dataclass(frozen=True)
class Entry:
    """A tensor in scope: the expression that reads it, its dtype and shape."""

    expression: str
    dtype: str
    dims: Dims


class UnfitError(Exception):
    """A line cannot be made: nothing fits, or TensorFlow does not take it."""


class Scope:
    """Inputs, lines and values so far; grows by `operand` and `add`."""

    def __init__(
        self,
        rng: np.random.Generator,
        rows: Sequence[int],
        split_axis_zero: bool,
        many_variables: bool = False,
        open_sizes: bool = False,
    ):
        self.rng = rng
        self.rows = tuple(rows)
        self.split_axis_zero = split_axis_zero
        self.many_variables = many_variables
        self.open = (ROWS, OTHERS) if open_sizes else (ROWS,) if len(rows) > 1 else ()
        self.sizes = [*SIZES, *[OTHERS] * 8] if open_sizes else SIZES
        self.environments = [helper_names() for _ in rows]
        for environment in self.environments:
            environment["numbers"] = tf.random.Generator.from_seed(1)
        self.arguments: list[Input] = []
        self.variables: list[Input] = []
        self.lines: list[Line] = []
        self.pool: list[Entry] = []

    def evaluate(self, expression: str) -> list[Any]:
        """Return the value of an expression for each number of rows."""
        code = compile(expression, "<fuzzed>", "eval")
        try:
            return [eval(code, environment) for environment in self.environments]
        except Exception as error:  # whatever TensorFlow says to a random line
            raise UnfitError(f"{expression}: {error}") from error

    def operand(self, kind: str, pattern: str | None, bound: Bound) -> tuple[str, Dims, Bound]:
        """Return an expression for an operand of a template: of something in scope, or of a new argument."""
        rng, wanted = self.rng, KINDS[kind]
        fits = []
        for entry in self.pool:
            found = match(pattern, entry.dims, bound) if pattern is not None else bound
            is_one = wanted.variable < 1 or entry.expression[0] == "w"
            if entry.dtype == wanted.dtype and is_one and found is not None:
                fits.append((entry.expression, entry.dims, found))
        full = len(self.arguments) + len(self.variables) >= MOST_INPUTS
        if fits and (full or rng.random() < 0.8):
            expression, dims, found = fits[max(rng.integers(len(fits)), rng.integers(len(fits)))]
        elif full:
            raise UnfitError(f"nothing of kind {kind} and shape {pattern}")
        else:
            if kind in ("ragged", "sparse"):
                pattern = "a3"
            anything = "abcd"[: rng.choice([0, 1, 1, 2, 2, 2, 3, 3, 4])]
            dims, found = make(anything if pattern is None else pattern, bound, rng, self.sizes)
            expression = self._new_input(wanted, dims)
            found = bound if pattern is None else found
        return wanted.wrapped.format(expression), dims, found

    def _new_input(self, kind: Kind, dims: Dims) -> str:
        number = len(self.arguments) + len(self.variables)
        always = kind.variable == 1
        often = max(kind.variable, _OFTEN) if self.many_variables and kind.variable else kind.variable
        may_be = not any(isinstance(dim, str) for dim in dims) or (self.many_variables and len(self.rows) == 1)
        if always or (self.arguments and may_be and self.rng.random() < often):
            if any(isinstance(dim, str) for dim in dims) and len(self.rows) > 1:
                raise UnfitError("a variable is no batch")
            numbers = tuple([int_of(dim, self.rows) for dim in dims])
            made = Input(f"w{number}", kind.values, numbers, kind.dtype)
            self.variables.append(made)
        else:
            made = self._argument(f"x{number}", kind, dims)
            self.arguments.append(made)
        for environment, rows in zip(self.environments, self.rows, strict=True):
            value = eval(made.source, environment, {"rows": rows})
            environment[made.name] = tf.Variable(value) if made in self.variables else value
        self._know(made.name, [environment[made.name] for environment in self.environments])
        return made.name

    def _argument(self, name: str, kind: Kind, dims: Dims) -> Input:
        """Return an argument; a size that equals the batch is the batch, or is so by chance."""
        if kind.dtype in ("ragged", "sparse"):
            if len(self.rows) > 1:
                raise UnfitError("the rows of a composite tensor are known")
            return Input(name, kind.values, dims, kind.dtype)
        if len(self.rows) == 1:
            dims = tuple([ROWS if dim == self.rows[0] and self.rng.random() < 0.7 else dim for dim in dims])
        axes = [axis for axis, dim in enumerate(dims) if dim == ROWS and (axis == 0 or not self.split_axis_zero)]
        axis = axes[self.rng.integers(len(axes))] if axes and self.rng.random() < 0.9 else None
        return Input(name, kind.values, dims, kind.dtype, axis)

    def add(self, expression: str) -> bool:
        """Add a line, if it has a value that a later line may want; return whether it has."""
        values = self.evaluate(expression)
        line = Line(f"v{len(self.lines)}", expression)
        if not all(map(self._sound, values)) or not self._know(line.target, values):
            return False
        for environment, value in zip(self.environments, values, strict=True):
            environment[line.target] = value
        self.lines.append(line)
        return True

    @contextmanager
    def names(self, **values: Sequence[Any]) -> Iterator[None]:
        """Let expressions also read these names: what a function in a line takes."""
        before = list(self.pool)
        for name, by_rows in values.items():
            self._know(name, by_rows)
            for environment, value in zip(self.environments, by_rows, strict=True):
                environment[name] = value
        try:
            yield
        finally:
            inputs = [e for e in self.pool[len(before) :] if e.expression[0] in "xw"]
            self.pool = before + inputs

    def dims(self, values: Sequence[Any]) -> Dims:
        """Return a shape; the number of rows is recognized where several are tried."""
        sizes = zip(*[tuple(value.shape) for value in values], strict=True)
        is_open = {tuple([size_of(dim, rows) for rows in self.rows]): dim for dim in (OTHERS, ROWS) if dim in self.open}
        return tuple([is_open.get(size, size[0]) for size in sizes])

    def _know(self, expression: str, values: Sequence[Any]) -> bool:
        """Put a value, or the tensors that it is made of, into the pool."""
        if isinstance(values[0], (list, tuple)):
            parts = [zip(*values, strict=False)] if len({len(value) for value in values}) == 1 else []
            known = [self._know(f"{expression}[{i}]", part) for p in parts for i, part in enumerate(p)]
            return any(known)
        for composite, name in ((tf.RaggedTensor, "ragged"), (tf.SparseTensor, "sparse")):
            if isinstance(values[0], composite):
                self.pool.append(Entry(expression, name, ()))
                return True
        if not all(isinstance(value, (tf.Tensor, tf.Variable)) for value in values):
            return False
        dtype = values[0].dtype.name
        if dtype in _DTYPES and len({value.shape.rank for value in values}) == 1:
            self.pool.append(Entry(expression, dtype, self.dims(values)))
            return True
        return False

    def _sound(self, value: Any) -> bool:
        """Return whether numbers are neither many nor large."""
        for tensor in tf.nest.flatten(value, expand_composites=True):
            if isinstance(tensor, tf.Tensor) and tensor.shape.num_elements() > MOST_ENTRIES:
                return False
            if isinstance(tensor, tf.Tensor) and (tensor.dtype.is_floating or tensor.dtype.is_complex):
                sizes = np.abs(tensor.numpy().astype(np.complex128))
                finite = sizes[sizes < 1e300]  # the lowest number there is stands for minus infinity
                if (finite.size < sizes.size and self.rng.random() < 0.9) or np.max(finite, initial=0) > LARGEST:
                    return False
        return True


def int_of(dim: Dim, rows: Sequence[int]) -> int:
    """Return a size that is at most the real one, whatever the number of rows."""
    return min([size_of(dim, count) for count in rows])
