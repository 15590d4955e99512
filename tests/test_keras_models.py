"""Wrapped models against their templates' own `fit`: every kind of model, optimizer, batch size, number of devices."""

import itertools
import operator

import keras
import pytest
import tensorflow as tf

from tests.helpers.float64 import EXACT, float64
from tests.helpers.keras_cases import CASES, OPTIMIZERS, assert_same, assert_sharded, fit, state
from tests.helpers.samples import sample

__all__ = ["float64"]
pytestmark = pytest.mark.usefixtures("plain_oracle")

BATCHES = (1, 3, 7, 8, 19)
DEVICES = (2, 3, 4)
PARAMETERS = ("name", "optimizer", "batch", "devices")
GRID = {
    "-".join(map(str, values)): dict(zip(PARAMETERS, values, strict=True))
    for values in itertools.product(CASES, OPTIMIZERS, BATCHES, DEVICES)
}
CHOSEN = sample(GRID, len(CASES))
MORE = sample(GRID, len(GRID) // 11) - CHOSEN
# A float32 sum of n numbers, in any order, is off by less than n * 6e-8 of the sum of their magnitudes. A gradient of
# a convolution's bias here sums 7 rows x 36 positions, and its terms cancel to a tenth: 2e-4. Float64 finds defects.
SINGLE = 2e-4


def check(name, optimizer, batch, devices, tolerance):
    case = CASES[name]
    options = {"batch_size": batch, "validation_data": case.data()}
    single, expected = fit(case, optimizer, 1, **options)
    model, history = fit(case, optimizer, devices, **options)
    assert list(history) == list(expected)
    assert_same(list(history.items()), list(expected.items()), tolerance)
    assert_same(state(model), state(single), tolerance)
    if batch > 1:
        assert_sharded(model, case.sharded, devices)
    x, y = case.data()
    assert_same(_numbered(model.predict(x, verbose=0)), _numbered(single.predict(x, verbose=0)), tolerance)
    assert_same(_numbered(model.test_on_batch(x, y)), _numbered(single.test_on_batch(x, y)), tolerance)


def _numbered(values):
    return [(str(i), value) for i, value in enumerate(keras.tree.flatten(values))]


def combinations(names):
    return pytest.mark.parametrize(PARAMETERS, [tuple(GRID[name].values()) for name in sorted(names)])


@pytest.mark.sampled(1, quick=1)
@combinations(CHOSEN)
def test_equals_the_template_in_float64(name, optimizer, batch, devices, float64):
    check(name, optimizer, batch, devices, EXACT)


@pytest.mark.long
@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["dense", "convolutional", "subclassed"])
def test_equals_the_template_in_float32(name, devices):
    check(name, "sgd", 7, devices, SINGLE)


@pytest.mark.long
@pytest.mark.parametrize("known", [False, True])
def test_losses_of_single_outputs_are_weighted_as_keras_does(known, float64):
    """By rows where Keras knows their number while tracing, which shows if the last batches are smaller."""
    case = CASES["siamese"]
    x, y = case.data()

    def batches():
        for rows in (slice(7), slice(7, 14), slice(14, 19)):
            yield keras.tree.map_structure(operator.itemgetter(rows), (x, y))

    def losses(gpus):
        model, _ = fit(case, "sgd", gpus, epochs=1)
        if known:  # each batch is an iterator of its own, which knows its rows
            return [model.train_on_batch(*batch) for batch in batches()][-1]
        specs = keras.tree.map_structure(lambda part: tf.TensorSpec([None, *part.shape[1:]], part.dtype), (x, y))
        dataset = tf.data.Dataset.from_generator(batches, output_signature=specs)
        dataset = dataset.apply(tf.data.experimental.assert_cardinality(3))
        return [*model.fit(dataset, verbose=0, shuffle=False).history.values(), *model.evaluate(dataset, verbose=0)]

    assert_same(_numbered(losses(3)), _numbered(losses(1)), EXACT)


@pytest.mark.long
@combinations(MORE)
def test_equals_the_template_in_more_combinations(name, optimizer, batch, devices, float64):
    check(name, optimizer, batch, devices, EXACT)


def test_the_chosen_combinations_cover_every_value():
    for parameter, values in zip(PARAMETERS, (CASES, OPTIMIZERS, BATCHES, DEVICES), strict=True):
        assert {GRID[name][parameter] for name in CHOSEN} == set(values)
