"""Programs in the manner of well-known tutorials, run against one device: differences, shares of the work, first calls.

The shares are counted, not timed: the floating-point operations of every node of the emitted graph, from
`graphsplit.inspect`. Home is a device of its own here, so what a device of a shard does is what runs on the shards,
in loops too.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from rich.table import Table

import graphsplit as gs
from benchmarks.coverage_models import Training
from benchmarks.programs import FLOAT32, LESS_SHARDED, PROGRAMS

ROWS = 11  # does not divide, and no width of any network is like it
MANY_ROWS = 509  # the share is that of a batch of a usual size: a prime, planned and not run


@dataclass(frozen=True)
class Outcome:
    """What one program does on several devices.

    Attributes:
      difference: the largest relative difference of an output or a variable to one device.
      dtype: of its numbers: differences are at rounding of that.
      flops, sharded_flops: of all nodes, and of those on the shards, for a batch of `MANY_ROWS` rows.
      at_home: what carries the batch and runs at home: "count x type: reason".
      whole_flops: the costliest of what runs at home: "type at source: share of all".
      first_call: seconds of the first call over those of the plain function's.
    """

    name: str
    difference: float
    dtype: str
    flops: int
    sharded_flops: int
    at_home: tuple[str, ...]
    whole_flops: tuple[str, ...]
    first_call: float

    @property
    def share(self) -> float:
        """The share of all floating-point operations that run on the shards."""
        return self.sharded_flops / self.flops if self.flops else 1.0


def run_program(name: str, devices: int) -> Outcome:
    """Run one program both ways on `ROWS` rows, and count what a step on `MANY_ROWS` rows does where.

    It takes one logical device more than the shards have, for what is at home.
    """
    with built(name) as training:
        arguments = training.inputs(ROWS)
        parallel = gs.parallelize(training.step, devices=devices)
        first_call = _first_call(training.step, arguments, parallel)
        start_elsewhere(parallel.variables(*arguments))
        difference = gs.verify(parallel, *arguments).largest
        flops, sharded, whole = count(training, devices)
        reasons = Counter(f"{op.type}: {reason}" for op, reason in parallel.plan(*arguments).unsharded_ops)
    at_home = tuple(f"{number} x {reason}" for reason, number in reasons.most_common())
    return Outcome(name, difference, precision(name), flops, sharded, at_home, whole, first_call)


def precision(name: str) -> str:
    """Return the dtype in which a program computes."""
    return "float32" if name in FLOAT32 else "float64"


@contextmanager
def built(name: str) -> Iterator[Training]:
    """Build a program whose layers have its precision, which is Keras' for as long as it is used."""
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.backend.clear_session()
    keras.config.set_floatx(precision(name))
    keras.config.set_dtype_policy(precision(name))
    keras.utils.set_random_seed(1)
    try:
        yield PROGRAMS[name]()
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
        gc.collect()


def start_elsewhere(variables: Iterable[Any]) -> None:
    """Let no variable start at zero: one without a gradient would stay there, and its rounding errors be compared."""
    for variable in variables:
        if tf.as_dtype(variable.dtype).is_floating:
            variable.assign(variable + 0.01 * tf.random.uniform(variable.shape, 0.5, 1.0, variable.dtype))


def _first_call(step: Callable[..., Any], arguments: tuple[Any, ...], parallel: gs.ParallelFunction) -> float:
    """Return how much longer the first call takes than that of a `tf.function`. (Each trains a step.)"""
    started = time.perf_counter()
    tf.function(step)(*arguments)
    plain_s = time.perf_counter() - started
    started = time.perf_counter()
    parallel(*arguments)
    return (time.perf_counter() - started) / plain_s


def count(training: Training, devices: int, most: int = 3) -> tuple[int, int, tuple[str, ...]]:
    """Return FLOPs of a step on many rows, those on the shards, and what costs most of the rest."""
    names = [f"CPU:{i}" for i in range(devices)]
    parallel = gs.parallelize(training.step, devices=names, tuning={"default_device": f"CPU:{devices}"})
    ops = parallel.placement(*training.inputs(MANY_ROWS)).ops.values()
    total = sum(op.flops or 0 for op in ops)
    whole: Counter[str] = Counter()
    for op in ops:
        if op.flops and op.requested.endswith(f":{devices}"):
            whole[f"{op.type} at {op.source or 'no line'}"] += op.flops
    found = tuple(f"{what}: {100 * flops / total:.2f} %" for what, flops in whole.most_common(most))
    return total, total - sum(whole.values()), found


def program_table(found: list[Outcome]) -> Table:
    """Return the results for people."""
    made = Table(
        "program",
        "difference",
        "FLOPs sharded",
        "first call",
        "rows on one device, and why",
        "most FLOPs on one device",
    )
    for one in found:
        made.add_row(
            one.name,
            f"{one.difference:.1e}{' (float32)' if one.dtype == 'float32' else ''}",
            f"{100 * one.share:.2f} %",
            f"{one.first_call:.1f}x",
            "\n".join(one.at_home) or "nothing",
            "\n".join(one.whole_flops) if one.share < 0.99 else "",
        )
    return made


def document(found: list[Outcome], devices: int) -> str:
    """Return the results as a page of the documentation."""
    rows = [
        f"| {one.name} | {one.difference:.0e} | {one.dtype} | {100 * one.share:.1f} % | "
        f"{'<br>'.join(one.at_home) or 'nothing'} | {one.first_call:.1f} |"
        for one in found
    ]
    reasons = [f"* **{one.name}**: {LESS_SHARDED[one.name][1]}" for one in found if one.name in LESS_SHARDED]
    return _PAGE.format(
        devices=devices,
        few=ROWS,
        many=MANY_ROWS,
        rows="\n".join(rows),
        reasons="\n".join(reasons) or "* none",
    )


_PAGE = """# Operation coverage

Which programs run on several devices, how much of each, and with which numbers? Three tables answer this: training
steps after tutorials, [Keras' tests](#other-peoples-tests), and [models of other packages](#other-peoples-models). In
all of them, logical CPU devices take the place of GPUs.

Small training steps after well-known tutorials (`benchmarks/programs/`). Each runs on one device and on {devices}
devices, with {few} rows.

| column | meaning |
|---|---|
| difference | between one and several devices: the largest in an output or variable, relative to its largest entry |
| FLOPs sharded | the share of the arithmetic that is divided over the devices, with {many} rows; loops count once |
| on one device | operations on the batch that run once, on whole tensors, and why |
| first call | its time, as a multiple of a `tf.function`'s; most of both is building the graph |

| program | difference | dtype | FLOPs sharded | on one device, and why | first call |
|---|---|---|---|---|---|
{rows}

Programs of which more than a hundredth of the FLOPs is not sharded, by plan:

{reasons}

`python -m benchmarks.coverage --names programs --page docs/generated/coverage.md` makes this table, and
`python -m pytest -m long tests/test_programs.py` checks it.
"""
