"""Files written by wrapped models are the template's own: they load without graphsplit, and training goes on."""

import copy
import json
import pickle
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.keras_cases import assert_same, classes, numbers, state
from tests.helpers.processes import python

layers = keras.layers

LOADER = """
import json, os, sys
sys.path.insert(0, os.getcwd())
import keras, numpy as np, tensorflow as tf
import own_model
x = np.load("x.npy")
results = {}
for name in ("wrapped.keras", "template.keras", "epoch-2.keras", "function.keras"):
    model = keras.models.load_model(name)
    iterations = int(model.optimizer.iterations)
    results[name] = [type(model).__name__, iterations, model.predict(x, verbose=0).tolist()]
for name in ("wrapped.weights.h5", "epoch-2.weights.h5"):
    model = own_model.classifier()
    model.load_weights(name)
    results[name] = ["", 0, model.predict(x, verbose=0).tolist()]
model = own_model.classifier()
model.compile(keras.optimizers.Adam(), "mse")
model.optimizer.build(model.trainable_variables)
status = tf.train.Checkpoint(model=model).restore("checkpoint-1")
status.assert_existing_objects_matched()
results["checkpoint"] = ["", int(model.optimizer.iterations), model.predict(x, verbose=0).tolist()]
exported = tf.saved_model.load("exported")
results["exported"] = ["", 0, exported.serve(x).numpy().tolist()]
results["own.keras"] = [type(keras.models.load_model("own.keras")).__name__, 0, None]
assert not any(name.startswith("graphsplit") for name in sys.modules)
print(json.dumps(results))
"""

OWN_MODEL = """
import keras
from keras import layers

def classifier():
    image = keras.Input((6, 6, 2), name="image")
    x = layers.Conv2D(4, 3, use_bias=False, name="convolution")(image)
    x = layers.BatchNormalization(name="normalisation")(x)
    x = layers.Flatten()(layers.Dropout(0.2)(x))
    return keras.Model(image, layers.Dense(3, name="logits")(x), name="classifier")

@keras.saving.register_keras_serializable("own")
class Own(keras.Model):
    def __init__(self, width, **options):
        super().__init__(**options)
        self.width, self.dense = width, layers.Dense(width)

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return {**super().get_config(), "width": self.width}
"""


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    (tmp_path / "own_model.py").write_text(OWN_MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    sys.modules.pop("own_model", None)
    import own_model

    yield own_model
    sys.modules.pop("own_model", None)


def trained(module, gpus, **options):
    keras.utils.set_random_seed(1)
    template = module.classifier()
    model = gs.multi_gpu_model(template, gpus)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, epsilon=1e-3), loss, metrics=["accuracy"])
    model.fit(*data(), batch_size=8, epochs=2, verbose=0, **options)
    return template, model


def data():
    return numbers(6, 6, 2), classes(3)


@pytest.mark.long
def test_every_file_loads_in_a_process_without_graphsplit(own_model, tmp_path):
    callbacks = [
        keras.callbacks.ModelCheckpoint("epoch-{epoch}.keras"),
        keras.callbacks.ModelCheckpoint("epoch-{epoch}.weights.h5", save_weights_only=True),
        keras.callbacks.BackupAndRestore("backup", delete_checkpoint=False),
    ]
    template, model = trained(own_model, 3, callbacks=callbacks)
    model.save("wrapped.keras")
    template.save("template.keras")
    keras.saving.save_model(model, "function.keras")
    model.save_weights("wrapped.weights.h5")
    model.export("exported", verbose=False)
    tf.train.Checkpoint(model=model).save("checkpoint")
    own = own_model.Own(3)
    own(numbers(4))
    gs.multi_gpu_model(own, 2).save("own.keras")
    np.save("x.npy", data()[0])
    process = python("-c", LOADER, cwd=tmp_path)
    assert process.returncode == 0, process.stderr[-3000:]
    results = json.loads(process.stdout.splitlines()[-1])
    assert results.pop("own.keras")[0] == "Own"
    expected = template.predict(data()[0], verbose=0)
    assert len(results) == 8
    for name, (kind, iterations, predictions) in results.items():
        assert_same([(name, np.array(predictions))], [(name, expected)])
        assert kind == ("Functional" if name.endswith(".keras") else "")
        assert iterations == (6 if name.endswith(".keras") or name == "checkpoint" else 0)


def test_files_of_wrapped_model_and_template_have_the_same_content(own_model):
    template, model = trained(own_model, 3)
    assert model.to_json() == template.to_json()
    assert model.get_config() == template.get_config()
    assert json.dumps(model.get_compile_config()) == json.dumps(template.get_compile_config())
    names = []
    for one in (model, template):
        path = tf.train.Checkpoint(model=one).save("names")
        names.append([name for name, _ in tf.train.list_variables(path)])
    assert names[0] == names[1]


@pytest.mark.long
@pytest.mark.parametrize("gpus", [2, 4])
def test_training_goes_on_after_a_reload_on_another_number_of_devices(own_model, gpus):
    """The reference is Keras' own reload on one device: a file does not hold where Dropout's seeds were."""
    histories, models = [], []
    for before, after in ((1, 1), (3, gpus)):
        _, model = trained(own_model, before)
        model.save("half.keras")
        keras.utils.set_random_seed(5)
        models.append(gs.multi_gpu_model(keras.models.load_model("half.keras"), after))
        histories.append(models[-1].fit(*data(), batch_size=7, epochs=2, verbose=0).history)
    assert_same(list(histories[1].items()), list(histories[0].items()))
    assert_same(state(models[1]), state(models[0]))


def test_load_weights_into_the_wrapped_model(own_model):
    template, model = trained(own_model, 3)
    template.save_weights("some.weights.h5")
    before = model.get_weights()
    model.set_weights([weight + 1 for weight in before])
    model.load_weights("some.weights.h5")
    assert_same([("w", w) for w in template.get_weights()], [("w", w) for w in before], 0)


def test_copies_are_templates(own_model):
    template, model = trained(own_model, 3)
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), keras.models.clone_model(model)):
        assert type(made) is type(template)


def test_distillation_and_fine_tuning_use_the_wrapped_model_as_a_layer(own_model):
    template, model = trained(own_model, 3)
    outer = keras.Sequential([layers.Input((6, 6, 2)), model, layers.Dense(2)])
    assert outer.layers[0].get_layer("convolution") is template.get_layer("convolution")
    assert outer.predict(data()[0], verbose=0).shape == (19, 2)
