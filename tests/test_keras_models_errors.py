"""What cannot be wrapped, and what wrapped models refuse: whole messages."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.messages import message

layers = keras.layers


def small(**options):
    return keras.Sequential([layers.Input((3,)), layers.Dense(2)], **options)


def test_no_model():
    assert message(gs.errors.ArgumentError, gs.multi_gpu_model, layers.Dense(3), 2) == (
        "multi_gpu_model takes a Keras model, got keras.src.layers.core.dense.Dense. For a function or a layer use "
        "graphsplit.parallelize."
    )


def test_not_built():
    model = keras.Sequential([layers.Dense(3)], name="late")
    assert message(gs.errors.ArgumentError, gs.multi_gpu_model, model, 2) == (
        "'late' is not built: it has no variables yet that could be shared. Give it an Input, or call it once on a "
        "batch, before it is wrapped. If its fit makes its layers, call model.fit(x, y, epochs=0)."
    )


def test_a_model_whose_fit_makes_its_layers():
    """Calling it once would fail, or make other layers; `fit(epochs=0)` makes those that are trained."""

    class Adversarial(keras.Model):
        def call(self, x):
            return self.net(x)

        def fit(self, x, y=None, **options):
            if not self.built:
                self.net = small()
                self.build(x.shape)
            return super().fit(x, y, **options)

    model = Adversarial(name="dann")
    model.compile("sgd", "mse")
    x, y = np.ones((5, 3)), np.ones((5, 2))
    assert "call model.fit(x, y, epochs=0)" in message(gs.errors.ArgumentError, gs.multi_gpu_model, model, 2)
    model.fit(x, y, epochs=0, verbose=0)
    assert gs.verify(gs.multi_gpu_model(model, 2), x, y)


def test_wrapped_already():
    template = small(name="twice")
    model = gs.multi_gpu_model(template, 3)
    assert message(gs.errors.ArgumentError, gs.multi_gpu_model, model, 2) == (
        "'twice' is wrapped already, on 3 devices. Wrap its template, model.template, to run it on others."
    )
    assert model.template is template
    assert len(gs.multi_gpu_model(model.template, 2).model_devices.devices) == 2


def test_own_batch_functions():
    class Own(keras.Sequential):
        def make_train_function(self, force=False):
            return super().make_train_function(force)

    model = Own([layers.Input((3,)), layers.Dense(2)], name="own")
    assert message(gs.errors.UnsupportedError, gs.multi_gpu_model, model, 2) == (
        "'own' overrides make_train_function, which runs the batches itself and cannot be split. "
        "Override train_step, test_step or predict_step instead."
    )


def test_another_backend(monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    assert message(gs.errors.UnsupportedError, gs.multi_gpu_model, small(), 2) == (
        "multi_gpu_model splits TensorFlow graphs, but Keras runs on 'jax'. Set the environment variable "
        "KERAS_BACKEND=tensorflow before Keras is imported."
    )


def test_one_device_is_the_template():
    model = small()
    assert gs.multi_gpu_model(model, 1) is model
    assert gs.multi_gpu_model(model, ["CPU:2"]) is model


def test_more_devices_than_exist():
    listed = "\n".join(f"  - CPU:{i}" for i in range(5))
    assert message(gs.errors.DeviceError, gs.multi_gpu_model, small(), 9) == (
        f"gpus=9: there are only 5 CPU devices. This process has:\n{listed}\n"
        "To try several devices without GPUs, call graphsplit.use_logical_devices(n) before TensorFlow starts.\n"
        'For a plan or a placement only, name them: gpus=[f"GPU:{k}" for k in range(9)].'
    )
    assert message(gs.errors.DeviceError, gs.multi_gpu_model, small(), [0, 7]) == (
        f"gpus=['CPU:0', 'CPU:7']: CPU:7 does not exist. This process has:\n{listed}\n"
        "To try several devices without GPUs, call graphsplit.use_logical_devices(n) before TensorFlow starts."
    )


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (0, "gpus=0: at least one device is needed."),
        (-2, "gpus=-2: at least one device is needed."),
        ([], "gpus is an empty list; name at least one device."),
        (True, "gpus takes a number or a list of device names, got True."),
        (2.0, "gpus takes a number or a list of device names, got 2.0."),
        ([0, 0], "gpus names a device more than once: CPU:0."),
        (["first"], "gpus: 'first' is not a device name; write it like 'GPU:0'."),
    ],
)
def test_devices_that_make_no_sense(gpus, expected):
    assert message(gs.errors.ArgumentError, gs.multi_gpu_model, small(), gpus) == expected


def test_devices_and_patterns_are_checked_when_a_model_is_wrapped():
    said = message(gs.errors.DeviceError, gs.multi_gpu_model, small(), ["CPU:0", "CPU:17"])
    assert said.startswith("gpus=['CPU:0', 'CPU:17']: CPU:17 does not exist. This process has:\n  - CPU:0\n")
    for pattern in ("nope*", "slots of nope*"):
        model = small(name="net")
        kernel, bias = [variable.path for variable in model.variables]
        assert message(gs.errors.ArgumentError, gs.multi_gpu_model, model, 2, variables={pattern: "sharded"}) == (
            f"No variable's name fits {pattern!r}. The variables are:\n  - {kernel}\n  - {bias}"
            f"\nSimilar to {pattern!r}: 'net/*'."
        )
    for pattern in ("adam*", "*_momentum", "*/learning_rate", "slots of net/*", "rm_sprop*"):
        gs.multi_gpu_model(small(name="net"), 2, variables={pattern: "host"})  # an optimizer may come later
    model = small(name="net")
    model.compile(keras.optimizers.SGD(name="mine"))
    gs.multi_gpu_model(model, 2, variables={"mine*": "host"})


def test_sizes_that_a_model_cannot_take():
    three_rows = layers.Lambda(lambda x: x + tf.ones((3, 1)))
    model = gs.multi_gpu_model(keras.Sequential([layers.Input((4,)), layers.Dense(4), three_rows]), gpus=2)
    model.compile("sgd", "mse")
    said = message(gs.errors.ArgumentError, model.fit, np.ones((5, 4)), np.ones((5, 4)), verbose=0)
    assert said.startswith("The function cannot run on arguments of these sizes. TensorFlow says: Dimensions must be ")


def compiled_by_xla(model) -> bool:
    x, y = tf.ones((5, 3)), tf.ones((5, 2))
    model.fit(x, y, verbose=0)
    definition = model.train_function.step.graph_def(None, x, y)
    return any("_XlaMustCompile" in node.attr for node in definition.node)


def test_the_default_of_keras_is_followed():
    """Keras compiles nothing without a GPU; where there is one, it sets `jit_compile` of the plain model."""
    model = gs.multi_gpu_model(small(), 2)
    model.compile("sgd", "mse", jit_compile="auto")
    assert not compiled_by_xla(model)
    for options, expected in ({}, True), ({"recompute": 0.9}, False):
        template = small()
        template.compile("sgd", "mse")
        template.jit_compile = True
        assert compiled_by_xla(gs.multi_gpu_model(template, 2, **options)) == expected
    assert message(gs.errors.ArgumentError, model.compile, "sgd", "mse", jit_compile="yes") == (
        "jit_compile must be True or False, got 'yes'."
    )


def test_what_the_template_was_compiled_with_is_followed():
    for asked in (True, False):
        template = small()
        template.compile("sgd", "mse", jit_compile=asked)
        assert compiled_by_xla(gs.multi_gpu_model(template, 2)) == asked


STRATEGY = (
    "'owned' was made, compiled or wrapped under a tf.distribute strategy's scope, which mirrors variables and splits "
    "batches itself. Make, compile and wrap it outside of `with strategy.scope():`; multi_gpu_model takes the "
    "strategy's place."
)


def test_models_of_a_strategy():
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        inside = small(name="owned")
    assert message(gs.errors.UnsupportedError, gs.multi_gpu_model, inside, 2) == STRATEGY
    compiled = small(name="owned")
    with strategy.scope():
        compiled.compile("sgd", "mse")
    assert message(gs.errors.UnsupportedError, gs.multi_gpu_model, compiled, 2) == STRATEGY
    with strategy.scope():
        assert message(gs.errors.UnsupportedError, gs.multi_gpu_model, small(name="owned"), 2) == STRATEGY
    model = gs.multi_gpu_model(small(name="owned"), 2)
    with strategy.scope():
        assert message(gs.errors.UnsupportedError, model.compile, "sgd", "mse") == (
            "compile() on 'owned', which runs on 2 devices, is called under a tf.distribute strategy's scope, which "
            "would mirror the optimizer's variables. Call it outside of `with strategy.scope():`."
        )


def test_relocation_of_weights_that_cannot_move(monkeypatch):
    class Elsewhere:
        """A variable as it would be on a GPU, which this machine may not have."""

        def __init__(self, i):
            self.path = self.name = f"dense/kernel_{i}"
            self.device = "/job:localhost/replica:0/task:0/device:GPU:0"

    model = small()
    monkeypatch.setattr(type(model), "variables", [Elsewhere(i) for i in range(7)])
    assert message(gs.errors.ArgumentError, gs.multi_gpu_model, model, 2, cpu_relocation=True) == (
        "cpu_relocation=True keeps the weights on the CPU, but variables cannot move once they are made:\n"
        + "".join(f"  - dense/kernel_{i} on GPU:0\n" for i in range(5))
        + "  - ... and 2 more\n"
        "Make the model under `with tf.device('CPU:0'):`. If it is trained already, make a copy there with "
        "clone_model, and copy the weights with set_weights. Or leave out cpu_relocation."
    )


def test_not_compiled_is_keras_own_error():
    model = gs.multi_gpu_model(small(), 2)
    assert message(ValueError, model.fit, tf.ones((5, 3)), tf.ones((5, 2))) == (
        "You must call `compile()` before using the model."
    )


def test_wrong_arguments_of_compile_are_keras_own_error():
    model = gs.multi_gpu_model(small(), 2)
    assert "unexpected keyword argument 'optimiser'" in message(TypeError, model.compile, optimiser="sgd")


def batch_of(*rows: int) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensors(tuple(np.ones((count, 3), "float32") for count in rows))


@pytest.mark.parametrize(
    ("rows", "named", "told"),
    [
        ((8, 7), "(y, ", "x 8, y 7"),
        ((8, 8, 7), "", "x 8, y 8, sample_weight 7"),
    ],
)
def test_parts_of_a_batch_that_differ_in_rows(rows, named, told):
    model = gs.multi_gpu_model(keras.Sequential([layers.Input((3,)), layers.Dense(3)]), gpus=2)
    model.compile("sgd", "mse")
    for call in (functools.partial(model.fit, shuffle=False), model.evaluate):
        text = message(ValueError, lambda call=call: call(batch_of(*rows), verbose=0))
        assert named in text
        assert text.endswith(f"\nThe batch has parts of different numbers of rows: {told}.")
    model.fit(batch_of(8, 8), shuffle=False, verbose=0)  # it can go on


def test_inputs_that_differ_in_rows():
    inputs = [layers.Input((3,), name="user"), layers.Input((3,), name="item")]
    model = gs.multi_gpu_model(keras.Model(inputs, layers.Add()(inputs)), gpus=2)
    user, item = np.ones((8, 3), "float32"), np.ones((7, 3), "float32")
    text = message(ValueError, lambda: model.predict_on_batch({"user": user, "item": item}))
    assert "(x_user, x_item)" in text
    assert text.endswith("\nThe batch has parts of different numbers of rows: x['user'] 8, x['item'] 7.")


def test_targets_that_differ_in_rows_from_what_keras_does_not_know_while_tracing():
    x = layers.Input((3,))
    model = gs.multi_gpu_model(keras.Model(x, {"a": layers.Dense(3)(x), "b": layers.Dense(3)(x)}), gpus=2)
    model.compile("sgd", {"a": "mse", "b": "mse"})
    spec = tf.TensorSpec((None, 3))
    batches = [(np.ones((8, 3)), {"a": np.ones((8, 3)), "b": np.ones((7, 3))})]
    data = tf.data.Dataset.from_generator(lambda: batches, output_signature=(spec, {"a": spec, "b": spec}))
    text = message(ValueError, lambda: model.fit(data, shuffle=False, verbose=0))
    assert text.endswith("\nThe batch has parts of different numbers of rows: x 8, y['a'] 8, y['b'] 7.")


def test_a_step_of_ones_own_names_its_data():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3)

        def call(self, x):
            return self.dense(x)

        def train_step(self, data):
            return {"loss": tf.reduce_mean((self(data["image"]) - data["label"]) ** 2)}

    template = Own()
    template(np.ones((8, 3), "float32"))
    model = gs.multi_gpu_model(template, gpus=2)
    model.compile("sgd")
    batch = {"image": np.ones((8, 3), "float32"), "label": np.ones((7, 3), "float32")}
    text = message(ValueError, lambda: model.fit(tf.data.Dataset.from_tensors(batch), shuffle=False, verbose=0))
    assert "data_label)" in text
    assert text.endswith("\nThe batch has parts of different numbers of rows: data['image'] 8, data['label'] 7.")


def test_stages_by_layers_of_a_layer_with_fit():
    trainer = next(base for base in keras.Model.__mro__ if "fit" in vars(base))

    class Trained(trainer, layers.Layer):
        def __init__(self):
            layers.Layer.__init__(self, name="trained")
            trainer.__init__(self)

        def call(self, x):
            return x

    model = Trained()
    model(np.ones((2, 3)))
    assert message(gs.errors.ArgumentError, gs.multi_gpu_model, model, 2, stages=["dense*"]) == (
        "stages=['dense*']: 'trained' is a layer with fit, no keras.Model, and does not say which layers it has. "
        "Give a number of stages, or make it a keras.Model."
    )
