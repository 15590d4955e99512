"""What XLA can compile may depend on sizes: a function of unknown sizes, asked about for each size that it meets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import tensorflow as tf

from graphsplit.core.polynomials import Point, Symbol
from graphsplit.core.symbolic_sizes import ROWS
from graphsplit.planning.plan import Plan
from graphsplit.runtime.differentiable import Differentiable, ForwardAndBackward
from graphsplit.runtime.trial_compilations import Trials
from graphsplit.tracing.trace import Trace

Sizes = tuple[tuple[Symbol, int], ...]


def differentiable(trace: Trace, plan: Plan, name: str, trials: Trials) -> Differentiable:
    """Return a planned function; one of unknown sizes that XLA has to be asked about is asked about when it is called.

    Args:
      trace, plan: the function.
      name: what the user calls it.
      trials: what XLA is asked with.
    """
    by_size = plan.jit_compile == "auto" and plan.program.symbols
    return (CompiledBySize if by_size else Differentiable)(trace, plan, name, trials)


class CompiledBySize(Differentiable):
    """A function of unknown sizes, of which XLA compiles what it can at each size.

    Before it first runs at a size, XLA is asked about that. Sizes at which the same is refused run the same graph. In a
    graph, where sizes may stay unknown, XLA compiles nothing of it: it could refuse when nothing can be done any more.
    """

    def __init__(self, trace: Trace, plan: Plan, name: str, trials: Trials):
        super().__init__(trace, plan, name, trials)
        self._by_sizes: dict[Sizes | None, Differentiable] = {}
        self._by_refused: dict[frozenset[int], Differentiable] = {}

    def __call__(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Run on the flat arguments what is compiled for their sizes."""
        return self._at(tensors)(tensors)

    def send(self, tensors: Sequence[tf.Tensor], readers: tuple[str, ...] = ()) -> list[tf.Tensor]:
        """Send the pieces of the flat arguments; see `Differentiable`."""
        return self._at(tensors).send(tensors, readers)

    def run_sent(
        self, tensors: Sequence[tf.Tensor], pieces: Sequence[tf.Tensor] | None, readers: tuple[str, ...] = ()
    ) -> list[tf.Tensor]:
        """Run on pieces that were sent; see `Differentiable`."""
        return self._at(tensors).run_sent(tensors, pieces, readers)

    def pair(self, watched: tuple[bool, ...] | None = None) -> ForwardAndBackward:
        """Return the function with its gradients as it would run where no size is known."""
        return self._of(None).pair(watched)

    def _at(self, tensors: Sequence[tf.Tensor]) -> Differentiable:
        return self._of(_sizes_of(self.plan, tensors))

    def _of(self, sizes: Sizes | None) -> Differentiable:
        if sizes not in self._by_sizes:
            with self.trace.lock:
                if sizes not in self._by_sizes:
                    self._by_sizes[sizes] = self._made(sizes)
        return self._by_sizes[sizes]

    def _made(self, sizes: Sizes | None) -> Differentiable:
        plan = replace(self.plan, refused=None)
        if sizes is None:
            plan = replace(plan, asked=replace(plan.asked, jit_compile=False))
            return Differentiable(self.trace, plan, self.name, self.trials)
        made = Differentiable(self.trace, plan, self.name, self.trials, dict(sizes))
        self.plan = replace(plan, refused={**(self.plan.refused or {}), **(made.plan.refused or {})})
        return made


def _sizes_of(plan: Plan, tensors: Sequence[tf.Tensor]) -> Sizes | None:
    """Return what the sizes are that a plan does not know; None if the arguments do not say either."""
    shapes = {position: tensor.shape for position, tensor in zip(plan.program.inputs, tensors, strict=False)}
    point: Point = {}
    sources = {symbol: (*found, 1) for symbol, found in plan.length_sources().items()}
    if plan.program.batch_is_unknown:
        sources[ROWS] = plan.rows_sources()[0]
    for symbol, (position, axis, each) in sources.items():
        shape = shapes[position]
        if shape.rank is None or shape[axis] is None:
            return None
        point = {**point, symbol: shape[axis] // each}
    known = set(point) >= set(plan.program.symbols)
    return tuple(sorted(point.items())) if known else None
