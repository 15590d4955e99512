"""Keras' TensorBoard callback writes about a wrapped model what it writes about its template."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import graphsplit as gs
from tests.helpers.keras_cases import CASES, copied

pytest.importorskip("tensorboard", reason="the callback needs TensorBoard, which is not installed")

OPTIONS = {"histogram_freq": 1, "write_graph": True, "write_images": True, "update_freq": 1}


def written(folder):
    """Return what lies in the event files: kind of run, tag and step -> the value, None for graphs."""
    found = {}
    for path in sorted(folder.glob("*/events*")):
        for record in tf.data.TFRecordDataset(str(path)):
            event = tf.compat.v1.Event.FromString(record.numpy())
            for value in event.summary.value:
                kind = value.metadata.plugin_data.plugin_name
                key = (path.parent.name, kind, value.tag, event.step)
                found[key] = tf.make_ndarray(value.tensor) if kind in ("scalars", "histograms") else None
    return found


def compare(folder, fit):
    for gpus in (1, 3):
        fit(gpus, str(folder / str(gpus)))
    plain, wrapped = written(folder / "1"), written(folder / "3")
    assert wrapped.keys() == plain.keys()
    kinds = {kind for _, kind, _, _ in plain}
    assert {"scalars", "histograms", "images"} <= kinds
    for key, value in plain.items():
        if value is not None:
            np.testing.assert_allclose(wrapped[key], value, rtol=1e-4, atol=1e-5, err_msg=str(key))


@pytest.mark.long
def test_keras_3(tmp_path):
    x = np.random.RandomState(0).normal(size=(14, 5)).astype(np.float32)

    def fit(gpus, folder):
        keras.utils.set_random_seed(0)
        keras.backend.clear_session()
        net = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        model = gs.multi_gpu_model(net, gpus)
        model.compile("sgd", "mse", metrics=["mae"])
        callback = keras.callbacks.TensorBoard(folder, **OPTIONS)
        model.fit(
            x, x[:, :2], batch_size=7, shuffle=False, verbose=0, validation_data=(x, x[:, :2]), callbacks=[callback]
        )

    compare(tmp_path, fit)
    assert "graph_keras_model" in {kind for _, kind, _, _ in written(tmp_path / "3")}


@pytest.mark.long
def test_keras_3_with_a_profile(tmp_path):
    case = CASES["dense"]

    def fit(gpus, folder):
        keras.utils.set_random_seed(0)
        keras.backend.clear_session()  # for the same names
        model = gs.multi_gpu_model(case.model(), gpus)
        model.compile("sgd", **copied(case.compile))
        keras.utils.set_random_seed(0)
        x, y = case.data()
        callback = keras.callbacks.TensorBoard(folder, **OPTIONS, profile_batch=(2, 3))
        model.fit(x, y, batch_size=7, epochs=2, verbose=0, validation_data=(x, y), callbacks=[callback])

    compare(tmp_path, fit)
    kinds = {kind for _, kind, _, _ in written(tmp_path / "3")}
    assert "graph_keras_model" in kinds
    for gpus in ("1", "3"):
        assert list((tmp_path / gpus).glob("**/*.xplane.pb"))  # the profile


@pytest.mark.long
def test_tf_keras(tmp_path):
    x = np.random.RandomState(0).normal(size=(17, 5)).astype(np.float32)

    def fit(gpus, folder):
        tf_keras.utils.set_random_seed(0)
        tf_keras.backend.clear_session()
        net = tf_keras.Sequential([tf_keras.layers.Input((5,)), tf_keras.layers.Dense(4), tf_keras.layers.Dense(2)])
        model = gs.multi_gpu_model(net, gpus)
        model.compile("sgd", "mse", metrics=["mae"])
        callback = tf_keras.callbacks.TensorBoard(folder, **OPTIONS)
        data = {"batch_size": 7, "shuffle": False, "validation_data": (x, x[:, :2])}
        model.fit(x, x[:, :2], epochs=2, verbose=0, callbacks=[callback], **data)

    compare(tmp_path, fit)
