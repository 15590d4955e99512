"""What `verify` says it compared: devices of the plan that ran, and which step; and what it refuses."""

from __future__ import annotations

import functools

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.law import rows


def mean(x):
    return tf.reduce_mean(x * x)


@pytest.mark.parametrize(
    ("options", "count", "first", "header"),
    [
        ({"devices": 4}, 8, "PASS", "4 devices against one, mean:"),
        ({"devices": 4}, 3, "PASS", "3 devices against one"),
        ({"devices": 4}, 1, "NOTHING COMPARED", "1 device against one"),
        ({"devices": 4, "plan": "auto"}, 8, "NOTHING COMPARED", "1 device against one"),
        ({"devices": 1}, 8, "NOTHING COMPARED", "1 device against one"),
        ({"devices": 1, "micro_batches": 2}, 8, "PASS", "1 device, 2 shards, against one"),
    ],
)
def test_devices_are_those_of_the_plan_that_ran(options, count, first, header):
    report = gs.verify(gs.parallelize(mean, **options), rows(count, 3))
    lines = str(report).splitlines()
    assert lines[0].startswith(first)
    assert lines[1].startswith(header)
    assert report.passed
    assert report.compared == (first == "PASS")
    assert ("#1a7f37" in report._repr_html_()) == report.compared  # green is for proofs
    assert len(report.devices) == int(header[0])


def test_nothing_is_compared_where_nothing_is_sharded():
    report = gs.verify(gs.parallelize(lambda x: tf.unique(x).y, devices=3), tf.ones(5))
    assert str(report).splitlines()[0] == (
        "NOTHING COMPARED: the plan uses one device, CPU:0, so one device ran twice; print(function.plan(...)) shows "
        "the plan"
    )


def test_copies_of_variables_are_compared_where_nothing_is_sharded():
    v = tf.Variable(tf.ones((8, 2)))
    gs.set_variable_layout(v, "replicated", 3)
    report = gs.verify(gs.parallelize(lambda x: v.assign_add(tf.ones((8, 2)) * x), devices=3), tf.constant(5.0))
    assert report.compared
    assert len(report.devices) == 3


def small(module=keras):
    model = gs.multi_gpu_model(module.Sequential([module.layers.Input((3,)), module.layers.Dense(2)], name="small"), 2)
    model.compile("sgd", "mse")
    return model


def test_the_report_says_which_step_of_a_model_ran():
    model, x, y = small(), rows(5, 3), rows(5, 2)
    titles = [
        str(gs.verify(model, *batch, **which)).splitlines()[1]
        for batch, which in [((x, y), {}), ((x, y), {"step": "test"}), ((x,), {})]
    ]
    assert titles == [
        "2 devices against one, a training step of 'small':",
        "2 devices against one, an evaluation step of 'small':",
        "2 devices against one, a prediction of 'small' (to check training, pass y or step='train'):",
    ]


class Generative(keras.Model):
    """A step for `fit(x)`, and no `call()`."""

    def __init__(self):
        super().__init__(name="generative")
        self.critic = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1)])

    def train_step(self, x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.critic(x) - 1) ** 2)
        weights = self.critic.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}


class Pairs(keras.Sequential):
    """Steps for batches that are exactly what `fit(x, y)`, `evaluate(x, y)` and `predict(x)` bring."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self(x) - y) ** 2)
        weights = self.trainable_variables
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return {"loss": loss}

    def test_step(self, data):
        x, y = data
        return {"loss": tf.reduce_mean((self(x) - y) ** 2)}

    def predict_step(self, data):
        return 2 * self(tf.reshape(data, [-1, 3]))  # (of a tensor, not of a tuple of one)


def test_steps_get_what_fit_gives_them():
    x, y = rows(5, 3).numpy(), rows(5, 1).numpy()
    model = gs.multi_gpu_model(Generative(), 2)
    model.compile("sgd")
    model.fit(x, verbose=0)
    report = gs.verify(model, x, step="train")
    assert report.passed, str(report)
    assert report.compared
    assert model.plan(tf.TensorSpec((None, 3)), step="train").sharded_fraction > 0.99
    for ask in (lambda: gs.verify(model, x), lambda: model.plan(x)):
        with pytest.raises(gs.errors.ArgumentError) as error:
            ask()
        assert str(error.value) == (
            "A batch without y is for a prediction, and 'generative' has no call(): write step='train'."
        )
    model = gs.multi_gpu_model(Pairs([keras.layers.Input((3,)), keras.layers.Dense(1)]), 2)
    model.compile("sgd")
    for batch, step in (((x, y), "train"), ((x, y), "test"), ((x,), "predict")):
        report = gs.verify(model, *batch, step=step)
        assert report.passed, str(report)
        assert report.compared


def test_a_batch_is_not_taken_for_inputs():
    model, x, y = small(), rows(5, 3), rows(5, 2)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(5)
    told = "write gs.verify(model, *next(iter(dataset))), and plan and placement alike."
    for ask in (functools.partial(gs.verify, model), model.plan, model.placement):
        with pytest.raises(gs.errors.ArgumentError) as error:
            ask(dataset)
        assert str(error.value) == f"This takes one batch of 'small', got a tf.data.Dataset: {told}"
        with pytest.raises(gs.errors.ArgumentError) as error:
            ask(next(iter(dataset)))
        assert str(error.value) == (
            f"x is a tuple of 2 tensors, and 'small' takes 1 input. If it is a whole batch, {told}"
        )
    with pytest.raises(gs.errors.ArgumentError, match=r"write gs\.verify\(model, next\(iter\(dataset\)\)\)"):
        model.plan(dataset.map(lambda x, y: x))
    assert gs.verify(model, *next(iter(dataset))).compared
    a, b = keras.layers.Input((3,)), keras.layers.Input((3,))
    two = gs.multi_gpu_model(keras.Model([a, b], keras.layers.Add()([a, b])), 2)
    assert gs.verify(two, (x, x)).compared  # its inputs are a tuple
    with pytest.raises(gs.errors.ArgumentError, match=r"x is a tuple of 3 tensors, and .* takes 2 inputs"):
        gs.verify(two, ((x, x), y))


def test_parts_that_differ_in_rows_are_named():
    model, x, y = small(), rows(5, 3), rows(5, 2)
    for ask in (gs.verify, gs.placement, lambda model, *batch: model.plan(*batch)):
        with pytest.raises(ValueError, match=r"\nThe batch has parts of different numbers of rows: x 5, y 4\.$"):
            ask(model, x, y[:4])
    with pytest.raises(ValueError, match=r"\nThe batch has parts of different numbers of rows: x 6, y 4\.$"):
        model.plan(tf.TensorSpec((6, 3)), tf.TensorSpec((4, 2)))
    assert gs.verify(model, x, y).compared  # it can go on


def test_where_numbers_cancel_no_relative_difference_is_said():
    """It would be about 1, and passes: one device's result is as far from zero."""
    cancelling = gs.parallelize(lambda x: tf.reduce_mean(x - tf.reduce_mean(x, 0), 0), devices=3)
    report = gs.verify(cancelling, tf.cast(rows(101, 20), tf.float32))
    [difference] = report.differences
    assert report.passed
    assert difference.relative > 0.1
    verdict, _, line = str(report).splitlines()
    most = difference.absolute * difference.rounding / difference.relative
    text = f"{difference.absolute:.2g} absolute, of a value that is rounding only (numbers cancel): up to {most:.2g}"
    assert verdict == f"PASS: every difference is rounding; largest: output 0, {text}"
    assert line == f"  output 0  {text}"
