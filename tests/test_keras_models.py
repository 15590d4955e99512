"""Wrapped models against their templates' own `fit`: every kind of model, optimizer, batch size, number of devices."""

import itertools

import keras
import pytest

from tests.keras_cases import CASES, OPTIMIZERS, ROWS, assert_same, assert_sharded, fit, state

pytestmark = pytest.mark.usefixtures("plain_oracle")

BATCHES = (1, 3, 7, 8, 19)
GRID = list(itertools.product(CASES, OPTIMIZERS, BATCHES, (2, 3, 4)))
CHOSEN = GRID[::43]


@pytest.fixture
def float64():
    """Make models in float64, where a difference is a defect and not a rounding error that grew."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def check(name, optimizer, batch, devices, tolerance):
    case = CASES[name]
    options = {"batch_size": batch, "validation_data": case.data()}
    single, expected = fit(case, optimizer, 1, **options)
    model, history = fit(case, optimizer, devices, **options)
    assert list(history) == list(expected)
    unweighted = [key for key in history if key.endswith("_loss") and key != "val_loss"] if ROWS % batch else []
    assert_same(_without(history, unweighted), _without(expected, unweighted), tolerance)
    # Keras weights the losses of single outputs by rows only where it knows the batch size while tracing. A wrapped
    # model knows it, Keras' own `fit` on arrays does not, which shows if the last batch is smaller.
    trackers = {f"compile_loss/{key.removeprefix('val_')}/{part}" for key in unweighted for part in ("total", "count")}
    assert_same(_without(state(model), trackers), _without(state(single), trackers), tolerance)
    if batch > 1:
        assert_sharded(model, case.sharded, devices)
    x, y = case.data()
    assert_same(_numbered(model.predict(x, verbose=0)), _numbered(single.predict(x, verbose=0)), tolerance)
    assert_same(_numbered(model.test_on_batch(x, y)), _numbered(single.test_on_batch(x, y)), tolerance)


def _numbered(values):
    return [(str(i), value) for i, value in enumerate(keras.tree.flatten(values))]


def _without(named, left_out):
    pairs = named.items() if isinstance(named, dict) else named
    return [(name, value) for name, value in pairs if name not in left_out]


@pytest.mark.parametrize(("name", "optimizer", "batch", "devices"), CHOSEN)
def test_equals_the_template_in_float64(name, optimizer, batch, devices, float64):
    check(name, optimizer, batch, devices, 1e-11)


@pytest.mark.parametrize("devices", [2, 4])
@pytest.mark.parametrize("name", ["dense", "convolutional", "subclassed"])
def test_equals_the_template_in_float32(name, devices):
    check(name, "sgd", 7, devices, 1e-5)


@pytest.mark.long
@pytest.mark.parametrize(("name", "optimizer", "batch", "devices"), GRID[5::11])
def test_equals_the_template_in_more_combinations(name, optimizer, batch, devices, float64):
    check(name, optimizer, batch, devices, 1e-11)


def test_the_chosen_combinations_cover_every_value():
    for position, values in enumerate((CASES, OPTIMIZERS, BATCHES, (2, 3, 4))):
        assert {combination[position] for combination in CHOSEN} == set(values)
