"""Batch functions: what Keras calls for every batch, `f(iterator) -> logs`, on top of a parallelized step.

The iterator is advanced outside of the parallelized step, eagerly, so that every batch arrives with its true shape,
for which it is planned. What the step's code knows of that shape is what it knows in Keras' own functions. Keras asks
for sizes in Python (`losses.reduce_values` returns a loss of no rows as it is, if it knows that there are none), and so
may layers, losses and steps of users. All that they are to know is what they know on one device: see `SeenShapes`. A
plan is for the sizes of the batch at hand all the same: see `TracedFunction.read`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.one_device_traces import Retracing, is_open
from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.options import Options
from graphsplit.core import structures
from graphsplit.core.structures import CompositeLeaf, Leaf, StaticLeaf, TensorLeaf, Tree
from graphsplit.errors import CheckError
from graphsplit.planning.plan import Plan
from graphsplit.runtime.gradients.planned_functions import PlannedFunction

_LEFT_OUT = object()  # stands for an argument of a step that a batch does not have


class _HandedError(Exception):
    """Takes what Keras hands to a function that is only asked for that back to whoever asked."""

    def __init__(self, data: Any):
        super().__init__("a step's arguments, for whoever asked for them")
        self.data = data


class BatchFunction:
    """Runs up to `steps()` batches of an iterator through a parallelized step.

    Attributes:
      step: the template's step, parallelized; see `step_of_parts`.
      batches: how many it ran.
      before: called with the step and its arguments before each batch, if it is not None.
      after: called after the first batch, if it is not None.
      owner: the wrapped model that runs its batches so, if it is to be found from here.

    Args:
      step: the attribute.
      steps: returns the most batches for one call.
      finish: joins what the steps returned.
      is_graph: whether Keras' own function is one graph, for one batch or a list of them, whatever it is called with.
    """

    def __init__(
        self,
        step: ModelStep,
        steps: Callable[[], int],
        finish: Callable[[list[Any]], Any],
        is_graph: bool = False,
    ):
        self.step = step
        self.batches = 0
        self.before: Callable[[ParallelFunction[..., Any], tuple[Any, ...]], None] | None = None
        self.after: Callable[[], None] | None = None
        self.owner: Any = None
        self._only_asked = False
        self._of_graphs, self._of_steps = Retracing(), None if is_graph else Retracing()
        self._steps = steps
        self._finish = finish
        self._last: tuple[Any, ...] = ()

    def __call__(self, iterator: Iterator[Any]) -> Any:
        """Return what the steps returned, joined; raise `StopIteration` if there is no batch left."""
        seen_tree = None
        if isinstance(iterator, tf.data.Iterator):  # a graph reads it
            seen_tree = self._of_graphs.seen(tree_of_elements(iterator.element_spec))
        return self.run((batch, seen_tree) for batch in _take(iterator, self._steps()))

    def run(self, batches: Iterable[tuple[Any, structures.Tree | None]]) -> Any:
        """Run the step on every batch, given with what the graph of Keras' own that has it sees, if one does."""
        outputs = []
        for batch, in_graph in batches:
            data = _without_optionals(batch)
            if self._only_asked:
                raise _HandedError(data)
            seen_tree = structures.flatten(data)[1] if in_graph is None else in_graph
            self._last = parts_of_batch(data, seen_tree if self._of_steps is None else self._of_steps.seen(seen_tree))
            if self.before is not None:
                self.before(self.step, self._last)
            outputs.append(self._run_step())
            if self.after is not None and not self.batches:
                self.after()
            self.batches += 1
        if not outputs:
            raise StopIteration
        return self._finish(outputs)

    def _run_step(self) -> Any:
        with _differing_rows_told(self.step, self._last):
            return self.step(*self._last)

    def batch_in(self, call: Callable[[], Any]) -> Any:
        """Return the batch that `call` brings, as the step has it; nothing runs."""
        self._only_asked = True
        try:
            call()
        except _HandedError as handed:
            return handed.data
        finally:
            self._only_asked = False
        raise CheckError("Keras runs a step in another way than graphsplit knows.")

    def plan(self) -> Plan:
        """Return what ran where for the last batch. `print` it."""
        return self.step.plan(*self._last)


class BatchesFunction(BatchFunction):
    """Runs a list of batches, which Keras 3 hands to `predict_function`."""

    def __call__(self, batches: Any) -> Any:
        """Return the predictions of all, joined."""
        seen_batches = self._of_graphs.seen(structures.flatten(list(map(_without_optionals, batches)))[1])
        assert isinstance(seen_batches, structures.Container)
        return self.run(zip(batches, seen_batches.entries, strict=True))


@contextlib.contextmanager
def _differing_rows_told(step: ParallelFunction[..., Any], batch: tuple[Any, ...]) -> Iterator[None]:
    """Let errors of shapes say which parts of a batch differ in rows.

    (Keras compares these for arrays, and not for what a dataset or `train_on_batch` brings. TensorFlow then names an
    operation of a loss, which the user may never have seen.)
    """
    try:
        yield
    except ValueError as error:
        explanation = _rows_that_differ(step, batch)
        if explanation and explanation not in str(error):
            error.args = (f"{error}\n{explanation}",)
        raise
    except tf.errors.InvalidArgumentError as error:  # (of a step that was not to know its rows)
        if explanation := _rows_that_differ(step, batch):
            raise type(error)(error.node_def, error.op, f"{error.message}\n{explanation}") from error.__cause__
        raise


def _rows_that_differ(step: ParallelFunction[..., Any], batch: tuple[Any, ...]) -> str:
    """Return the number of rows of each part of a batch, "" if they are the same."""
    named = inspect.signature(step).bind_partial(*batch).arguments
    tree = structures.flatten(dict(named), specs=True)[1]
    assert isinstance(tree, structures.Container)
    rows = {path: leaf.shape[0] for path, leaf in structures.paths(tree) if leaf.shape and leaf.shape[0] is not None}
    if len(set(rows.values())) < 2:
        return ""
    return f"The batch has parts of different numbers of rows: {', '.join(f'{p} {n}' for p, n in rows.items())}."


def step_of_parts(step: Callable[[Any], Any]) -> Callable[..., Any]:
    """Return a step of a model's data as a function of what `parts_of_batch` gives, which has the user's names."""

    def run(
        seen: SeenShapes | None,
        x: Any = _LEFT_OUT,
        y: Any = _LEFT_OUT,
        sample_weight: Any = _LEFT_OUT,
        data: Any = _LEFT_OUT,
    ) -> Any:
        if data is _LEFT_OUT:
            data = tuple(part for part in (x, y, sample_weight) if part is not _LEFT_OUT)
        return step(data if seen is None else seen.of(data))

    run.__name__ = step.__name__
    step_function: Callable[..., Any] = tf.autograph.experimental.do_not_convert(run)
    return step_function


class ModelStep(ParallelFunction[..., Any]):
    """A step of a model, of what `parts_of_batch` gives.

    Args:
      step, options: see `ParallelFunction`.
      title: which step it is, and of which model.
    """

    def __init__(self, step: Callable[..., Any], options: Options, title: str):
        super().__init__(step, options)
        self._own_title = title

    def _title(self) -> str:
        return self._own_title

    def as_called(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the arguments for a batch, see `parts_of_batch`, with the sizes that a call with such a batch knew."""
        _, tree = self._flatten(arguments, {}, specs=True)
        for planned_tree in [signature.arguments for signature in self._traces.planned]:
            if (planned_tree.keys, planned_tree.entries[1:]) == (tree.keys, tree.entries[1:]):
                (first, *_) = planned_tree.entries
                return first.value if isinstance(first, StaticLeaf) else None, *arguments[1:]
        return arguments

    def _planning(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool = False
    ) -> tuple[PlannedFunction, list[Any]]:
        with _differing_rows_told(self, args):
            return super()._planning(args, kwargs, runs)

    def _seen(self, arguments: structures.Container) -> structures.Container:
        [shapes_leaf, *batch] = arguments.entries
        if not isinstance(shapes_leaf, structures.StaticLeaf) or shapes_leaf.value is None:
            return arguments
        tree = replace(arguments, keys=arguments.keys[1:], entries=tuple(batch))
        return replace(arguments, entries=(shapes_leaf, *shapes_leaf.value.in_place_of(tree).entries))

    def _cover(self, arguments: structures.Container, seen_tree: structures.Container) -> structures.Container:
        if not self._options.tuning["reduce_retracing"]:
            return arguments  # each batch is planned for its sizes
        return super()._cover(arguments, seen_tree)


def parts_of_batch(data: Any, seen_tree: structures.Tree | None = None) -> tuple[Any, ...]:
    """Return the arguments of a step for a batch: `x, y, sample_weight`, as Keras takes tuples, else `data` whole.

    Args:
      data: the batch.
      seen_tree: its structure as the step's code sees it; None for a code that does not know the number of rows.
    """
    if seen_tree is None:
        seen_tree = with_open_rows(structures.flatten(data, specs=True)[1])
    first = SeenShapes(seen_tree) if is_open(seen_tree) else None
    if type(data) is tuple and 1 <= len(data) <= 3:
        return first, *data
    return first, _LEFT_OUT, _LEFT_OUT, _LEFT_OUT, data


def last(outputs: list[Any]) -> Any:
    """Return what the last step returned."""
    return outputs[-1]


def last_sorted(outputs: list[Any]) -> Any:
    """Return the logs of the last step in alphabetical order, in which Keras 3 gets them from `tf.data`'s optionals."""
    logs = outputs[-1]
    return {key: logs[key] for key in sorted(logs)} if type(logs) is dict else logs


def joined_predictions(outputs: list[Any]) -> Any:
    """Return the predictions of several steps, joined along the rows."""
    return outputs[0] if len(outputs) == 1 else tf.nest.map_structure(_join, *outputs)


def _join(*parts: Any) -> Any:
    if isinstance(parts[0], tf.SparseTensor):
        return tf.sparse.concat(0, list(parts))
    return tf.stack(parts) if parts[0].shape.rank == 0 else tf.concat(parts, 0)


def _take(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    for _ in range(count):
        try:
            batch = next(iterator)
        except StopIteration:
            return
        yield batch


def _without_optionals(batch: Any) -> Any:
    """Replace `tf.data`'s optional values, of which Keras 3 makes missing targets and weights, by None."""
    return tf.nest.map_structure(lambda part: None if isinstance(part, tf.experimental.Optional) else part, batch)


class SeenShapes:
    """The tensors of a batch as a model's code sees them; an argument of its step, and part of its signature.

    Args:
      tree: the structure of the batch, with None for sizes that the code does not know.
    """

    def __init__(self, tree: Tree):
        self._leaves = tuple([leaf for _, leaf in structures.walk(tree) if not isinstance(leaf, StaticLeaf)])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SeenShapes) and self._leaves == other._leaves

    def __hash__(self) -> int:
        return hash(self._leaves)

    def __repr__(self) -> str:
        specs = [leaf.spec if isinstance(leaf, CompositeLeaf) else structures.spec_text(leaf) for leaf in self._leaves]
        return f"seen as {', '.join(map(str, specs))}"

    def in_place_of(self, tree: Tree) -> Tree:
        """Return a structure of the same tensors as the code sees it."""
        return structures.with_leaves(tree, self._leaves)

    def of(self, batch: Any) -> Any:
        """Return a batch as the code sees it: in a graph whose sizes are known, too."""
        tensors, tree = structures.flatten(batch)
        seen_tree = self.in_place_of(tree)
        if tf.executing_eagerly() or seen_tree == tree:
            return batch
        pairs = zip(tensors, [leaf.shape for leaf in structures.leaves(seen_tree)], strict=True)
        return structures.unflatten(seen_tree, [tf.compat.v1.placeholder_with_default(*pair) for pair in pairs])


def tree_of_elements(spec: Any) -> Tree:
    """Return the structure of the elements of a `tf.data` iterator, as the graph that reads it sees them."""
    return structures.flatten(tf.nest.map_structure(_of_tensors, spec), specs=True)[1]


def with_open_rows(tree: Tree) -> Tree:
    """Return the structure of a batch of which the number of rows is not known."""
    return structures.map_leaves(_without_rows, tree)


def _without_rows(leaf: Leaf) -> Leaf:
    return replace(leaf, shape=(None, *leaf.shape[1:])) if isinstance(leaf, TensorLeaf) and leaf.shape else leaf


def _of_tensors(spec: Any) -> Any:
    """Return a specification of tensors; None for what is no tensor, as the optional values that stand for nothing."""
    if isinstance(spec, tf.TensorSpec):
        return spec
    parts = tf.nest.flatten(spec, expand_composites=True)
    return None if not parts or any(part.dtype in (tf.resource, tf.variant) for part in parts) else spec
