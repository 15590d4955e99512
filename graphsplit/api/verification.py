"""`verify`: whether several devices give one device's results, for the user's own function and data."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, overload

import numpy as np
import tensorflow as tf

from graphsplit.api.calls.parallel_function import P, ParallelFunction, R, Stepping, step_of
from graphsplit.core import structures
from graphsplit.core.devices import short_name
from graphsplit.core.notebooks import text_html
from graphsplit.core.stand_ins import answering
from graphsplit.core.tensorflow_internals import op_definition
from graphsplit.errors import ArgumentError
from graphsplit.planning.amounts import count_text
from graphsplit.planning.plan import Plan
from graphsplit.planning.work_shares import devices_of_shards
from graphsplit.program.graph.compilability import is_of_variables
from graphsplit.program.graph.function_calls import CONTROL_FLOW
from graphsplit.program.program import Program

_PERTURBED_RUNS = 2
_SHOWN = 3  # operations among the causes
_HALF = 3e-4  # two calls that differ by half of the digits of a float32 differ by more than how a kernel added up


@dataclass(frozen=True)
class Report:
    """What `verify` found; `print` it.

    Attributes:
      differences: one for each output and variable, those that rounding does not explain first, then those that take
        most of what it does explain.
      devices: those that the plan uses.
      causes: what of the function can make more of a rounding error, or gives other numbers each time.
      shards: into how many the plan divides work; micro-batches count.
      title: what ran, the function's name or which step of a model.
    """

    differences: tuple[Difference, ...]
    devices: tuple[str, ...]
    causes: tuple[str, ...] = ()
    shards: int = 0
    title: str = ""

    @property
    def largest(self) -> float:
        """The largest relative difference; 0.0 if everything is equal bit by bit."""
        return max((d.relative for d in self.differences), default=0.0)

    @property
    def passed(self) -> bool:
        """Whether rounding explains every difference; also true if nothing was compared, see `compared`."""
        return all(d.is_rounding for d in self.differences)

    @property
    def compared(self) -> bool:
        """Whether the plan divides anything. If not, one device ran twice, and `passed` proves nothing."""
        return len(self.devices) > 1 or self.shards > 1

    def _verdict(self) -> str:
        d = max(self.differences, key=lambda d: (not d.is_rounding, d.share), default=None)
        if self.passed and not self.compared:
            return (
                f"NOTHING COMPARED: the plan uses one device, {short_name(self.devices[0])}, so one device ran twice; "
                "print(function.plan(...)) shows the plan"
            )
        if d is None or not self.largest:
            return "PASS: equal bit by bit"
        if self.passed:
            return f"PASS: every difference is rounding; largest: {d.name}, " + (
                d._noise or f"{d.relative:.2g} relative, where rounding explains up to {d.rounding:.2g}"
            )
        if d.again:
            return (
                f"CHECK: {d.name} is {d.again:.2g} relative from itself in two calls on one device, so there is "
                "nothing to compare with. The function draws new random numbers in each call (with "
                "tf.random.set_seed, or a seed= of tf.random.normal and tf.nn.dropout, as well: use stateless ones, a "
                "tf.random.Generator or Keras' SeedGenerator), or reads what changes"
            )
        return f"CHECK: {d.name} {d.relative:.2g} relative, more than rounding explains ({d.rounding:.2g})"

    def __str__(self) -> str:
        lines = [self._verdict()]
        if not self.passed and not any(d.again for d in self.differences):
            lines += ["likely causes:", *[f"  {cause}" for cause in self.causes]]
        shards = f", {self.shards} shards," if self.shards > len(self.devices) else ""
        lines.append(f"{count_text(len(self.devices), 'device')}{shards} against one, {self.title}:")
        width = max((len(d.name) for d in self.differences[:10]), default=0)
        for d in self.differences[:10]:
            explained = f"; rounding explains up to {d.rounding:.2g}" if d.relative else ""
            size = d._noise or f"{d.absolute:.2g} absolute, {d.relative:.2g} relative{explained}"
            lines.append(f"  {d.name:{width}}  {size}")
        if len(self.differences) > 10:
            lines.append(f"  ... and {len(self.differences) - 10} more, smaller in proportion to rounding")
        return "\n".join(lines)

    __repr__ = __str__  # what a prompt, and an assertion that fails, show

    def _repr_html_(self) -> str:
        return text_html(str(self), "the differences", good=self.passed and self.compared)


@overload
def verify(function: ParallelFunction[P, R], *args: P.args, **kwargs: P.kwargs) -> Report: ...


@overload
def verify(function: Stepping, *args: Any, **kwargs: Any) -> Report: ...


def verify(function: Any, *args: Any, **kwargs: Any) -> Report:
    """Run a parallelized function, or a step of a wrapped model, and its single-device original, and compare.

    Both start with the same arguments and state. Several devices add up in another order than one, so results differ
    by rounding. If anything differs by more than 8 units in the last place, the original runs twice more on one
    device, with all arguments and variables changed at random by one unit in the last place (of the function's
    shortest floating type, if it has half ones). A difference of at most 16 times what that changes is rounding. (This
    estimates the function's condition, as in N. Higham, Accuracy and Stability of Numerical Algorithms, chapter 1.) If
    one device differs from itself from call to call, as on GPUs, that is rounding, too; unless the function draws
    numbers or reads what changes, and half of all digits differ: then nothing can be compared, and the verdict says so.

    Variables get their values back, whether or not the function succeeds. Other state (files, tables, what `tf.print`
    wrote, generators that are not variables) is not restored.

    Args:
      function: made by `parallelize`; or a model made by `multi_gpu_model`, or under `keras.distribution`, see
        `gs.keras.enable_distribution`.
      *args, **kwargs: its arguments, tensors; of a model one batch, `x, y, sample_weight`: its training step is run, or
        without `y` its prediction; or the one that is named, `step="train"`, `"test"` or `"predict"`.

    Returns:
      A `Report`; print it. Its first line is the verdict: `PASS`, `CHECK`, or `NOTHING COMPARED` if the plan uses one
      device only.

    Raises:
      ArgumentError: if `function` is neither, arguments are specifications, or this is not eager code.

    >>> import tensorflow as tf, graphsplit as gs
    >>> mean = gs.parallelize(tf.reduce_mean, devices=2)
    >>> gs.verify(mean, tf.constant([1.0, 2.0, 6.0])).passed
    True
    """
    function = answering(function)
    is_model = isinstance(function, Stepping)
    if not is_model and not isinstance(function, ParallelFunction):
        plain = _NOT_WRAPPED * hasattr(function, "train_step")
        if callable(function) and not plain:
            plain = f" Write gs.verify(gs.parallelize({getattr(function, '__name__', 'fn')}, devices=4), ...)."
        raise ArgumentError(
            f"verify takes a function made by parallelize or a model made by multi_gpu_model, got {function!r}.{plain}"
        )
    if not tf.executing_eagerly():
        raise ArgumentError("verify runs the function twice and compares numbers: call it outside of tf.function.")
    specs = [str(leaf) for leaf in tf.nest.flatten((args, kwargs)) if isinstance(leaf, tf.TypeSpec)]
    if specs:
        raise ArgumentError(f"verify runs the function, so it needs tensors, not specifications: {'; '.join(specs)}.")
    if is_model and not args:
        raise ArgumentError("verify runs a step of the model: give it a batch, x and y.")
    function, args, kwargs = step_of(function, args, kwargs)
    runs = _Runs(function, args, kwargs)
    expected, computed = runs.on_one_device(), runs.on_devices()
    names = runs.names(len(expected))
    apart = list(map(difference_of, names, expected, computed))
    again = [replace(difference, relative=0.0) for difference in apart]
    most = [ROUNDED * max(last_place(value.dtype), runs.last_place) for value in expected]
    if any(difference.relative > explained for difference, explained in zip(apart, most, strict=True)):
        again = list(map(difference_of, names, expected, runs.on_one_device()))
        most = list(map(_explained, most, again))
        for seed in range(_PERTURBED_RUNS):
            moved = map(difference_of, names, expected, runs.on_one_device(np.random.default_rng(seed)))
            most = list(map(_explained, most, moved))
    plan, draws = runs.plan, runs.draws
    judged = [replace(difference, rounding=explained) for difference, explained in zip(apart, most, strict=True)]
    if _gives_other_results(plan.program) or (draws is not None and draws.unseeded):
        judged = [
            replace(d, again=by.relative if by.relative > _HALF else 0.0) for d, by in zip(judged, again, strict=True)
        ]
    judged.sort(key=lambda d: (d.is_rounding, -d.share))
    shards = len(plan.devices) if plan.sharded_ops else 0
    return Report(tuple(judged), _devices_of(plan), _causes(plan), shards, function._title())


_NOT_WRAPPED = (
    " Write gs.verify(gs.multi_gpu_model(model, gpus=4), x, y). (On one device, multi_gpu_model gives back the model "
    "itself.)"
)


def _devices_of(plan: Plan) -> tuple[str, ...]:
    """Return the devices that a plan uses: those of shards; if that is one at most, those of all that runs."""
    sharding = devices_of_shards(plan)
    return sharding if len(sharding) > 1 else tuple(sorted({*sharding, *plan.places.all_once}))


# They have effects, and yet their results follow from what they read.
_SAME_RESULTS = CONTROL_FLOW.keys() | {"Assert", "Print", "PrintV2", "CudnnRNNV3", "CudnnRNNBackpropV3"}


def _gives_other_results(program: Program) -> bool:
    """Return whether an operation may give other results for equal arguments and variables: draws, tables, files."""
    return any(
        (op_definition(op.type).is_stateful and op.type not in _SAME_RESULTS and not is_of_variables(op.type))
        or any(map(_gives_other_results, op.bodies.values()))
        for op in program.ops
    )


def _explained(explained_before: float, by: Difference) -> float:
    """Return how far rounding explains, given another run: one that overflows tells nothing of finite numbers."""
    return max(explained_before, MARGIN * by.relative) if math.isfinite(by.relative) else explained_before


_JUMPS = frozenset({"ArgMax", "ArgMin", "Bucketize", "Ceil", "Floor", "Rint", "Round", "Sign", "TopKV2", "Where"})


def _causes(plan: Plan) -> tuple[str, ...]:
    """Return what of a function can make more of a rounding error, or gives other numbers each time."""
    jumps = dict.fromkeys((op.type, plan.program.line_of(op)) for op in plan.program.ops if op.type in _JUMPS)
    causes = [
        f"{kind}{f' at {where}' if where else ''}: between equal candidates, or at an edge, a rounding error decides"
        for kind, where in list(jumps)[:_SHOWN]
    ]
    causes.append(
        "Python code that does something else each time it is traced: it is traced for one device and for several"
    )
    causes.append("a defect of graphsplit: please report it with the plan, print(function.plan(...))")
    return tuple(causes)


class _Runs:
    """Runs of a function and of its single-device original, all from the same state: results, then variables."""

    def __init__(self, function: ParallelFunction[..., Any], args: Any, kwargs: Any):
        self._function = function
        self._variables = function.variables(*args, **kwargs)  # traces, which may make variables
        self._values_before = [tf.identity(variable) for variable in self._variables]
        self._tensors, self._tree = structures.flatten((args, kwargs))
        planned = function._planned(args, kwargs, runs=False)
        self.plan, self.draws = planned.plan, planned.trace.draws
        self._single = tf.function(function.function)
        types = {dtype for op in self.plan.program.ops for dtype in op.out_dtypes}
        self.last_place = max([last_place(dtype) for dtype in types & {tf.float16, tf.bfloat16}], default=0.0)

    def names(self, count: int) -> list[str]:
        """Return the names of so many tensors that a run gives."""
        names = [getattr(variable, "path", None) or variable.name for variable in self._variables]
        return [*[f"output {i}" for i in range(count - len(names))], *[f"variable {name}" for name in names]]

    def on_devices(self) -> list[tf.Tensor]:
        """Run the parallelized function."""
        with self._state_restored(), contextlib.nullcontext() if self.draws is None else self.draws.begun_anew():
            return self._results(self._function, self._tensors)

    def on_one_device(self, rng: np.random.Generator | None = None) -> list[tf.Tensor]:
        """Run the original; if there is a generator, from arguments and variables changed in their last places."""
        if self.draws is not None:  # its kernels draw their first numbers
            self._single = tf.function(self._function.function)
        with self._state_restored(), tf.device(self._function.default_device):
            if rng is None:
                return self._results(self._single, self._tensors)
            for variable, value in zip(self._variables, self._values_before, strict=True):
                variable.assign(self._moved(value, rng))
            return self._results(self._single, [self._moved(tensor, rng) for tensor in self._tensors])

    def _results(self, call: Callable[..., Any], tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        args, kwargs = structures.unflatten(self._tree, tensors)
        outputs, _ = structures.flatten(structures.map_static(_as_tensor, call(*args, **kwargs)))
        return [*outputs, *[tf.identity(variable) for variable in self._variables]]

    def _moved(self, tensor: tf.Tensor, rng: np.random.Generator) -> tf.Tensor:
        by = max(last_place(tensor.dtype), self.last_place)
        if not (tensor.dtype.is_floating or tensor.dtype.is_complex):
            return tensor
        signs = tf.constant(rng.choice([-1.0, 1.0], tensor.shape), tensor.dtype.real_dtype)
        return tensor * tf.cast(1 + by * signs, tensor.dtype)

    @contextlib.contextmanager
    def _state_restored(self) -> Iterator[None]:
        try:
            yield
        finally:
            for variable, value in zip(self._variables, self._values_before, strict=True):
                variable.assign(value)


def _as_tensor(value: Any) -> Any:
    """Return a Python number or string as a tensor: `tf.function` returns those as tensors too."""
    return tf.convert_to_tensor(value) if isinstance(value, (bool, int, float, complex, str, bytes)) else value


ROUNDED = 8  # units in the last place that any sum of many terms may be off, relative to its largest entry
MARGIN = 16  # how many times what a change in the last place of all that goes in does


@dataclass(frozen=True)
class Difference:
    """One output or variable.

    Attributes:
      name: `output 0` or `variable dense/kernel`.
      absolute: the largest absolute difference.
      relative: that, divided by the largest magnitude.
      rounding: the relative difference that rounding explains, see `verify`.
      again: how far apart two calls on one device are, relative, if that is more than rounding: then there is nothing
        to compare with.
    """

    name: str
    absolute: float
    relative: float
    rounding: float = 0.0
    again: float = 0.0

    @property
    def is_rounding(self) -> bool:
        """Whether rounding explains it."""
        return self.relative <= self.rounding and not self.again

    @property
    def share(self) -> float:
        """The difference as a multiple of what rounding explains. Above 1, it is not rounding."""
        return self.relative / self.rounding if self.rounding else float("inf") if self.relative else 0.0

    @property
    def _noise(self) -> str:
        """What to say where rounding explains all digits, as where numbers cancel to zero; "" elsewhere."""
        if not (self.relative and self.is_rounding and self.rounding >= 1):
            return ""
        most = self.absolute * self.rounding / self.relative
        return f"{self.absolute:.2g} absolute, of a value that is rounding only (numbers cancel): up to {most:.2g}"


_LAST_PLACES = {tf.float16: 2.0**-10, tf.bfloat16: 2.0**-7, tf.float32: 2.0**-23, tf.float64: 2.0**-52}


def last_place(dtype: tf.DType) -> float:
    """Return a unit in the last place of numbers around 1; 0.0 for types that are not rounded."""
    return _LAST_PLACES.get(dtype.real_dtype, 0.0) if dtype.is_floating or dtype.is_complex else 0.0


def difference_of(name: str, expected: tf.Tensor, actual: tf.Tensor) -> Difference:
    """Return how far one tensor is from another; infinitely far for another shape."""
    a, b = expected.numpy(), actual.numpy()
    if np.shape(a) != np.shape(b):
        return Difference(name, float("inf"), float("inf"))
    if expected.dtype == tf.string:
        differs = float(np.any(a != b))
        return Difference(name, differs, differs)
    kind = np.complex128 if expected.dtype.is_complex else np.float64
    a, b = np.asarray(a, kind), np.asarray(b, kind)
    if not a.size:
        return Difference(name, 0.0, 0.0)
    same_special = (np.isnan(a) & np.isnan(b)) | (a == b)
    distance = np.where(same_special, 0.0, np.abs(np.where(same_special, 0, a) - np.where(same_special, 0, b)))
    largest = float(np.nan_to_num(distance, nan=np.inf, posinf=np.inf).max())
    scale = float(np.max(np.abs(a[np.isfinite(a)]), initial=0.0))
    return Difference(name, largest, largest / scale if scale else largest)
