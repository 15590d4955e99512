"""What a model's code sees while it is traced: what it sees on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs

L = keras.layers
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(22, 6)).astype("float32"), RNG.normal(size=(22, 1)).astype("float32")


class Rows(L.Layer):
    """Remembers how many rows it saw in a graph, and does something else where that number is not known."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int | None] = []

    def call(self, x: Any) -> Any:
        if isinstance(x, tf.Tensor) and not tf.executing_eagerly():
            self.seen.append(x.shape[0])
        return x if x.shape[0] is None else 2 * x


def model(options: dict[str, Any] | None, *layers: Any) -> Any:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((6,)), *layers, L.Dense(4), L.Dense(1)])
    made = gs.multi_gpu_model(made, **options) if options else made
    made.compile("sgd", "mse", metrics=["mae"])
    return made


def batches(*sizes: int, known: bool = False) -> Any:
    """Return a dataset of batches of these sizes, whose rows are known to it or not."""
    each = [tf.data.Dataset.from_tensors((X[:size], Y[:size])) for size in sizes]
    found = each[0]
    for more in each[1:]:
        found = found.concatenate(more)
    return found if known or len(set(sizes)) > 1 else found.map(lambda *parts: tuple(map(_open, parts)))


def _open(x: Any) -> Any:
    return tf.compat.v1.placeholder_with_default(x, [None, *x.shape[1:]])


class Batches(keras.utils.PyDataset):  # type: ignore[misc]
    def __len__(self) -> int:
        return 3

    def __getitem__(self, i: int) -> Any:
        return X[8 * i : 8 * i + 8], Y[8 * i : 8 * i + 8]


def pairs(*sizes: int) -> Iterator[Any]:
    yield from ((X[:size], Y[:size]) for size in sizes)


def on_batches(call: Callable[..., Any], *sizes: int) -> list[Any]:
    return [call(X[:size], Y[:size]) for size in sizes]


RUNS: dict[str, Callable[[Any], Any]] = {
    "arrays": lambda m: m.fit(X[:16], Y[:16], batch_size=8, validation_data=(X, Y), verbose=0).history,
    "uneven arrays": lambda m: m.fit(X, Y, batch_size=8, verbose=0, shuffle=False).history,
    "datasets": lambda m: [m.fit(batches(n, n, known=True), verbose=0, shuffle=False).history for n in (8, 4, 8)],
    "rows that a dataset does not know": lambda m: m.evaluate(batches(8, 6, 0), verbose=0),
    "a generator": lambda m: m.fit(pairs(8, 8, 6), steps_per_epoch=3, verbose=0, shuffle=False).history,
    "a PyDataset": lambda m: m.fit(Batches(), verbose=0, shuffle=False).history,
    "batches one by one": lambda m: on_batches(m.train_on_batch, 8, 8, 5, 8, 0, 7),
    "batches, then a dataset": lambda m: [on_batches(m.test_on_batch, 8), m.evaluate(batches(4, 8), verbose=0)],
    "predictions": lambda m: m.predict(X, batch_size=8, verbose=0),
    "one prediction after another": lambda m: [m.predict_on_batch(X[:size]) for size in (8, 5, 3)],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", RUNS)
def test_code_sees_the_rows_that_it_sees_on_one_device(run: str):
    """As often, too: the plan for other rows takes no other trace."""
    results, seen = [], []
    for options in (None, {"gpus": 2}):
        rows = Rows()
        results.append(RUNS[run](model(options, rows)))
        seen.append(rows.seen)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
    assert seen[1] == seen[0]


LAYOUTS = [
    {"gpus": 2},
    {"gpus": 3, "variables": "sharded"},
    {"gpus": 2, "micro_batches": 2},
    {"gpus": 2, "memory": "1GB"},
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", LAYOUTS, ids=str)
def test_a_batch_without_rows(options: dict[str, Any]):
    """Keras returns the loss of rows that are known to be none as it is, shape (0,), and its mean is no number."""
    data, histories = batches(8, 8, 6, 0), []
    for given in (None, options):
        made = model(given)
        stop = keras.callbacks.TerminateOnNaN()
        options_of_fit = {"validation_data": data, "callbacks": [stop], "shuffle": False}
        history = made.fit(data, epochs=2, verbose=0, **options_of_fit).history
        histories.append([*history.values(), made.evaluate(data, verbose=0)])
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *histories)
    made.plan(X[:8], Y[:8])
    assert np.isfinite(histories[1][0]).all()
    assert len(histories[1][0]) == 2
    assert "on each of" in str(made.plan())


def test_rows_without_weight():
    """A batch whose rows all have weight 0, and one row."""
    results = []
    for options in (None, {"gpus": 3}):
        made = model(options, Rows())
        weights = np.where(np.arange(17) < 8, 1.0, 0.0)
        results.append(made.fit(X[:17], Y[:17], sample_weight=weights, batch_size=8, shuffle=False, verbose=0).history)
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *results)


SEQUENCES: dict[str, tuple[tuple[int, ...], Callable[[], list[Any]]]] = {
    "one": ((7, 5), lambda: [L.LSTM(4)]),
    "behind a layer": ((7, 5), lambda: [L.Dense(4), L.LSTM(3)]),
    "repeated": ((6,), lambda: [L.Dense(4), L.RepeatVector(3), L.SimpleRNN(3)]),
    "several": ((7, 5), lambda: [L.SimpleRNN(3, return_sequences=True), L.SimpleRNN(3)]),
}


@pytest.mark.long
@pytest.mark.parametrize("sequence", SEQUENCES)
def test_loops_of_a_trace_of_any_rows_are_sharded(sequence: str):
    """What loops carry and keep in lists follows from rows that are open to TensorFlow."""
    made, results = None, []
    shape, layers = SEQUENCES[sequence]
    x = RNG.normal(size=(22, *shape)).astype("float32")
    for options in (None, {"gpus": 2}):
        keras.utils.set_random_seed(1)
        made = keras.Sequential([keras.Input(shape), *layers(), L.Dense(1)])
        made = gs.multi_gpu_model(made, **options) if options else made
        made.compile("sgd", "mse")
        results.append(made.fit(x, Y, batch_size=8, verbose=0, shuffle=False).history["loss"])
    np.testing.assert_allclose(*results, rtol=1e-5)
    loops = [op for op in made.plan().sharded_ops if "While" in op.type]
    assert len(loops) == (4 if sequence == "several" else 2)
    assert not any(None in shape for op in loops for shape in op.out_shapes)
    assert "lists of" not in str(made.plan())


def as_dense(x: Any) -> Any:
    return tf.sparse.to_dense(x) if isinstance(x, tf.SparseTensor) else x.to_tensor(shape=[None, 6])


KINDS: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "sparse": (tf.sparse.from_dense(X * (X > 0.5)), lambda x: L.Dense(5, activation="relu")(x)),
    "sparse, made dense": (tf.sparse.from_dense(X * (X > 0.5)), lambda x: L.Lambda(as_dense, (6,))(x)),
    "ragged": (tf.RaggedTensor.from_row_lengths(X.ravel(), [6] * 22), lambda x: L.Lambda(as_dense, (6,))(x)),
}


@pytest.mark.parametrize(
    ("kind", "loop"), [("sparse", False), ("sparse", True), ("sparse, made dense", True), ("ragged", False)]
)
def test_what_is_made_of_sparse_and_ragged_rows_is_sharded(kind: str, loop: bool):
    """Sizes of batches whose code knows none of their rows are those of the batch at hand, behind loops, too."""
    (data, dense), results = KINDS[kind], []
    for options in (None, {"gpus": 2}):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,), sparse=kind != "ragged", ragged=kind == "ragged")
        hidden = dense(inputs)
        hidden = L.SimpleRNN(3)(L.RepeatVector(3)(hidden)) if loop else L.Dense(4)(hidden)
        made = keras.Model(inputs, L.Dense(1)(hidden))
        made = gs.multi_gpu_model(made, **options) if options else made
        made.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensor_slices((data, Y)).batch(8)
        losses = made.fit(dataset, verbose=0, shuffle=False).history["loss"]
        results.append([losses, made.evaluate(dataset, verbose=0), made.predict(dataset, verbose=0)])
    tf.nest.map_structure(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *results)
    products = [op for op in made.plan().sharded_ops if op.type in ("MatMul", "StatelessWhile")]
    assert len(products) > 2
