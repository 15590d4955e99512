"""The one oracle: a parallelized function against the function itself, and proof that the work was sharded."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import Partial
from graphsplit.emission import check_emitted, emit
from graphsplit.planning.communication.bucketing import leading_to_shards
from graphsplit.planning.costs.exchanges import EXCHANGE_BYTES

TOLERANCE = {tf.float16: 2e-3, tf.bfloat16: 2e-2, tf.float32: 1e-5, tf.float64: 1e-12, tf.complex64: 1e-5}


def assert_close(actual: Any, expected: Any, what: str = "output", tolerance: float | None = None) -> None:
    """Compare nested results: same structure, dtypes and shapes; numbers to the tolerance of their dtype.

    The tolerance is relative to the largest entry of the tensor: a sum in another order changes small entries of a
    tensor by rounding errors of its large ones.
    """
    tf.nest.assert_same_structure(actual, expected, expand_composites=True)
    for i, (a, b) in enumerate(zip(_leaves(actual), _leaves(expected), strict=True)):
        assert isinstance(a, tf.Tensor) == isinstance(b, tf.Tensor), f"{what} {i}"
        if not isinstance(b, tf.Tensor):
            assert type(a) is type(b), f"{what} {i}"
            assert a == b or not isinstance(b, (bool, int, float, str)), f"{what} {i}"
            continue
        assert a.dtype == b.dtype, f"{what} {i}"
        assert a.shape == b.shape, f"{what} {i}"
        allowed = TOLERANCE.get(b.dtype) if tolerance is None else tolerance
        if allowed is None:
            np.testing.assert_array_equal(a.numpy(), b.numpy(), err_msg=f"{what} {i}")
            continue
        kind = np.complex128 if b.dtype.is_complex else np.float64
        a64, b64 = a.numpy().astype(kind), b.numpy().astype(kind)
        scale = np.max(np.abs(b64[np.isfinite(b64)]), initial=1e-30)
        np.testing.assert_allclose(a64, b64, rtol=0, atol=allowed * scale, err_msg=f"{what} {i}")


def _leaves(value: Any) -> list[Any]:
    """Take a result apart with TensorFlow's own functions, since graphsplit's are what put it together.

    TensorFlow takes dataclasses for leaves: each becomes its type and its fields.
    """
    found: list[Any] = []
    for leaf in tf.nest.flatten(value, expand_composites=True):
        if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            fields = [getattr(leaf, field.name) for field in dataclasses.fields(leaf)]
            found += [type(leaf).__name__, *_leaves(fields)]
        else:
            found.append(tf.convert_to_tensor(leaf) if isinstance(leaf, (np.ndarray, np.generic)) else leaf)
    return found


def assert_law(
    make: Callable[[], tuple[Callable[..., Any], Sequence[tf.Variable]]],
    calls: Sequence[tuple[Any, ...]],
    *,
    devices: int = 3,
    sharded: Sequence[str] = (),
    at_home: int | None = 0,
    tolerance: float | None = None,
    **options: Any,
) -> gs.inspect.Plan:
    """Run a function and its parallelized twin, made anew each, on the same calls; compare results and variables.

    The function runs in eager code, as it is called by whoever has one device. If sums lead on to shards, its twin runs
    in both ways: these sums go through one device, as between logical devices of one CPU, and from each shard to each,
    as between GPUs.

    Args:
      make: returns a function and its variables, the same every time it is called.
      calls: the arguments of each call.
      sharded: op types that must run on the shards.
      at_home: how many ops may carry the batch and run at home; None for any number.

    Returns:
      The plan of the last call.
    """
    plan = _assert_law(make, calls, devices, sharded, at_home, tolerance, options)
    if (at_once := with_sums_at_once(plan, options)) is not None:
        _assert_law(make, calls, devices, sharded, at_home, tolerance, at_once)
    return plan


def with_sums_at_once(plan: gs.inspect.Plan, options: dict[str, Any]) -> dict[str, Any] | None:
    """Return options by which sums that shards wait for go from each to each; None if a plan has none, or they do."""
    tuning = options.get("tuning", {})
    sums = {move.tensor for move in plan.moves if isinstance(move.source, Partial)}
    if "exchange_bytes" in tuning or not sums & leading_to_shards(plan.program, plan.steps):
        return None
    return {**options, "tuning": {**tuning, "exchange_bytes": EXCHANGE_BYTES}}


def _assert_law(
    make: Callable[[], tuple[Callable[..., Any], Sequence[tf.Variable]]],
    calls: Sequence[tuple[Any, ...]],
    devices: int,
    sharded: Sequence[str],
    at_home: int | None,
    tolerance: float | None,
    options: dict[str, Any],
) -> gs.inspect.Plan:
    single, single_variables = make()
    many, many_variables = make()
    assert calls, "no calls: nothing is compared"
    parallel = gs.parallelize(many, devices=devices, **options)
    for i, arguments in enumerate(calls):
        # (a variable that is returned is its value, as a `tf.function` returns it)
        expected = tf.nest.map_structure(
            lambda v: tf.identity(v) if isinstance(v, tf.Variable) else v, single(*arguments)
        )
        actual = parallel(*arguments)
        assert_close(actual, expected, f"call {i}: output", tolerance)
        pairs = zip(many_variables, single_variables, strict=True)
        for a, b in pairs:
            name = getattr(b, "path", b.name)
            assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), f"call {i}: variable {name}", tolerance)
    plan = parallel.plan(*calls[-1])
    plan.check()
    plan.program.check()
    check_emitted(plan, emit(plan))
    kinds = {op.type for op in plan.sharded_ops}
    assert set(sharded) <= kinds, f"not sharded: {set(sharded) - kinds}\n{plan}"
    if at_home is not None:
        assert len(plan.unsharded_ops) + len(plan.rows_kept) == at_home, str(plan)
    return plan


def squares_step(model: Any) -> tuple[Callable[..., Any], Sequence[tf.Variable]]:
    """Return a training step of a Keras model that makes its results small, and the model's variables."""

    def step(x: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x, training=True) ** 2)
        for v, g in zip(model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True):
            v.assign_sub(0.1 * g)
        return loss

    return step, model.variables


def rows(count: int, *rest: int) -> tf.Tensor:
    return tf.random.stateless_normal((count, *rest), [count, 7], dtype=tf.float64)


def sharded_types(function: gs.ParallelFunction, *args: Any, **kwargs: Any) -> set[str]:
    plan = function.plan(*args, **kwargs)
    plan.check()
    return {op.type for op in plan.sharded_ops}


def check(fn: Any, *args: Any, sharded: str | None = None, devices: Any = 3, **options: Any) -> gs.ParallelFunction:
    parallel = gs.parallelize(fn, devices=devices, **options)
    assert_close(parallel(*args), fn(*args))
    if sharded:
        assert sharded in sharded_types(parallel, *args)
    return parallel


def compiled_calls(parallel: gs.ParallelFunction, *arguments: Any) -> set[str]:
    """Return the devices of the emitted graph's compiled calls."""
    graph = parallel.graph_def(*arguments)
    library = {f.signature.name: f for f in graph.library.function}
    calls = [n for n in graph.node if n.op == "PartitionedCall"]
    assert all(n.attr["_XlaMustCompile"].b and library[n.attr["f"].func.name].attr["_XlaMustCompile"].b for n in calls)
    return {n.device for n in calls}
