"""Parallelized methods, one per instance; copies and pickles of functions and of what holds them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import keras
import pytest
import tensorflow as tf

import graphsplit as gs

TRACES: list[str] = []


def ones(count: int = 4, width: int = 3) -> tf.Tensor:
    return tf.ones((count, width))


class Scale:
    def __init__(self, factor: float):
        self.factor = tf.Variable(factor)

    @gs.parallelize(devices=2)
    def apply(self, x):
        TRACES.append("apply")
        return x * self.factor

    @gs.parallelize(devices=2)
    def __call__(self, x):
        TRACES.append("call")
        return x * self.factor


class ScaleModule(Scale, tf.Module):
    def __init__(self, factor: float):
        tf.Module.__init__(self)
        Scale.__init__(self, factor)


class Slotted:
    __slots__ = ("__weakref__", "factor")

    def __init__(self, factor: float):
        self.factor = tf.Variable(factor)

    @gs.parallelize(devices=2)
    def apply(self, x):
        TRACES.append("apply")
        return x * self.factor


@dataclass
class Equal:  # not hashable, and all of them are equal
    factor: Any

    def __post_init__(self) -> None:
        self.factor = tf.Variable(self.factor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Equal)

    @gs.parallelize(devices=2)
    def apply(self, x):
        TRACES.append("apply")
        return x * self.factor


class Signed(tf.Module):
    def __init__(self, factor: float):
        super().__init__()
        self.factor = tf.Variable(factor)

    @gs.parallelize(devices=2)
    @tf.function(input_signature=[tf.TensorSpec([None, 3])])
    def apply(self, x):
        TRACES.append("apply")
        return x * self.factor


@gs.parallelize(devices=2)
def double(x):
    return 2 * x


def square(x):
    return x * x


@pytest.fixture(autouse=True)
def no_traces() -> None:
    TRACES.clear()


def first(result: tf.Tensor) -> float:
    return float(tf.reshape(result, [-1])[0])


@pytest.mark.parametrize("kind", [Scale, ScaleModule, Slotted, Equal, Signed])
def test_traced_once_for_each_instance(kind: Callable[[float], Any]):
    two, three = kind(2.0), kind(3.0)
    for _ in range(5):
        assert first(two.apply(ones())) == 2
        assert first(three.apply(ones())) == 3
    assert len(TRACES) == 2


def test_call_is_traced_once():
    two, three = Scale(2.0), Scale(3.0)
    for _ in range(5):
        assert first(two(ones())) == 2
        assert first(three(ones())) == 3
    assert TRACES == ["call", "call"]


@pytest.mark.parametrize("kind", [Scale, ScaleModule, Slotted, Equal, Signed])
def test_a_copy_reads_its_own_variables(kind: Callable[[float], Any]):
    one = kind(2.0)
    one.apply(ones())
    other = copy.copy(one)
    other.factor = tf.Variable(5.0)
    assert first(other.apply(ones())) == 5
    assert first(one.apply(ones())) == 2


def test_binding_leaves_nothing_on_the_instance():
    one = Scale(2.0)
    one.apply(ones())
    one(ones())
    assert list(vars(one)) == ["factor"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Scale, ScaleModule, Slotted, Equal, Signed])
def test_instances_go_with_their_traces(kind: Callable[[float], Any]):
    one = kind(2.0)
    with tf.GradientTape() as tape:
        result = one.apply(ones())
    assert tape.gradient(result, one.factor) is not None
    graph = weakref.ref(one.apply._get(one.apply._flatten((ones(),), {})[1]).trace.graph)
    instance = weakref.ref(one)
    del one, tape, result
    gc.collect()
    assert instance() is None
    assert graph() is None


def test_a_keras_model_goes_with_its_traces():
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(2)

        def call(self, x):
            return self.dense(x)

        @gs.parallelize(devices=2)
        def predictions(self, x):
            return self(x, training=False)

    model = Model()
    model.predictions(ones())
    instance = weakref.ref(model)
    del model
    gc.collect()
    assert instance() is None


def test_a_bound_method_keeps_its_instance():
    apply = Scale(2.0).apply
    gc.collect()
    assert first(apply(ones())) == 2
    assert first(apply(ones())) == 2
    assert TRACES == ["apply"]


def test_static_methods_class_methods_and_callable_objects():
    class Model:
        @gs.parallelize(devices=2)
        @staticmethod
        def inside(x):
            TRACES.append("inside")
            return x + 1

        @staticmethod
        @gs.parallelize(devices=2)
        def outside(x):
            TRACES.append("outside")
            return x + 2

        @classmethod
        @gs.parallelize(devices=2)
        def of_class(cls, x):
            TRACES.append(cls.__name__)
            return x + 3

        layer = gs.parallelize(keras.layers.Rescaling(5.0), devices=2)  # not bound, as it would not be by itself

    for model in (Model, Model(), Model()):
        results = [first(f(ones())) for f in (model.inside, model.outside, model.of_class, model.layer)]
        assert results == [2, 3, 4, 5]
    assert TRACES == ["inside", "outside", "Model"]


def test_an_instance_without_weak_references_is_refused():
    class Pair(NamedTuple):
        factor: tf.Tensor

        @gs.parallelize(devices=2)
        def apply(self, x):
            return x * self.factor

    pair = Pair(tf.constant(2.0))
    with pytest.raises(gs.errors.UnsupportedError) as error:
        pair.apply(ones())
    assert str(error.value) == (
        f"apply is a parallelized method of {Pair.__qualname__}, whose traces belong to one instance and go with it, "
        f"but an instance of {Pair.__qualname__} does not take weak references. Add '__weakref__' to its __slots__; or "
        "parallelize the method of the instance once: f = graphsplit.parallelize(instance.apply)."
    )


# Copies


class _Bound:
    """A callable that holds the module that holds it."""

    def __init__(self, module: Any):
        self.module = module

    def __call__(self, x):
        return x * self.module.factor


def test_deep_copies_of_a_module_that_holds_one():
    module = ScaleModule(2.0)
    module.step = gs.parallelize(_Bound(module), devices=2)
    assert first(module.step(ones())) == 2
    assert first(module.apply(ones())) == 2
    twin = copy.deepcopy(module)
    twin.factor.assign(7.0)
    assert first(twin.step(ones())) == 7
    assert first(twin.apply(ones())) == 7
    assert first(module.step(ones())) == 2


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_copies_of_functions(copied: Callable[[Any], Any]):
    function = gs.parallelize(square, devices=["CPU:1", "CPU:3"], tuning={"default_device": "CPU:2"})
    function(ones() * 3)
    twin = copied(function)
    assert not twin._traces.planned
    assert first(twin(ones() * 3)) == 9
    assert (twin.devices, twin.default_device) == (function.devices, function.default_device)
    assert twin.function is square
    assert copied(double) is double  # found under its name, like any function


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
def test_copies_of_bound_methods(copied: Callable[[Any], Any]):
    method = WithNumber(3.0).apply
    twin = copied(method)
    assert first(twin(ones())) == 3
    assert first(method(ones())) == 3


class WithNumber:
    def __init__(self, factor: float):
        self.factor = factor

    @gs.parallelize(devices=2)
    def apply(self, x):
        return x * self.factor


def test_stages_are_copied_as_stages():
    stage = gs.on_device(square, "CPU:1")
    twin = pickle.loads(pickle.dumps(stage))
    assert type(twin) is type(stage)
    assert "CPU:1" in str(gs.parallelize(lambda x: twin(x), devices=2).plan(ones()))
