"""The law on two and four logical GPUs; and the same cases on CPU devices, which shows that the cases work.

`python -m pytest -m gpu -n 0` runs them on GPUs.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, optimizers

import graphsplit as gs
from benchmarks.steps import make_parts, single_device_step
from benchmarks.workloads import WORKLOADS, data, workload
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.inspect import PlacedOp
from graphsplit.planning.device_bytes import traffic
from graphsplit.planning.state import devices_of_handles
from tests.helpers import staged_programs
from tests.helpers.law import assert_close, squares_step
from tests.helpers.on_devices import Make, assert_law_on, idle, misplaced
from tests.helpers.trainings import start_elsewhere

ROOT = Path(__file__).parent.parent
PLACES = {
    "2 CPUs": (["CPU:0", "CPU:1"], ()),
    "4 CPUs": ([f"CPU:{d}" for d in range(4)], (pytest.mark.long,)),
    "2 GPUs": (["GPU:0", "GPU:1"], (pytest.mark.gpu,)),
    "4 GPUs": ([f"GPU:{d}" for d in range(4)], (pytest.mark.gpu,)),
}
on_every_place = pytest.mark.parametrize("devices", [pytest.param(d, id=p, marks=m) for p, (d, m) in PLACES.items()])

# In float64 only what is wrong differs: by whatever algorithm, kernels round to 1e-16. In float32, cuDNN chooses the
# algorithm of a convolution by its shape, and a shard has other rows than the batch: transforms (Winograd, FFT) round
# to 1e-4 of the largest entry (https://docs.nvidia.com/deeplearning/cudnn, "Reproducibility"; Lavin and Gray,
# https://arxiv.org/abs/1509.09308, table 5). float16 has 11 bits, and a loss is a sum of what was rounded to them:
# on one device, images whose last bit is another change the first filters' momentum in mini_googlenet_bn by 0.042 of
# its largest entry.
TOLERANCE = {"float64": 1e-10, "float32": 1e-3, "mixed_float16": 5e-2}
# In the same network of few rows, images that are another by 3e-5, less than such algorithms round, change it on one
# device by 0.011 to 0.020. On an H100, one device and two, and four, were 0.005 apart in float32, and 1e-10 in float64.
TOLERANCE_OF_MANY_NORMS_ON_GPUS = 2e-2
ROWS = 9


@pytest.fixture(autouse=True)
def whole_float32() -> Iterator[None]:
    """Multiply float32 numbers as such: TensorFloat-32, the default on GPUs, keeps 10 of their 23 bits."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield
    tf.config.experimental.enable_tensor_float_32_execution(before)


@pytest.fixture
def precision(request: pytest.FixtureRequest) -> Iterator[str]:
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64" if request.param == "float64" else "float32")
    keras.config.set_dtype_policy(request.param)
    yield request.param
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


def numbers(*shape: int, seed: int = 0, dtype: Any = tf.float64) -> tf.Tensor:
    return tf.constant(np.random.default_rng([seed, *shape]).standard_normal(shape), dtype)


def network_cases() -> Iterator[Any]:
    """Yield every network, in each mode and precision, on each place; on CPU devices all but a few are long."""
    quick = {("mlp_bn", "training", "float64"), ("mlp_bn", "training", "mixed_float16")}
    for place in ("2 CPUs", "2 GPUs", "4 GPUs"):
        devices, marks = PLACES[place]
        for name, found in WORKLOADS.items():
            for mode in found.modes:
                for kind in TOLERANCE:
                    if (name, kind) == ("polyfit", "mixed_float16"):
                        continue  # its loss is beyond the largest number of float16
                    own = marks if marks or (name, mode, kind) in quick else (pytest.mark.long,)
                    yield pytest.param(devices, name, mode, kind, id=f"{place}, {name} {mode}, {kind}", marks=own)


@pytest.mark.sampled(1)
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:.*sends much through one device")  # (as it should, of ResNet50 on GPUs)
@pytest.mark.parametrize(("devices", "name", "mode", "precision"), list(network_cases()), indirect=["precision"])
def test_networks_of_the_benchmarks(devices: Sequence[str], name: str, mode: str, precision: str):
    found = workload(name, small=True)

    def make() -> tuple[Any, Any]:
        parts = make_parts(found)
        variables = [*parts.model.variables, *parts.optimizer.variables]
        start_elsewhere(variables)
        return single_device_step(parts, mode), variables

    floats = "float64" if precision == "float64" else "float32"
    calls = []
    for rows in (ROWS,) if name.startswith("resnet50") else (ROWS, ROWS - 2):  # (each is traced four times)
        arrays = [a.astype(floats) if a.dtype == np.float32 else a for a in data(found, rows)]
        calls.append(tuple(map(tf.constant, arrays))[: 2 if mode == "training" else 1])
    many_norms = (name, mode, precision) == ("mini_googlenet_bn", "training", "float32") and "GPU" in devices[0]
    assert_law_on(devices, make, calls, TOLERANCE_OF_MANY_NORMS_ON_GPUS if many_norms else TOLERANCE[precision])


def recurrent_cases() -> Iterator[Any]:
    """Yield both kinds of layers, with cuDNN's kernels where there are any, and without; on CPUs most are long."""
    for place in ("2 CPUs", "2 GPUs", "4 GPUs"):
        devices, marks = PLACES[place]
        for layer in ("LSTM", "GRU"):
            for use_cudnn in ("auto", False):
                for kind in ("float64", "float32"):
                    quick = (layer, use_cudnn, kind) == ("LSTM", "auto", "float64")
                    own = marks if marks or quick else (pytest.mark.long,)
                    values = (devices, getattr(layers, layer), use_cudnn, kind)
                    yield pytest.param(*values, id=f"{place}, {layer}, cuDNN {use_cudnn}, {kind}", marks=own)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "layer", "use_cudnn", "precision"), list(recurrent_cases()), indirect=["precision"]
)
def test_recurrent_layers(devices: Sequence[str], layer: Any, use_cudnn: Any, precision: str):
    def make() -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([layers.Input((5, 3)), layer(4, use_cudnn=use_cudnn)])

        return squares_step(model)

    calls = [(numbers(rows, 5, 3, dtype=precision),) for rows in (ROWS, 5)]
    plan = assert_law_on(devices, make, calls, TOLERANCE[precision])
    cudnn = use_cudnn == "auto" and devices[0].startswith("GPU")
    assert ("CudnnRNNV3" in {op.type for op in plan.program.ops}) == cudnn


@on_every_place
@pytest.mark.parametrize("precision", ["float64"], indirect=True)
def test_embeddings_with_dropout(devices: Sequence[str], precision: str):
    def make() -> tuple[Any, Any]:
        keras.utils.set_random_seed(0)
        hidden = [layers.Embedding(20, 6), layers.Dropout(0.5), layers.Flatten(), layers.Dense(3)]
        model = keras.Sequential([layers.Input((4,), dtype="int32"), *hidden])
        optimizer = optimizers.SGD(0.1)
        optimizer.build(model.trainable_variables)

        def step(words: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(words, training=True) ** 2)
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
            return loss

        return step, [*model.variables, *optimizer.variables]

    words = tf.constant(np.random.default_rng(0).integers(0, 20, (ROWS, 4)), tf.int32)
    assert_law_on(devices, make, [(words,), (words[:5],)], TOLERANCE[precision])


@on_every_place
def test_strings_beside_numbers(devices: Sequence[str]):
    """Strings have no kernels on GPUs: they are hashed on the host, and what follows is computed on the GPUs."""

    def make() -> tuple[Any, Any]:
        table, weights = tf.Variable(numbers(20, 6)), tf.Variable(numbers(6, 3, seed=1))

        def step(words: tf.Tensor) -> Any:
            vectors = tf.gather(table, tf.strings.to_hash_bucket_fast(words, 20))
            return tf.tanh(tf.reduce_mean(vectors, 1) @ weights), tf.strings.upper(words)

        return step, [table, weights]

    words = tf.reshape([f"word {i * i}" for i in range(ROWS * 4)], (ROWS, 4))
    assert_law_on(devices, make, [(words,), (words[:5],)])


@on_every_place
def test_integers_that_stay_on_the_host(devices: Sequence[str]):
    """int32 on a GPU lies in the host's memory, in and out of kernels that say so; int64 lies in the GPU's."""

    def make() -> tuple[Any, Any]:
        count, total = tf.Variable(0), tf.Variable(0, dtype=tf.int64)
        weights = tf.Variable(numbers(3, 3))

        def step(x: tf.Tensor, labels: tf.Tensor) -> Any:
            count.assign_add(tf.shape(x)[0])
            total.assign_add(tf.reduce_sum(tf.cast(labels, tf.int64)))
            chosen = tf.argmax(x @ weights, 1, tf.int32)
            right = tf.cast(chosen == labels, tf.int32)
            return (
                chosen,
                tf.reduce_sum(right),
                tf.reduce_max(labels * 2 + right),
                tf.one_hot(chosen, 3) * tf.cast(right, tf.float32)[:, None],
            )

        return step, [count, total, weights]

    labels = tf.constant(np.random.default_rng(0).integers(0, 3, ROWS), tf.int32)
    assert_law_on(devices, make, [(numbers(ROWS, 3), labels), (numbers(5, 3), labels[:5])])


@on_every_place
def test_compiled_functions_inside(devices: Sequence[str]):
    def make() -> tuple[Any, Any]:
        w = tf.Variable(numbers(3, 2))

        @tf.function(jit_compile=True)
        def model(x: tf.Tensor) -> tf.Tensor:
            return tf.tanh(x @ w)

        def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) @ tf.ones((2, 2), x.dtype) - y) ** 2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return loss

        return step, [w]

    plan = assert_law_on(devices, make, [(numbers(ROWS, 3), numbers(ROWS, 2))] * 2, 1e-10)
    assert "PartitionedCall" in {op.type for op in plan.sharded_ops}


@on_every_place
@pytest.mark.parametrize("inside", [False, True], ids=["eager", "in tf.function"])
def test_tapes_outside(devices: Sequence[str], inside: bool):
    with tf.device(devices[0]):
        kernel, w = tf.Variable(numbers(3, 3, 2, 4)), tf.Variable(numbers(4, 3))

    def forward(x: tf.Tensor) -> tf.Tensor:
        return tf.nn.softmax(tf.reduce_mean(tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME")), [1, 2]) @ w)

    def gradients(fn: Any, x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(fn(x) ** 3)
        return tape.gradient(loss, [x, kernel, w])

    sharded, x = gs.parallelize(forward, devices=list(devices)), numbers(ROWS, 6, 6, 2)
    actual = tf.function(lambda: gradients(sharded, x), autograph=False)() if inside else gradients(sharded, x)
    with tf.device(devices[0]):
        expected = gradients(forward, x)
    assert_close(actual, expected, tolerance=1e-10)
    assert "Conv2DBackpropFilter" in {op.type for op in sharded.gradient_plan(x).sharded_ops}


@on_every_place
def test_any_number_of_rows_in_one_trace(devices: Sequence[str]):
    """Devices without rows do nothing: their operations are dead, on GPUs as on CPUs."""

    def make() -> tuple[Any, Any]:
        w, count = tf.Variable(numbers(3, 2)), tf.Variable(0)

        def step(x: tf.Tensor) -> Any:
            count.assign_add(tf.shape(x)[0])
            with tf.GradientTape() as tape:
                y = tf.nn.softmax(x @ w + tf.random.stateless_normal(tf.shape(x)[:1], [1, 2], dtype=x.dtype)[:, None])
                loss = tf.reduce_mean(y**2)
            w.assign_sub(0.1 * tape.gradient(loss, w))
            return y, loss, tf.reduce_max(x)

        return step, [w, count]

    calls = [(numbers(rows, 3),) for rows in (1, 3, 8, ROWS)]
    assert_law_on(devices, make, calls, tuning={"reduce_retracing": True})


@on_every_place
def test_variables_in_parts(devices: Sequence[str]):
    def make() -> tuple[Any, Any]:
        w, slot = tf.Variable(numbers(6, 400)), tf.Variable(tf.zeros((6, 400), tf.float64))

        def step(x: tf.Tensor) -> tf.Tensor:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((x @ w) ** 2)
            slot.assign(0.9 * slot + tape.gradient(loss, w))
            w.assign_sub(0.1 * slot)
            return loss

        return step, [w, slot]

    def make_in_parts() -> tuple[Any, Any]:
        step, variables = make()
        gs.set_variable_layout(variables, "sharded", devices=list(devices))
        return step, variables

    with tf.device(devices[0]):
        (plain, expected), (step, actual) = make(), make_in_parts()
        many, x = gs.parallelize(step, devices=list(devices)), numbers(ROWS, 6)
        for _ in range(2):
            assert_close(many(x), tf.function(plain)(x), tolerance=1e-10)
    plan = many.plan(x)
    held = {*devices_of_handles(plan.program, plan.state)}
    assert held == set(plan.devices)
    for a, b in zip(actual, expected, strict=True):
        assert_close(tf.convert_to_tensor(a), tf.convert_to_tensor(b), tolerance=1e-10)


def laid_out(make: Make, layout: Any, devices: Sequence[str], mesh: Any = None) -> Make:
    """Return what makes a step and its variables, the first time as they are, then laid out."""
    made = itertools.count()

    def make_next() -> Any:
        step, variables = make()
        if next(made):
            gs.set_variable_layout(list(variables), layout, devices=list(devices), mesh=mesh)
        return step, variables

    return make_next


def words_model() -> tuple[Any, Any]:
    """Return a training step with momentum of layers between a table and a vocabulary, and its variables."""
    shapes = {"table": (10, 4), "up": (4, 40), "down": (40, 4), "head": (4, 10)}
    weights = [tf.Variable(numbers(*shape), name=name) for name, shape in shapes.items()]
    slots = [tf.Variable(tf.zeros_like(v), name=f"slot_of_{name}") for v, name in zip(weights, shapes, strict=True)]

    def step(words: tf.Tensor) -> tf.Tensor:
        table, up, down, head = weights
        with tf.GradientTape() as tape:
            x = tf.gather(table, words)
            for _ in range(3):
                x = x + tf.tensordot(tf.tanh(tf.tensordot(x, up, 1)), down, 1)
            logits = tf.tensordot(x, head, 1)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(words, logits))
        for v, slot, gradient in zip(weights, slots, tape.gradient(loss, weights), strict=True):
            slot.assign(0.9 * slot + gradient)
            v.assign_sub(0.1 * slot)
        return loss

    return step, [*weights, *slots]


WORDS = tf.constant(np.random.default_rng(0).integers(0, 10, (ROWS, 4)), tf.int32)


@pytest.mark.long
@on_every_place
def test_a_mesh_with_a_vocabulary_in_parts(devices: Sequence[str]):
    mesh = {"batch": 2, "model": 2} if len(devices) == 4 else {"model": 2}
    layout = {"table": ("model", None), "up": (None, "model"), "down": ("model", None), "head": (None, "model")}
    make = laid_out(words_model, layout, devices, mesh)
    plan = assert_law_on(devices, make, [(WORDS,), (WORDS[:5],)], 1e-10, mesh=mesh)
    assert "computed in place" in str(plan)
    held = {*devices_of_handles(plan.program, plan.state)}
    assert {f"/device:{device}" for device in devices[:2]} <= held


def trained_perceptron() -> tuple[Any, Any]:
    """Return a training step of Adam with a norm of all gradients, and its variables and slots."""
    variables, step = staged_programs.perceptron()
    return step, variables


@pytest.mark.long
@pytest.mark.usefixtures("copies_take_time")
@on_every_place
def test_the_default_layout(devices: Sequence[str]):
    calls = [tuple(staged_programs.rows(ROWS)), tuple(staged_programs.rows(5))]
    plan = assert_law_on(devices, trained_perceptron, calls, 1e-10, variables="auto")
    assert {*devices_of_handles(plan.program, plan.state)} == set(plan.devices)


@pytest.mark.long
@on_every_place
@pytest.mark.parametrize("compiled", [False, True], ids=["kernels", "XLA"])
def test_rows_layers_and_stages(devices: Sequence[str], compiled: bool):
    """Of four devices: each stage on two, which share rows without XLA, and layers with it."""
    inner = {} if len(devices) == 2 else {"model": 2} if compiled else {"batch": 2}
    layout = {"*/up": (None, "model"), "*/down": ("model", None), "*": "home"} if "model" in inner else "replicated"
    mesh = {"stage": 2, **inner}
    make = laid_out(trained_perceptron, layout, devices, mesh) if inner else trained_perceptron
    plan = assert_law_on(
        devices, make, [tuple(staged_programs.rows(ROWS))], 1e-10, mesh=mesh, micro_batches=2, jit_compile=compiled
    )
    assert len({device for stage in plan.program.stages for device in stage.devices}) == len(devices), str(plan)
    assert ("compiled by XLA" in str(plan)) == compiled, str(plan)


@pytest.mark.long
@on_every_place
def test_blocks_that_are_recomputed(devices: Sequence[str]):
    plan = assert_law_on(devices, words_model, [(WORDS,), (WORDS[:5],)], 1e-10, recompute=0.9)
    assert any(note.startswith("recomputing") for note in plan.notes)


@pytest.mark.long
@on_every_place
@pytest.mark.parametrize("weights", ["home", "sharded"])
def test_slots_in_the_hosts_memory(devices: Sequence[str], weights: str):
    if devices[0] == "CPU:0":  # of CPU devices that is the host
        devices = [f"CPU:{d + 1}" for d in range(len(devices))]
    make = laid_out(words_model, {"slot*": "host", "*": weights}, devices)
    plan = assert_law_on(devices, make, [(WORDS,), (WORDS[:5],)], 1e-10)
    [line] = [line for line in str(plan).splitlines() if "variables in the memory of CPU:0" in line]
    assert line.startswith("  variables in the memory of CPU:0: 4, 3.2 kB; ")
    # (the words, integers, stay on the host of a GPU, and are cut there)
    words = WORDS[:5].numpy().nbytes if devices[0].startswith("GPU") else 0
    assert traffic(plan).sent["/device:CPU:0"] == 3200 + words  # the update, and no slot beside it
    updates = {plan.owners.of_ops[op.index] for op in plan.ops_once if op.type == "AssignVariableOp"}
    assert updates == {"/device:CPU:0"}


@pytest.mark.long
@on_every_place
@pytest.mark.parametrize("cut", [False, True], ids=["DataParallel", "ModelParallel"])
def test_keras_distribution(devices: Sequence[str], cut: bool):
    x, y = numbers(ROWS, 6, dtype=tf.float32).numpy(), numbers(ROWS, 3, seed=1, dtype=tf.float32).numpy()

    def losses() -> Any:
        keras.utils.set_random_seed(1)
        with tf.device(devices[0]):
            hidden = [layers.Dense(8, "tanh", name="wide"), layers.Dropout(0.3), layers.Dense(3)]
            model = keras.Sequential([layers.Input((6,)), *hidden])
            # (where there is a GPU, Keras compiles by default, and XLA draws other masks on one device)
            model.compile(optimizers.SGD(0.1), "mse", jit_compile=False)
            keras.utils.set_random_seed(2)
            history = model.fit(x, y, batch_size=5, epochs=2, verbose=0, shuffle=False)  # (5 and 4 rows)
        return model, [np.array(history.history["loss"]), *[v.numpy() for v in model.variables]]

    names = [device.lower() for device in devices]
    chosen: Any = keras.distribution.DataParallel(devices=names)
    if cut:
        sizes = (2, 2) if len(devices) == 4 else (1, 2)
        layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(sizes, ["batch", "model"], names))
        layout_map[".*wide.*kernel"] = (None, "model")
        chosen = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
    _, expected = losses()
    with gs.keras.enable_distribution(), chosen.scope():
        model, found = losses()
        parts = parts_of_variable(model.layers[0].kernel.value)
        assert (None if parts is None else parts.layout) == ((None, "model") if cut else None)
    assert_close(found, expected, tolerance=TOLERANCE["float32"])


@on_every_place
def test_batches_sent_ahead(devices: Sequence[str]):
    with tf.device(devices[0]):
        w = tf.Variable(numbers(3, 2))
    parallel = gs.parallelize(lambda x, n: (tf.tanh(x @ w), n + 1), devices=list(devices))
    rows, counts = numbers(ROWS * 2 + 1, 3), tf.range(ROWS * 2 + 1)
    dataset = tf.data.Dataset.from_tensor_slices((rows, counts)).batch(ROWS)
    found = list(parallel.map(dataset))
    assert_close([y for y, _ in found], [tf.tanh(x @ w) for x, _ in dataset])
    assert_close([n for _, n in found], [n + 1 for _, n in dataset])


@pytest.mark.sampled(1)
@on_every_place
@pytest.mark.parametrize("replicate", [False, True], ids=["weights at home", "weights everywhere"])
def test_saved_models(devices: Sequence[str], replicate: bool, tmp_path: Path):
    hidden = [layers.Conv2D(4, 3, padding="same"), layers.BatchNormalization(), layers.ReLU(), layers.Flatten()]
    model = keras.Sequential([layers.Input((6, 6, 2)), *hidden, layers.Dense(3, "softmax")])
    model.layers[1].moving_mean.assign([0.5, -0.5, 0.1, 0.2])
    model.export(str(tmp_path / "original"), verbose=False)
    gs.serving.transpile_saved_model(
        str(tmp_path / "original"), str(tmp_path / "many"), list(devices), replicate_weights=replicate
    )
    loaded = [tf.saved_model.load(str(tmp_path / form)) for form in ("original", "many")]
    single, many = (model.signatures["serving_default"] for model in loaded)
    [(name, _)] = single.structured_input_signature[1].items()
    for rows in (1, 3, ROWS):
        request = {name: numbers(rows, 6, 6, 2, dtype=tf.float32)}
        with tf.device(devices[0]):
            assert_close(dict(many(**request)), dict(single(**request)), tolerance=TOLERANCE["float32"])
    placement = gs.placement(many, **{name: numbers(ROWS, 6, 6, 2, dtype=tf.float32)}, actual=True)
    assert misplaced(placement) == []
    convolved = {op.actual for op in placement.ops.values() if op.type in ("Conv2D", "Softmax")}
    assert convolved >= {f"/device:{device}" for device in devices}


DETERMINISTIC = """
import hashlib, sys
import keras, tensorflow as tf
import graphsplit as gs
from benchmarks.steps import make_parts, single_device_step
from benchmarks.workloads import data, workload

kind, count, megabytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
devices = gs.use_logical_devices(count, kind=kind, memory_mb=megabytes if kind == "GPU" else None)
tf.config.experimental.enable_op_determinism()
found = workload("mini_googlenet_bn", small=True)
arguments = [tf.constant(a) for a in data(found, 9)]

def digest(seed):
    parts = make_parts(found)
    keras.utils.set_random_seed(seed)
    for variable in parts.model.trainable_variables:
        variable.assign(variable + 0.01 * tf.random.normal(variable.shape))
    step = gs.parallelize(single_device_step(parts, "training"), devices=devices)
    losses = [step(*arguments).numpy().tobytes() for _ in range(3)]
    values = [v.numpy().tobytes() for v in parts.model.variables]
    return hashlib.sha256(b"".join(losses + values)).hexdigest()

print(digest(0), digest(0), digest(1))
"""


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        pytest.param("CPU", 2, marks=pytest.mark.long),
        pytest.param("GPU", 2, marks=pytest.mark.gpu),
        pytest.param("GPU", 4, marks=pytest.mark.gpu),
    ],
)
def test_deterministic_runs_are_bit_equal(kind: str, count: int):
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DETERMINISTIC, kind, str(count), "1000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, again, other = done.stdout.split()
    assert first == again
    assert first != other  # as they are when anything differs at all


def test_a_device_that_did_not_get_its_work_is_seen():
    product = {"flops": 8, "shard": 0, "requested": "/device:GPU:0"}
    ran = PlacedOp("ran", "MatMul", actual="/device:GPU:0", **product)
    silent = PlacedOp("silent", "MatMul", actual="/device:CPU:0", reason="TensorFlow placed it on CPU:0", **product)
    forced = PlacedOp(
        "forced", "StringUpper", actual="/device:CPU:0", reason="no GPU kernel for StringUpper", **product
    )
    placement = gs.inspect.Placement([ran, silent, forced], [], actual=True)
    assert misplaced(placement) == ["silent: TensorFlow placed it on CPU:0"]
    assert idle(placement, ["GPU:0", "GPU:1"]) == ["GPU:1"]


GUIDE = (ROOT / "docs" / "gpu.md").read_text()


@pytest.mark.long
def test_the_example_of_the_page_runs_on_cpu_devices():
    [example] = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    cut = 'use_logical_devices(4, kind="GPU", memory_mb=3500)'
    assert cut in example
    script = example.replace(cut, "use_logical_devices(4)")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2. 2. 2. 2. 2. 2. 2.]\n"


ASKED = re.compile(r"^\$ (.*)$|^\| `((?:graphsplit|python) .*?)` \|", re.MULTILINE)  # alone, and in tables
COMMANDS = [shlex.split(alone or listed) for alone, listed in ASKED.findall(GUIDE)]


def test_the_page_has_these_commands():
    assert [command[:3] for command in COMMANDS] == [
        ["graphsplit", "doctor"],
        ["graphsplit", "doctor", "--devices"],
        ["python", "-m", "pytest"],
        ["python", "-m", "benchmarks"],
        ["python", "-m", "benchmarks.report"],
        ["python", "-m", "benchmarks.choices"],
        ["python", "-m", "benchmarks.keras_fit"],
        ["python", "-m", "benchmarks.operations"],
        ["python", "-m", "benchmarks.fitting"],
        ["graphsplit", "inspect", "module:function"],
        ["graphsplit", "validate", "module:function"],
    ]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (3, "no GPU to measure on"),
        pytest.param(1, "divides GPUs, and TensorFlow finds none here", marks=pytest.mark.long),
        pytest.param(5, "divides GPUs, and TensorFlow finds none here", marks=pytest.mark.long),
        pytest.param(6, "divides GPUs, and TensorFlow finds none here", marks=pytest.mark.long),
        pytest.param(7, "divides GPUs, and TensorFlow finds none here", marks=pytest.mark.long),
        pytest.param(8, "divides GPUs, and TensorFlow finds none here", marks=pytest.mark.long),
    ],
)
def test_commands_of_the_page_are_understood_up_to_the_gpu(command: int, said: str):
    program, *arguments = COMMANDS[command]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1", "PATH": str(ROOT)}
    run = [str(Path(sys.executable).parent / program), *arguments]
    done = subprocess.run(run, capture_output=True, text=True, timeout=240, cwd=ROOT, env=environment, check=False)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
