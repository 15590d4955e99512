"""What a user reads when something is wrong: whole messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from tests.helpers.messages import message
from tests.helpers.processes import python

pytestmark = pytest.mark.sampled(quick=37)

CPUS = "".join(f"  - CPU:{i}\n" for i in range(5))
MAKE_MORE = "To try several devices without GPUs, call graphsplit.use_logical_devices(n) before TensorFlow starts."
_STRICT = (
    "strict must be True or False, got {!r}. To require a share of the work, write: assert step.plan(x).balance > 0.9."
)


def identity(x):
    return x


def two(x, y):
    return x, y


@dataclass
class Pair:
    left: Any
    right: Any


@pytest.mark.parametrize(
    ("devices", "kind", "expected"),
    [
        (
            6,
            gs.errors.DeviceError,
            f"devices=6: there are only 5 CPU devices. This process has:\n{CPUS}{MAKE_MORE}\n"
            'For a plan or a placement only, name them: devices=[f"GPU:{k}" for k in range(6)].',
        ),
        (0, gs.errors.ArgumentError, "devices=0: at least one device is needed."),
        (-2, gs.errors.ArgumentError, "devices=-2: at least one device is needed."),
        (True, gs.errors.ArgumentError, "devices takes a number or a list of device names, got True."),
        ([], gs.errors.ArgumentError, "devices is an empty list; name at least one device."),
        (
            ["GPU:0", "CPU:1"],
            gs.errors.DeviceError,
            f"devices=['GPU:0', 'CPU:1']: GPU:0 does not exist. This process has:\n{CPUS}{MAKE_MORE}",
        ),
        (["CPU:1", "/cpu:1"], gs.errors.ArgumentError, "devices names a device more than once: CPU:1."),
        (["CPU"], gs.errors.ArgumentError, "devices: 'CPU' is not a device name; write it like 'GPU:0'."),
        *[
            ([name], gs.errors.ArgumentError, f"devices: {name!r} is not a device name; write it like 'GPU:0'.")
            for name in (
                "CPU:-1",
                "CPU:\u0663",
                "CPU:0/CPU:1",
                "/job:/task:0/device:CPU:0",
                " CPU:0",
                "CPU:1.5",
                "CPU:*",
            )
        ],
        ([3], gs.errors.ArgumentError, "devices takes device names, got 3. Write 'GPU:3'."),
        ([b"CPU:0"], gs.errors.ArgumentError, "devices takes device names, got b'CPU:0'."),
        ("4", gs.errors.ArgumentError, "devices: '4' is not a device name; write devices=4, or 'GPU:0'."),
        (2.5, gs.errors.ArgumentError, "devices takes a number or a list of device names, got 2.5."),
    ],
)
def test_devices(devices: Any, kind: type[Exception], expected: str):
    assert message(kind, lambda: gs.parallelize(identity, devices=devices)(tf.zeros(3))) == expected


def test_home():
    assert message(
        gs.errors.DeviceError,
        lambda: gs.parallelize(identity, devices=2, tuning={"default_device": "GPU:7"})(tf.zeros(3)),
    ) == (f"default_device='GPU:7': GPU:7 does not exist. This process has:\n{CPUS}{MAKE_MORE}")


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: gs.parallelize(identity, device=2), "parallelize() has no option device=. Did you mean devices=?"),
        (
            lambda: gs.parallelize(identity, micro_batch=2, layout="sharded"),
            "parallelize() has no option micro_batch=, layout=. Did you mean micro_batches=? "
            "Layouts belong to variables: gs.set_variable_layout(model, 'sharded', devices=...).",
        ),
        (
            lambda: gs.parallelize(identity, num_gpus=4, gradient_accumulation_steps=2),
            "parallelize() has no option num_gpus=, gradient_accumulation_steps=. Did you mean devices=, "
            "micro_batches=?",
        ),
        (
            lambda: gs.multi_gpu_model(identity, devices=4, jit_compile=True),
            "multi_gpu_model() has no option devices=, jit_compile=. Did you mean gpus=? Keras has it: "
            "model.compile(..., jit_compile=True).",
        ),
        (
            lambda: gs.parallelize(q=1),
            "parallelize() has no option q=. It has devices=, mesh=, split=, shares=, variables=, micro_batches=, "
            "stages=, schedule=, recompute=, jit_compile=, strict=, plan=, memory=, tuning=.",
        ),
        (
            lambda: gs.parallelize(identity, weights=[3, 1], device=2),
            "parallelize() has no option weights=, device=. weights= is now shares=[3, 1]. Did you mean devices=?",
        ),
        (
            lambda: gs.parallelize(identity, home="CPU:1", plan="auto", machine="dgx-a100"),
            "parallelize() has no option home=, machine=. home= is now tuning={'default_device': 'CPU:1'}. machine= is "
            "now plan='dgx-a100'.",
        ),
        (
            lambda: gs.set_variable_layout([], "home", mesh={"rows": 2}, batch_axis="rows"),
            "set_variable_layout() has no option batch_axis=. batch_axis= is now the axis of mesh= that is called "
            "'batch' or 'data', mesh={'batch': 2, 'model': 4}.",
        ),
        (
            lambda: gs.parallelize(identity, random="exact"),
            "parallelize() has no option random=. Random numbers are always those of one device: leave random out.",
        ),
        (lambda: gs.multi_gpu_model(None, gpu=2), "multi_gpu_model() has no option gpu=. Did you mean gpus=?"),
    ],
)
def test_options_of_other_names(call: Any, expected: str):
    assert message(TypeError, call) == expected


def test_a_mesh_larger_than_the_machine_is_called_a_mesh():
    mesh, w = {"batch": 4, "model": 2}, tf.Variable(tf.zeros((2, 3)))
    for call in (
        lambda: gs.parallelize(tf.square, mesh=mesh)(tf.ones((4, 2))),
        lambda: gs.set_variable_layout([w], "replicated", mesh=mesh),
        gs.variable_layout("sharded", mesh=mesh).__enter__,
    ):
        assert message(gs.errors.DeviceError, call).startswith(
            f"mesh={mesh!r} has 8 devices: there are only 5 CPU devices. "
        )


def test_what_the_advice_about_gs_cut_says_can_be_typed():
    w, mesh = tf.Variable(tf.zeros((8, 3, 6)), name="w"), {"batch": 1, "model": 4}
    said = message(gs.errors.ArgumentError, lambda: gs.set_variable_layout([w], (None, "model"), mesh=mesh))
    copied = "(None, gs.cut('model'), None)"
    assert said.endswith(f"dimension 1 has 3 entries, and 'model' has 4 devices; {copied} copies it")
    gs.set_variable_layout([w], (None, gs.cut("model"), None), mesh=mesh)
    gs.set_variable_layout([w], "home", mesh=mesh)
    assert message(gs.errors.ArgumentError, lambda: gs.set_variable_layout([w], gs.cut("model"), mesh=mesh)) == (
        "gs.cut('model') says how one dimension is cut: give the layout an entry for each dimension, "
        "(gs.cut('model'),) for the first, (None, gs.cut('model')) for the second."
    )


def test_names_that_are_not_there():
    assert message(AttributeError, lambda: gs.paralelize) == (
        "module 'graphsplit' has no attribute 'paralelize'. Did you mean 'parallelize'?"
    )
    assert message(AttributeError, lambda: gs.xyz) == "module 'graphsplit' has no attribute 'xyz'."
    for name, hint in {
        "DataParallel": "gs.multi_gpu_model(model, gpus=4)",
        "MirroredStrategy": "gs.parallelize(step, devices=4)",
        "pmap": "gs.parallelize(step, devices=4)",
        "shard": "gs.set_variable_layout(model, 'sharded', devices=4)",
        "replicate": "gs.set_variable_layout(model, 'replicated', devices=4)",
        "DeviceMesh": "mesh={'batch': 2, 'model': 4}",
    }.items():
        said = message(AttributeError, lambda name=name: getattr(gs, name))
        assert said.startswith(f"module 'graphsplit' has no attribute {name!r}. ")
        assert hint in said
    assert dir(gs) == sorted([*gs.__all__, "__version__"])


@pytest.mark.parametrize("asked", ["auto", 1, None])
def test_jit_compile_is_true_or_false(asked: Any):
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(identity, jit_compile=asked)) == (
        f"jit_compile must be True or False, got {asked!r}."
    )


SHARES = "shares must be finite numbers of at least 0, not all of them 0, got"


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([1, 2, 3], "shares=[1, 2, 3] has 3 entries for 2 devices; give one for each device."),
        ([0, 0], f"{SHARES} [0, 0]."),
        ([1, -1], f"{SHARES} [1, -1]."),
        ([float("inf"), 1], f"{SHARES} [inf, 1]."),
        ([float("nan"), 1], f"{SHARES} [nan, 1]."),
        ([True, 1], f"{SHARES} [True, 1]."),
        (["1", 1], f"{SHARES} ['1', 1]."),
        ([], f"{SHARES} []."),
        (5, "shares must be a number for each device, [3, 1], got 5."),
    ],
)
def test_shares(shares: Any, expected: str):
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(identity, devices=2, shares=shares)) == expected


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("strict", "yes", _STRICT.format("yes")),
        ("strict", None, _STRICT.format(None)),
        ("tuning", {"reduce_retracing": 7}, "reduce_retracing must be True or False, got 7."),
        (
            "tuning",
            {"random": "independent"},
            "tuning has no key 'random'. Random numbers are always those of one device: leave random out. It has "
            "'bucket_bytes', 'exchange_bytes', 'default_device', 'reduce_retracing'.",
        ),
        ("tuning", ["random"], "tuning must map names to values, {'reduce_retracing': True}, got ['random']."),
        (
            "tuning",
            {"bucket_byte": 3},
            "tuning has no key 'bucket_byte'. Did you mean 'bucket_bytes'? It has 'bucket_bytes', 'exchange_bytes', "
            "'default_device', 'reduce_retracing'.",
        ),
    ],
)
def test_flags(option: str, value: Any, expected: str):
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(identity, devices=2, **{option: value})) == expected
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(devices=2, **{option: value})) == expected


def test_weights_against_all_devices():
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(identity, shares=[1, 2])) == (
        "shares=[1, 2] has 2 entries for 5 devices; give one for each device."
    )


def test_transpiling_what_is_no_graph():
    assert message(gs.errors.ArgumentError, lambda: gs.serving.transpile_graph_def(3, "x", "y", 2)) == (
        "transpile_graph_def takes a GraphDef, got 3. For a tf.Graph pass graph.as_graph_def(); for a function, "
        "graphsplit.parallelize(fn).graph_def(*args) returns the graph for several devices."
    )
    graph = tf.Graph().as_graph_def()
    assert message(
        gs.errors.ArgumentError, lambda: gs.serving.transpile_graph_def(graph, "x", "y", 2, strict="yes")
    ) == (_STRICT.format("yes"))


def test_not_a_function():
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(4)) == (
        "parallelize takes a function, got 4; options are named: devices=4, split=0, ..."
    )


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"z": 0}, "split names 'z', which the function does not take. It takes 'x', 'y'."),
        ((0, 0, 0), "split has 3 entries, but the function takes 2 arguments: 'x', 'y'."),
        ("x", "split takes an axis, or a mapping from argument names to an axis or None, got 'x'."),
    ],
)
def test_split_against_the_function(split: Any, expected: str):
    assert message(gs.errors.ArgumentError, lambda: gs.parallelize(two, devices=2, split=split)) == expected


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ({"x": 2}, "split names axes that do not exist:\n  - x has shape [6, 2], which has no axis 2"),
        (3, "split=3, but no argument has an axis 3:\n  - x has shape [6, 2]\n  - y has shape [4]"),
        (
            {"x": 0, "y": 0},
            "The arguments named in split have different batch sizes:\n"
            "  - x: 6 along axis 0 (shape [6, 2])\n"
            "  - y: 4 along axis 0 (shape [4])\n"
            "Rows are split alike over the devices; give None to arguments that are not batches.",
        ),
        ({"x": [0]}, "split gives [0] for x, which is a single tensor; give an axis or None."),
    ],
)
def test_split_against_the_arguments(split: Any, expected: str):
    call = gs.parallelize(two, devices=2, split=split)
    assert message(gs.errors.ArgumentError, lambda: call(tf.zeros((6, 2)), tf.zeros(4))) == expected


def test_split_deeper_than_the_argument():
    call = gs.parallelize(identity, devices=2, split={"x": {"a": 0, "c": 0}})
    assert message(gs.errors.ArgumentError, lambda: call({"a": tf.zeros(3), "b": tf.zeros(3)})) == (
        "split for x has entries 'a', 'c', but x has 'a', 'b'."
    )


def test_split_of_a_ragged_argument():
    call = gs.parallelize(identity, devices=2, split={"x": 0})
    assert message(gs.errors.ArgumentError, lambda: call(tf.ragged.constant([[1], [2, 3]]))) == (
        "split asks to split x, a RaggedTensor; composite tensors are kept whole. "
        "Leave it out of split, or pass its parts as ordinary tensors."
    )


def test_an_exception_of_the_function_arrives_as_it_is():
    class OwnError(Exception):
        pass

    def fails(x):
        raise OwnError("of the user")

    with pytest.raises(OwnError) as error:
        gs.parallelize(fails, devices=2)(tf.zeros(4))
    assert re.search(r'test_errors.py", line \d+, in fails  \*\n.*\n\n    OwnError: of the user', str(error.value))


def test_outputs_that_are_no_tensors():
    def returns(x):
        return {"x": x, "pair": Pair(object(), np.dtype("int8"))}

    assert message(gs.errors.OutputError, lambda: gs.parallelize(returns, devices=2)(tf.zeros(4))).endswith(
        "The function returns values that are not tensors:\n"
        "  - ['pair'].left: builtins.object\n"
        "  - ['pair'].right: numpy.dtypes.Int8DType\n"
        "Return tensors, numpy arrays, Python numbers, strings, None, or lists, tuples, dicts and dataclasses of "
        "them; keep other objects outside of the function."
    )


def test_a_variable_made_on_every_call():
    def makes(x):
        return x + tf.Variable(1.0)

    text = message(ValueError, lambda: gs.parallelize(makes, devices=2)(tf.zeros(4)))
    assert "tf.function only supports singleton tf.Variables created on the first call" in text


def test_what_yields_batches():
    def named(x, y=None):
        return tf.tanh(x)

    dataset, step = tf.data.Dataset.from_tensor_slices(tf.ones((4, 2))).batch(3), gs.parallelize(named, devices=2)
    for batches, kind in (
        (dataset, type(dataset).__name__),
        (iter(dataset), "OwnedIterator"),
        ((batch for batch in dataset), "generator"),
        (map(tf.identity, dataset), "map"),
    ):
        assert message(gs.errors.ArgumentError, step, batches) == (
            f"named takes one batch, and got what yields batches:\n  - x: {kind}\n"
            "For a result for each batch, iterate over named.map(batches)."
        )
    assert [result.shape.as_list() for result in step.map(dataset)] == [[3, 2], [1, 2]]
    total = gs.parallelize(lambda d: d.reduce(0.0, lambda s, b: s + tf.reduce_sum(b)), devices=2)
    assert float(total(dataset)) == 8  # a function may take a dataset


def test_specifications_in_a_call():
    call = gs.parallelize(two, devices=2)
    assert message(gs.errors.ArgumentError, lambda: call(tf.zeros(4), tf.TensorSpec([4]))) == (
        "two was called with specifications, and needs tensors:\n"
        "  - y: TensorSpec(shape=(4,), dtype=tf.float32, name=None)\n"
        "These accept specifications, because they run nothing: two.plan(...), two.placement(...), predict(two, ...)."
    )


def test_errors_of_tensorflow_name_arguments_as_the_user_does():
    call = gs.parallelize(lambda batch, y: batch["x of it"] - y, devices=2)
    text = message(ValueError, lambda: call({"x of it": tf.zeros(4)}, tf.zeros(3)))
    assert "(batch_x_of_it, y)" in text


def test_a_model_as_a_function_names_what_fits():
    net = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    call = gs.parallelize(net, devices=2)
    assert message(AttributeError, lambda: call.fit) == (
        "'ParallelFunction' object has no attribute 'fit'; multi_gpu_model(sequential, gpus=...) has"
    )
    assert message(AttributeError, lambda: gs.parallelize(two, devices=2).fit) == (
        "'ParallelFunction' object has no attribute 'fit'"
    )


def test_missing_and_unknown_arguments():
    call = gs.parallelize(two, devices=2)
    assert message(TypeError, lambda: call(tf.zeros(4))) == "two(x, y): missing a required argument: 'y'"
    assert message(TypeError, lambda: call(tf.zeros(4), z=1)) == "two(x, y): missing a required argument: 'y'"


def test_jit_compile_around_it():
    call = gs.parallelize(identity, devices=2)
    outer = tf.function(lambda x: call(x), jit_compile=True)
    assert (
        message(gs.errors.UnsupportedError, lambda: outer(tf.zeros(4)))
        .strip()
        .endswith(
            "identity is called inside a function with jit_compile=True. XLA compiles such a function for one device "
            "and would erase the placement. Remove jit_compile=True from the outer function; you may set it on "
            "functions that the parallelized one calls."
        )
    )


def test_strict_names_the_operation_and_the_line():
    def couples(x):
        return tf.unique(x).y  # this line

    here = couples.__code__.co_firstlineno + 1
    call = gs.parallelize(couples, devices=2, strict=True)
    text = message(gs.errors.StrictError, lambda: call(tf.constant([1.0, 2.0, 1.0, 3.0])))
    assert re.sub(r"'\S*Unique'", "'Unique'", text) == (
        "strict=True, but these operations work on rows of the batch and would run on one device:\n"
        f"  - Unique 'Unique' at test_errors.py:{here}: nothing gathered; which entries are new depends on all rows\n"
        "    -> leave it out if it only saves lookups, or call it in dataset.map, pad its values and pass them with "
        "split={...: None}\n"
        "Or drop strict=True, and assert how evenly devices work: step.plan(x).balance > 0.9."
    )


def test_a_failing_step_leaves_the_function_usable():
    total = tf.Variable(0.0)

    @gs.parallelize(devices=3)
    def step(x):
        tf.debugging.assert_positive(x)
        total.assign_add(tf.reduce_sum(x))
        return total.read_value()

    with pytest.raises(tf.errors.InvalidArgumentError):
        step(tf.constant([1.0, -1.0, 2.0, 3.0]))
    assert float(total) == 0.0
    assert float(step(tf.constant([1.0, 1.0, 2.0, 3.0]))) == 7.0


def test_logical_devices_after_the_start():
    assert gs.use_logical_devices(5) == ("CPU:0", "CPU:1", "CPU:2", "CPU:3", "CPU:4")
    assert message(gs.errors.DeviceError, lambda: gs.use_logical_devices(2)) == (
        "use_logical_devices(2) was called after TensorFlow had started with 5 CPU devices; devices are fixed from "
        "then on. Call it first in the program, before any tensor, variable or model is made."
    )


@pytest.mark.parametrize(
    ("there", "make_more"),
    [
        ("/device:CPU:0", MAKE_MORE),
        (
            "/device:GPU:0",
            "A number of devices means GPUs if there are any; name CPU devices to use them. To divide one GPU, call "
            "graphsplit.use_logical_devices(n, kind='GPU', memory_mb=...) before TensorFlow starts.",
        ),
    ],
)
def test_one_device_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch, there: str, make_more: str):
    monkeypatch.setattr("graphsplit.core.devices.available_devices", lambda: (there,))
    with pytest.warns(UserWarning, match="nothing will run in parallel") as caught:
        gs.parallelize(identity)
    assert [str(warning.message) for warning in caught] == [
        "devices=None means all GPUs, or all CPU devices where there is no GPU. Here that is one, "
        f"{there.removeprefix('/device:')}: nothing will run in parallel. {make_more} (devices=1 says that one is "
        "meant.)"
    ]
    assert caught[0].filename == __file__
    gs.parallelize(identity, devices=1)


@pytest.mark.parametrize("count", [0, -1, 2.0, True])
def test_logical_devices_takes_a_positive_number(count: Any):
    assert message(gs.errors.ArgumentError, lambda: gs.use_logical_devices(count)) == (
        f"use_logical_devices(count) takes a positive number of devices, got {count!r}."
    )


def test_checks_before_tensorflow_starts():
    """Mistakes that need no devices to be seen are reported at once; others on first use."""
    script = (
        "import graphsplit as gs\n"
        "f = gs.parallelize(lambda x: x, devices=7)\n"
        "try: gs.parallelize(lambda x: x, devices=0)\n"
        "except gs.errors.ArgumentError as error: print(error)\n"
        "gs.use_logical_devices(2)\n"
        "try: f.devices\n"
        "except gs.errors.DeviceError as error: print(str(error).splitlines()[0])\n"
    )
    done = python("-c", script)
    assert done.stdout.splitlines() == [
        "devices=0: at least one device is needed.",
        "devices=7: there are only 2 CPU devices. This process has:",
    ]


def test_verify_takes_a_parallel_function():
    text = message(gs.errors.ArgumentError, lambda: gs.verify(identity, tf.zeros(3)))
    assert text.startswith(
        "verify takes a function made by parallelize or a model made by multi_gpu_model, got <function"
    )
    assert text.endswith(" Write gs.verify(gs.parallelize(identity, devices=4), ...).")


def test_devices_as_tensorflow_lists_them():
    listed = tf.config.list_logical_devices("CPU")[:2]
    text = message(gs.errors.ArgumentError, lambda: gs.parallelize(identity, devices=listed))
    assert text.startswith("devices takes device names, got LogicalDevice(")
    assert text.endswith(" Write 'CPU:0'.")


def test_the_layout_of_a_tensor():
    text = message(gs.errors.ArgumentError, lambda: gs.set_variable_layout(tf.ones((10, 6)), "sharded", devices=2))
    assert text == (
        "Variable layouts are for variables, modules, models and optimizers, got a tensor of shape [10, 6]. In a "
        "function, gs.with_layout asks for a tensor's."
    )


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_a_method_that_runs_batches_is_no_function_of_tensors(method: str):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)], name="small")
    text = message(gs.errors.ArgumentError, lambda: gs.parallelize(getattr(model, method), devices=2))
    assert text == (
        f"parallelize takes a function of tensors, and {method} of 'small' runs batches by itself: write model = "
        f"gs.multi_gpu_model(model, gpus=4), then model.{method}(...)."
    )
