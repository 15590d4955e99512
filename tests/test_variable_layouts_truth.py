"""Variables in parts: one truth at a time, for everybody."""

from __future__ import annotations

import contextlib
import copy
import gc
import signal
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.variables import copied_variables, parted_classes, parted_variables
from graphsplit.core.variables.parted_classes import raw_handles
from graphsplit.core.variables.parted_variables import parts_of_variable
from tests.helpers.law import assert_close
from tests.helpers.layout_cases import (
    Optimizer,
    X,
    Y,
    adam,
    fused_adam,
    keras_model,
    numbers,
    train,
)


def test_everybody_else_finds_the_value():
    weight = tf.Variable(numbers(30, 40), name="weight")
    before = weight.numpy()
    read_earlier = tf.function(lambda: weight + 0.0)
    read_earlier()
    gs.set_variable_layout(weight, "sharded", 3)
    double = gs.parallelize(lambda x: (weight.assign(2 * weight), x)[1], devices=3)
    read = tf.function(lambda: tf.reduce_sum(weight))
    write = tf.function(lambda: weight.assign_add(tf.ones_like(weight)))
    expected = before
    for _ in range(2):
        double(tf.ones(3))
        expected = 2 * expected
        parts = parts_of_variable(weight)
        assert parts is not None
        assert parts.in_parts
        assert_close(read(), tf.reduce_sum(tf.constant(expected)))  # traced once, and told of the parts at each call
        double(tf.ones(3))
        write()
        expected = 2 * expected + 1
        np.testing.assert_array_equal(weight.numpy(), expected)
        assert not parts.in_parts
        double(tf.ones(3))
        expected = 2 * expected
        assert float(weight[2, 3]) == expected[2, 3]
        double(tf.ones(3))
        expected = 2 * expected
        assert_close(tf.reduce_sum(weight), tf.reduce_sum(tf.constant(expected)))
    double(tf.ones(3))
    expected = 2 * expected
    np.testing.assert_array_equal(read_earlier(), expected)  # traced before the parts were, and told of them, too
    double(tf.ones(3))
    gs.set_variable_layout(weight, "home")
    np.testing.assert_array_equal(weight.numpy(), 2 * expected)
    np.testing.assert_array_equal(read_earlier(), 2 * expected)
    assert parts_of_variable(weight) is None
    double(tf.ones(3))  # planned again
    np.testing.assert_array_equal(weight.numpy(), 4 * expected)


def functions_of(weight: tf.Variable) -> dict[str, Callable[[], tf.Tensor]]:
    """Return functions that are traced, some of which write the variable."""

    def gradient() -> tf.Tensor:
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(weight * weight)
        return tape.gradient(total, weight)

    def add() -> tf.Tensor:
        return weight.assign_add(tf.ones_like(weight)) * 1.0

    write = tf.function(add)
    found = {
        "read": tf.function(lambda: weight * 1.0),
        "write": write,
        "call": tf.function(lambda: write() + 1.0),
        "branch": tf.function(lambda: tf.cond(tf.reduce_sum(weight) > 0, add, gradient)),
        "gradient": tf.function(gradient),
        "concrete": write.get_concrete_function(),
    }
    for fn in found.values():
        fn()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "layouts",
    [
        ["replicated"],
        ["sharded"],
        ["replicated", "home", "sharded", "replicated"],
        pytest.param(["sharded", "replicated", "home", "sharded"], marks=pytest.mark.long),
    ],
    ids=" ".join,
)
def test_functions_that_were_traced_before_a_layout(layouts: list[str]):
    """They are told at each call, as those are that are traced later; whichever layout came in between."""
    weight, plain = (tf.Variable(numbers(30, 40)) for _ in range(2))
    x = numbers(5, 30)
    sharded, found = [], [(functions_of(variable), variable) for variable in (weight, plain)]
    for layout in layouts:
        gs.set_variable_layout(weight, layout, 3)
        step = gs.parallelize(lambda x: (weight.assign(1.5 * weight), x @ weight)[1], devices=3)
        for name in found[0][0]:
            plain.assign(1.5 * plain)
            assert_close(step(x), x @ plain)
            one, other = (fns[name]() for fns, _ in found)
            np.testing.assert_array_equal(one, other)
            np.testing.assert_array_equal(weight, plain)
        sharded.append("MatMul" in {op.type for op in step.plan(x).sharded_ops})
        for fns, variable in found:
            fns[f"since {layout}"] = tf.function(partial(variable.assign_add, tf.ones((30, 40))))
            fns[f"since {layout}"]()
    assert all(sharded)


def test_a_step_that_reads_a_mirrored_variable_leaves_its_copies_as_they_are():
    weight = tf.Variable(numbers(30, 40))
    inner = tf.function(lambda: tf.reduce_sum(weight))
    read = tf.function(lambda: inner() + tf.reduce_sum(weight))
    read()
    gs.set_variable_layout(weight, "replicated", 3)
    parts = parts_of_variable(weight)
    assert parts is not None
    assert_close(read(), 2 * tf.reduce_sum(numbers(30, 40)))
    assert parts.in_parts


@pytest.mark.long
@pytest.mark.parametrize("layout", ["replicated", pytest.param("sharded", marks=pytest.mark.long)])
def test_a_model_that_was_fitted_before_a_layout_goes_on(layout: str):
    """Keras keeps the functions of `fit`, `evaluate` and `predict`; the last batch makes them trace again."""
    x, y = numbers(19, 6, 6, 3), numbers(19, 5, seed=1)

    def run(laid: bool) -> list[Any]:
        model = keras_model()
        model.compile("adam", "mse")

        def fit() -> list[Any]:
            found = model.fit(x, y, batch_size=8, shuffle=False, verbose=0).history["loss"]
            return [*found, model.evaluate(x, y, verbose=0), model.predict(x[:3], verbose=0)]

        found = fit()
        forward: Any = model
        if laid:
            gs.set_variable_layout(model, layout, 3)
            forward = gs.parallelize(lambda x: model(x, training=False), devices=3)
        for _ in range(2):
            found += [*fit(), forward(x)]
        return found

    for one, other in zip(run(True), run(False), strict=True):
        assert_close(one, other, tolerance=1e-5)


def test_in_a_function_of_the_users():
    weight = tf.Variable(numbers(30, 40))
    gs.set_variable_layout(weight, "sharded", 3)
    apply = gs.parallelize(lambda x: x @ weight, devices=3)

    @tf.function
    def outer(x: tf.Tensor) -> tf.Tensor:
        return apply(x) * 2.0

    x = numbers(5, 30)
    apply(x)  # planned in parts, which the function outside cannot have: it may use the variable itself
    plans: list[str] = []
    tf.function(lambda x: plans.append(str(apply.plan(x))))(x)
    assert "is gathered for each call: the function is called inside of a tf.function" in plans[0]
    for _ in range(2):
        assert_close(outer(x), 2.0 * (x @ tf.constant(weight.numpy())))
        weight.assign_add(tf.ones_like(weight))  # puts it together: the next call of `outer` takes it apart


def test_what_takes_a_variable_whole_has_it_whole():
    table = tf.Variable(numbers(300, 4))
    expected = tf.Variable(table)
    gs.set_variable_layout(table, "sharded", 3)

    def update(to: tf.Variable, x: tf.Tensor) -> tf.Tensor:
        to.scatter_nd_add([[2], [7]], tf.ones((2, 4)))
        return x @ tf.transpose(to)

    step = gs.parallelize(lambda x: update(table, x), devices=3)
    x = numbers(5, 4)
    for _ in range(2):
        assert_close(step(x), update(expected, x))
        np.testing.assert_array_equal(table.numpy(), expected.numpy())
    assert "ResourceScatterNdAdd" in str(step.plan(x))


def test_born_in_parts():
    with gs.variable_layout("sharded", devices=3):
        model = keras.Sequential([keras.layers.Input((20,)), keras.layers.Dense(64), keras.layers.Dense(8)])
        plain = tf.Variable(numbers(50, 40))
    held = [parts_of_variable(variable.value) for variable in model.variables]
    assert [parts is not None and parts.in_parts for parts in held].count(True) >= 2
    assert parts_of_variable(plain) is not None
    after = tf.Variable(numbers(50, 40))
    assert parts_of_variable(after) is None


def test_by_name_and_back():
    model = keras_model()
    gs.set_variable_layout(model, {"*dense*": "sharded", "*": "home"}, 3)
    parted = [v.path for v in model.variables if parts_of_variable(v.value) is not None]
    assert parted
    assert all("dense" in path for path in parted)
    weights = model.get_weights()
    gs.set_variable_layout(model, "home")
    assert all(parts_of_variable(v.value) is None for v in model.variables)
    for a, b in zip(model.get_weights(), weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_copies_and_verify():
    made, _ = train("sharded", 3, update=adam)
    copied = copy.deepcopy(made.weights[0])
    np.testing.assert_array_equal(copied.numpy(), made.weights[0].numpy())
    assert gs.verify(gs.parallelize(made.step, devices=3), X, Y).largest < 1e-4


@pytest.mark.parametrize("layout", ["home", "sharded", "replicated"])
def test_variables_that_are_used_by_their_handles_alone(layout: str):
    made = Optimizer(fused_adam)
    if layout != "home":
        gs.set_variable_layout(made.variables, layout, 2)
    step, before = gs.parallelize(made.step, devices=2), [variable.numpy() for variable in made.variables]
    found = step.variables(X, Y)
    with raw_handles():
        assert {id(variable.handle) for variable in found} == {id(variable.handle) for variable in made.variables}
        assert len(found) == len(made.variables)
    report = gs.verify(step, X, Y)
    assert len(report.differences) == 1 + len(made.variables)
    assert report.largest < 1e-4
    for variable, value in zip(made.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_a_variable_behind_a_bare_handle_is_one_object():
    made = Optimizer(fused_adam)
    handles = [variable.handle for variable in made.variables]
    used = tf.function(lambda: [tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32) for handle in handles])
    step = gs.parallelize(lambda x: (x, used()), devices=2)
    first, again, other = step.variables(X), step.variables(X), step.variables(X[:4])
    assert len(first) == len(handles)
    for one, two, three in zip(first, again, other, strict=True):
        assert one is two
        assert one is three


def test_patterns_fit_from_any_slash_on():
    model = keras.Sequential([keras.layers.Embedding(1000, 64), keras.layers.Dense(2)], name="net")
    model.build((None, 3))
    with pytest.raises(gs.errors.ArgumentError) as raised:
        gs.set_variable_layout(model, {"embeding/*": "sharded", "bedding*": "home"}, devices=2)
    table, kernel, bias = (variable.path for variable in model.variables)
    layer = table.split("/")[1]
    assert str(raised.value) == (
        f"No variable's name fits 'embeding/*', 'bedding*'. The variables are:\n  - {table}\n  - {kernel}\n  - {bias}\n"
        f"Similar to 'embeding/*': '{layer}/*'.\nSimilar to 'bedding*': '{layer}/*'."
    )
    gs.set_variable_layout(model, {"embedding*": "sharded"}, devices=2)
    layouts = [getattr(parts_of_variable(v.value), "layout", None) for v in model.variables]
    assert layouts == ["sharded", None, None]


def test_errors():
    variable = tf.Variable(numbers(20, 20), name="table")
    with pytest.raises(
        gs.errors.ArgumentError, match=r"Unknown layout 'split'\. Layouts: 'home', 'replicated', 'sharded'"
    ):
        gs.set_variable_layout(variable, "split")
    with pytest.raises(gs.errors.ArgumentError) as raised:
        gs.set_variable_layout(variable, {"tabel*": "sharded"})
    assert str(raised.value) == (
        "No variable's name fits 'tabel*'. The variables are:\n  - table\nSimilar to 'tabel*': 'table'."
    )
    with pytest.raises(gs.errors.ArgumentError, match="found no variables in"):
        gs.set_variable_layout(tf.Module(), "sharded")
    with pytest.raises(gs.errors.ArgumentError, match="are for variables, modules, models and optimizers, got 3"):
        gs.set_variable_layout(3, "sharded")
    with pytest.raises(gs.errors.DeviceError):
        gs.set_variable_layout(variable, "sharded", 99)
    with pytest.raises(gs.errors.UnsupportedError, match="while a graph is built"):
        tf.function(lambda: gs.set_variable_layout(variable, "home"))()


def test_variables_are_in_the_order_of_their_captures():
    """What is laid out by a trace, as a prediction does it, lies by their order: it is the same in every process."""
    made = [tf.Variable(tf.ones([64, 32]), name=f"v{k}") for k in range(24)]
    used = [made[7 * k % 24] for k in range(24)]
    step = gs.parallelize(lambda x: tf.add_n([x @ variable for variable in used]), devices=2)
    found = step.variables(tf.ones([4, 64]))
    assert [variable.name for variable in found] == [variable.name for variable in used]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("moves", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("what", ["a read", "a call", "an assignment"])
def test_an_interrupt_leaves_one_value_whole(monkeypatch: pytest.MonkeyPatch, layout: str, moves: int, what: str):
    """As if Ctrl-C came right after any of the moves between a variable and its parts."""
    variable = tf.Variable(tf.ones((600, 8)))
    gs.set_variable_layout(variable, layout, devices=3)
    parallel, x = gs.parallelize(lambda x: x @ variable, devices=3), tf.ones((6, 600))
    parallel(x)
    if what == "a call":
        variable.assign(variable * 1.0)
    actions = {
        "a read": variable.numpy,
        "a call": lambda: parallel(x),
        "an assignment": lambda: variable.assign(tf.fill((600, 8), 7.0)),
    }
    assign, left = parted_variables.assign, [moves]

    def interrupted(*args):
        assign(*args)
        left[0] -= 1
        if left[0] == 0:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        for module in (parted_variables, copied_variables):
            patched.setattr(module, "assign", interrupted)
        with contextlib.suppress(KeyboardInterrupt):
            actions[what]()
    values = np.unique(variable.numpy()).tolist()
    assert values in ([[1.0], [7.0]] if what == "an assignment" else [[1.0]])
    np.testing.assert_array_equal(parallel(x), np.full((6, 8), 600 * values[0]))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["sharded", "replicated"])
@pytest.mark.parametrize("what", ["home", "replicated", "sharded"])
def test_an_interrupt_while_a_layout_changes(layout: str, what: str, request: pytest.FixtureRequest):
    """As if Ctrl-C came at any line that makes a variable one with parts, or an ordinary one again."""
    gc.freeze()  # what tests before have left is not looked through at each line
    request.addfinalizer(gc.unfreeze)
    x = tf.ones((6, 60))
    for line in range(1, 100):
        variable = tf.Variable(tf.ones((60, 8)))
        parallel = gs.parallelize(lambda x, variable=variable: x @ variable, devices=3)
        if what != layout:
            gs.set_variable_layout(variable, layout, devices=3)
            parallel(x)
        if not interrupted_at(line, lambda v=variable: gs.set_variable_layout(v, what, 3)):
            assert line > 5
            return
        for value in (1.0, 3.0):  # asked by others, by a call, and by others again
            variable.assign(tf.fill((60, 8), value))
            np.testing.assert_array_equal(variable, np.full((60, 8), value))
            np.testing.assert_array_equal(parallel(x), np.full((6, 8), 60 * value))
            np.testing.assert_array_equal(variable, np.full((60, 8), value))
        gs.set_variable_layout(variable, what, devices=3)
        np.testing.assert_array_equal(parallel(x), np.full((6, 8), 180.0))
        assert getattr(parts_of_variable(variable), "layout", "home") == what
    raise AssertionError("it never ended")


def interrupted_at(line: int, action: Callable[[], object]) -> bool:
    """Return whether an action came to the n-th line of functions about parts, where it was interrupted."""
    files, left = {module.__file__ for module in (parted_classes, parted_variables, copied_variables)}, [line]
    functions = ("__init__", "forget", "give_parts", "take_parts")
    seen: set[tuple[FrameType, int]] = set()  # (the end of a `with` is its line once more, before what it releases)

    def at_line(frame: FrameType, event: str, arg: object) -> object:
        left[0] -= event == "line" and (frame, frame.f_lineno) not in seen
        seen.add((frame, frame.f_lineno))
        if left[0] == 0:
            raise KeyboardInterrupt
        return at_line

    def at_call(frame: FrameType, event: str, arg: object) -> object:
        code = frame.f_code
        return at_line if code.co_filename in files and code.co_name in functions else None

    before = sys.gettrace()
    sys.settrace(at_call)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
