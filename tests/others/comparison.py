"""One call of somebody else's code, run plainly and through graphsplit: same results, same variables.

The plain call is eager, as they wrote it, and comes first: what it does to Python objects stays, what it does to
variables is undone before the call through graphsplit. Where the two differ, a `tf.function` of the same call decides
whose difference it is.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

import graphsplit as gs
from tests.fuzzing.oracle import distance, scale
from tests.fuzzing.verdicts import DIFFERENT, EQUAL, NOT_TRACEABLE, RAISED, REFUSED, UNSTABLE
from tests.others.records import GRAPH_DIFFERS, Calls

# Relative to the largest entry. Beyond it, `verify` says whether rounding explains the difference.
_TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "complex64": 1e-5}


class Variables:
    """The TensorFlow variables that it is told of, with their first values."""

    def __init__(self) -> None:
        self._alive: dict[int, weakref.ref[tf.Variable]] = {}
        self._new: dict[int, tuple[tf.Variable, tf.Tensor]] | None = None
        self._left_alone = False

    @contextlib.contextmanager
    def left_alone(self) -> Iterator[None]:
        """Know nothing of what is made in the meantime: parts and copies of variables."""
        self._left_alone = True
        try:
            yield
        finally:
            self._left_alone = False

    def add(self, variable: tf.Variable) -> None:
        """Know a variable that was just made."""
        if self._left_alone:
            return
        self._alive[id(variable)] = weakref.ref(variable)
        with tf.init_scope():  # out of what is traced
            if self._new is not None and tf.executing_eagerly() and variable.is_initialized():
                self._new[id(variable)] = variable, tf.identity(variable)

    @contextlib.contextmanager
    def remembered(self) -> Iterator[dict[int, tuple[tf.Variable, tf.Tensor]]]:
        """Yield the values that variables have now; those that are made in the meantime join with their first ones."""
        found = [variable for ref in self._alive.values() if (variable := ref()) is not None]
        self._alive = {id(variable): weakref.ref(variable) for variable in found}
        self._new = {id(v): (v, tf.identity(v)) for v in found if v.is_initialized()}
        try:
            yield self._new
        finally:
            self._new = None


class Through:
    """Runs calls plainly and through graphsplit.

    Attributes:
      active: whether calls go through graphsplit, else they are left alone.
      calls: what became of them.

    Args:
      devices: how many.
      layout: of the variables that a call reads.
      micro_batches: as `parallelize` takes them.
    """

    def __init__(self, devices: int = 3, layout: str = "home", micro_batches: int = 1):
        self.devices = devices
        self.layout = layout
        self.micro_batches = micro_batches
        self.active = False
        self.calls = Calls()
        self._inside = False
        self._variables = Variables()

    @contextlib.contextmanager
    def on(self) -> Iterator[Calls]:
        """Send calls through graphsplit; yield what becomes of them."""
        self.calls, self._variables, self.active = Calls(), Variables(), True
        try:
            yield self.calls
        finally:
            self.active = False

    def knows(self, variable: tf.Variable) -> None:
        """Know a variable, which calls may change."""
        if self.active:
            self._variables.add(variable)

    def laying_out(self) -> contextlib.AbstractContextManager[None]:
        """Know nothing of the parts and copies of variables that are made in the meantime."""
        return self._variables.left_alone()

    def takes(self) -> bool:
        """Return whether a call that begins here and now is one to be sent through graphsplit."""
        return self.active and not self._inside and tf.executing_eagerly()

    def not_routed(self, why: str) -> None:
        """Count a call that runs without graphsplit."""
        self.calls.not_routed[why] += 1

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Leave calls alone that another call makes."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before

    def call(
        self,
        what: str,
        run: Callable[..., Any],
        args: Any,
        kwargs: Any,
        untraced: Callable[[], Any],
        batched: bool = True,
    ) -> Any:
        """Return what `run(*args, **kwargs)` returns through graphsplit, if that is right, else plainly.

        Args:
          what: names the call, for messages.
          run: a function of tensors (in structures) and of what is no tensor.
          untraced: returns a context manager that undoes what tracing does to Python objects.
          batched: whether the arguments have rows of a batch, as gradients do not.
        """
        parallel = gs.parallelize(
            tf.autograph.experimental.do_not_convert(run), devices=self.devices, micro_batches=self.micro_batches
        )
        return self.compare(what, parallel, run, args, kwargs, untraced, batched)

    def compare(
        self,
        what: str,
        parallel: gs.ParallelFunction[..., Any],
        plain: Callable[..., Any],
        args: Any,
        kwargs: Any,
        untraced: Callable[[], Any],
        batched: bool = True,
    ) -> Any:
        """Return what a parallelized function returns, if it is what `plain` returns, else the latter."""
        with self.inside():
            with self._variables.remembered() as before:
                results = plain(*args, **kwargs)
            state = _State(before)
            expected = state.outcome(results)
            graph = tf.function(tf.autograph.experimental.do_not_convert(plain))
            runs = [lambda: graph(*args, **kwargs), lambda: parallel(*args, **kwargs)]
            try:
                with untraced():
                    read = parallel.variables(*args, **kwargs)
                    if batched and rows_of(args, kwargs) > 1:
                        self._count_sharded(parallel.plan(*args, **kwargs))
                    with self._laid_out(read):
                        actual = state.run(runs[1])
            except Exception as error:  # whatever it is, it is counted
                self.calls.add(*self._whose_error(error, state, runs[0], untraced, what))
                state.give(expected)
                return results
            if not (found := differences(expected, actual)):
                self.calls.add(EQUAL, what)
                return actual.results
            with untraced():
                kind = _whose_difference(state, *runs, expected, actual)
                if kind == DIFFERENT:
                    state.undo()
                    report = gs.verify(parallel, *args, **kwargs)
                    rounding = max([d.rounding for d in report.differences], default=0.0)
                    is_rounding = report.passed and max(one.relative for one in found) <= rounding
                    kind = UNSTABLE if is_rounding else DIFFERENT
            self.calls.add(kind, what, "; ".join(map(str, found))[:600])
            state.give(actual if kind == DIFFERENT else expected)
            return actual.results if kind == DIFFERENT else results

    def _whose_error(
        self, error: Exception, state: _State, graph: Callable[[], Any], untraced: Callable[[], Any], what: str
    ) -> tuple[str, str, str]:
        """Return the kind of what raised: it is TensorFlow's if a `tf.function` raises too."""
        message = f"{type(error).__name__}: {str(error)[:600]}"
        if isinstance(error, gs.errors.UnsupportedError):
            return REFUSED, what, message
        try:
            with untraced():
                state.run(graph)
        except Exception as same:
            return NOT_TRACEABLE, what, f"{type(same).__name__}: {str(same)[:200]}"
        return RAISED, what, message

    @contextlib.contextmanager
    def _laid_out(self, variables: Iterable[tf.Variable]) -> Iterator[None]:
        """Lay variables out for one call."""
        if self.layout == "home" or not variables:
            yield
            return
        with self.laying_out():
            gs.set_variable_layout(list(variables), self.layout, self.devices)
        try:
            yield
        finally:
            gs.set_variable_layout(list(variables), "home", self.devices)

    def _count_sharded(self, plan: gs.inspect.Plan) -> None:
        """Count a program that has rows to share out, and whether anything is shared out."""
        self.calls.with_rows += 1
        if plan.sharded_ops and len(plan.devices) > 1:
            self.calls.sharded += 1
        self.calls.at_home.update({f"{op.type}: {reason}" for op, reason in plan.unsharded_ops})


@dataclass(frozen=True)
class _Outcome:
    """What a run returned, and the values that it left in variables."""

    results: Any
    values: dict[int, tuple[tf.Variable, tf.Tensor]]


class _State:
    """Values of variables before a call, for runs that all begin with them."""

    def __init__(self, before: dict[int, tuple[tf.Variable, tf.Tensor]]):
        self._before = before

    def run(self, call: Callable[[], Any]) -> _Outcome:
        """Return what becomes of a call that begins with these values."""
        self.undo()
        return self.outcome(call())

    def outcome(self, results: Any) -> _Outcome:
        """Return results with the values that variables have now."""
        return _Outcome(results, {key: (v, tf.identity(v)) for key, (v, _) in self._before.items()})

    def undo(self) -> None:
        """Give variables these values."""
        _assign(self._before)

    def give(self, outcome: _Outcome) -> None:
        """Give variables the values that a run left."""
        _assign(outcome.values)


def _assign(values: dict[int, tuple[tf.Variable, tf.Tensor]]) -> None:
    for variable, value in values.values():
        if variable.shape.is_compatible_with(value.shape):  # (one of open shape may be given another)
            variable.assign(value)


def _whose_difference(
    state: _State, graph: Callable[[], Any], parallel: Callable[[], Any], expected: _Outcome, actual: _Outcome
) -> str:
    """Return the kind of a difference: TensorFlow's if a `tf.function` is as far from the eager call, and not from us.

    Numbers that a graph draws anew in each call are compared with nothing.
    """
    try:
        results = state.run(graph)
    except Exception:
        return NOT_TRACEABLE
    if differences(expected, results) and not differences(results, actual):
        return GRAPH_DIFFERS
    return UNSTABLE if differences(results, state.run(graph)) else DIFFERENT


@dataclass(frozen=True)
class _Apart:
    """How two numbers, or arrays of numbers, differ; `relative` to the largest entry."""

    name: str
    how: str
    relative: float = float("inf")

    def __str__(self) -> str:
        return f"{self.name}: {self.how}"


def differences(expected: _Outcome, actual: _Outcome) -> list[_Apart]:
    """Return what differs between two runs."""
    a, b = _leaves(expected.results), _leaves(actual.results)
    found = [] if len(a) == len(b) else [_Apart("outputs", f"{len(b)} instead of {len(a)}")]
    pairs = [(f"output {i}", *pair) for i, pair in enumerate(zip(a, b, strict=False))]
    pairs += [(f"variable {v.name}", value, actual.values[key][1]) for key, (v, value) in expected.values.items()]
    return [*found, *[apart for pair in pairs if (apart := _apart(*pair)) is not None]]


def _leaves(results: Any) -> list[Any]:
    """Return all that results consist of; of rows of a tensor (`IndexedSlices`) also those whose parts are lists."""
    found: list[Any] = []
    for leaf in tf.nest.flatten(results):
        if isinstance(leaf, tf.IndexedSlices):
            found += [leaf.values, tf.convert_to_tensor(leaf.indices)]
        elif leaf is not None:
            found += tf.nest.flatten(leaf, expand_composites=True)
    return found


def _apart(name: str, expected: Any, actual: Any) -> _Apart | None:
    """Return how two leaves differ; None if they do not.

    A Python number stays one through graphsplit; a `tf.function` makes a tensor of it.
    """
    known = (tf.Tensor, np.ndarray, np.generic, bool, int, float, complex, str, bytes, tf.Variable)
    if not isinstance(expected, known) or expected.__class__.__name__ == "KerasTensor":
        return None  # what is no number is Python's
    a, b = _array(expected), _array(actual)
    if a.shape != b.shape or (a.dtype != b.dtype and isinstance(expected, tf.Tensor) and hasattr(actual, "dtype")):
        return _Apart(name, f"{b.dtype}{list(b.shape)} instead of {a.dtype}{list(a.shape)}")
    size, apart = scale(a), distance(a, b)
    if apart <= _TOLERANCE.get(a.dtype.name, 1e-9) * size:
        return None
    return _Apart(name, f"{apart:.2g} apart, of {size:.2g}", apart / size if size else float("inf"))


def _array(value: Any) -> np.ndarray:
    return np.asarray(value.numpy() if hasattr(value, "numpy") else value)  # (bfloat16 is no type of numpy's own)


def rows_of(args: Any, kwargs: Any) -> int:
    """Return the rows of the batch: the first axis of the first tensor that has one; 0 without a tensor, else 1."""
    tensors = tensors_of(args, kwargs)
    sized = [tensor.shape[0] for tensor in tensors if len(tensor.shape)]
    return int(sized[0] or 0) if sized else int(bool(tensors))


def tensors_of(args: Any, kwargs: Any) -> list[Any]:
    """Return the tensors and arrays among arguments."""
    return [leaf for leaf in _leaves((args, kwargs)) if isinstance(leaf, (tf.Tensor, np.ndarray))]


def most_common(counts: Counter[str], number: int = 8) -> list[str]:
    """Return the commonest entries with their counts."""
    return [f"{count} x {what}" for what, count in counts.most_common(number)]
