"""What a case of the conformance table is, and how its arguments are made.

An operand is written as its shape, one character per axis: `"b43"` is an argument of shape [rows, 4, 3] that is split
along axis 0, `"4b"` one of shape [4, rows] split along axis 1, `"43"` one that stays whole, `"B43"` one that is as
large as the batch and stays whole, and `"+43"` a partial sum: an argument [rows, 4, 3], summed over its rows before
the op sees it. Anything else is a constant, or a function from the number of rows to one.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from graphsplit.program.undefined_outputs import undefined_outputs

Values = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.standard_normal(shape)


@dataclass(frozen=True)
class Arg:
    """An argument: its shape as written above, and its values."""

    shape: str
    values: Values = normal

    @property
    def axis(self) -> int | None:
        return 0 if self.partial else self.shape.find("b") if "b" in self.shape else None

    @property
    def partial(self) -> bool:
        return self.shape.startswith("+")

    def make(self, rng: np.random.Generator, rows: int) -> np.ndarray:
        return self.values(rng, tuple(rows if c in "bB+" else int(c) for c in self.shape))


def kind(values: Values) -> Callable[[str], Arg]:
    return lambda shape: Arg(shape, values)


F32 = kind(lambda rng, shape: rng.standard_normal(shape).astype(np.float32))
POSITIVE = kind(lambda rng, shape: rng.uniform(0.5, 3.0, shape))
UNIT = kind(lambda rng, shape: rng.uniform(0.05, 0.95, shape))
UNIT32 = kind(lambda rng, shape: rng.uniform(0.05, 0.95, shape).astype(np.float32))
ABOVE_ONE = kind(lambda rng, shape: rng.uniform(1.1, 4.0, shape))
BOOL = kind(lambda rng, shape: rng.random(shape) < 0.5)
COMPLEX = kind(lambda rng, shape: rng.standard_normal(shape) + 1j * rng.standard_normal(shape))
WITH_NANS = kind(lambda rng, shape: np.where(rng.random(shape) < 0.5, rng.choice([np.nan, np.inf], shape), 1.0))
SPD = kind(lambda rng, shape: (a := rng.standard_normal(shape)) @ np.swapaxes(a, -1, -2) + 3 * np.eye(shape[-1]))


def ints(below: int, start: int = 0, dtype: Any = np.int32) -> Callable[[str], Arg]:
    return kind(lambda rng, shape: rng.integers(start, below, shape).astype(dtype))


def distinct(shape: str) -> Arg:
    """Numbers that all differ, for ops that choose among them."""
    return Arg(shape, lambda rng, sizes: rng.permutation(int(np.prod(sizes))).reshape(sizes).astype(np.float64))


@dataclass(frozen=True)
class Case:
    """One op, its operands, and what is expected of its plan.

    Attributes:
      function: from the arguments as tensors (and the number of rows) to the results.
      arguments: how each argument is made and split.
      partial: operands of the op that must arrive as partial sums; its result must then be one as well.
      demand: whether no operand is sharded and the op runs on the shards because its result is read in pieces.
      at_home: how many operations that carry rows run at home.
      answered: whether the op can be made in pieces when all its operands are constants.
    """

    op_type: str
    name: str
    function: Callable[..., Any] = field(repr=False)
    arguments: tuple[Arg, ...]
    partial: tuple[int, ...] = ()
    demand: bool = False
    at_home: int = 0
    answered: bool = True

    def make_arguments(self, rows: int) -> list[tf.Tensor]:
        rng = np.random.default_rng([rows, zlib.crc32(self.name.encode())])
        return [tf.constant(argument.make(rng, rows)) for argument in self.arguments]

    def run(self, rows: int, tensors: Sequence[Any]) -> list[tf.Tensor]:
        """Run the op on the arguments, partial sums summed first; return what TensorFlow defines of its results."""
        return [tensor for i, tensor in enumerate(self._results(rows, tensors)) if i not in self.undefined]

    @cached_property
    def undefined(self) -> frozenset[int]:
        """The results that may hold anything, and are not compared."""
        with tf.Graph().as_default():
            results = self._results(3, self.make_arguments(3))
        found = enumerate(results)
        return frozenset(i for i, t in found if t.value_index in undefined_outputs(t.op.node_def))

    def _results(self, rows: int, tensors: Sequence[Any]) -> list[tf.Tensor]:
        given = [
            tf.raw_ops.Sum(input=tensor, axis=[0]) if argument.partial else tensor
            for argument, tensor in zip(self.arguments, tensors, strict=True)
        ]
        return [tensor for tensor in tf.nest.flatten(self.function(rows, *given)) if isinstance(tensor, tf.Tensor)]


CASES: list[Case] = []


def first_of_each(cases: Sequence[Case]) -> list[Any]:
    """Return cases as parameters of a test: the first of each op type, and the others with the long tests."""
    seen: set[str] = set()
    found = []
    for case in cases:
        found.append(case if case.op_type not in seen else pytest.param(case, marks=pytest.mark.long, id=case.name))
        seen.add(case.op_type)
    return found


def call(op_type: str, *operands: Any, **attributes: Any) -> Any:
    """Make exactly this op, operands in their order."""
    make = getattr(tf.raw_ops, op_type)
    return make(**dict(zip(inspect.signature(make).parameters, operands, strict=False)), **attributes)


def _is_argument(operand: Any) -> bool:
    return isinstance(operand, (str, Arg))


def _is_several(operand: Any) -> bool:
    return isinstance(operand, list) and any(map(_is_argument, operand))


def _as_argument(operand: str | Arg) -> Arg:
    return Arg(operand) if isinstance(operand, str) else operand


def case(op_type: str, *operands: Any, expect: dict[str, Any] | None = None, **attributes: Any) -> None:
    """Add a case. A list among the operands holds several operands of an op that takes any number."""
    flat = [o for operand in operands for o in (operand if _is_several(operand) else [operand])]
    arguments = [_as_argument(o) for o in flat if _is_argument(o)]

    def function(rows: int, *tensors: tf.Tensor) -> Any:
        rest = iter(tensors)

        def resolve(operand: Any) -> Any:
            if _is_several(operand):
                return [resolve(entry) for entry in operand]
            if _is_argument(operand):
                return next(rest)
            return operand(rows) if callable(operand) else operand

        return call(op_type, *[resolve(operand) for operand in operands], **attributes)

    partial = tuple(i for i, o in enumerate(flat) if _is_argument(o) and _as_argument(o).partial)
    add(op_type, function, arguments, partial=partial, **(expect or {}))


def add(op_type: str, function: Callable[..., Any], arguments: Sequence[Any], **expect: Any) -> None:
    """Add a case that needs more than one op."""
    made = tuple(map(_as_argument, arguments))
    expect.setdefault("demand", not expect.get("partial") and all(a.axis is None for a in made))
    number = sum(c.op_type == op_type for c in CASES)
    name = f"{op_type}-{number}-{','.join(a.shape for a in made)}"
    CASES.append(Case(op_type, name, function, made, **expect))
