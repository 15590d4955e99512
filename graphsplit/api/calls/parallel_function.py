"""`ParallelFunction`: an ordinary function, run on several devices.

What enters: a function and its options; for each call, arguments. What leaves: results. The first call with arguments
of some structure, dtypes and shapes is traced and planned (`compilation`); later ones run what was made then.

A wrapped Keras model has parallelized steps: `step_of` returns the one that a question is about.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar, overload, runtime_checkable

import tensorflow as tf

from graphsplit.api import input_pipelines
from graphsplit.api.calls.argument_splitting import check_split, resolve_split, same_batch
from graphsplit.api.calls.call_signatures import (
    as_call,
    by_bound_arguments,
    check_no_specs,
    check_takes_inputs,
    parameters_of,
    signature_of,
    spread,
    warn_of_retracing,
)
from graphsplit.api.calls.chosen_devices import ChosenDevices, choose_devices
from graphsplit.api.calls.compilation import Called, trace_and_plan
from graphsplit.api.calls.one_device_traces import as_specified, is_open
from graphsplit.api.calls.outer_graphs import (
    check_no_distributed_values,
    check_no_dtensors,
    check_no_replica,
    explaining_trace,
    warn_of_kernels,
    warn_of_outer_graph,
    warn_of_stateless_scope,
    warn_of_variables,
)
from graphsplit.api.calls.traces import PerInstance, Signature, Traces
from graphsplit.api.layouts.variable_layouts import decide_later
from graphsplit.api.options import Options
from graphsplit.core import structures
from graphsplit.core.garbage_collection import collection_paused
from graphsplit.core.hosts import host_name
from graphsplit.core.keras_internals import open_scopes, variables_have_other_values
from graphsplit.core.progress import phase
from graphsplit.core.stand_ins import answering
from graphsplit.core.tensorflow_internals import eager_context_started, in_xla_context, rewritten_by_autograph
from graphsplit.core.user_code import shortened, with_users_traceback
from graphsplit.core.variables.arrangements import Arrangement
from graphsplit.emission.clusters import graph_def_that_runs
from graphsplit.emission.emitter import emit
from graphsplit.errors import ArgumentError, UnsupportedError
from graphsplit.planning.plan import Plan
from graphsplit.program.program import Program
from graphsplit.rules.families.random import has_seeded_kernels
from graphsplit.runtime.gradients.planned_functions import PlannedFunction
from graphsplit.runtime.handles import Layouts, LayoutsChangedError
from graphsplit.tracing.draw_counters import DrawCounters
from graphsplit.tracing.trace import inside_trace

if TYPE_CHECKING:
    from graphsplit.inspect.placements import Placement
    from graphsplit.inspect.sources import Planned


P = ParamSpec("P")
R = TypeVar("R")
Self = TypeVar("Self")  # what a method is bound to
Q = ParamSpec("Q")  # a method's parameters without that


class ParallelFunction(Generic[P, R]):
    """A function that runs on several devices and returns what it would return on one. Made by `parallelize`.

    Copies, deep ones and those that were pickled, are traced for themselves.
    """

    def __init__(self, fn: Callable[P, R], options: Options):
        self._fn = fn
        self._options = options
        self._attribute = ""
        self._instance: Any = None  # that a method is bound to
        functools.update_wrapper(self, fn, updated=())
        del self.__dict__["__wrapped__"]  # else a tf.function given this object as an argument calls that instead
        self._start()
        check_split(options.split, parameters_of(self._signature))
        if eager_context_started():
            _ = self._chosen

    def _start(self) -> None:
        """Begin without traces."""
        self._asks: Callable[[Arrangement], None] | None = None  # decides how variables lie once the first call runs
        self._signature = self.__signature__ = signature_of(self._fn)
        self.__dict__.pop("_specs", None)  # of what a method was bound to before
        self._traces = Traces()
        self._instances = PerInstance(Traces)

    @functools.cached_property
    def _chosen(self) -> ChosenDevices:
        return choose_devices(self._options)

    @functools.cached_property
    def _specs(self) -> dict[str, Any]:
        """The `input_signature` of the function, by its parameters. (To ask TensorFlow takes long.)"""
        return self._signature.bind_partial(*(getattr(self._fn, "input_signature", None) or ())).arguments

    @property
    def devices(self) -> tuple[str, ...]:
        """The full names of the devices; those that were named need not be here. The first use starts TensorFlow."""
        return self._chosen.devices

    @property
    def default_device(self) -> str:
        """The device of whole operations and variables' updates; on several hosts plans may choose another one."""
        return self._chosen.default_device

    @property
    def function(self) -> Callable[P, R]:
        """The single-device function."""
        return self._fn

    @property
    def _traced(self) -> Callable[P, R]:
        """What is traced: the single-device function, or (a subclass) something around it."""
        return self._fn

    def _seen(self, arguments: structures.Container) -> structures.Container:
        """Return the arguments as the function sees them while one device traces it: not every size, perhaps.

        Sizes are open where it is a `tf.function` with an `input_signature`, and under `reduce_retracing`.
        """
        seen_tree = as_specified(arguments, self._specs)
        if self._options.tuning["reduce_retracing"]:
            seen_tree = self._traces.retracing.seen(seen_tree)
        assert isinstance(seen_tree, structures.Container)
        return seen_tree

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the devices."""
        run = self._run if tf.executing_eagerly() else tf.autograph.experimental.do_not_convert(self._run)
        try:
            result: R = run(args, kwargs)
        except Exception as error:
            raise shortened(error) from error.__cause__
        return result

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if inside_trace(self._name()):  # of another parallelized function, whose plan covers this one as well
            return tf.function(self._fn)(*args, **kwargs)
        if variables_have_other_values():
            warn_of_stateless_scope(self._name(), self._traces)
            return rewritten_by_autograph(self._fn)(*args, **kwargs)
        check_no_replica(self._name())
        self._chosen.check()
        tensors, arguments = self._flatten(args, kwargs)

        def run(planned: PlannedFunction) -> list[tf.Tensor]:
            if not tf.executing_eagerly():
                warn_of_outer_graph(self._name(), self._traces, (*self.devices, planned.plan.default_device))
            if planned.runs:
                return planned(tensors)
            check_no_dtensors(self._name(), planned.trace, tensors)
            with phase(self._name()), phase("building and running it for the first time"):
                return planned(tensors)

        return self._run_planned(arguments, tensors, run)

    def _run_planned(
        self,
        arguments: structures.Container,
        tensors: list[tf.Tensor] | None,
        run: Callable[[PlannedFunction], list[tf.Tensor]],
    ) -> Any:
        """Return what the planned form returns; another one's, if layouts change before it runs.

        Args:
          arguments: the signature.
          tensors: where they lie, they are cut; None if each host has them.
          run: is given the planned form.
        """
        while True:
            planned = self._get(arguments)
            try:
                self._settle(planned)
                planned = planned if tensors is None else planned.on(tensors)
                results = run(planned)
            except LayoutsChangedError:
                continue
            planned.runs += 1
            return structures.unflatten(planned.trace.result, results)

    def _settle(self, planned: PlannedFunction) -> None:
        """Move variables to where the planned form has them, before it runs for the first time.

        Raises:
          LayoutsChangedError: see `Layouts.settle`, as for all else.
        """
        layouts, moves = planned.layouts, planned.plan.first_move is not None
        if not layouts.settled:
            with contextlib.ExitStack() as doing:
                for text in (self._name(), "moving variables")[: layouts.lies.is_noticed + moves]:
                    doing.enter_context(phase(text))
                layouts.settle()
        if not planned.runs:
            warn_of_variables(self._name(), self._traces, planned.plan)

    # (a batch may be any structure)
    def map(self, batches: Iterable[Any] | Callable[[], Iterable[Any]], *, prefetch: int = 1) -> Iterator[R]:
        """Return an iterator over the results for many batches; the next batch travels while this one computes.

        Another thread reads the batches, cuts them and sends each device its rows. Results and changes of variables
        are those of calling the function on one batch after the other.

        Args:
          batches: a `tf.data.Dataset` or any iterable. A tuple is the function's arguments in order, as in
            `Dataset.map`; anything else is its only argument. Or a function that returns such a dataset: where devices
            are on workers, it is called for each of their hosts, which read there, and no rows are sent. All have to
            read the same, which is checked: shuffles and draws need seeds.
          prefetch: how many batches are read and sent ahead of the one that computes; 0 for none.

        Raises:
          ArgumentError: if `prefetch` is not a number of at least 0, or a function for workers returns no dataset.
          UnsupportedError: in a graph; from the iterator, if a gradient tape watches, or hosts read different batches.

        >>> import tensorflow as tf, graphsplit as gs
        >>> double = gs.parallelize(lambda x: 2 * x, devices=2)
        >>> [y.numpy().tolist() for y in double.map(tf.data.Dataset.range(5).batch(3))]
        [[0, 2, 4], [6, 8]]
        """
        if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
            raise ArgumentError(f"prefetch takes a number of batches, 0 or more, got {prefetch!r}.")
        if not tf.executing_eagerly():
            raise UnsupportedError(
                f"{self._name()}.map runs batch by batch, eagerly; it is called while a graph is built. Call it "
                "outside of tf.function, or call the function itself in a loop over the dataset."
            )
        self._chosen.check()
        return input_pipelines.results(self, batches, prefetch)

    @overload
    def plan(self) -> Plan: ...

    @overload
    def plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan: ...

    @with_users_traceback
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """Return what would run where for these arguments, without running it. `print` it.

        Args:
          *args, **kwargs: the function's arguments; a `tf.TensorSpec` does for a tensor, as in all that runs nothing.
            Without any: those of the calls that ran most.
        """
        return self._planning(args, kwargs)[0].plan

    @with_users_traceback
    def gradient_plan(self, *args: P.args, **kwargs: P.kwargs) -> Plan:
        """Return the plan of the function together with its gradients, as it runs under a tape around the call."""
        planned = self._planning(args, kwargs)[0]
        plan, first_move = planned.pair().plan, planned.plan.first_move
        return plan if first_move is None else replace(plan, first_move=first_move)

    @with_users_traceback
    def graph_def(self, *args: P.args, **kwargs: P.kwargs) -> Any:  # generated protos have no types
        """Return the multi-device graph for these arguments as a `GraphDef`; every node has a device."""
        return graph_def_that_runs(emit(self._planning(args, kwargs)[0].plan))

    @with_users_traceback
    def variables(self, *args: P.args, **kwargs: P.kwargs) -> tuple[tf.Variable, ...]:
        """Return the variables that a call with these arguments reads or changes."""
        return self._planning(args, kwargs)[0].trace.variables

    def _variables_so_far(self) -> tuple[tf.Variable, ...]:
        """Return the variables that the calls so far read or change."""
        variables = [variable for planned in self._traces.all() for variable in planned.trace.variables]
        return tuple({id(variable): variable for variable in variables}.values())

    def _programs_so_far(self) -> list[Program]:
        """Return what the calls so far were traced to."""
        return [planned.trace.program for planned in self._traces.all()]

    # (Any: a ParamSpec leaves no room for another keyword)
    @with_users_traceback
    def placement(self, *args: Any, actual: bool = False, **kwargs: Any) -> Placement:
        """Return which operation runs on which device for these arguments; `print` it, `save` it, ask it.

        Args:
          *args, **kwargs: the function's arguments, or `tf.TensorSpec`s; without any, those of the calls that ran most.
          actual: run the function once, give all variables back the values that they had, and read from TensorFlow
            where each operation ran. Other state (tables, files, what is printed) is not restored.
        """
        from graphsplit.inspect.placements import placement_of_plan

        return placement_of_plan(self._planned(args, kwargs, actual), actual)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool) -> Planned:
        """Return what a call with these arguments runs, for those who look at it or, if `runs`, run it."""
        from graphsplit.inspect.sources import Planned

        planned, tensors = self._planning(args, kwargs, runs)
        return Planned(planned.trace, planned.plan, tensors, self._name())

    def _planning(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], runs: bool = False
    ) -> tuple[PlannedFunction, list[Any]]:
        """Return the planned form for these arguments, and the tensors among them, or what stands for tensors.

        Without arguments it is the one that ran most, if any has. What moves variables when it runs moves none of them
        as long as it is only looked at.
        """
        if not args and not kwargs:
            if (most := self._traces.ran_most()) is not None:
                return most, [tf.TensorSpec.from_tensor(tensor) for tensor in most.trace.inputs]
            self._check_takes_nothing()
        tensors, arguments = self._flatten(args, kwargs, specs=True)
        planned = self._get(arguments)
        if runs:
            self._settle(planned)
        check_no_dtensors(self._name(), planned.trace, tensors)
        return planned.on(tensors), tensors

    def _check_takes_nothing(self) -> None:
        """Raise `ArgumentError` for a question without arguments that no call answers, and no arguments will do."""
        try:
            self._signature.bind()
        except TypeError as error:
            raise ArgumentError(
                "Without arguments, plan() and placement() describe the signature that was called most, and "
                f"{self._name()} has not been called. Pass arguments or tf.TensorSpecs."
            ) from error

    if not TYPE_CHECKING:  # (for type checkers, what is not there stays an error)

        def __getattr__(self, name: str) -> Any:
            """Say what has the methods of a model that was parallelized as a function."""
            fn = self.__dict__.get("_fn")
            instead = f"; multi_gpu_model({type(fn).__name__.lower()}, gpus=...) has" if hasattr(fn, "fit") else ""
            raise AttributeError(
                f"{type(self).__name__!r} object has no attribute {name!r}{instead}", name=name, obj=self
            )

    def __set_name__(self, owner: type, name: str) -> None:
        self._attribute = name

    @overload
    def __get__(self, instance: None, owner: type) -> ParallelFunction[P, R]: ...

    @overload
    def __get__(
        self: ParallelFunction[Concatenate[Self, Q], R], instance: Self, owner: type | None = None
    ) -> ParallelFunction[Q, R]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> ParallelFunction[..., R]:
        """Bind to an instance as the function itself would be. The traces belong to the instance and go with it."""
        bind = None if isinstance(self._fn, staticmethod) else getattr(self._fn, "__get__", None)
        if instance is None or bind is None:
            return self
        traces = self._instances.of(instance, self._name())
        bound = traces.bound() if traces.bound is not None else None
        if bound is None:
            bound = object.__new__(type(self))
            bound.__dict__.update(self.__dict__, _fn=bind(instance, owner), _instance=instance)
            bound._start()
            bound._traces = traces
            traces.bound = weakref.ref(bound)
        return bound  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copy and pickle the function and its options: by name what is found under its name, methods by instance."""
        if self._instance is not None and self._attribute:
            return getattr, (self._instance, self._attribute)
        named: Any = sys.modules.get(getattr(self, "__module__", None) or "")
        for name in str(getattr(self, "__qualname__", "")).split("."):
            named = getattr(named, name, None)
        return self.__qualname__ if named is self else super().__reduce_ex__(protocol)

    def __getstate__(self) -> dict[str, Any]:
        left_out = ("_traces", "_instances", "_signature", "__signature__", "_chosen", "_asks", "_specs")
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._start()

    def __repr__(self) -> str:
        name = getattr(self, "__qualname__", getattr(self, "__name__", repr(self._fn)))
        return f"<ParallelFunction {name} on {self._options.devices or 'all devices'}>"

    def _flatten(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], specs: bool = False
    ) -> tuple[list[tf.Tensor], structures.Container]:
        try:
            bound = self._signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{self._name()}{self._signature}: {error}") from None
        tensors, tree = structures.flatten(dict(bound.arguments), specs)
        assert isinstance(tree, structures.Container)
        return tensors, tree

    def _get(self, arguments: structures.Container) -> PlannedFunction:
        """Return the planned form for this signature, making it on first use."""
        if in_xla_context():
            raise UnsupportedError(
                f"{self._name()} is called inside a function with jit_compile=True. XLA compiles such a function for "
                "one device and would erase the placement. Remove jit_compile=True from the outer function; you may "
                "set it on functions that the parallelized one calls."
            )
        if (planned := self._find(arguments)) is not None:
            return planned
        with self._traces.lock:
            seen_tree = self._seen(arguments)
            arguments = self._cover(arguments, seen_tree)
            planned = self._find(arguments)  # another thread may have been faster, or another call was like this
            if planned is None:
                planned = self._trace_and_plan(arguments, seen_tree)
                warn_of_kernels(self._name(), self._traces, Signature(seen_tree, open_scopes()), planned.trace.program)
                signature = Signature(arguments, open_scopes())
                current = [other for other in self._traces.planned.get(signature, ()) if other.is_current]
                self._traces.planned[signature] = [*current, planned]
                warn_of_retracing(self._name(), list(dict.fromkeys(key.arguments for key in self._traces.planned)))
        return planned

    def _find(self, arguments: structures.Container) -> PlannedFunction | None:
        """Return the planned form for this signature that is valid here and now.

        What it captured is at hand, and variables lie as they did. (In a graph they are whole: it may use them itself.)
        """
        if variables_have_other_values():  # (a call does not come here)
            raise UnsupportedError(
                f"A plan of {self._name()} was requested inside a keras.StatelessScope, which stateless_call and "
                "building a model open. Variables have other values there, and a plan reads their values. Call plan "
                "and map outside of the scope."
            )
        outer = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        signature = Signature(self._traces.covered.get(arguments, arguments), open_scopes())
        for planned in self._traces.planned.get(signature, ()):
            in_reach = planned.trace.outer_graph in (None, outer) and not (outer and self._is_eager(planned))
            if planned.is_current and in_reach:
                return planned
        return None

    def _is_eager(self, planned: PlannedFunction) -> bool:
        """Return whether a planned form is for eager calls: in a graph each call is a place of its own.

        There variables are whole, and kernels that draw remember what they drew at this place.
        """
        program = planned.plan.program
        return bool(planned.plan.state.parts or planned.trace.draws or has_seeded_kernels(program))

    def _cover(self, arguments: structures.Container, seen_tree: structures.Container) -> structures.Container:
        """Return the signature for which a call is planned: its own, or one that leaves sizes open.

        Args:
          arguments: of the call.
          seen_tree: the same as one device traces it.
        """
        if seen_tree == arguments:
            return arguments
        resolve_split(self._options.split, spread(arguments, self._signature))  # (says in numbers what does not fit)
        wide = self._traces.open_sizes.covering(self._name(), seen_tree, arguments)
        if wide is None:
            wide = seen_tree if self._is_one_batch(seen_tree, arguments) else arguments
        if wide != arguments:
            self._traces.remember_covered(arguments, wide)
        return wide

    def _is_one_batch(self, planned_arguments: structures.Container, arguments: structures.Container) -> bool:
        splitting = resolve_split(self._options.split, spread(planned_arguments, self._signature))
        return same_batch(splitting, spread(arguments, self._signature))

    @collection_paused()
    def _trace_and_plan(self, arguments: structures.Container, seen_tree: structures.Container) -> PlannedFunction:
        named = spread(arguments, self._signature)
        check_no_distributed_values(self._name(), named)
        check_no_specs(self._name(), named)
        fn = by_bound_arguments(self._traced, self._signature)
        with phase(self._name()):
            # (what is traced in a graph may capture what is there)
            functions = self._traces.functions if is_open(seen_tree) and tf.executing_eagerly() else None
            called = Called(fn, as_call(seen_tree), named, functions, self._draws_of(seen_tree))
            with explaining_trace(self._name(), named):
                traced, plan, request = trace_and_plan(called, self._chosen, self._arrangement, self._traces.choices)
        return PlannedFunction(traced, plan, self._name(), request, Layouts(traced, plan, request.lies))

    def _draws_of(self, seen_tree: structures.Container) -> DrawCounters | None:
        """Return what counts the draws of kernels in a trace; None where each plan has kernels that do.

        In a graph each call is a place of its own, whose kernels begin and end with the graph.
        """
        if (
            not tf.executing_eagerly()
            or self._chosen.missing
            or any(map(host_name, (*self.devices, self.default_device)))
        ):
            return None
        return self._traces.draws.setdefault(Signature(seen_tree, open_scopes()), DrawCounters())

    def _arrangement(self) -> Arrangement:
        """Return how variables are to lie by what was asked before they are known to be the function's."""
        lies = Arrangement()
        decide_later(lies)
        if self._asks is not None:
            self._asks(lies)
            lies.then(functools.partial(setattr, self, "_asks", None))
        return lies

    def _title(self) -> str:
        """Return what a report calls it: its name, or (a subclass) more."""
        return self._name()

    def _name(self) -> str:
        return str(getattr(self, "__name__", type(self._fn).__name__))


@runtime_checkable
class Stepping(Protocol):
    """Whatever has parallelized steps: a wrapped Keras model."""

    def _parallel_step(self, *args: Any, **kwargs: Any) -> tuple[ParallelFunction[..., Any], tuple[Any, ...]]: ...


def step_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Return a function and its arguments: of what has steps, the step for a batch; of a function, as they are."""
    fn = answering(fn)
    if isinstance(fn, ParallelFunction) or not isinstance(fn, Stepping):
        check_takes_inputs(fn, args)
        return fn, args, kwargs
    step, batch = fn._parallel_step(*args, **kwargs)
    return step, batch, {}
