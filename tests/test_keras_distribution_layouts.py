"""`keras.distribution` on TensorFlow: where variables live, as a map says of each, and their way home."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables.parted_variables import VariableParts, parts_of_variable
from tests.helpers.keras_cases import assert_same, assert_sharded, state
from tests.helpers.keras_distributions import compiled, fixture_enabled, numbers_of, parallel  # noqa: F401 (a fixture)

distribution, layers = keras.distribution, keras.layers
ROWS = 16  # two batches of 8: one trace


def model_parallel(
    count: int, entries: dict[str, Any] | None = None, axes: dict[str, int] | None = None, batch: str = "batch"
) -> distribution.ModelParallel:
    """Return a distribution on so many devices, two of them along "model" where no axes are given."""
    sizes = axes or {"batch": count // 2, "model": 2}
    mesh = distribution.DeviceMesh(tuple(sizes.values()), list(sizes), [f"cpu:{d}" for d in range(count)])
    layout_map = distribution.LayoutMap(mesh)
    for pattern, own in (entries or {".*wide.*kernel": (None, "model")}).items():
        layout_map[pattern] = own
    return distribution.ModelParallel(layout_map=layout_map, batch_dim_name=batch)


def wide(inputs: bool = True) -> keras.Model:
    """Return a model with two matrices that a map cuts, the second of odd sizes, and one that none does."""
    keras.utils.set_random_seed(1)
    first = [layers.Input((60,))] if inputs else []
    hidden = [layers.Dense(16, "tanh", name="wide"), layers.Dropout(0.3), layers.Dense(7, "tanh", name="wide_and_odd")]
    return keras.Sequential([*first, *hidden, layers.Dense(5)])


def data(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 60)).astype("float32"), random.normal(size=(rows, 5)).astype("float32")


def devices_of(model: keras.Model) -> dict[str, tuple[str, ...]]:
    """Return the devices of each variable of a model and its optimizer that is laid out, by its path."""
    return {path: parts.devices for path, parts in parts_of_model(model).items()}


def parts_of_model(model: keras.Model) -> dict[str, VariableParts]:
    """Return the parts of each variable of a model and its optimizer that is laid out, by its path."""
    variables = {v.path.partition("/")[2]: v.value for v in [*model.variables, *model.optimizer.variables]}
    found = {path: parts_of_variable(value) for path, value in variables.items()}
    return {path: parts for path, parts in found.items() if parts is not None}


def fit(model: keras.Model) -> list[tuple[str, Any]]:
    return numbers_of(model.fit(*data(), batch_size=8, verbose=0, shuffle=False))


def layouts_of(model: keras.Model) -> dict[str, Any]:
    """Return the layout of each variable of a model and its optimizer that is laid out, by its path."""
    return {path: parts.layout for path, parts in parts_of_model(model).items()}


def assert_in_parts(model: keras.Model) -> None:
    """Assert that a step left each part where it is, and that the parts of a variable are all that there is of it."""
    for variable in [*model.variables, *model.optimizer.variables]:
        parts = parts_of_variable(variable.value)
        if parts is not None:
            held = [size for size in parts.bytes_on_devices().values() if size]
            assert parts.in_parts, variable.path
            assert len(held) == len(parts.devices) > 1
            assert sum(held) == math.prod(variable.shape) * variable.value.dtype.size


def names(count: int) -> tuple[str, ...]:
    return tuple(f"/device:CPU:{d}" for d in range(count))


BIRTHS = [
    pytest.param(True, True, id="born in parts"),
    pytest.param(False, True, id="laid out later", marks=pytest.mark.long),
    pytest.param(False, False, id="unbuilt"),
    pytest.param(True, False, id="unbuilt, made under it", marks=pytest.mark.long),
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("early", "inputs"), BIRTHS)
def test_equals_one_device(early: bool, inputs: bool, enabled: gs.keras.KerasDistribution):
    expected_model = compiled(wide())
    expected = [*fit(expected_model), *fit(expected_model), *state(expected_model)]
    chosen = model_parallel(4)
    with chosen.scope() if early else parallel(1).scope():
        model = compiled(wide(inputs))
    before = {} if not inputs else devices_of(model)
    assert before.get("wide/kernel") == (names(2) if early and inputs else None)
    with chosen.scope():
        found = [*fit(model), *fit(model)]
        assert_in_parts(model)
        assert_same([*found, *state(model)], expected)
        assert_sharded(model, ("MatMul", "TanhGrad"), 2)
        plan = enabled.plan(model, *data())
    assert plan.mesh.columns == (("/device:CPU:0", "/device:CPU:2"), ("/device:CPU:1", "/device:CPU:3"))
    laid_out = layouts_of(model)
    kinds = [path.rpartition("_")[2] for path in laid_out]
    assert sorted(kinds) == [*["momentum"] * 2, *["odd/kernel", "velocity", "velocity", "wide/kernel"]]
    assert set(laid_out.values()) == {(None, "model")}
    used = [line for line in str(plan).splitlines() if line.endswith("computed in place")]
    assert len(used) == len(laid_out) == 6
    assert sum("wide_and_odd" in line and ", 4 + 3," in line for line in used) == 3
    assert not plan.state.gathered


def test_no_device_has_all_of_what_is_born_in_parts():
    with model_parallel(4).scope():
        model = compiled(wide())
        assert_in_parts(model)
        kernel = model.layers[0].kernel
        parts = parts_of_variable(kernel.value)
        held = parts.bytes_on_devices()
        assert max(held.values()) == 60 * 16 * 4 // 2
        value = np.random.default_rng(3).normal(size=(60, 16)).astype("float32")
        kernel.assign(value)  # as what is loaded is
        assert parts.bytes_on_devices() == held
        np.testing.assert_array_equal(kernel, value)


def test_slots_are_born_where_their_variables_are():
    with model_parallel(4).scope():
        model = compiled(wide())
        model.optimizer.build(model.trainable_variables)
        assert_in_parts(model)
        laid_out = devices_of(model)
        slots = [path for path in laid_out if "wide_kernel" in path]
        assert len(slots) == 2
        assert {laid_out[path] for path in slots} == {names(2)}
        assert not any("bias" in path for path in laid_out)


@pytest.mark.long
def test_other_distributions_move_the_variables():
    expected_model, model = compiled(wide()), compiled(wide())
    expected = [fit(expected_model) for _ in range(6)]
    four, three = model_parallel(4), model_parallel(3, axes={"batch": 1, "model": 3})
    devices = []
    for i, one in enumerate([four, three, parallel(3), four, None, three]):
        distribution.set_distribution(one)
        assert_same(fit(model), expected[i])
        devices.append(devices_of(model).get("wide/kernel"))
    assert devices == [names(2), names(3), None, names(2), None, names(3)]
    assert_same(state(model), state(expected_model))


@pytest.mark.long
def test_a_function_that_was_kept_brings_its_layout_back():
    expected_model, model = compiled(wide()), compiled(wide())
    expected = [fit(expected_model) for _ in range(2)]
    four, two = model_parallel(4, axes={"batch": 1, "model": 4}), model_parallel(2)
    with four.scope():
        assert_same(fit(model), expected[0])
    with two.scope():
        model.predict(data()[0], verbose=0)  # does not make the training function anew
        assert devices_of(model)["wide/kernel"] == names(2)
    with four.scope():
        assert_same(fit(model), expected[1])
        assert devices_of(model)["wide/kernel"] == names(4)


@pytest.mark.long
def test_disabled_everything_is_at_home(tmp_path: Path):
    expected_model = compiled(wide())
    expected = [fit(expected_model) for _ in range(2)]
    distribution.set_distribution(model_parallel(4))
    model = compiled(wide())
    alone = wide()  # born in parts, and never run
    assert_same(fit(model), expected[0])
    assert devices_of(model)
    assert parts_of_variable(alone.layers[0].kernel.value) is not None
    assert all(getattr(v, "_layout", None) is None for v in [*model.variables, *model.optimizer.variables])
    gs.keras.enable_distribution().disable()
    assert devices_of(model) == {}
    assert parts_of_variable(alone.layers[0].kernel.value) is None
    assert_same(fit(model), expected[1])
    model.export(str(tmp_path / "exported"), verbose=False)


@pytest.mark.long
def test_what_a_user_has_laid_out_stays():
    expected_model, model = compiled(wide()), compiled(wide())
    expected = [fit(expected_model) for _ in range(2)]
    gs.set_variable_layout(model.layers[-1].kernel, "replicated", devices=4)
    for i, one in enumerate([parallel(4), model_parallel(4)]):
        with one.scope():
            assert_same(fit(model), expected[i])
            [layout] = [parts_of_variable(v.value).layout for v in model.layers[-1].variables if "kernel" in v.path]
            assert layout == "replicated"
    gs.keras.enable_distribution().disable()
    assert parts_of_variable(model.layers[-1].kernel.value).layout == "replicated"


def test_patterns_are_those_of_keras():
    """Neither ours, which stand for the end of a name, nor the first that matches: two are an error."""
    model = compiled(wide())
    one = model_parallel(4, {"wide/kernel": (None, "model")})  # searched for up to Keras 3.13, matched in full since
    with one.scope(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(model)
        fits = any(one.get_variable_layout(model.layers[0].kernel).axes)
        assert bool(devices_of(model)) == fits
        assert fits or any("'wide/kernel' (similar: .*wide/kernel, " in str(warning.message) for warning in told)
    with model_parallel(4, {".*wide.*kernel": (None, "model"), ".*odd.*kernel": ("model", None)}).scope():
        with pytest.raises(ValueError, match="matches multiple layout"):
            fit(model)
        with pytest.raises(ValueError, match="matches multiple layout"):
            wide()


@pytest.mark.long
def test_a_mesh_of_three_axes():
    """A map that cuts a matrix along both axes beside the batch's, and one of one entry that stays whole along one."""
    expected_model = compiled(wide())
    expected = fit(expected_model)
    axes = {"batch": 1, "model": 2, "other": 2}
    entries = {".*wide/kernel": ("other", "model"), ".*odd/kernel": ("model", None), ".*odd/bias": ("other",)}
    with warnings.catch_warnings(), model_parallel(4, entries, axes).scope():
        warnings.simplefilter("error")
        model = compiled(wide())
        assert_same(fit(model), expected)
        laid_out = layouts_of(model)
        assert laid_out["wide/kernel"] == ("other", "model")
        assert laid_out["wide_and_odd/bias"] == ("other",)
        assert_in_parts(model)
        assert devices_of(model)["wide/kernel"] == ("/device:CPU:0", "/device:CPU:1", "/device:CPU:2", "/device:CPU:3")
        assert_sharded(model, ("MatMul",), 1)


@pytest.mark.long
def test_compiled_by_xla(enabled: gs.keras.KerasDistribution):
    expected_model, model = compiled(wide()), compiled(wide(), jit_compile=True)
    with model_parallel(4).scope():
        found = fit(model)
        assert_in_parts(model)
        assert_same([*found, *state(model)], [*fit(expected_model), *state(expected_model)])
        assert "compiled by XLA" in str(enabled.plan(model, *data()))


NAMED = [
    pytest.param({"model": 2, "batch": 2}, "batch", "model", id="columns first", marks=pytest.mark.long),
    pytest.param({"data": 1, "tensor": 3}, "data", "tensor", id="one row of three"),
    pytest.param({"model": 2, "batch": 2}, "model", "batch", id="the batch along model", marks=pytest.mark.long),
]


@pytest.mark.long
@pytest.mark.parametrize(("axes", "batch", "axis"), NAMED)
def test_axes_are_called_as_their_user_likes(
    axes: dict[str, int], batch: str, axis: str, enabled: gs.keras.KerasDistribution
):
    expected_model, model = compiled(wide()), compiled(wide())
    entries = {".*wide.*kernel": (None, axis), ".*wide.*bias": (axis,), ".*dense.*kernel": (axis, None)}
    with model_parallel(math.prod(axes.values()), entries, axes, batch).scope():
        found = fit(model)
        assert_in_parts(model)
        assert_same([*found, *state(model)], [*fit(expected_model), *state(expected_model)])
        plan = enabled.plan(model, *data())
    assert len(plan.mesh.columns) == axes[axis]
    assert len(plan.devices) == axes[batch]
    laid_out = layouts_of(model)
    assert len(laid_out) == 3 * 5  # with the slots of Adam
    assert {len(layout) for layout in laid_out.values()} == {1, 2}
    assert all(sum(map(bool, layout)) == 1 for layout in laid_out.values())


def test_what_a_map_leaves_out_is_on_the_plan(enabled: gs.keras.KerasDistribution):
    """And what lies otherwise than it says."""

    def made() -> keras.Model:
        keras.utils.set_random_seed(1)
        hidden = [layers.Dense(32, "tanh", name="wide"), layers.Dense(9, "tanh", name="left_1")]
        return compiled(
            keras.Sequential(
                [layers.Input((60,)), *hidden, layers.Dense(9, name="left_2"), layers.Dense(1, name="dense")]
            )
        )

    def run(model: keras.Model) -> Any:
        x, y = data()
        return numbers_of(model.fit(x, y[:, :1], batch_size=8, verbose=0, shuffle=False))

    expected_model, model = made(), made()
    entries = {
        ".*wide/kernel": ("batch", "model"),
        ".*dense.*kernel": (None, "model"),
        ".*wyde.kernel": ("model",),
        ".*nothing": ("model",),
    }
    idle = "no layer's output: '.*wyde.kernel' (similar: .*wide/kernel, .*dense/kernel, .*left_2/kernel)"
    with model_parallel(4, entries).scope():
        with pytest.warns(UserWarning, match="of its layout map") as told:
            assert_same(run(model), run(expected_model))
        plan = enabled.plan(model, data()[0], data()[1][:, :1])
    assert [str(warning.message) for warning in told] == [
        "ModelParallel on 4 devices: some variables do not have the layouts of its layout map:\n"
        "  - dimension 1 has 1 entry for 2 devices along 'model': it stays whole\n"
        "The results are the same as on one device. The plan names the variables.",
        f"ModelParallel on 4 devices: entries of its layout map match no variable and {idle}, '.*nothing'. "
        "They have no effect.",
    ]
    own = f"{model.name}/"
    last = model.layers[-1].kernel.path.removeprefix(own)
    unmatched = "no pattern of the layout map matches"
    assert [note.replace(own, "") for note in plan.notes] == [
        f"{last}: dimension 1 has 1 entry for 2 devices along 'model': it stays whole",
        f"entries of the layout map that match no variable and {idle}, '.*nothing'",
        f"{unmatched} left_1/kernel [32, 9], 1.2 kB, 12.26 % of the model: stored whole on one device",
        f"{unmatched} left_2/kernel [9, 9], 324 B, 3.448 % of the model: stored whole on one device",
    ]
    assert all(f"  note: {note}" in str(plan) for note in plan.notes)


BOTH_AXES = {
    ".*wide/kernel": ("data", "model"),
    ".*odd/kernel": ("model", "data"),
    ".*wide/bias": ("model",),
    ".*dense.*kernel": ("data", None),
    ".*dense.*bias": ("data",),
}


@pytest.mark.long
def test_maps_of_both_axes(enabled: gs.keras.KerasDistribution):
    """As KerasHub's are: what is cut along the batch's axis as well is gathered along that one, and not the other."""
    expected_model, model = compiled(wide()), compiled(wide())
    with model_parallel(4, BOTH_AXES, {"data": 2, "model": 2}, "data").scope():
        found = [*fit(model), *fit(model)]
        assert_in_parts(model)
        assert_same([*found, *state(model)], [*fit(expected_model), *fit(expected_model), *state(expected_model)])
        plan = enabled.plan(model, *data())
        assert not plan.state.gathered
        assert set(BOTH_AXES.values()) <= set(layouts_of(model).values())
        kernels = [parts_of_variable(layer.kernel.value) for layer in model.layers if hasattr(layer, "kernel")]
        assert [len(parts.devices) for parts in kernels] == [4, 4, 2]
        kernels[0].take_apart()
        assert [size for size in kernels[0].bytes_on_devices().values() if size] == [30 * 8 * 4] * 4


OUTPUTS = {".*wide.*kernel": (None, "model"), ".*wide/output": ("batch", None), ".*odd/output": ("batch", "model")}


@pytest.mark.long
def test_entries_for_outputs(enabled: gs.keras.KerasDistribution):
    """What is asked for whole is put together where it is made, what is asked for in parts is not."""
    expected_model, model = compiled(wide()), compiled(wide())
    with model_parallel(4, OUTPUTS).scope():
        assert_same([*fit(model), *state(model)], [*fit(expected_model), *state(expected_model)])
        notes = enabled.plan(model, *data()).notes
    assert [note.partition(" at ")[0] for note in notes[:2]] == [
        "with_layout (None, None) of [16, 16]",
        "with_layout (None, 'model') of [16, 7]",
    ]
    assert not any("match no variable" in note for note in notes)
    other = model_parallel(4, {".*wide.*kernel": (None, "model"), ".*wide/output": ("model", None, None)})
    with other.scope(), pytest.warns(UserWarning, match="is not used: it has 3 dimensions, and the output 2"):
        fit(model)


@pytest.mark.long
def test_a_function_for_generating_goes_on():
    """As KerasHub's models have one: it was traced before variables were laid out."""

    class Generating(keras.Sequential):
        generate_function = None

        def generate(self, x: Any) -> Any:
            if self.generate_function is None:
                self.generate_function = tf.function(lambda x: self(x, training=False))
            return self.generate_function(x)

    x = data()[0]
    model = compiled(Generating(wide().layers))
    expected = model.generate(x).numpy()
    with model_parallel(4).scope():
        model.predict(x, verbose=0)
        np.testing.assert_allclose(model.generate(x), expected, rtol=1e-5, atol=1e-6)
    model.predict(x, verbose=0)
    np.testing.assert_allclose(model.generate(x), expected, rtol=1e-5, atol=1e-6)


LATER = pytest.param(False, id="traced after", marks=pytest.mark.long)


@pytest.mark.long
@pytest.mark.parametrize("early", [pytest.param(True, id="traced before"), LATER])
def test_functions_of_a_users_own_see_every_value(early: bool):
    """A `DataParallel` moves no variable: what was traced before it reads and writes what a step reads and writes."""

    def run() -> list[tuple[str, Any]]:
        model = wide()
        compiled(model)
        x = tf.constant(data()[0])

        @tf.function
        def read() -> tf.Tensor:
            return model(x, training=False)

        @tf.function
        def halve() -> None:
            for variable in model.trainable_variables:
                variable.assign(0.5 * variable)

        found: list[tuple[str, Any]] = []
        for i in range(3):
            if i or early:
                halve()
                found.append(("read", read()))
            found += fit(model)
        return found

    expected = run()
    with parallel(4).scope():
        assert_same(run(), expected)


ON_GPUS = [
    pytest.param(["cpu:0", "cpu:1"], id="2 CPUs"),
    pytest.param(["gpu:0", "gpu:1"], id="2 GPUs", marks=pytest.mark.gpu),
    pytest.param([f"gpu:{d}" for d in range(4)], id="4 GPUs", marks=pytest.mark.gpu),
]


@pytest.mark.long
@pytest.mark.usefixtures("plain_oracle")
@pytest.mark.parametrize("chosen", ON_GPUS)
def test_on_gpus(chosen: list[str], enabled: gs.keras.KerasDistribution):
    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        x, y = (array.astype("float64") for array in data())

        def run() -> Any:
            # (Adam's scalars are float32; and by default Keras compiles where a GPU is: on one, XLA draws other masks)
            model = compiled(wide(), "sgd", jit_compile=False)
            found = numbers_of(model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False))
            return model, [*found, ("predicted", model.predict(x, verbose=0)), *state(model)]

        with tf.device(chosen[0]):
            _, expected = run()
            with distribution.DataParallel(devices=chosen).scope():
                model, found = run()
                placement = enabled.placement(model, x, y, actual=True)
        assert_same(found, expected, 1e-9)
        assert {op.actual for op in placement.ops.values() if op.flops} >= {f"/device:{d.upper()}" for d in chosen}
        assert devices_of(model) == {}
    finally:
        keras.config.set_floatx(before[0])
        keras.config.set_dtype_policy(before[1])
