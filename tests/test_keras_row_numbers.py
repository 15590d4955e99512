"""Keras' Python code that asks how many rows it has: wrapped `fit` answers as plain `fit` does, and is sharded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest

import graphsplit as gs
from tests.helpers.float64 import float64  # noqa: F401  # a fixture

pytestmark = pytest.mark.usefixtures("float64")
L, ops = keras.layers, keras.ops
RNG = np.random.default_rng(0)
ROWS, BATCH = 33, 8  # the last batch has one row
FLAT, STEPS = RNG.normal(size=(ROWS, 6)), RNG.normal(size=(ROWS, 5, 6))
WORDS = RNG.integers(1, 7, size=(ROWS, 5)) * [1, 1, 1, 0, 0]  # ends in padding
LABELS = RNG.integers(0, 2, size=(ROWS, 3))


class Calls(L.Layer):
    """A layer that is a function of Keras' operations."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x: Any) -> Any:
        return self.function(x)


class Case(NamedTuple):
    """A model of some data.

    Attributes:
      data: the inputs.
      layers: makes the layers, before the last one.
      sharded: types of operations that every device runs on its rows.
      batch: rows in a batch; known to the model if `is_stateful`.
      metrics: makes metrics, of several labels.
    """

    data: np.ndarray
    layers: Callable[[], list[Any]]
    sharded: set[str] = {"MatMul"}  # noqa: RUF012
    batch: int = BATCH
    is_stateful: bool = False
    metrics: Callable[[], list[Any]] | None = None


def dot(x: Any) -> Any:
    return L.Dot((2, 2), normalize=True)([x, ops.flip(x, 1)])


def each_row(row: Any) -> Any:
    return ops.tanh(row) * ops.sum(row)


def scores() -> list[Any]:
    of_labels = keras.metrics.AUC(num_thresholds=5, multi_label=True, num_labels=3)
    return [of_labels, keras.metrics.AUC(num_thresholds=5), keras.metrics.PrecisionAtRecall(0.5, num_thresholds=5)]


CASES = {
    "stateful LSTM": Case(STEPS, lambda: [L.LSTM(4, stateful=True)], batch=11, is_stateful=True),
    "stateful GRU, unrolled": Case(
        STEPS, lambda: [L.GRU(4, stateful=True, unroll=True)], {"MatMul", "Tanh"}, batch=11, is_stateful=True
    ),
    "TimeDistributed": Case(STEPS, lambda: [L.TimeDistributed(L.Dense(3)), L.Flatten()]),
    "TimeDistributed with a mask": Case(
        WORDS, lambda: [L.Embedding(7, 6, mask_zero=True), L.TimeDistributed(L.Dense(4)), L.LSTM(3)], {"StatelessWhile"}
    ),
    "Dot": Case(STEPS, lambda: [L.Dense(4), Calls(dot), L.Flatten()], {"BatchMatMulV2", "MatMul"}),
    "thresholds": Case(FLAT, lambda: [L.Dense(3, "sigmoid")], {"MatMul", "Sigmoid", "GreaterEqual"}, metrics=scores),
    "what could be a bias": Case(FLAT, lambda: [L.Dense(6), Calls(lambda x: ops.add(x, ops.mean(x, 0)))]),
    "as many as rows, added": Case(
        FLAT, lambda: [L.Dense(8), Calls(lambda x: ops.transpose(ops.add(ops.transpose(x), ops.mean(x, 1))))]
    ),
    "map over rows": Case(FLAT, lambda: [Calls(lambda x: ops.map(each_row, x))], {"StatelessWhile"}),
    "vectorized_map over rows": Case(FLAT, lambda: [Calls(lambda x: ops.vectorized_map(each_row, x))]),
    "scan over steps": Case(
        STEPS,
        lambda: [Calls(lambda x: ops.scan(lambda c, row: (c + row, c), 0 * x[:, 0], ops.transpose(x, (1, 0, 2)))[0])],
        {"StatelessWhile"},
    ),
    "scan over rows": Case(
        FLAT, lambda: [L.Dense(6), Calls(lambda x: ops.scan(lambda c, row: (c / 2 + row, c), ops.zeros(6), x)[1])]
    ),
}


def run(case: Case, gpus: int | None) -> tuple[Any, list[Any]]:
    keras.utils.set_random_seed(1)
    rows = case.batch if case.is_stateful else None
    inputs = keras.Input(batch_shape=(rows, *case.data.shape[1:]), dtype=case.data.dtype.name)
    x = inputs
    for layer in case.layers():
        x = layer(x)
    model = keras.Model(inputs, x if case.metrics else L.Dense(1)(x))
    model = gs.multi_gpu_model(model, gpus) if gpus else model
    model.compile("sgd", "mse", metrics=case.metrics() if case.metrics else ["mae"])
    y = LABELS if case.metrics else FLAT[:, :1]
    history = model.fit(case.data, y, batch_size=case.batch, shuffle=False, verbose=0).history
    return model, [*history.values(), *model.get_weights()]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_one_device(name: str):
    case = CASES[name]
    (_, expected), (model, actual) = run(case, None), run(case, 4)
    for own, plain in zip(actual, expected, strict=True):
        np.testing.assert_allclose(own, plain, rtol=1e-12, atol=1e-13)
    assert case.sharded <= {op.type for op in model.plan().sharded_ops}


def test_what_keras_refuses_is_refused_in_the_same_words():
    """A regularizer of a layer's rows has to know how many there are, and does not on one device."""
    regularizer, messages = keras.regularizers.OrthogonalRegularizer(mode="rows"), []
    for gpus in (None, 4):
        with pytest.raises(TypeError) as caught:
            run(Case(FLAT, lambda: [L.Dense(4, activity_regularizer=regularizer)]), gpus)
        messages.append(str(caught.value))
    assert messages[1] == messages[0]
    assert "num_rows=None" in messages[0]
