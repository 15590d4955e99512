"""What Keras users do with a model: kinds of data, weights of samples, callbacks, steps of their own."""

import re
from contextlib import nullcontext

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.float64 import EXACT, float64
from tests.helpers.keras_cases import CASES, ROWS, SPARSE, assert_same, assert_sharded, classes, copied, numbers, state

__all__ = ["float64"]
# In float32 a momentum whose gradient nearly cancels is off by as much as the kernels' order of summation likes.
pytestmark = pytest.mark.usefixtures("float64", "plain_oracle")

layers = keras.layers


def classifier():
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [layers.Input((6,)), layers.Dense(8, "tanh"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(3)]
    )


def pair(**compile_options):
    """Return a compiled template and a compiled model on three devices, with the same weights."""
    models = classifier(), gs.multi_gpu_model(classifier(), 3)
    for model in models:
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), **{**copied(SPARSE), **compile_options})
    return models


def compare(use, **compile_options):
    """Run `use` with both models and compare what it returns and the models' states; return the wrapped model."""
    models, results = pair(**compile_options), []
    for model in models:
        keras.utils.set_random_seed(3)
        results.append(use(model))
    numbered = [[(str(i), v) for i, v in enumerate(keras.tree.flatten(result))] for result in results]
    assert_same(numbered[1], numbered[0], EXACT)
    assert_same(state(models[1]), state(models[0]), EXACT)
    return models[1]


def arrays():
    return numbers(6), classes(3)


class Sequence(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        rows = slice(index * 7, index * 7 + 7)
        return arrays()[0][rows], arrays()[1][rows], np.linspace(0, 1, ROWS)[rows]


def generator():
    for i in range(3):
        yield Sequence()[i]


DATA = {
    "numpy": lambda: {"x": arrays()[0], "y": arrays()[1], "batch_size": 7, "sample_weight": np.linspace(0, 1, ROWS)},
    "tensors": lambda: {"x": tf.constant(arrays()[0]), "y": tf.constant(arrays()[1]), "batch_size": 7},
    "tf.data": lambda: {"x": tf.data.Dataset.from_tensor_slices(arrays()).batch(7), "shuffle": False},
    "tf.data repeated": lambda: {
        "x": tf.data.Dataset.from_tensor_slices(arrays()).batch(7, drop_remainder=True).repeat(),
        "steps_per_epoch": 3,
        "shuffle": False,
    },
    "generator": lambda: {"x": generator(), "steps_per_epoch": 3, "epochs": 1, "shuffle": False},
    "PyDataset": lambda: {"x": Sequence()},
    "validation split": lambda: {"x": arrays()[0], "y": arrays()[1], "validation_split": 0.3, "batch_size": 4},
    "class weights": lambda: {"x": arrays()[0], "y": arrays()[1], "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}},
    "initial epoch": lambda: {"x": arrays()[0], "y": arrays()[1], "initial_epoch": 1, "epochs": 3},
}


@pytest.mark.long
@pytest.mark.parametrize("kind", DATA)
def test_kinds_of_data(kind):
    def use(model):
        history = model.fit(**{"epochs": 2, "verbose": 0, **DATA[kind]()})
        return list(history.history.values()), history.epoch

    model = compare(use, weighted_metrics=["accuracy"])
    assert_sharded(model, ("MatMul",), 3)


@pytest.mark.long
@pytest.mark.parametrize("steps", [2, 5])
def test_steps_per_execution(steps):
    ended = {}

    def use(model):
        callback = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: ended.setdefault(id(model), []).append(batch)
        )
        x, y = arrays()
        history = model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback]).history
        return history, model.predict(x, batch_size=4, verbose=0), model.evaluate(x, y, batch_size=4, verbose=0)

    compare(use, steps_per_execution=steps)
    single, wrapped = ended.values()
    assert single == wrapped
    assert len(single) < 10


@pytest.mark.long
def test_single_batches():
    def use(model):
        x, y = arrays()
        weight = np.linspace(1, 2, ROWS)
        return [
            model.train_on_batch(x, y, sample_weight=weight, return_dict=True),
            model.train_on_batch(x[:2], y[:2], class_weight={0: 1.0, 1: 3.0, 2: 1.0}),
            model.train_on_batch(x[:1], y[:1]),
            model.test_on_batch(x, y, sample_weight=weight),
            model.predict_on_batch(x),
            model.predict_on_batch(x[:1]),
        ]

    compare(use)


def test_callbacks_see_an_ordinary_model(tmp_path):
    def use(model):
        x, y = arrays()
        seen = []
        callbacks = [
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5),
            keras.callbacks.EarlyStopping("loss", patience=0, min_delta=10.0, restore_best_weights=True),
            keras.callbacks.ReduceLROnPlateau("loss", patience=1),
            keras.callbacks.CSVLogger(tmp_path / "log.csv"),
            keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])),
        ]
        model.fit(x, y, batch_size=7, epochs=5, verbose=0, callbacks=callbacks)
        return seen, model.optimizer.learning_rate.numpy()

    compare(use)


@pytest.mark.long
def test_progress_bar_and_history_are_as_usual(capsys):
    lines = []

    def use(model):
        x, y = arrays()
        history = model.fit(x, y, batch_size=7, epochs=1, verbose=2).history
        lines.append(re.sub(r"\d+(m?s|us)\b", "", capsys.readouterr().out))
        return list(history.values())

    compare(use)
    assert lines[0] == lines[1]
    assert "accuracy: 0." in lines[0]


@pytest.mark.long
def test_compiling_again_changes_what_runs():
    x, y = arrays()

    def use(model):
        first = model.train_on_batch(x, y)
        model.layers[0].trainable = False
        model.compile(keras.optimizers.SGD(0.5), "mse", metrics=[])
        return first, model.train_on_batch(x, numbers(3))

    compare(use)


def test_compiling_the_template_compiles_the_wrapped_model():
    x, y = arrays()
    template = classifier()
    model = gs.multi_gpu_model(template, 2)
    template.compile("sgd", **copied(SPARSE))
    model.train_on_batch(x, y)
    template.compile(keras.optimizers.SGD(0.0), "mse", metrics=[])
    before = model.get_weights()[0]
    model.train_on_batch(x, numbers(3))
    np.testing.assert_array_equal(model.get_weights()[0], before)


def test_template_keeps_its_own_functions():
    x, y = arrays()
    template = classifier()
    model = gs.multi_gpu_model(template, 2)
    model.compile("sgd", **copied(SPARSE))
    model.fit(x, y, verbose=0)
    template.fit(x, y, verbose=0)
    assert len(model.train_function.plan().devices) == 2
    assert not hasattr(template.train_function, "plan")
    assert int(template.optimizer.iterations) == 2


def test_eager_steps_say_what_they_cost():
    x, y = arrays()
    models = pair(run_eagerly=True)
    expected = models[0].train_on_batch(x, y)
    with pytest.warns(UserWarning, match="compiled with run_eagerly=True") as caught:
        actual = models[1].train_on_batch(x, y)
    assert str(caught[0].message) == (
        f"{models[1].name!r} was compiled with run_eagerly=True: it runs operation by operation, on one device instead "
        "of 3, many times slower. The numbers are the same. To use the devices, compile without run_eagerly."
    )
    np.testing.assert_allclose(actual, expected, rtol=EXACT)


def test_many_shapes_are_warned_of_once():
    model = pair()[1]
    sizes = [*range(1, 8), *range(1, 8)]
    for size in sizes:
        model.predict_on_batch(numbers(6)[:size])
    with pytest.warns(gs.errors.RetracingWarning) as caught:
        model.predict_on_batch(numbers(6)[:8])
    model.predict_on_batch(numbers(6)[:9])
    assert [str(warning.message).splitlines()[:2] for warning in caught] == [
        [
            "predict_step has been called with 8 signatures, and has a plan for each:",
            "  - x: float32[1, 6], float32[2, 6], float32[3, 6], float32[4, 6], ... (8 in all)",
        ]
    ]


def test_no_trainable_weights_is_keras_own_warning():
    model = keras.Sequential([layers.Input((6,)), layers.Dense(3, trainable=False)])
    before = model.get_weights()
    model = gs.multi_gpu_model(model, 2)
    model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="The model does not have any trainable weights."):
        model.fit(numbers(6), numbers(3), verbose=0)
    assert_same([("w", w) for w in model.get_weights()], [("w", w) for w in before], 0)


def test_a_loss_of_ones_own():
    class Huber(keras.Model):
        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
            return keras.ops.mean(keras.losses.huber(y, y_pred)) + 0.1 * keras.ops.mean(x**2)

    results = []
    for gpus in (1, 3):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        model = gs.multi_gpu_model(Huber(inputs, layers.Dense(3)(inputs)), gpus)
        model.compile("sgd")
        history = model.fit(numbers(6), numbers(3), batch_size=8, epochs=2, verbose=0, shuffle=False).history
        results.append([("loss", history["loss"]), *state(model)])
    assert_same(results[1], results[0], EXACT)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seeded", [True, False])
def test_noise_in_a_step_with_a_smaller_last_batch(seeded):
    """Drawn by a kernel, or by `keras.random` with a `SeedGenerator`: one device's."""

    class Noisy(keras.Model):
        def train_step(self, data):
            x, y = data
            normal = keras.random.normal if seeded else tf.random.normal
            noise = normal(tf.shape(x), dtype=x.dtype, seed=self.noise if seeded else 3)
            return super().train_step((x + noise, y))

    results = []
    for gpus in (1, 3):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((6,))
        model = Noisy(inputs, layers.Dense(3)(inputs))
        model.noise = keras.random.SeedGenerator(4)
        model = gs.multi_gpu_model(model, gpus)
        model.compile("sgd", "mse")
        history = model.fit(numbers(6), numbers(3), batch_size=8, epochs=2, verbose=0, shuffle=False).history
        results.append([("loss", history["loss"]), *state(model)])
    assert_same(results[1], results[0], EXACT)


def test_two_optimizers_in_one_step():
    class Adversaries(keras.Model):
        def __init__(self):
            super().__init__()
            self.left, self.right = layers.Dense(3), layers.Dense(3)
            self.built = True

        def compile(self, left_optimizer, right_optimizer):
            super().compile()
            self.left_optimizer, self.right_optimizer = left_optimizer, right_optimizer

        def train_step(self, data):
            x, y = data
            with tf.GradientTape(persistent=True) as tape:
                left = tf.reduce_mean((self.left(x) - y) ** 2)
                right = tf.reduce_mean((self.right(x) - tf.stop_gradient(self.left(x))) ** 2)
            for layer, loss, optimizer in (
                (self.left, left, self.left_optimizer),
                (self.right, right, self.right_optimizer),
            ):
                optimizer.apply(tape.gradient(loss, layer.trainable_variables), layer.trainable_variables)
            return {"left": left, "right": right}

    results = []
    for gpus in (1, 4):
        keras.utils.set_random_seed(1)
        template = Adversaries()
        template.left.build((None, 6))
        template.right.build((None, 6))
        model = gs.multi_gpu_model(template, gpus)
        model.compile(keras.optimizers.SGD(0.1), keras.optimizers.Adam(0.01))
        history = model.fit(numbers(6), numbers(3), batch_size=8, epochs=2, verbose=0, shuffle=False).history
        results.append([*history.items(), *[(v.path, np.asarray(v)) for v in model.variables]])
    assert_same(results[1], results[0], EXACT)


def test_training_loop_without_wrapping():
    x, y = arrays()
    single, other = classifier(), classifier()
    for model in (single, other):
        model.compile(keras.optimizers.SGD(0.1), **copied(SPARSE))
    step = gs.parallelize(other.train_step, devices=4)
    for rows in (slice(0, 8), slice(8, 19)):
        expected = single.train_on_batch(x[rows], y[rows], return_dict=True)
        other.reset_metrics()
        actual = step((x[rows], y[rows], None))
        assert_same(sorted(actual.items()), sorted(expected.items()), EXACT)
    assert_same(state(other), state(single), EXACT)


@pytest.mark.parametrize("name", ["siamese", "subclassed"])
def test_the_wrapped_model_is_a_model_of_the_same_kind(name):
    template = CASES[name].model()
    model = gs.multi_gpu_model(template, 3)
    assert isinstance(model, keras.Model)
    assert isinstance(model, type(template))
    assert model.layers == template.layers
    assert [v.path for v in model.weights] == [v.path for v in template.weights]
    assert all(a is b for a, b in zip(model.weights, template.weights, strict=True))
    assert repr(model) == f"<{type(template).__name__} name={template.name} on CPU:0, CPU:1, CPU:2>"
    assert model.count_params() == template.count_params()
    x, _ = CASES[name].data()
    np.testing.assert_array_equal(keras.tree.flatten(model(x))[0], keras.tree.flatten(template(x))[0])


@pytest.mark.long
def test_predictions_are_merged_on_the_cpu_unless_told_otherwise():
    for cpu_merge, home in ((True, "/device:CPU:0"), (False, "/device:CPU:1")):
        model = gs.multi_gpu_model(classifier(), ["CPU:1", "CPU:2"], cpu_merge=cpu_merge)
        model.predict(numbers(6), verbose=0)
        assert model.predict_function.plan().default_device == home
        assert model.predict_function.plan().devices == ("/device:CPU:1", "/device:CPU:2")
        model.compile("sgd", **copied(SPARSE))
        model.train_on_batch(*arrays())
        assert model.train_function.plan().default_device == "/device:CPU:1"


def test_relocation_trains_on_the_cpu():
    model = gs.multi_gpu_model(classifier(), [1, 2], cpu_relocation=True, cpu_merge=False)
    model.compile("sgd", **copied(SPARSE))
    model.train_on_batch(*arrays())
    plan = model.train_function.plan()
    assert plan.default_device == "/device:CPU:0"
    assert plan.devices == ("/device:CPU:1", "/device:CPU:2")


@pytest.mark.long
def test_relocation_of_a_trained_model_by_a_copy():
    x, y = arrays()
    with tf.device("CPU:1"):  # in the place of a GPU
        trained = classifier()
    trained.compile("sgd", **copied(SPARSE))
    trained.fit(x, y, batch_size=7, verbose=0)
    with tf.device("CPU:0"):
        template = keras.models.clone_model(trained)
    template.set_weights(trained.get_weights())
    model = gs.multi_gpu_model(template, ["CPU:1", "CPU:2"], cpu_relocation=True)
    assert_same([("y", model.predict(x, verbose=0))], [("y", trained.predict(x, verbose=0))])
    model.compile("sgd", **copied(SPARSE))
    model.fit(x, y, batch_size=7, verbose=0)
    assert model.train_function.plan().default_device == "/device:CPU:0"
    assert {v.value.device.rsplit("device:")[-1] for v in trained.variables} == {"CPU:1"}
    assert {v.value.device.rsplit("device:")[-1] for v in model.variables} == {"CPU:0"}


@pytest.mark.long
def test_a_shared_layer_on_two_devices_goes_forward_and_backward_there():
    keras.utils.set_random_seed(1)
    shared, head = layers.LSTM(5), layers.Dense(1)
    shared.build((None, 4, 3))
    head.build((None, 10))
    variables = [v.value for v in (*shared.trainable_variables, *head.trainable_variables)]
    a, b = tf.constant(numbers(4, 3)), tf.constant(numbers(4, 3, seed=6))

    def step(left, right):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(head(tf.concat([left(a), right(b)], -1)) ** 2)
        return loss, tape.gradient(loss, variables)

    left, right = (gs.parallelize(shared, devices=[device]) for device in ("CPU:1", "CPU:2"))
    placed = tf.function(lambda: step(left, right))
    with partition_graphs() as graphs:
        actual = placed()
    expected = step(shared, shared)
    assert_same([("loss", actual[0])], [("loss", expected[0])])
    assert_same(*[[(str(i), g.numpy()) for i, g in enumerate(grads)] for grads in (actual[1], expected[1])])
    found = {"forward": set(), "backward": set()}
    for node in [node for graph in graphs for node in graph.node if "MatMul" in node.op and "lstm_cell" in node.name]:
        call, device = node.name.split("/")[0], node.device.split("device:")[1]
        found["backward" if "while_grad" in node.name else "forward"].add((call, device))
    for calls in found.values():
        assert sorted(device for _, device in calls) == ["CPU:1", "CPU:2"], found


TRAINER = next(base for base in keras.Model.__mro__ if "fit" in vars(base))


class Trained(TRAINER, layers.Layer):
    """A layer with `fit`, and no `keras.Model`."""

    def __init__(self):
        layers.Layer.__init__(self)
        TRAINER.__init__(self)
        self.dense, self.normalized, self.dropped = layers.Dense(3), layers.BatchNormalization(), layers.Dropout(0.5)

    def call(self, x, training=False):
        return self.dropped(self.normalized(self.dense(x), training=training), training=training)


@pytest.mark.long
def test_a_layer_with_fit_that_is_no_model():
    results, models = [], []
    for gpus in (1, 3):
        keras.utils.set_random_seed(1)
        template = Trained()
        template(numbers(6)[:1])
        models.append(gs.multi_gpu_model(template, gpus))
        models[-1].compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        history = models[-1].fit(numbers(6), numbers(3), batch_size=5, epochs=2, verbose=0, shuffle=False).history
        scores = models[-1].evaluate(numbers(6), numbers(3), verbose=0)
        found = [("loss", history["loss"]), ("scores", scores), ("y", models[-1].predict(numbers(6), verbose=0))]
        results.append([*found, *state(models[-1])])
    assert_same(results[1], results[0], EXACT)
    assert isinstance(models[1], Trained)
    assert_sharded(models[1], ("MatMul",), 3)
    assert gs.verify(models[1], numbers(6), numbers(3)).passed


class Gan(keras.Model):
    """Two networks that `train_step` trains, each with an optimizer of its own; there is no `call`."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential([keras.Input((4,)), layers.Dense(30, "relu"), layers.Dense(3)])
        self.discriminator = keras.Sequential([keras.Input((3,)), layers.Dense(1)])

    def compile(self, first, second):
        super().compile()
        self.first, self.second = first, second

    def train_step(self, x):
        x = x[0] if isinstance(x, tuple) else x
        generator, discriminator = (part.trainable_variables for part in (self.generator, self.discriminator))
        with tf.GradientTape(persistent=True) as tape:
            made = self.generator(tf.ones((tf.shape(x)[0], 4)))
            loss = tf.reduce_mean(self.discriminator(made) - self.discriminator(x))
            other = -tf.reduce_mean(self.discriminator(made))
        self.second.apply(tape.gradient(loss, discriminator), discriminator)
        self.first.apply(tape.gradient(other, generator), generator)
        return {"loss": loss}


@pytest.mark.long
@pytest.mark.parametrize("variables", ["home", "sharded"])
def test_a_model_that_has_a_train_step_and_no_call(variables):
    results = []
    for gpus in (1, 3):
        keras.utils.set_random_seed(1)
        model = gs.multi_gpu_model(Gan(), gpus, variables=variables)
        model.compile(keras.optimizers.Adam(), keras.optimizers.Adam())
        history = model.fit(numbers(3), batch_size=5, epochs=2, verbose=0, shuffle=False).history
        kept = [*model.weights, *model.first.variables, *model.second.variables]
        results.append([("loss", history["loss"]), *[(v.path, v.numpy()) for v in kept]])
    assert_same(results[1], results[0])
    assert_sharded(model, ("MatMul",), 3)


def test_a_model_without_call_whose_layers_are_not_built():
    model = Gan()
    model.other = layers.Dense(2, name="other")
    with pytest.raises(
        gs.errors.ArgumentError, match=r"no call\(\), and some of its layers have no variables(.|\n)*- other"
    ):
        gs.multi_gpu_model(model, 2)


@pytest.mark.long
@pytest.mark.parametrize("on", ["wrapped", "template"])
def test_quantized_after_a_prediction(on):
    def scores(wrap, on):
        keras.utils.set_random_seed(1)
        template = keras.Sequential([keras.Input((32,)), layers.Dense(64, "gelu"), layers.Dense(8)])
        model = wrap(template)
        before = model.predict(x, verbose=0)
        (model if on == "wrapped" else template).quantize("int8", filters="dense.*")
        return before, model.predict(x, verbose=0), template.predict(x, verbose=0)

    x = numbers(32)
    before, expected, _ = scores(lambda template: template, on)
    assert np.abs(before - expected).max() > 1e-3
    for found in scores(lambda template: gs.multi_gpu_model(template, 2), on)[1:]:
        assert_same([("scores", found)], [("scores", expected)])


@pytest.mark.long
def test_layouts_of_an_optimizer_that_compile_brings_after_a_prediction():
    results = []
    for gpus in (1, 4):
        keras.utils.set_random_seed(1)
        template = keras.Sequential([keras.Input((20,)), layers.Dense(64, "relu"), layers.Dense(1)])
        layout = {"adam*": "sharded", "*": "replicated"}
        model = template if gpus == 1 else gs.multi_gpu_model(template, gpus, variables=layout)
        with pytest.warns(UserWarning, match=r"fits 'adam\*'.*once compile\(\)") if gpus > 1 else nullcontext():
            model.predict(numbers(20), verbose=0)
        model.compile("adam", "mse")
        model.fit(numbers(20), numbers(1), batch_size=5, verbose=0, shuffle=False)
        results.append(state(model))
    assert_same(results[1], results[0])
    found = [parts_of_variable(v.value) for v in model.optimizer.variables[2:4]]
    assert [parts.layout for parts in found if parts is not None] == ["sharded", "sharded"]
