"""Gradients from outside: the user's own tape around a parallelized forward function."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.tensorflow_internals import partition_graphs
from graphsplit.core.variables.parted_variables import parts_of_variable
from graphsplit.runtime.gradients.planned_functions import PlannedFunction
from tests.helpers.law import assert_close

pytestmark = pytest.mark.sampled(quick=9)

DOUBLE = tf.float64


def weights() -> tuple[tf.Variable, tf.Variable]:
    generator = tf.random.Generator.from_seed(1)
    return tf.Variable(generator.normal((5, 3), dtype=DOUBLE)), tf.Variable(generator.normal((3,), dtype=DOUBLE))


def rows(count: int = 7, width: int = 5) -> tf.Tensor:
    return tf.random.stateless_normal((count, width), [1, count], dtype=DOUBLE)


def model() -> tuple[Callable[[tf.Tensor], Any], tuple[tf.Variable, tf.Variable]]:
    w, b = weights()

    def forward(x):
        hidden = tf.tanh(x @ w + b)
        return {"y": tf.nn.softmax(hidden), "loss": tf.reduce_mean((x @ w) ** 2), "argmax": tf.argmax(hidden, 1)}

    return forward, (w, b)


def parallel(fn: Callable[..., Any], **options: Any) -> gs.ParallelFunction:
    return gs.parallelize(fn, devices=3, **options)


def gradients(fn: Callable[..., Any], x: tf.Tensor, variables: Any, persistent: bool = True) -> Any:
    with tf.GradientTape(persistent=persistent) as tape:
        tape.watch(x)
        result = fn(x)
        total = tf.reduce_sum(result["y"] ** 3) + 2 * result["loss"]
    whole = tape.gradient(total, [x, *variables])
    return [whole, tape.gradient(result["loss"], [x, *variables])] if persistent else whole


@pytest.mark.sampled(2)
@pytest.mark.parametrize("count", [1, 2, 7])
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "in tf.function"])
def test_gradients_by_inputs_and_variables(count: int, graph: bool):
    forward, variables = model()
    sharded = parallel(forward)
    x = rows(count)

    def call(fn):
        return gradients(fn, x, variables)

    actual = tf.function(lambda: call(sharded), autograph=False)() if graph else call(sharded)
    expected = call(forward)
    assert_close(actual, expected)
    assert expected[1][2] is None  # the loss does not depend on b: no gradient, which is not a gradient of zeros
    kinds = [op.type for op in sharded.gradient_plan(x).sharded_ops]
    assert kinds.count("MatMul") >= 4


def test_python_runs_once():
    calls = []

    def forward(x):
        calls.append(1)
        return {"y": tf.tanh(x), "loss": tf.reduce_sum(x)}

    sharded = parallel(forward)
    for _ in range(3):
        gradients(sharded, rows(), ())
    sharded(rows())
    assert len(calls) == 1


def test_tf_gradients_in_a_graph():
    forward, _ = model()
    sharded = parallel(forward)

    def slope(fn):
        @tf.function(autograph=False)
        def inner(x):
            return tf.gradients(fn(x)["loss"], [x])

        return inner(rows())

    assert_close(slope(sharded), slope(forward))


def test_tf_gradients_of_a_function_with_effects_is_refused():
    counter = tf.Variable(0.0, dtype=DOUBLE)

    def forward(x):
        counter.assign_add(1.0)
        return tf.reduce_sum(x**2)

    sharded = parallel(forward)

    @tf.function(autograph=False)
    def slope(x):
        return tf.gradients(sharded(x), [x])

    with pytest.raises(gs.errors.UnsupportedError) as error:
        slope(rows())
    assert str(error.value).endswith(
        "tf.gradients through forward, which changes variables, would run it twice. Use tf.GradientTape."
    )


def second_derivative(fn, x, w):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = fn(x)["loss"]
        slope = inner.gradient(loss, x)
        penalty = tf.reduce_sum(slope**2)
    return outer.gradient(penalty, [x, w])


def test_nested_tapes():
    forward, (w, _) = model()
    assert_close(
        second_derivative(parallel(forward), rows(), w), second_derivative(forward, rows(), w), tolerance=1e-11
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("pfor", [False, True])
def test_jacobians(pfor: bool):
    forward, (w, _) = model()

    def jacobians(fn):
        x = rows()
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            y = fn(x)["y"]
        return (
            tape.jacobian(y, w, experimental_use_pfor=pfor),
            tape.batch_jacobian(y, x, experimental_use_pfor=pfor),
        )

    assert_close(jacobians(parallel(forward)), jacobians(forward))


def test_custom_gradient_stop_gradient_and_recompute():
    w, _ = weights()

    @tf.custom_gradient
    def clipped(x):
        return tf.identity(x), lambda dy: tf.clip_by_value(dy, -0.01, 0.01)

    def forward(x):
        again = tf.recompute_grad(lambda h: tf.tanh(h) ** 2)
        return {"y": clipped(x @ w) + tf.stop_gradient(x @ w), "loss": tf.reduce_mean(again(x @ w))}

    sharded = parallel(forward)
    assert_close(gradients(sharded, rows(), (w,)), gradients(forward, rows(), (w,)))
    assert not sharded.gradient_plan(rows()).unsharded_ops


def test_state_changes_once_under_a_tape():
    def make():
        keras.utils.set_random_seed(3)
        layers = keras.layers
        dense = layers.Dense(4, use_bias=False, dtype="float64")
        norm = layers.BatchNormalization(dtype="float64")
        return keras.Sequential([keras.Input((5,)), dense, norm, layers.Dense(2, dtype="float64")])

    def train(net, call):
        x = rows(9)
        for _ in range(3):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((call(x) - x[:, :2]) ** 2)
            for v, g in zip(net.trainable_variables, tape.gradient(loss, net.trainable_variables), strict=True):
                v.assign_sub(0.1 * g)
        return [tf.convert_to_tensor(v) for v in net.variables]

    one, many = make(), make()
    sharded = parallel(lambda x: many(x, training=True))
    assert_close(train(many, sharded), train(one, lambda x: one(x, training=True)))


def test_backward_ops_and_residuals_stay_on_the_shards():
    forward, (w, _) = model()
    sharded = parallel(forward)
    x = rows(9)
    with partition_graphs() as graphs:
        with tf.GradientTape() as tape:
            loss = sharded(x)["loss"]
        tape.gradient(loss, w)
    devices = {}
    for graph in graphs:
        for node in graph.node:
            if "MatMul" in node.op and "shard_" in node.name:
                devices.setdefault(node.name.split("shard_")[1][0], set()).add(node.device.rsplit("/", 1)[-1])
    assert devices == {str(d): {f"device:CPU:{d}"} for d in range(3)}


def test_forward_mode_is_refused():
    sharded = parallel(tf.sin)
    x = rows()
    with pytest.raises(gs.errors.UnsupportedError) as error, tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)):
        sharded(x)
    assert str(error.value) == (
        "sin is called under tf.autodiff.ForwardAccumulator. Forward-mode differentiation around a parallelized "
        "function is not supported: use tf.GradientTape, or put the accumulator inside."
    )


def test_an_unwatched_call_records_nothing_and_builds_no_gradient():
    forward, _ = model()
    sharded = parallel(forward)
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        y = sharded(rows())["loss"]
    assert tape.gradient(y, rows()) is None


# Second derivatives with unknown sizes


def recurrent() -> tuple[Callable[[tf.Tensor], Any], tf.Variable]:
    w, _ = weights()
    w = tf.Variable(w[:3])

    def forward(x):
        h = total = tf.zeros_like(x[:, 0])
        for t in tf.range(tf.shape(x)[1]):
            h = tf.tanh(h @ w + x[:, t])
            total += h**2
        return {"y": total, "loss": tf.reduce_mean(h**2)}

    return tf.function(forward, input_signature=[tf.TensorSpec([None, None, 3], DOUBLE)]), w


def sequences(count: int, length: int) -> tf.Tensor:
    return tf.random.stateless_normal((count, length, 3), [count, length], dtype=DOUBLE)


@pytest.mark.long
def test_second_derivative_through_a_loop_over_an_unknown_length():
    forward, w = recurrent()
    sharded = parallel(forward)
    for count, length in ((5, 2), (6, 4)):
        x = sequences(count, length)
        assert_close(second_derivative(sharded, x, w), second_derivative(forward, x, w), tolerance=1e-11)
    ((compiled,),) = sharded._traces.planned.values()
    (pair,) = compiled._pairs.values()
    bodies = compiled.trace.shared.bodies
    assert len(pair.again) == 1  # the second derivative asked for one of the groups
    seen = len(bodies)
    for g in range(len(pair.joint.groups)):
        pair._again(g)
    assert len(bodies) == seen > 0  # what the others share with it was not read again


def test_gradients_of_outputs_with_sources_of_their_own_are_traced_once():
    forward, variables = model()
    sharded = parallel(forward)
    gradients(sharded, rows(), variables)
    compiled = sharded._get(sharded._flatten((rows(),), {})[1])
    seeds = [op for op in compiled.trace.graph.get_operations() if op.name.startswith("graphsplit_seed")]
    assert len(seeds) == 2  # one for each output


def test_constants_that_wait_for_a_gradient_are_in_one_part():
    def f(x):
        return tf.image.ssim(x, tf.sin(x), 1.0, filter_size=3)

    x = tf.random.stateless_normal((6, 6, 3), [1, 2])
    parallel, found = gs.parallelize(f, devices=1), []
    for function in (tf.function(f), parallel):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        found.append(tape.gradient(y, x))
    assert_close(found[1], found[0])


def test_a_second_derivative_never_reads_what_was_changed_since():
    w = tf.Variable([2.0, 3.0])

    def f(x):
        y = tf.reduce_sum(x * x * w, 1)
        w.assign_add([1.0, 1.0])
        return y

    parallel, x = gs.parallelize(f, devices=2), tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(parallel(x) ** 2)
        with pytest.raises(
            gs.errors.UnsupportedError, match="its value depends on variables that it changes while it runs"
        ):
            inner.gradient(loss, x)


# Variables that are changed between a call and its gradients


LAYOUTS = ["home", "replicated", "sharded"]


def laid_out(layout: str) -> tuple[Callable[[tf.Tensor], tf.Tensor], tf.Variable]:
    w = tf.Variable(rows(6, 6) / 3)
    gs.set_variable_layout(w, layout, devices=3)
    return lambda q: tf.tanh(q @ w) @ tf.transpose(w) + tf.gather(w, [1, 2, 3])[0], w


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "in tf.function"])
def test_three_derivatives_where_the_function_was_called(layout: str, graph: bool):
    forward, w = laid_out(layout)
    x, start = rows(7, 6), tf.convert_to_tensor(w)

    def derivatives(fn):
        with tf.GradientTape() as outermost:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_sum(fn(x) ** 2)
                w.assign(w * 2 + 1)
                first = tf.convert_to_tensor(inner.gradient(loss, w))
                penalty = tf.reduce_sum(first**2)
            w.assign(w - 3)
            second = tf.convert_to_tensor(outer.gradient(penalty, w))
            total = tf.reduce_sum(second**2)
        return loss, first, second, tf.convert_to_tensor(outermost.gradient(total, w))

    found = []
    for fn in (forward, parallel(forward)):
        w.assign(start)
        found.append((tf.function(derivatives) if graph else derivatives)(fn))
    assert_close(found[1], found[0], tolerance=1e-11)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("then", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives_across_a_change_of_layout(layout: str, then: str):
    forward, w = laid_out(layout)
    x, found = rows(7, 6), []
    for fn in (forward, parallel(forward)):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = tf.reduce_sum(fn(x) ** 2)
            gs.set_variable_layout(w, then, devices=3)
            penalty = tf.reduce_sum(tf.convert_to_tensor(inner.gradient(loss, w)) ** 2)
        found.append((penalty, tf.convert_to_tensor(outer.gradient(penalty, w))))
        gs.set_variable_layout(w, layout, devices=3)
    assert_close(found[1], found[0], tolerance=1e-11)


def test_derivatives_from_outside_of_a_function_that_changes_its_variable():
    forward, w = laid_out("home")
    x, start, found = rows(7, 6), tf.convert_to_tensor(w), []
    for fn in (forward, parallel(forward)):

        @tf.function
        def changing(fn=fn):
            loss = tf.reduce_sum(fn(x) ** 2)
            w.assign(w * 2 + 1)
            return loss

        w.assign(start)
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                loss = changing()
            first = tf.convert_to_tensor(inner.gradient(loss, w))
            penalty = tf.reduce_sum(first**2)
        found.append((loss, first, tf.convert_to_tensor(outer.gradient(penalty, w))))
    assert_close(found[1], found[0], tolerance=1e-11)


def test_graph_gradients_of_a_variable_that_was_changed_since():
    forward, w = laid_out("home")
    x, start, found = rows(7, 6), tf.convert_to_tensor(w), []
    for fn in (forward, parallel(forward)):

        @tf.function
        def slope(fn=fn):
            loss = tf.reduce_sum(fn(x) ** 2)
            w.assign(w * 2 + 1)
            return tf.convert_to_tensor(tf.gradients(loss, [w.handle])[0])

        w.assign(start)
        found.append(slope())
    assert_close(found[1], found[0], tolerance=1e-11)


def test_a_tape_that_begins_after_the_call_gets_no_second_derivative_of_other_values():
    forward, w = laid_out("home")
    sharded, x, start, found = parallel(forward), rows(7, 6), tf.convert_to_tensor(w), []
    for fn in (forward, sharded):
        w.assign(start)
        with tf.GradientTape() as inner:
            inner.watch(x)
            loss = tf.reduce_sum(fn(x) ** 2)
        w.assign(w * 2 + 1)
        with tf.GradientTape() as outer:
            outer.watch(x)
            found.append(inner.gradient(loss, x))
            penalty = tf.reduce_sum(found[-1] ** 2)
        if fn is sharded:
            with pytest.raises(gs.errors.UnsupportedError, match="Begin the outer tape before the call"):
                outer.gradient(penalty, x)
    assert_close(found[1], found[0], tolerance=1e-11)


# Gradients of gradients that are taken in loops, branches, vectorized maps and functions


def in_a_branch(tape: tf.GradientTape, loss: tf.Tensor, w: tf.Variable) -> tf.Tensor:
    return tf.cond(loss > 0, lambda: tf.convert_to_tensor(tape.gradient(loss, w)), lambda: tf.zeros_like(w))


def jacobian(tape: tf.GradientTape, loss: tf.Tensor, w: tf.Variable, vectorized: bool) -> tf.Tensor:
    return tape.jacobian(loss, w, experimental_use_pfor=vectorized)


PLACES: dict[str, Callable[[tf.GradientTape, tf.Tensor, tf.Variable], tf.Tensor]] = {
    "a branch": in_a_branch,
    "a loop": partial(jacobian, vectorized=False),
    "a vectorized map": partial(jacobian, vectorized=True),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["home", "replicated"])
@pytest.mark.parametrize("place", PLACES)
def test_a_gradient_that_is_taken_elsewhere_than_the_call(place: str, layout: str):
    """In a graph, where variables that hold what was kept are made outside of what cannot make any."""
    forward, w = laid_out(layout)
    x, start, found = rows(7, 6), tf.convert_to_tensor(w), []
    for fn in (forward, parallel(forward)):

        @tf.function(autograph=False)
        def derivatives(fn=fn):
            with tf.GradientTape(persistent=True) as outer:
                with tf.GradientTape(persistent=True) as inner:
                    y = fn(x)
                    loss = tf.reduce_sum(y**2) if place == "a branch" else tf.reduce_sum(y**2, 0)[:2]
                w.assign(w * 2 + 1)
                first = PLACES[place](inner, loss, w)
                penalty = tf.reduce_sum(first**2)
            return first, tf.convert_to_tensor(outer.gradient(penalty, w))

        w.assign(start)
        found.append(derivatives())
    assert_close(found[1], found[0], tolerance=1e-11)


@pytest.mark.long
@pytest.mark.parametrize("vectorized", [False, True])
def test_a_jacobian_between_two_tapes(vectorized: bool):
    forward, w = laid_out("home")
    x, start, found = rows(7, 6), tf.convert_to_tensor(w), []
    for fn in (forward, parallel(forward)):
        w.assign(start)
        with tf.GradientTape() as outer:
            with tf.GradientTape(persistent=True) as inner:
                totals = tf.reduce_sum(fn(x) ** 2, 0)
            w.assign(w * 2 + 1)
            first = inner.jacobian(totals, w, experimental_use_pfor=vectorized)
            penalty = tf.reduce_sum(first**2)
        found.append((first, tf.convert_to_tensor(outer.gradient(penalty, w))))
    assert_close(found[1], found[0], tolerance=1e-11)


def repeated(fn: Callable[[tf.Tensor], tf.Tensor], x: tf.Tensor) -> tf.Tensor:
    return tf.while_loop(lambda i, _: i < 2, lambda i, y: (i + 1, fn(y)), (0, x))[1]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_second_derivatives_of_a_loop_of_calls(layout: str):
    """TensorFlow makes functions of a loop to differentiate it, which capture nothing once they are made."""
    _, w = laid_out(layout)
    x, found = rows(7, 6), []
    for fn in (lambda q: tf.tanh(q @ w), parallel(lambda q: tf.tanh(q @ w))):

        @tf.function(autograph=False)
        def derivatives(fn=fn):
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = tf.reduce_sum(repeated(fn, x) ** 2)
                first = tf.convert_to_tensor(inner.gradient(loss, w))
                penalty = tf.reduce_sum(first**2)
            return first, tf.convert_to_tensor(outer.gradient(penalty, w))

        found.append(derivatives())
    assert_close(found[1], found[0], tolerance=1e-11)


def test_a_value_is_kept_before_the_variable_changes_in_a_function_around():
    """TensorFlow puts the inner function's operations among the outer one's, and orders reads that somebody reads."""
    w = tf.Variable(rows(6, 6) / 3)
    x, start, found = rows(7, 6), tf.convert_to_tensor(w), []
    for fn in (lambda q: tf.tanh(q @ w) * 2, parallel(lambda q: tf.tanh(q @ w) * 2)):
        inner_function = tf.function(lambda q, fn=fn: fn(q) * 2, autograph=False)

        @tf.function(autograph=False)
        def derivatives(inner_function=inner_function):
            with tf.GradientTape(persistent=True) as outer:
                with tf.GradientTape(persistent=True) as inner:
                    loss = tf.reduce_sum(inner_function(x) ** 2)
                w.assign(2 * w + 1)
                penalty = tf.reduce_sum(tf.convert_to_tensor(inner.gradient(loss, w)) ** 2)
            return loss, penalty, tf.convert_to_tensor(outer.gradient(penalty, w))

        w.assign(start)
        found.append(derivatives())
    assert_close(found[1], found[0], tolerance=1e-11)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("graph", [False, True], ids=["eager", "in tf.function"])
def test_a_variable_that_functions_inside_read_by_its_handle(layout: str, graph: bool):
    """Each function around asks for the handle again when it is called, and has to know what it is the handle of."""
    _, w = laid_out(layout)
    x = rows(7, 6)

    @tf.function(autograph=False)
    def innermost(q):
        return tf.tanh(q @ tf.raw_ops.ReadVariableOp(resource=w.handle, dtype=w.dtype))

    forward = tf.function(lambda q: innermost(q) * 2, autograph=False)
    sharded = parallel(forward)

    def derivatives(fn):
        with tf.GradientTape() as outer:
            outer.watch(w)
            with tf.GradientTape() as inner:
                inner.watch(w)
                loss = tf.reduce_sum(fn(x) ** 2)
            first = tf.convert_to_tensor(inner.gradient(loss, w))
            penalty = tf.reduce_sum(first**2)
        return first, tf.convert_to_tensor(outer.gradient(penalty, w))

    actual, expected = [(tf.function(derivatives) if graph else derivatives)(fn) for fn in (sharded, forward)]
    assert_close(actual, expected, tolerance=1e-11)
    assert "MatMul" in [op.type for op in sharded.gradient_plan(x).sharded_ops]


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eager_calls_that_functions_differentiate(layout: str):
    """A vectorized Jacobian is such a function. What it plans is used again in eager code."""
    forward, w = laid_out(layout)
    x, start = rows(7, 6), tf.convert_to_tensor(w)

    def jacobians(fn):
        w.assign(start)
        for vectorized in (True, False):
            with tf.GradientTape(persistent=True) as outer:
                with tf.GradientTape(persistent=True) as inner:
                    totals = tf.reduce_sum(fn(x), 0)[:2]
                w.assign(w * 2 + 1)
                first = inner.jacobian(totals, w, experimental_use_pfor=vectorized)
                parts = tf.reduce_sum(first**2, [1, 2])
            yield first
            yield outer.jacobian(parts, w, experimental_use_pfor=vectorized)
            yield tf.convert_to_tensor(tf.function(partial(inner.gradient, totals, w), autograph=False)())
            w.assign(w / 4)

    sharded = parallel(forward)
    expected = list(jacobians(forward))
    assert_close(list(jacobians(sharded)), expected, tolerance=1e-11)
    assert "MatMul" in [op.type for op in sharded.gradient_plan(x).sharded_ops]


@pytest.mark.long
def test_what_a_vectorized_jacobian_plans_captures_the_variables_themselves():
    forward, w = laid_out("sharded")
    sharded = parallel(forward)
    with tf.GradientTape(persistent=True) as outer:
        with tf.GradientTape(persistent=True) as inner:
            totals = tf.reduce_sum(sharded(rows(7, 6)), 0)[:2]
        first = inner.jacobian(totals, w)
    outer.gradient(first, w)
    own = parts_of_variable(w).raw_handle
    planned = [kept for kept in gc.get_objects() if isinstance(kept, PlannedFunction) and "gradient" in kept.name]
    # (not what stood for them in the graph in which it was planned)
    assert any(capture is own for single in planned for capture in single.trace.captures)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_through_a_vectorized_map_in_a_graph(layout: str):
    forward, w = laid_out(layout)
    x = rows(7, 6)

    def derivatives(fn):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.vectorized_map(lambda row: fn(row[None])[0], x) ** 2)
            by_w, by_x = inner.gradient(loss, [w, x])
            penalty = tf.reduce_sum(tf.convert_to_tensor(by_w) ** 2)
        return tf.convert_to_tensor(by_w), by_x, tf.convert_to_tensor(outer.gradient(penalty, w))

    actual, expected = [tf.function(derivatives, autograph=False)(fn) for fn in (parallel(forward), forward)]
    assert_close(actual, expected, tolerance=1e-11)


AROUND = {"eager": lambda f: f, "in a function": lambda f: tf.function(f, autograph=False)}


@pytest.mark.long
@pytest.mark.parametrize("place", AROUND)
@pytest.mark.parametrize(
    "layout", [pytest.param(one, marks=[] if one == "home" else [pytest.mark.long]) for one in LAYOUTS]
)
def test_vectorized_jacobians_of_custom_gradients_between_two_tapes(layout: str, place: str):
    """TensorFlow writes calls anew there, operation by operation, which do not say what their gradients are."""
    _, w = laid_out(layout)
    x = rows(7, 6)

    @tf.custom_gradient
    def own(y):
        value = tf.tanh(y)
        return value, lambda dy: 1.5 * dy * (1 - value**2)

    def forward(x):
        return own(x @ w)

    def derivatives(fn):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                totals = tf.reduce_sum(fn(x) ** 2, 0)[:2]
            penalty = tf.reduce_sum(inner.jacobian(totals, x) ** 2)
        return [penalty, *map(tf.convert_to_tensor, outer.gradient(penalty, [w, x]))]

    expected = derivatives(forward)
    around = [tf.function(parallel(forward), autograph=False)] if layout == "home" else []
    for sharded in (parallel(forward), *around):
        assert_close(AROUND[place](partial(derivatives, sharded))(), expected, tolerance=1e-11)
    assert "MatMul" in [op.type for op in parallel(forward).gradient_plan(x).sharded_ops]


@pytest.mark.long
def test_a_vectorized_jacobian_of_a_vectorized_jacobian_of_a_custom_gradient():
    w, _ = weights()
    x = rows()

    @tf.custom_gradient
    def own(y, z):
        value = tf.sin(y)
        return (value, 2 * z), lambda dy, dz: (dy * tf.cos(y) * 1.5, 3 * dz)

    def forward(x):
        value, shift = own(x @ w, tf.ones((3,), DOUBLE))
        return value * shift

    def derivatives(fn):
        with tf.GradientTape() as third:
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    totals = tf.reduce_sum(fn(x) ** 2, 0)
                parts = tf.reduce_sum(inner.jacobian(totals, w) ** 2, 0)
            second = outer.jacobian(parts, w)
            total = tf.reduce_sum(second**2)
        return second, tf.convert_to_tensor(third.gradient(total, w))

    assert_close(derivatives(parallel(forward)), derivatives(forward), tolerance=1e-11)


@pytest.mark.parametrize("layout", ["home", "replicated"])
def test_what_gradients_read_by_themselves_they_read_when_they_run(layout: str):
    """So do recomputed gradients, and a `tf.custom_gradient` whose gradient reads a variable: as on one device."""
    _, w = laid_out(layout)
    scale = tf.Variable(2.0, dtype=DOUBLE)
    x, start = rows(7, 6), tf.convert_to_tensor(w)
    block = tf.recompute_grad(lambda y: tf.tanh(y @ w))

    @tf.custom_gradient
    def scaled(y):
        return 2 * y, lambda dy, variables=None: (scale * dy, [None] * len(variables or ()))

    def forward(x):
        return tf.reduce_sum(scaled(block(x)) ** 2)

    def derivatives(fn):
        w.assign(start)
        scale.assign(2.0)
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = fn(x)
        before = tape.gradient(loss, [w, x])
        w.assign(w * 2 + 1)
        scale.assign(3.0)
        return [loss, *before, *tape.gradient(loss, [w, x])]

    expected, sharded = derivatives(forward), parallel(forward)
    assert_close(derivatives(sharded), expected, tolerance=1e-11)
    if layout == "home":
        assert_close(derivatives(tf.function(sharded, autograph=False)), expected, tolerance=1e-11)
    assert "MatMul" in [op.type for op in sharded.gradient_plan(x).sharded_ops]


def test_what_a_gradient_captures_is_by_no_other_source():
    """An eager tensor that only a gradient captures stands before what functions ask for at each call."""
    forward, w = laid_out("replicated")
    factor = tf.constant(1.5, DOUBLE)

    @tf.custom_gradient
    def own(y):
        return tf.sin(y), lambda dy: factor * dy * tf.cos(y)

    def derivatives(fn):
        x = rows(7, 6)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(fn(x) ** 2)
        found = [tape.gradient(loss, w)]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            loss = tf.reduce_sum(fn(x) ** 2)
        return [*found, *tape.gradient(loss, [x, w])]

    def whole(x):
        return own(forward(x))

    assert_close(
        [*map(tf.convert_to_tensor, derivatives(parallel(whole)))],
        [*map(tf.convert_to_tensor, derivatives(whole))],
        tolerance=1e-11,
    )
