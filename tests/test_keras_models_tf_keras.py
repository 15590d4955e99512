"""Wrapped tf_keras (Keras 2) models against their templates' own `fit`, and their files."""

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.float64 import EXACT
from tests.helpers.keras_cases import ROWS, assert_same, assert_sharded, classes, numbers
from tests.helpers.processes import python

tf_keras = pytest.importorskip("tf_keras")
layers = tf_keras.layers
pytestmark = [
    pytest.mark.usefixtures("float64", "plain_oracle"),
    pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file:UserWarning"),
]


# tf_keras 2.16 has losses over batches, and weights of classes, in float32 whatever the model has
COUNTED = 1e-6 if tf_keras.__version__.startswith("2.16.") else EXACT


@pytest.fixture
def float64():
    """Make models in float64: in float32, a momentum that nearly cancels depends on the order of summation."""
    policy = tf_keras.mixed_precision.global_policy()
    tf_keras.backend.set_floatx("float64")
    tf_keras.mixed_precision.set_global_policy("float64")  # (a policy that some other test set follows no floatx)
    yield
    tf_keras.backend.set_floatx("float32")
    tf_keras.mixed_precision.set_global_policy(policy)


def dense():
    return tf_keras.Sequential(
        [
            layers.Input((6,)),
            layers.Dense(8, "tanh", kernel_regularizer="l2"),
            layers.BatchNormalization(),
            layers.Dense(3),
        ]
    )


def convolutional():
    image = tf_keras.Input((8, 8, 2))
    x = layers.Conv2D(4, 3, padding="same", use_bias=False)(image)
    x = layers.Activation("relu")(layers.BatchNormalization(momentum=0.5)(x))
    return tf_keras.Model(image, layers.Dense(3)(layers.Flatten()(layers.MaxPooling2D()(x))))


def branching():
    left, right = tf_keras.Input((5,), name="left"), tf_keras.Input((5,), name="right")
    encoder = layers.Dense(4, "tanh")
    joined = layers.Concatenate()([encoder(left), encoder(right)])
    return tf_keras.Model({"left": left, "right": right}, layers.Dense(3)(joined))


class Subclassed(tf_keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = layers.Dense(3)

    def call(self, inputs):
        return self.dense(inputs)

    def train_step(self, data):
        return {**super().train_step(data), "weight": tf.reduce_sum(self.dense.kernel)}


def subclassed():
    model = Subclassed()
    model(numbers(6))
    return model


CASES = {
    "dense": (dense, lambda: numbers(6)),
    "convolutional": (convolutional, lambda: numbers(8, 8, 2)),
    "branching": (branching, lambda: {"left": numbers(5), "right": numbers(5, seed=3)}),
    "subclassed": (subclassed, lambda: numbers(6)),
}
OPTIMIZERS = {
    "sgd": lambda: tf_keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: tf_keras.optimizers.Adam(0.01, epsilon=1e-3, global_clipnorm=0.1),
    "legacy": lambda: tf_keras.optimizers.legacy.Adam(0.01, epsilon=1e-3),
}


def made(build, gpus, optimizer="sgd", **options):
    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(1)
    model = gs.multi_gpu_model(build(), gpus)
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"], **options)
    tf_keras.utils.set_random_seed(2)
    return model


def state(model):
    optimizer = model.optimizer.variables
    variables = [*model.weights, *(optimizer() if callable(optimizer) else optimizer)]
    return [(v.name, v.numpy()) for v in variables]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("name", "optimizer", "batch", "gpus"),
    [
        ("dense", "sgd", 7, 3),
        ("dense", "adam", 1, 2),
        ("convolutional", "legacy", 8, 2),
        ("convolutional", "sgd", 19, 4),
        ("branching", "adam", 7, 4),
        ("subclassed", "legacy", 3, 2),
    ],
)
def test_equals_the_template(name, optimizer, batch, gpus):
    build, data = CASES[name]
    results = []
    for devices in (1, gpus):
        model = made(build, devices, optimizer)
        x, y = data(), classes(3)
        options = {"sample_weight": np.linspace(0.5, 1, ROWS), "validation_data": (x, y)}
        history = model.fit(x, y, batch_size=batch, epochs=2, verbose=0, **options).history
        extra = [("predictions", model.predict(x, batch_size=5, verbose=0)), ("test", model.evaluate(x, y, verbose=0))]
        results.append([*history.items(), *state(model), *extra])
    assert_same(results[1], results[0], EXACT)
    if batch > 1:
        assert_sharded(model, ("MatMul",), gpus)


@pytest.mark.long
@pytest.mark.parametrize("steps", [2, 5])
def test_steps_per_execution_and_counters(steps):
    results = []
    for gpus in (1, 3):
        model = made(dense, gpus, steps_per_execution=steps)
        x, y = numbers(6), classes(3)
        batches = []
        callback = tf_keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs, b=batches: b.append(batch))
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback]).history
        prediction = model.predict(x, batch_size=4, verbose=0)
        counters = model._train_counter.numpy(), model._predict_counter.numpy()
        results.append([*history.items(), ("b", batches), ("c", counters), ("p", prediction), *state(model)])
    assert_same(results[1], results[0], COUNTED)


@pytest.mark.long
def test_single_batches():
    results = []
    for gpus in (1, 3):
        model = made(dense, gpus)
        x, y = numbers(6), classes(3)
        values = [
            model.train_on_batch(x, y, class_weight={0: 1.0, 1: 2.0, 2: 0.5}),
            model.test_on_batch(x[:2], y[:2]),
            model.predict_on_batch(x[:1]),
        ]
        results.append([*[(str(i), value) for i, value in enumerate(values)], *state(model)])
    assert_same(results[1], results[0], COUNTED)


def with_dropout():
    return tf_keras.Sequential([layers.Input((6,)), layers.Dropout(0.5), layers.Dense(3)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("generator", "batch"), [(True, 7), (False, 19), (False, 7)])
def test_dropout(generator, batch):
    """Keras 2's default Dropout keeps its position in the kernel of a trace, which has batches of all sizes."""
    random = tf_keras.backend.experimental
    if generator:
        random.enable_tf_random_generator()
    try:
        results = []
        for gpus in (1, 3):
            model = made(with_dropout, gpus)
            history = model.fit(numbers(6), classes(3), batch_size=batch, epochs=3, verbose=0).history
            results.append([*history.items(), *state(model)])
        assert_same(results[1], results[0], EXACT)
    finally:
        random.disable_tf_random_generator()


def test_draws_in_loops_of_a_smaller_last_batch_are_warned_of_once():
    def with_noise():
        def noise(x):
            return tf.random.normal(tf.shape(x), dtype=x.dtype)

        def noisy(x):
            return tf.while_loop(lambda i, _: i < 2, lambda i, x: (i + 1, x + noise(x)), (0, x))[1]

        layers = tf_keras.layers
        return tf_keras.Sequential([layers.Input((6,)), layers.Lambda(noisy), layers.Dense(3)])

    model = made(with_noise, 3)
    model.fit(numbers(6)[:18], classes(3)[:18], batch_size=6, epochs=2, verbose=0)  # batches of one size: nothing
    with pytest.warns(UserWarning, match="seeded numbers") as told:
        model.fit(numbers(6), classes(3), batch_size=7, epochs=2, verbose=0)
    model.fit(numbers(6), classes(3), batch_size=8, verbose=0)
    assert [str(warning.message) for warning in told] == [
        "train_step is planned once more, for other sizes or layouts, and draws seeded numbers by TensorFlow's kernels "
        "in a loop, in a branch, under XLA or on workers: RandomStandardNormal (test_keras_models_tf_keras.py:194). "
        "They begin anew in each plan, and go on in one device's trace: from this call on, these numbers are not those "
        "of one device. Draw by a tf.random.Generator, by keras.random with a SeedGenerator, or by "
        "tf.random.stateless_normal and its like (in tf_keras, call "
        "tf_keras.backend.experimental.enable_tf_random_generator() before you make the model)."
    ]
    assert told[0].filename == __file__


LOADER = """
import sys
import numpy as np, tensorflow as tf, tf_keras
x, expected = np.load("x.npy"), np.load("expected.npy")
for name in ("wrapped.keras", "wrapped.h5", "wrapped", "epoch-1.keras"):
    model = tf_keras.models.load_model(name)
    np.testing.assert_allclose(model.predict(x, verbose=0), expected, rtol=1e-5, atol=1e-6)
    # Keras 2 itself loads no optimizer from a SavedModel folder.
    assert int(model.optimizer.iterations) == (3 if "." in name else 0), name
exported = tf.saved_model.load("exported")
np.testing.assert_allclose(exported.serve(x), expected, rtol=1e-5, atol=1e-6)
assert not any(name.startswith("graphsplit") for name in sys.modules)
"""


@pytest.mark.long
def test_files_load_in_a_process_without_graphsplit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = made(dense, 3)
    checkpoint = tf_keras.callbacks.ModelCheckpoint("epoch-{epoch}.keras")
    model.fit(numbers(6), classes(3), batch_size=8, verbose=0, callbacks=[checkpoint])
    model.save("wrapped.keras")
    model.save("wrapped.h5")
    model.save("wrapped", save_format="tf")
    model.export("exported")
    names = []
    for one in (model, model.template):
        names.append([n for n, _ in tf.train.list_variables(tf.train.Checkpoint(model=one).save("names"))])
    assert names[0] == names[1]
    np.save("x.npy", numbers(6))
    np.save("expected.npy", model.template.predict(numbers(6), verbose=0))
    process = python("-c", LOADER)
    assert process.returncode == 0, process.stderr[-3000:]


def test_refusals():
    late = tf_keras.Sequential([layers.Dense(3)], name="late")
    with pytest.raises(gs.errors.ArgumentError, match=r"^'late' is not built: it has no variables"):
        gs.multi_gpu_model(late, 2)
    model = gs.multi_gpu_model(dense(), 2)
    with pytest.raises(gs.errors.ArgumentError, match=r"is wrapped already, on 2 devices\."):
        gs.multi_gpu_model(model, 3)
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        inside = dense()
    with pytest.raises(gs.errors.UnsupportedError, match=r"wrapped under a tf\.distribute strategy's scope"):
        gs.multi_gpu_model(inside, 2)
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.warns(UserWarning, match="was compiled with run_eagerly=True"):
        model.train_on_batch(numbers(6), numbers(3))


@pytest.mark.long
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_variables_by_layout(optimizer, layout):
    results = []
    for where in ("home", layout):
        tf_keras.backend.clear_session()
        tf_keras.utils.set_random_seed(1)
        model = gs.multi_gpu_model(dense(), 3, variables=where)
        loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(OPTIMIZERS[optimizer](), loss, metrics=["accuracy"])
        history = model.fit(numbers(6), classes(3), batch_size=7, epochs=2, verbose=0).history
        results.append([*history.items(), *state(model)])
    assert_same(results[1], results[0], EXACT)
    own = model.optimizer.variables
    slots = own() if callable(own) else own
    assert layout in [parts.layout for v in slots if (parts := parts_of_variable(v)) is not None]
