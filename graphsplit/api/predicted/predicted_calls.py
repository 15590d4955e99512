"""A call that is predicted: traced once, planned for devices that need not exist, as often as asked."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from graphsplit.api.calls.argument_splitting import Splitting, argument_paths, check_split, resolve_split
from graphsplit.api.calls.call_signatures import as_call, by_bound_arguments, parameters_of, signature_of, spread
from graphsplit.api.calls.chosen_devices import check_no_others
from graphsplit.api.calls.compilation import plan_as_if, variables_elsewhere
from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.options import Options
from graphsplit.api.predicted.predicted_layouts import Layout
from graphsplit.core import structures
from graphsplit.core.errors import ArgumentError, bullet_list
from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.tensorflow_internals import is_compiled_function
from graphsplit.planning.plan import Plan
from graphsplit.tracing.trace import Trace, trace


@dataclass(frozen=True, eq=False)
class PredictedCall:
    """A function with the arguments of one call. It is traced when that is first asked for.

    Attributes:
      title: the function's name.
      options: those under which it is planned unless others are asked for.
      splitting: how the arguments are split.
      arguments: their structure, by name.
      run_trace: traces the function.
      notes: for predictions.
    """

    title: str
    options: Options
    splitting: Splitting
    arguments: structures.Branch
    run_trace: Callable[[], Trace] = field(repr=False)
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def trace(self) -> Trace:
        """The traced function.

        Raises:
          Exception: whatever the function raises.
        """
        found = self.run_trace()
        check_no_others(found.program, self.options)
        return found

    @collection_paused()
    def plan(self, devices: Sequence[str], layout: Layout = None, **options: Any) -> Plan:
        """Return the plan for some devices, full names; they need not exist.

        Args:
          devices: the first is home.
          layout: of the variables; None for as they lie.
          **options: instead of those that the function has, `micro_batches=4`.
        """
        chosen = replace(self.options, **options)
        notes = (*self.splitting.notes, *variables_elsewhere(self.trace))
        return plan_as_if(self.trace, replace(self.splitting, notes=notes), chosen, devices, layout)


def predicted_call(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], **given: Any
) -> PredictedCall:
    """Return a call of a function. Arguments may be `tf.TensorSpec`s, whose sizes are all known.

    Args:
      fn, args, kwargs: see `predict`.
      **given: options instead of those that the function has; None: as it has them.

    Raises:
      ArgumentError: if it is no function, sizes of arguments are not known, or an option cannot be meant.
    """
    function = fn.function if isinstance(fn, ParallelFunction) else fn
    options = fn._options if isinstance(fn, ParallelFunction) else Options(jit_compile=is_compiled_function(function))
    if not callable(function):
        raise ArgumentError(f"predict takes a function and its arguments, got {fn!r} for the function.")
    if given.get("mesh") is not None:  # (as many devices as it has)
        options = replace(options, devices=None)
    asked = " and ".join(options.automatic.given) if options.automatic is not None else ""
    notes = (f"{asked}= chooses nothing here; the function is predicted with its other options",) if asked else ()
    options = replace(options, **{name: value for name, value in given.items() if value is not None}, automatic=None)
    signature = signature_of(function)
    check_split(options.split, parameters_of(signature))
    bound = signature.bind(*args, **kwargs)
    tree = _with_leaves(structures.flatten(dict(bound.arguments))[1])
    assert isinstance(tree, structures.Branch)
    named = spread(tree, signature)
    _check_known(named)
    splitting = resolve_split(options.split, named)
    names = [path for path, _ in argument_paths(named)]
    traced = functools.partial(
        trace,
        by_bound_arguments(function, signature),
        as_call(tree),
        names,
        splitting.shapes,
        bool(options.jit_compile),
    )
    title = str(getattr(function, "__name__", None) or getattr(function, "name", None) or type(function).__name__)
    return PredictedCall(title, options, splitting, named, traced, notes)


def _with_leaves(tree: structures.Tree) -> structures.Tree:
    """Return a structure with specifications of tensors as if they were tensors."""
    if isinstance(tree, structures.StaticLeaf) and isinstance(tree.value, tf.TensorSpec):
        spec = tree.value
        return structures.TensorLeaf(spec.dtype, None if spec.shape.rank is None else tuple(spec.shape))
    if isinstance(tree, structures.Branch):
        return dataclasses.replace(tree, entries=tuple([_with_leaves(entry) for entry in tree.entries]))
    return tree


def _check_known(arguments: structures.Branch) -> None:
    """Raise `ArgumentError` if a size of an argument is not known: times depend on all of them."""
    wrong = []
    for path, leaf in argument_paths(arguments):
        shape = leaf.shape if isinstance(leaf, structures.TensorLeaf) else ()
        if shape is None or None in shape:
            sizes = "[...]" if shape is None else f"[{','.join('?' if size is None else str(size) for size in shape)}]"
            wrong.append(f"{path}: {leaf.dtype.name}{sizes}")
    if wrong:
        raise ArgumentError(
            f"A prediction needs all sizes of the arguments, and some are not known:\n{bullet_list(wrong)}\n"
            "Give tensors, or a tf.TensorSpec with every size, like tf.TensorSpec([256, 224, 224, 3])."
        )
