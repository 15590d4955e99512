"""Keras, with its calls going through graphsplit: layers, operations, losses, metrics, optimizers, steps of models.

Its own objects stay what they are, and so do its tests; for as long as `routed` holds, the methods that they call ask a
`Through` first. (Only here, in tests: graphsplit itself changes nothing of Keras.)
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from keras.src import backend, ops, tree
from keras.src.backend.tensorflow.core import Variable
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from keras.src.layers import Layer
from keras.src.losses.loss import Loss
from keras.src.metrics import Metric
from keras.src.ops import core, image, linalg, math, nn, numpy
from keras.src.ops.operation import Operation
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import global_seed_generator
from keras.src.trainers.data_adapters.data_adapter_utils import unpack_x_y_sample_weight

import graphsplit as gs
from graphsplit.keras.batches import BatchFunction
from graphsplit.keras.models import is_wrapped
from tests.others.comparison import Through, tensors_of

# These make tensors of what is none, or say something of one: they compute nothing.
_NO_COMPUTATION = frozenset({"array", "convert_to_tensor", "convert_to_numpy", "is_tensor", "shape", "dtype", "device"})
_FIRST_BATCHES, _EVERY_BATCH = 3, 10
_STEPS = ("train", "test", "predict")
_RUNNERS = {
    "fit": "train",
    "evaluate": "test",
    "predict": "predict",
    "train_on_batch": "train",
    "test_on_batch": "test",
    "predict_on_batch": "predict",
}


@contextlib.contextmanager
def routed(through: Through) -> Iterator[None]:
    """Let calls of Keras ask `through`, while it is active, which way to go."""
    with contextlib.ExitStack() as undo:
        for owner in (Layer, Operation, Loss):
            _wrap(undo, owner, "__call__", functools.partial(_method, through))
        for owner in subclasses(BaseOptimizer):
            if "apply" in vars(owner):
                _wrap(undo, owner, "apply", functools.partial(_apply, through))
        for owner in subclasses(Metric):
            if "update_state" in vars(owner):
                _wrap(undo, owner, "update_state", functools.partial(_method, through))
        for module in (core, image, linalg, math, nn, numpy):
            _wrap_functions(undo, through, module)
        _wrap(undo, Variable, "_initialize", functools.partial(_initialize, through))
        for kind in _STEPS:
            _wrap(undo, TensorFlowTrainer, f"make_{kind}_function", functools.partial(_make_function, through, kind))
        for runner, kind in _RUNNERS.items():
            _wrap(undo, TensorFlowTrainer, runner, functools.partial(_runner, through, kind))
        yield


def before_test(through: Through) -> None:
    """Tell of the variable that Keras keeps for all tests."""
    through.knows(global_seed_generator().state.value)


def subclasses(owner: type) -> list[type]:
    """Return a class with all that are derived from it by now."""
    found = [owner]
    for derived in owner.__subclasses__():
        found += [one for one in subclasses(derived) if one not in found]
    return found


def _wrap(undo: contextlib.ExitStack, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Put what `make` makes of an attribute in its place, until `undo`."""
    own = vars(owner)[name]
    setattr(owner, name, functools.wraps(own)(make(own)))
    undo.callback(setattr, owner, name, own)


def _wrap_functions(undo: contextlib.ExitStack, through: Through, module: types.ModuleType) -> None:
    import keras

    for name, own in list(vars(module).items()):
        is_own = isinstance(own, types.FunctionType) and own.__module__ == module.__name__
        if not is_own or name.startswith("_") or name in _NO_COMPUTATION:
            continue
        made = functools.wraps(own)(_function(through, own))
        for place in (module, ops, keras.ops):
            if vars(place).get(name) is own:
                setattr(place, name, made)
                undo.callback(setattr, place, name, own)


def _goes_through(through: Through, args: Any, kwargs: Any) -> bool:
    """Return whether a call goes through graphsplit; count it if it might and does not."""
    if not through.takes():
        return False
    if any(isinstance(leaf, backend.KerasTensor) for leaf in tree.flatten((args, kwargs))):
        return False  # a call that builds a model computes nothing
    if backend.in_stateless_scope():
        through.not_routed("in a StatelessScope, where variables have other values")
        return False
    tensors = tensors_of(args, kwargs)
    if not any(len(tensor.shape) for tensor in tensors):
        if tensors or (args and isinstance(args[0], list)):  # (else it makes tensors of shapes and numbers)
            through.not_routed("its arguments are scalars, or lists of Python")
        return False
    return True


def _method(through: Through, own: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not _goes_through(through, args, kwargs):
            return own(self, *args, **kwargs)
        return _with_masks(through, type(self).__name__, functools.partial(own, self), args, kwargs, self)

    return call


def _function(through: Through, own: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _goes_through(through, args, kwargs):
            return own(*args, **kwargs)
        return _with_masks(through, f"ops.{own.__name__}", own, args, kwargs, None)

    return call


def _initialize(through: Through, own: Callable[..., Any]) -> Callable[..., Any]:
    def initialize(self: Any, value: Any) -> None:
        own(self, value)
        through.knows(self._value)

    return initialize


def _apply(through: Through, own: Callable[..., Any]) -> Callable[..., Any]:
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        grads = list(map(_with_tensors, grads)) if through.takes() else grads
        if not _goes_through(through, (grads,), {}):
            return own(self, grads, trainable_variables)
        if trainable_variables is not None:
            trainable_variables = list(trainable_variables)

        def run(grads: Any) -> Any:
            return own(self, grads, trainable_variables)

        kept = functools.partial(attributes_kept, self)
        return through.call(f"{type(self).__name__}.apply", run, (grads,), {}, kept, batched=False)

    return apply


def _with_tensors(leaf: Any) -> Any:
    """Return rows of a tensor whose parts are tensors: Keras' tests give lists, which no graph takes."""
    if not isinstance(leaf, tf.IndexedSlices):
        return leaf
    parts = (leaf.values, leaf.indices, leaf.dense_shape)
    return tf.IndexedSlices(*[None if part is None else tf.convert_to_tensor(part) for part in parts])


def _with_masks(through: Through, what: str, own: Callable[..., Any], args: Any, kwargs: Any, owner: Any) -> Any:
    """Run a call with the masks that Keras hangs on tensors, and the losses that layers keep, as tensors of its own."""
    args, kwargs = tree.map_structure(_with_tensors, (args, kwargs))
    layers = list(owner._flatten_layers()) if isinstance(owner, Layer) else []

    def run(args: Any, kwargs: Any, masks: Any) -> Any:
        for tensor, mask in zip(tree.flatten((args, kwargs)), masks, strict=True):
            if mask is not None:
                backend.set_keras_mask(tensor, mask)
        outputs = own(*args, **kwargs)
        losses = [list(layer._losses) for layer in layers]
        return outputs, list(map(_mask_of, tree.flatten(outputs))), losses

    masks = list(map(_mask_of, tree.flatten((args, kwargs))))
    found = through.call(what, run, (args, kwargs, masks), {}, functools.partial(attributes_kept, owner))
    outputs, masks, _ = found
    for tensor, mask in zip(tree.flatten(outputs), masks, strict=True):
        if mask is not None:
            backend.set_keras_mask(tensor, mask)
    return outputs


def _mask_of(value: Any) -> Any:
    return backend.get_keras_mask(value) if isinstance(value, (tf.Tensor, tf.RaggedTensor, tf.SparseTensor)) else None


@contextlib.contextmanager
def attributes_kept(owner: Any) -> Iterator[None]:
    """Give an object's attributes, and those of its layers, back what they were: tracing leaves tensors of graphs."""
    parts = [owner, *(owner._flatten_layers(include_self=False) if isinstance(owner, Layer) else [])]
    before = [(part, dict(vars(part)), _losses_of(part)) for part in parts if hasattr(part, "__dict__")]
    try:
        yield
    finally:
        for part, attributes, losses in before:
            vars(part).clear()
            vars(part).update(attributes)
            if losses is not None:
                part._losses[:], part._loss_ids = losses[0], set(losses[1])


def _losses_of(part: Any) -> tuple[list[Any], set[int]] | None:
    return (list(part._losses), set(part._loss_ids)) if isinstance(part, Layer) and hasattr(part, "_losses") else None


class _ComparedStep:
    """A parallelized step of a model, some of whose batches are compared: the first ones, then every so many."""

    def __init__(self, through: Through, what: str, step: gs.ParallelFunction[..., Any], model: Any):
        self._through = through
        self._what = what
        self._step = step
        self._model = model
        self._plain = tf.function(step.function)
        self._batches = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._step, name)

    def __call__(self, *args: Any) -> Any:
        self._batches += 1
        compared = self._batches <= _FIRST_BATCHES or self._batches % _EVERY_BATCH == 0
        if not compared or not self._through.takes():
            with self._through.inside():
                return self._step(*args)
        kept = functools.partial(attributes_kept, self._model)
        return self._through.compare(self._what, self._step, self._plain, args, {}, kept)


def _make_function(through: Through, kind: str, own: Callable[..., Any]) -> Callable[..., Any]:
    name = f"{kind}_function"

    def make(self: Any, force: bool = False) -> Any:
        if not through.takes() or is_wrapped(self) or (getattr(self, name) is not None and not force):
            return own(self, force)
        if self.run_eagerly:
            through.not_routed("compiled with run_eagerly=True")
            return own(self, force)
        setattr(self, name, _StepsOfModel(through, kind, self, functools.partial(own, self, True)))
        return getattr(self, name)

    return make


class _StepsOfModel:
    """The batches of a model, on several devices.

    Keras builds many models while it traces their first step. `multi_gpu_model` takes built ones, so this one is built
    when its first batch is known, as Keras does it under a strategy.
    """

    def __init__(self, through: Through, kind: str, model: Any, make_plain: Callable[[], Any]):
        self._through = through
        self._kind = kind
        self._model = weakref.ref(model)
        self._make_plain = make_plain
        self._steps: Any = None

    def __call__(self, iterator: Any) -> Any:
        if self._steps is None:
            model: Any = self._model()
            iterator = self._build(model, iterator)
            self._steps = self._wrapped(model)
            if not isinstance(self._steps, BatchFunction):
                setattr(model, f"{self._kind}_function", self._steps)
        return self._steps(iterator)

    def _build(self, model: Any, iterator: Any) -> Any:
        optimizer = getattr(model, "optimizer", None)
        if not model.built:
            iterator = iterator if isinstance(iterator, list) else _Peeking(iterator)
            first = iterator[0] if isinstance(iterator, list) else iterator.first
            x, _, _ = unpack_x_y_sample_weight(tree.map_structure(_without_optional, first))
            options = {"training": False} if model._call_has_training_arg else {}
            backend.compute_output_spec(model, x, **options)
        if self._kind == "train" and optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        return iterator

    def _wrapped(self, model: Any) -> Any:
        try:
            with self._through.laying_out():
                made = getattr(self._wrap(model), f"make_{self._kind}_function")(force=True)
        except gs.GraphsplitError as error:
            why = f"multi_gpu_model: {type(error).__name__}: {str(error).split('. ')[0][:200]}"
            self._through.not_routed(why.replace(repr(model.name), "the model"))
            return self._make_plain() or getattr(model, f"{self._kind}_function")
        made.step = _ComparedStep(self._through, f"{type(model).__name__}.{self._kind}_step", made.step, model)
        return made

    def _wrap(self, model: Any) -> Any:
        through = self._through
        return gs.multi_gpu_model(
            model, gpus=through.devices, variables=through.layout, micro_batches=through.micro_batches
        )


def _without_optional(part: Any) -> Any:
    return None if isinstance(part, tf.experimental.Optional) else part


class _Peeking:
    """An iterator whose first batch was looked at."""

    def __init__(self, iterator: Any):
        self._iterator = iterator
        self.first = next(iterator)
        self._ahead = [self.first]
        self.element_spec = getattr(iterator, "element_spec", ())

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._iterator)


def _runner(through: Through, kind: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        outermost = through.takes()
        result = own(self, *args, **kwargs)
        if outermost and not self.run_eagerly and not isinstance(getattr(self, f"{kind}_function"), _StepsOfModel):
            through.not_routed(f"{own.__name__}: the model has a function of its own")
        return result

    return run
