"""The law over random variables: shapes, dtypes, layouts, numbers of devices and of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.law import assert_law

LAYOUTS = ("home", "sharded", "replicated")
DTYPES = (
    *(tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int8, tf.int32, tf.int64, tf.uint8),
    *(tf.complex64, tf.complex128, tf.bool),
)
WIDTH = 6


def shape_of(rng: np.random.Generator) -> tuple[int, ...]:
    """Return a shape: of nothing, of little, of a length that does not divide, of something to be multiplied with."""
    kinds: list[tuple[int, ...]] = [
        (),
        (1,),
        (3,),
        (301,),
        (WIDTH, 67),
        (WIDTH, 2),
        (2, 1, 130),
        (97, WIDTH, 3),
        (0, 4),
    ]
    return kinds[int(rng.integers(len(kinds)))]


def made(seed: int, laid_out: bool, devices: int) -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
    """Return a function and its variables, the same for the same seed."""
    rng = np.random.default_rng(seed)
    chosen = [(shape_of(rng), DTYPES[int(rng.integers(len(DTYPES)))]) for _ in range(int(rng.integers(2, 6)))]
    values = [tf.cast(rng.integers(0, 4, shape), dtype) for shape, dtype in chosen]
    variables = [tf.Variable(value, name=f"variable_{k}") for k, value in enumerate(values)]
    layouts = {f"variable_{k}": str(rng.choice(LAYOUTS)) for k in range(len(variables))}
    updates = [int(rng.integers(4)) for _ in variables]
    if laid_out:
        gs.set_variable_layout(variables, layouts, devices)

    def function(x: tf.Tensor) -> list[tf.Tensor]:
        results = []
        for variable, how in zip(variables, updates, strict=True):
            if variable.dtype == tf.bool:
                variable.assign(tf.math.logical_xor(variable, tf.reduce_sum(tf.round(x)) > 0))
                results += [tf.reduce_any(variable), tf.transpose(variable)]
                continue
            total = tf.cast(tf.reduce_sum(tf.round(x)), variable.dtype)
            if how == 1:
                variable.assign_add(tf.ones_like(variable) * total)
            elif how == 2:
                variable.assign(variable * 2 + tf.cast(2, variable.dtype))
            elif how == 3:
                variable.assign_sub(variable // 2 if variable.dtype.is_integer else variable * total)
            if len(variable.shape) == 2 and variable.shape[0] == WIDTH and variable.dtype == x.dtype:
                results.append(x @ variable)
            results.append(tf.reduce_sum(variable) + total)
            results.append(tf.transpose(variable))
        return results

    return function, variables


@pytest.mark.sampled(2)
@pytest.mark.parametrize("seed", range(40))
def test_any_variables(seed: int):
    rng = np.random.default_rng([seed, 1])
    devices, rows = int(rng.integers(1, 6)), int(rng.integers(1, 9))
    calls = [(tf.cast(rng.integers(-1, 2, (count, WIDTH)), tf.float32),) for count in (rows, rows, rows + 1)]
    turns, several = iter([False, True]), []

    def make() -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
        several.append(made(seed, next(turns), devices))
        return several[-1]

    assert_law(make, calls, devices=devices, at_home=None)
    for variable in several[1][1]:
        parts = parts_of_variable(variable)
        if parts is not None and parts.layout == "replicated":
            handles = [part.handle for part in parts._parts] if parts.in_parts else []
            held = [tf.raw_ops.ReadVariableOp(resource=handle, dtype=variable.dtype).numpy() for handle in handles]
            for other in held[1:]:
                np.testing.assert_array_equal(other, held[0])


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
def test_variables_of_types_that_cannot_be_cut(layout: str):
    """TensorFlow cuts no numbers of four bits: such a variable stays whole, and can be copied."""
    dtype = tf.dtypes.experimental.int4
    v = tf.Variable(tf.cast(tf.reshape(tf.range(512) % 7, (64, 8)), dtype))

    def f(x):
        return tf.cast(tf.cast(v, tf.int32), tf.float32) + 1.0, tf.tanh(x)

    x = tf.ones((7, 3))
    expected = tf.function(f)(x)
    gs.set_variable_layout([v], layout, devices=3)
    for found, wanted in zip(gs.parallelize(f, devices=3)(x), expected, strict=True):
        tf.debugging.assert_near(found, wanted)
    assert (parts_of_variable(v) is None) == (layout == "sharded")


@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("dtype", [tf.dtypes.experimental.float8_e5m2, tf.dtypes.experimental.float8_e4m3fn])
def test_variables_of_eight_bit_floats(dtype: tf.DType, layout: str):
    plain, v = (tf.Variable(tf.cast(tf.reshape(tf.range(512.0) % 7, (64, 8)), dtype)) for _ in range(2))

    def step(v, x):
        v.assign(tf.cast(tf.cast(v, tf.float32) * 2.0, dtype))
        return tf.cast(v, tf.float32) + 1.0, tf.tanh(x)

    x = tf.ones((7, 3))
    expected = step(plain, x)
    gs.set_variable_layout([v], layout, devices=3)
    assert parts_of_variable(v) is not None
    for found, wanted in zip(gs.parallelize(lambda x: step(v, x), devices=3)(x), expected, strict=True):
        tf.debugging.assert_near(found, wanted)
    np.testing.assert_array_equal(tf.cast(v, tf.float32), tf.cast(plain, tf.float32))
