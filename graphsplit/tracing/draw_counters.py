"""Draws: random numbers of kernels that remember how many they drew, for all plans of a trace.

`tf.random.normal`, `tf.nn.dropout` and tf_keras' Dropout draw by kernels with a state of their own. On one device such
a kernel belongs to a trace: it goes on from call to call, whatever the sizes, and begins anew under a gradient tape,
whose forward part is a function of its own, and after `tf.random.set_seed`. Here a trace may have several plans, each
with kernels of its own, which would draw the first numbers once more. So what a kernel remembers is a variable, as that
of a `tf.random.Generator`, on which all plans of the trace count, and stateless operations draw the numbers: on each
shard those of its rows.

It is the same stream: a kernel of seeds `(seed, seed2)` begins at the counter `[0, seed2]` of the key `seed`, and
leaves 256 counters for each number (`tensorflow/core/util/guarded_philox_random.h`), as `RngReadAndSkip` does.

Kernels stay kernels in loops and branches; in what XLA compiles, which draws otherwise; in a graph that somebody else
runs, where each call is a place of its own; and where devices are on workers. A warning says so where a second plan
draws their first numbers again (`warn_of_kernels`).
"""

from __future__ import annotations

import contextlib
import functools
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from graphsplit.core.devices import name_for_runtime
from graphsplit.core.hosts import host_device
from graphsplit.core.tensorflow_internals import ANONYMOUS, last_seeding
from graphsplit.core.variables.parted_variables import assign, read_handle

_PHILOX = 1
_STATELESS: dict[str, Callable[..., tf.Tensor]] = {
    "RandomStandardNormal": tf.raw_ops.StatelessRandomNormalV2,
    "RandomUniform": tf.raw_ops.StatelessRandomUniformV2,
    "RandomUniformInt": tf.raw_ops.StatelessRandomUniformIntV2,
    "TruncatedNormal": tf.raw_ops.StatelessTruncatedNormalV2,
}


@dataclass(eq=False)
class DrawCounters:
    """How far each kernel of a function has drawn, as one device counts: for all traces of the same arguments.

    Attributes:
      variables: by the kernel's name, and whether a tape watches: a variable of `[counter, seed2, seed]`, and what it
        begins with.
      seeding: the last `tf.random.set_seed` before they began.
      unseeded: whether some have no seeds, and draw other numbers each time that they begin.
    """

    variables: dict[tuple[str, bool], tuple[tf.Tensor, tf.Tensor]] = field(default_factory=dict)
    seeding: object = field(default_factory=last_seeding)
    unseeded: bool = False

    @property
    def handles(self) -> list[tf.Tensor]:
        """The variables."""
        return [handle for handle, _ in self.variables.values()]

    def handle(self, node: Any, taped: bool) -> tf.Tensor:
        """Return the variable of a kernel, made on first use.

        Args:
          node: the `NodeDef` of the op.
          taped: whether it runs in the forward part of a function that is differentiated from outside.
        """
        key = (str(node.name), taped)
        if key not in self.variables:
            seeds = node.attr["seed2"].i, node.attr["seed"].i
            with tf.init_scope(), tf.device(name_for_runtime(host_device(""))):
                # (without seeds, a kernel chooses some)
                begin = tf.constant([0, *(seeds if any(seeds) else map(secrets.randbits, (63, 63)))], tf.int64)
                self.unseeded |= not any(seeds)
                handle = tf.raw_ops.VarHandleOp(dtype=begin.dtype, shape=begin.shape, shared_name=ANONYMOUS)
                assign(handle, begin)
            self.variables[key] = handle, begin
        return self.variables[key][0]

    @contextlib.contextmanager
    def begun_anew(self) -> Iterator[None]:
        """Let the kernels draw their first numbers again, as long as this lasts, and go on from where they were."""
        values_before = [(handle, read_handle(handle, begin.dtype)) for handle, begin in self.variables.values()]
        try:
            for handle, begin in self.variables.values():
                assign(handle, begin)
            yield
        finally:
            for handle, value in values_before:
                assign(handle, value)

    def follow_seeding(self) -> None:
        """Begin anew if `tf.random.set_seed` was called, as kernels do."""
        if self.seeding is not (seeding := last_seeding()):
            self.seeding = seeding
            for handle, begin in self.variables.values():
                assign(handle, begin)


def counted_draw(node: Any) -> Callable[..., tf.Tensor] | None:
    """Return what draws the numbers of a kernel, given its counter and what it reads; None for other operations."""
    if node.op not in _STATELESS:
        return None
    dtype = None if node.op == "RandomUniformInt" else tf.as_dtype(node.attr["dtype"].type)
    return _drawing(node.op, dtype)


@functools.cache
def _drawing(op_type: str, dtype: tf.DType | None) -> Callable[..., tf.Tensor]:
    dtype_option = {} if dtype is None else {"dtype": dtype}

    def draw(counter: tf.Tensor, shape: tf.Tensor, *bounds: tf.Tensor) -> tf.Tensor:
        count = tf.cast(tf.reduce_prod(tf.cast(shape, tf.int64)), tf.uint64)
        state = tf.raw_ops.RngReadAndSkip(resource=counter, alg=_PHILOX, delta=count)
        place, key = tf.bitcast(state[:2], tf.uint64), tf.bitcast(state[2:], tf.uint64)
        limits = dict(zip(("minval", "maxval"), bounds, strict=False))
        return _STATELESS[op_type](shape=shape, key=key, counter=place, alg=_PHILOX, **limits, **dtype_option)

    return draw
