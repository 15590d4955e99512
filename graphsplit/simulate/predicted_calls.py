"""A call that is predicted: traced once, planned for devices that need not exist, as often as asked."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from graphsplit.api.calls.argument_splitting import Splitting, check_split, resolve_split
from graphsplit.api.calls.call_signatures import as_call, by_bound_arguments, parameters_of, signature_of, spread
from graphsplit.api.calls.chosen_devices import check_no_others
from graphsplit.api.calls.compilation import trace_call, variables_elsewhere
from graphsplit.api.calls.parallel_function import ParallelFunction
from graphsplit.api.calls.plan_requests import PlanRequest, plan_as_if
from graphsplit.api.layouts.predicted_layouts import Layout
from graphsplit.api.stepping import Stepping
from graphsplit.core import structures
from graphsplit.core.gc_pause import collection_paused
from graphsplit.core.layouts import Shard
from graphsplit.core.tensorflow_internals import is_compiled_function
from graphsplit.errors import ArgumentError, bullet_list
from graphsplit.planning.options import Options
from graphsplit.planning.plan import Plan
from graphsplit.tracing.trace import Trace


@dataclass(frozen=True, eq=False)
class PredictedCall:
    """A function with the arguments of one call. It is traced when that is first asked for.

    Attributes:
      function: the single-device function.
      options: those under which it is planned unless others are asked for.
      arguments: their structure, as the function's signature binds them.
      splitting: how they are split.
      run_trace: traces the function.
      seen: returns arguments as the function sees them while it is traced.
      notes: for predictions.
    """

    function: Callable[..., Any]
    options: Options
    arguments: structures.Container
    splitting: Splitting
    run_trace: Callable[[], Trace] = field(repr=False)
    seen: Callable[[structures.Container], structures.Container] = field(repr=False)
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The function's name."""
        own = getattr(self.function, "__name__", None) or getattr(self.function, "name", None)
        return str(own or type(self.function).__name__)

    @functools.cached_property
    def trace(self) -> Trace:
        """The traced function.

        Raises:
          Exception: whatever the function raises.
        """
        found = self.run_trace()
        check_no_others(found.program, self.options)
        return found

    def with_options(self, options: Options) -> PredictedCall:
        """Return the same call under other options, traced only once."""
        return replace(self, options=options, run_trace=lambda: self.trace)

    def with_rows(self, rows: int) -> PredictedCall:
        """Return the call with another number of rows in what is split."""
        layouts, batch = iter(self.splitting.layouts), int(self.splitting.batch)

        def widen(leaf: structures.Leaf) -> Any:
            if isinstance(leaf, structures.CompositeLeaf):
                return replace(leaf, parts=tuple(map(widen, leaf.parts)))
            layout = next(layouts) if isinstance(leaf, structures.TensorLeaf) else None
            if not isinstance(leaf, structures.TensorLeaf) or not isinstance(layout, Shard):
                return leaf
            sizes = enumerate(leaf.shape or ())
            return replace(leaf, shape=tuple([n * rows // batch if n and k == layout.axis else n for k, n in sizes]))

        wide = structures.map_leaves(widen, self.arguments)
        assert isinstance(wide, structures.Container)
        return _call_of(self.function, self.options, wide, self.seen, self.notes)

    @collection_paused()
    def plan(self, devices: Sequence[str], layout: Layout = None, memory: float | None = None, **options: Any) -> Plan:
        """Return the plan for some devices, full names; they need not exist.

        Args:
          devices: the first is home.
          layout: of the variables; None for as they lie.
          memory: bytes that each device has, if that is known.
          **options: instead of those that the function has, `micro_batches=4`.
        """
        chosen = replace(self.options, **options)
        request = PlanRequest(self.trace, self.splitting, chosen, devices).noting(*variables_elsewhere(self.trace))
        return plan_as_if(request.as_if(chosen, devices), layout, memory=memory)


def check_renamed(fn: Any, kwargs: Mapping[str, Any]) -> None:
    """Raise `TypeError` for the old names of `variables=`, unless the function itself has such an argument."""
    own = () if isinstance(fn, Stepping) or not callable(fn) else signature_of(fn).parameters
    for name in [name for name in ("layout", "layouts") if name in kwargs and name not in own]:
        raise TypeError(f"{name}= is now variables={kwargs[name]!r}.")


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
    asked = options.asks_for_plan.partition("=")[0] if options.is_automatic else ""
    notes = (f"{asked}= is not used here; the function is predicted with its other options",) if asked else ()
    options = replace(options.as_given(), **{name: value for name, value in given.items() if value is not None})
    signature = signature_of(function)
    check_split(options.split, parameters_of(signature))
    bound = signature.bind(*args, **kwargs)
    _, tree = structures.flatten(dict(bound.arguments), specs=True)
    assert isinstance(tree, structures.Container)
    seen = fn._seen if isinstance(fn, ParallelFunction) else lambda arguments: arguments
    return _call_of(function, options, tree, seen, notes)


def _call_of(
    function: Callable[..., Any],
    options: Options,
    arguments: structures.Container,
    seen: Callable[[structures.Container], structures.Container],
    notes: tuple[str, ...],
) -> PredictedCall:
    signature = signature_of(function)
    named = spread(arguments, signature)
    paths = structures.paths(named)
    _check_known(paths)
    splitting = resolve_split(options.split, named)
    fn, names = by_bound_arguments(function, signature), [path for path, _ in paths]
    traced = functools.partial(trace_call, fn, as_call(seen(arguments)), names, splitting, bool(options.jit_compile))
    return PredictedCall(function, options, arguments, splitting, traced, seen, notes)


def _check_known(paths: Sequence[tuple[str, structures.TensorLeaf]]) -> None:
    """Raise `ArgumentError` if a size of an argument is not known: times depend on all of them."""
    wrong = [
        f"{path}: {structures.spec_text(leaf)}" for path, leaf in paths if leaf.shape is None or None in leaf.shape
    ]
    if wrong:
        raise ArgumentError(
            f"predict needs the shapes of all arguments, and these have unknown sizes:\n{bullet_list(wrong)}\n"
            "Give tensors, or a tf.TensorSpec with every size, like tf.TensorSpec([256, 224, 224, 3])."
        )
