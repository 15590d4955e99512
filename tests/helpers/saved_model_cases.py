"""SavedModels made on the spot: every kind that `transpile_saved_model` is tested with.

Each has a signature of an unknown number of rows, and most have one of seven rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

v1 = tf.compat.v1
Requests = dict[str, dict[str, np.ndarray]]  # of each signature, nine rows of every argument
ROWS = 9
FIXED = 7
WITH_FINGERPRINTS = pytest.mark.skipif(
    tf.__version__.startswith("2.16."), reason="its fingerprints are of another version, and not looked at"
)


def _floats(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def _export(folder: str, model: keras.Model, **arguments: np.ndarray) -> Requests:
    """Export a Keras model with an endpoint for any number of rows and one for seven."""
    archive = keras.export.ExportArchive()
    archive.track(model)
    for key, rows in (("serve", None), ("fixed", FIXED)):
        specs = [tf.TensorSpec([rows, *a.shape[1:]], a.dtype, name) for name, a in arguments.items()]

        def endpoint(*tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            result = model(tensors[0] if len(tensors) == 1 else dict(zip(arguments, tensors, strict=True)))
            return {"scores": result, "classes": tf.argmax(result, -1)}

        archive.add_endpoint(key, endpoint, input_signature=specs)
    archive.write_out(folder, verbose=False)
    return {key: dict(arguments) for key in ("serve", "fixed", "serving_default")}


def dense(folder: str) -> Requests:
    """Four biases, which travel together where the batch is known."""
    hidden = [keras.layers.Dense(units, "relu") for units in (16, 8, 8)]
    layers = [keras.Input([6]), *hidden, keras.layers.Dense(3, "softmax")]
    return _export(folder, keras.Sequential(layers), x=_floats(ROWS, 6))


def conv(folder: str) -> Requests:
    model = keras.Sequential(
        [
            keras.Input([8, 8, 3]),
            keras.layers.Conv2D(4, 3, padding="same"),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(5),
        ]
    )
    model.layers[1].moving_mean.assign([0.5, -0.5, 0.1, 0.2])
    return _export(folder, model, image=_floats(ROWS, 8, 8, 3))


def lstm(folder: str) -> Requests:
    model = keras.Sequential([keras.Input([5, 4]), keras.layers.LSTM(6), keras.layers.Dense(3)])
    return _export(folder, model, steps=_floats(ROWS, 5, 4))


def transformer(folder: str) -> Requests:
    words = keras.Input([6], dtype="int32", name="words")
    mask = keras.Input([6], dtype="bool", name="mask")
    x = keras.layers.Embedding(20, 8)(words)
    attended = keras.layers.MultiHeadAttention(2, 4)(x, x, attention_mask=mask[:, None, :])
    x = keras.layers.LayerNormalization()(x + attended)
    weights = keras.ops.cast(mask, "float32")[:, :, None]
    pooled = keras.ops.sum(x * weights, axis=1) / keras.ops.sum(weights, axis=1)
    model = keras.Model({"words": words, "mask": mask}, keras.layers.Dense(4)(pooled))
    rng = np.random.default_rng(0)
    masks = np.arange(6) < rng.integers(1, 7, [ROWS, 1])
    return _export(folder, model, words=rng.integers(0, 20, [ROWS, 6]).astype(np.int32), mask=masks)


def text(folder: str) -> Requests:
    """Words split, looked up in a table that is filled from an asset, embedded; ragged inside, strings outside."""
    vocabulary = Path(folder).with_suffix(".txt")
    vocabulary.write_text("good\nbad\nfine\n")
    module = tf.Module()
    initializer = tf.lookup.TextFileInitializer(
        str(vocabulary), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE, tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER
    )
    module.table = tf.lookup.StaticHashTable(initializer, 3)
    module.embedding = tf.Variable(_floats(4, 5))
    module.names = tf.Variable(["good", "bad", "fine", "other"])

    def classify(texts: tf.Tensor) -> dict[str, tf.Tensor]:
        words = tf.strings.split(tf.strings.lower(texts))
        ids = tf.ragged.map_flat_values(module.table.lookup, words)
        vectors = tf.gather(module.embedding, ids.to_tensor(default_value=3, shape=[None, 4]))
        scores = tf.nn.softmax(tf.reduce_sum(vectors, 1))
        first = ids.to_tensor(default_value=3, shape=[None, 1])[:, 0]
        total = tf.sparse.reduce_sum(tf.cast(ids.to_sparse(), tf.float32), 1)
        names = tf.gather(module.names, first)
        return {"scores": scores, "count": words.row_lengths(), "first": names, "total": tf.ensure_shape(total, [None])}

    def fixed(texts: tf.Tensor) -> dict[str, tf.Tensor]:
        return {"length": tf.strings.length(texts), "upper": tf.strings.upper(texts), "id": module.table.lookup(texts)}

    texts = ["good", "Bad bad", "a fine day", "x", "good bad fine", "fine", "so so so so so", "good good", "bad"]
    signatures = {
        "serving_default": tf.function(classify, input_signature=[tf.TensorSpec([None], tf.string, "texts")]),
        "fixed": tf.function(fixed, input_signature=[tf.TensorSpec([FIXED], tf.string, "texts")]),
    }
    tf.saved_model.save(module, folder, signatures=signatures)
    vocabulary.unlink()  # from now on it is an asset
    return {key: {"texts": np.array(texts, "S")} for key in signatures}


def decoding(folder: str) -> Requests:
    """Pictures that are decoded one by one, each a turn of `tf.map_fn`, and measured by another one."""
    module = tf.Module()
    module.weights = tf.Variable(_floats(12, 3))

    def decode(pair: tuple[tf.Tensor, tf.Tensor]) -> tuple[tf.Tensor, tf.Tensor]:
        pixels = tf.cast(tf.ensure_shape(tf.io.decode_png(pair[0], channels=3), [2, 2, 3]), tf.float32)
        return pixels / 255.0 + pair[1], tf.strings.length(pair[0])

    def serve(pictures: tf.Tensor, shift: tf.Tensor) -> dict[str, tf.Tensor]:
        like = tf.TensorSpec([2, 2, 3]), tf.TensorSpec([], tf.int32)
        pixels, lengths = tf.map_fn(decode, (pictures, shift), fn_output_signature=like)
        return {
            "scores": tf.tanh(tf.reshape(pixels, [-1, 12]) @ module.weights),
            "length": lengths,
            "name": tf.map_fn(lambda n: tf.strings.as_string(n) + " B", lengths, fn_output_signature=tf.string),
        }

    specs = {
        key: [tf.TensorSpec([rows], tf.string, "pictures"), tf.TensorSpec([rows], name="shift")]
        for key, rows in (("serving_default", None), ("fixed", FIXED))
    }
    signatures = {key: tf.function(serve, input_signature=own) for key, own in specs.items()}
    tf.saved_model.save(module, folder, signatures=signatures)
    pixels = np.random.default_rng(0).integers(0, 255, [ROWS, 2, 2, 3]).astype(np.uint8)
    pictures = np.array([tf.io.encode_png(picture).numpy() for picture in pixels], object)
    requests = {"pictures": pictures, "shift": _floats(ROWS)}
    return dict.fromkeys(signatures, requests)


def two_signatures(folder: str) -> Requests:
    module = tf.Module()
    module.weights = tf.Variable(_floats(4, 3))
    any_rows, fixed = ([tf.TensorSpec([rows, size], name="x") for rows, size in pairs] for pairs in _TWO)
    signatures = {
        "encode": tf.function(lambda x: {"code": tf.tanh(x @ module.weights)}, input_signature=any_rows[:1]),
        "decode": tf.function(lambda x: {"x": x @ tf.transpose(module.weights)}, input_signature=any_rows[1:]),
        "fixed": tf.function(lambda x: {"x": x @ tf.transpose(module.weights)}, input_signature=fixed),
        "norm": tf.function(lambda: {"norm": tf.norm(module.weights)}, input_signature=[]),
    }
    tf.saved_model.save(module, folder, signatures=signatures)
    codes, rows = {"x": _floats(ROWS, 3)}, {"x": _floats(ROWS, 4)}
    return {"encode": rows, "decode": codes, "fixed": codes, "norm": {}}


_TWO = ([(None, 4), (None, 3)], [(FIXED, 3)])


def tensorflow_1(folder: str, resource: bool = False) -> Requests:
    """A model of TensorFlow 1's builder: variables of the old kind, a table, an asset, a method of its own."""
    vocabulary = Path(folder).with_suffix(".txt")
    vocabulary.write_text("a\nb\nc\n")
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(0)
        weights = v1.get_variable("dense/weights", shape=[4, 3], use_resource=resource)
        initializer = tf.lookup.TextFileInitializer(
            str(vocabulary),
            tf.string,
            tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64,
            tf.lookup.TextFileIndex.LINE_NUMBER,
        )
        table = tf.lookup.StaticHashTable(initializer, -1)
        signatures = {}
        for key, rows in (("serving_default", None), ("fixed", FIXED)):
            x = v1.placeholder(tf.float32, [rows, 4])
            word = v1.placeholder(tf.string, [rows])
            outputs = {"y": tf.nn.softmax(x @ weights), "id": table.lookup(word)}
            signatures[key] = v1.saved_model.predict_signature_def({"x": x, "word": word}, outputs)
        signatures["fixed"].method_name = "tensorflow/serving/regress"
        session.run([v1.global_variables_initializer(), v1.tables_initializer()])
        builder = v1.saved_model.builder.SavedModelBuilder(folder)
        assets = v1.get_collection(v1.GraphKeys.ASSET_FILEPATHS)
        builder.add_meta_graph_and_variables(
            session, ["serve"], signatures, assets_collection=assets, main_op=v1.tables_initializer()
        )
        builder.save()
    vocabulary.unlink()
    requests = {"x": _floats(ROWS, 4), "word": np.array(["a", "b", "c", "d", "a", "c", "b", "b", "?"], "S")}
    return dict.fromkeys(signatures, requests)


def estimator(folder: str) -> Requests:
    """What an Estimator exported: serialized examples in, classes and scores out, for the classification method."""
    with tf.Graph().as_default(), v1.Session() as session:
        v1.set_random_seed(0)
        weights = v1.get_variable("linear/weights", shape=[4, 3], use_resource=False)
        signatures = {}
        for key, rows in (("serving_default", None), ("fixed", FIXED)):
            examples = v1.placeholder(tf.string, [rows])
            features = v1.parse_example(examples, {"numbers": tf.io.FixedLenFeature([4], tf.float32)})
            scores = tf.nn.softmax(features["numbers"] @ weights)
            classes = tf.tile(tf.constant([["u", "v", "w"]]), [tf.shape(scores)[0], 1])
            signatures[key] = v1.saved_model.classification_signature_def(examples, classes, scores)
        session.run(v1.global_variables_initializer())
        builder = v1.saved_model.builder.SavedModelBuilder(folder)
        builder.add_meta_graph_and_variables(session, ["serve"], signatures)
        builder.save()
    floats = [tf.train.Feature(float_list=tf.train.FloatList(value=row)) for row in _floats(ROWS, 4)]
    features = [tf.train.Features(feature={"numbers": row}) for row in floats]
    stored = np.array([tf.train.Example(features=row).SerializeToString() for row in features], object)
    return {key: {"inputs": stored} for key in signatures}


CASES: dict[str, Callable[[str], Requests]] = {
    case.__name__: case
    for case in (dense, conv, lstm, transformer, text, decoding, two_signatures, tensorflow_1, estimator)
}
