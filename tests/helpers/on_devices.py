"""The law on named devices, CPU or GPU, and proof that what was asked of a device ran there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import graphsplit as gs
from graphsplit.core.devices import canonical_name
from tests.helpers.law import assert_law

Make = Callable[[], tuple[Callable[..., Any], Sequence[tf.Variable]]]

# Why an operation may run on another device than the one asked for: it cannot run there, or is no operation any more.
_EXCUSED = (
    "no GPU kernel for ",
    "must run on the device of the variable or table that it uses: ",
    "folded into a constant, ",
    "lowered to its parts, ",
)


def assert_law_on(
    devices: Sequence[str], make: Make, calls: Sequence[tuple[Any, ...]], tolerance: float | None = None, **options: Any
) -> gs.inspect.Plan:
    """Compare with the unsplit function, on the first of the devices; then look where TensorFlow ran what."""
    with tf.device(devices[0]):
        plan = assert_law(make, calls, devices=list(devices), at_home=None, tolerance=tolerance, **options)
        function, _ = make()
        placement = gs.parallelize(function, devices=list(devices), **options).placement(*calls[-1], actual=True)
    assert misplaced(placement) == []
    assert idle(placement, devices) == []
    return plan


def misplaced(placement: gs.inspect.Placement) -> list[str]:
    """Return the operations that ran elsewhere than asked for, for no reason that forces them.

    Arguments are where the caller has them: on CPU:0, where no device of the call is that one.
    """
    moved = [op for op in placement.moved if op.type not in ("Placeholder", "_Arg")]
    return [f"{op.name}: {op.reason}" for op in moved if not op.reason.startswith(_EXCUSED)]


def idle(placement: gs.inspect.Placement, devices: Sequence[str]) -> list[str]:
    """Return the devices on which no shard's operation did any arithmetic."""
    working = {op.actual for op in placement.ops.values() if op.shard is not None and op.flops}
    return [name for name in devices if canonical_name(name) not in working]
