"""Threads: one parallelized function called, differentiated and updated by many at once."""

from __future__ import annotations

import gc
import itertools
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls import traces
from graphsplit.api.calls.traces import PerInstance
from graphsplit.core.garbage_collection import living_objects
from graphsplit.core.variables import running_calls
from graphsplit.workers import undo_log
from tests.helpers.law import assert_close

DOUBLE = tf.float64
THREADS = 8


def rows(count: int) -> tf.Tensor:
    return tf.random.stateless_normal((count, 3), [1, count], dtype=DOUBLE)


def at_once(work: Callable[[int], Any], threads: int = THREADS) -> list[Any]:
    """Return what `work(i)` returns in each thread; all start at the same moment."""
    barrier = threading.Barrier(threads)

    def run(i: int) -> Any:
        barrier.wait()
        return work(i)

    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(run, range(threads)))


def forward(w: tf.Variable) -> Callable[[tf.Tensor], Any]:
    return lambda x: {"y": tf.nn.softmax(x @ w), "loss": tf.reduce_mean((x @ w) ** 2)}


def gradients(fn: Callable[..., Any], x: tf.Tensor, w: tf.Variable) -> Any:
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        result = fn(x)
        total = tf.reduce_sum(result["y"] ** 3) + result["loss"]
    return tape.gradient(total, [x, w]), tape.gradient(result["loss"], [x, w])


def second(fn: Callable[..., Any], x: tf.Tensor, w: tf.Variable) -> Any:
    with tf.GradientTape() as outer:
        outer.watch(x)
        slope = gradients(fn, x, w)[0][0]
        value = tf.reduce_sum(slope**2)
    return outer.gradient(value, [x, w])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("again", range(4))
@pytest.mark.parametrize("derivative", [gradients, second])
def test_first_gradients(derivative: Callable[..., Any], again: int):
    w = tf.Variable(rows(3))
    parallel = gs.parallelize(forward(w), devices=2)
    x = rows(5)
    expected = derivative(forward(w), x, w)
    for found in at_once(lambda _: derivative(parallel, x, w), 4):
        assert_close(found, expected, tolerance=1e-11)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("reduce_retracing", [False, True])
def test_calls_and_gradients_of_same_and_different_shapes(reduce_retracing: bool):
    w = tf.Variable(rows(3))
    parallel = gs.parallelize(forward(w), devices=3, tuning={"reduce_retracing": reduce_retracing})
    inputs = [rows(2 + i // 2) for i in range(THREADS)]

    def work(i: int) -> Any:
        return [(parallel(inputs[i]), gradients(parallel, inputs[i], w)) for _ in range(3)]

    plain = tf.function(forward(w), reduce_retracing=True)
    for x, found in zip(inputs, at_once(work), strict=True):
        expected = (plain(x), gradients(plain, x, w))
        for each in found:
            assert_close(each, expected)
    assert len(parallel._traces.planned) <= 4


def test_traced_once_by_all_threads():
    traces = []

    def f(x):
        traces.append(threading.get_ident())
        return x * 2

    parallel = gs.parallelize(f, devices=2)
    for found in at_once(lambda _: parallel(rows(5))):
        assert_close(found, rows(5) * 2)
    assert len(traces) == 1


def test_updates_are_all_there():
    total, count = tf.Variable(0.0, dtype=DOUBLE), tf.Variable(0)

    @gs.parallelize(devices=2)
    def update(x):
        total.assign_add(tf.reduce_sum(x))
        return count.assign_add(1)

    x = tf.ones((5, 3), DOUBLE)
    numbers = [n for found in at_once(lambda _: [int(update(x)) for _ in range(5)]) for n in found]
    assert int(count) == 5 * THREADS
    assert float(total) == 15.0 * 5 * THREADS
    assert max(numbers) == 5 * THREADS


def test_methods_of_one_instance():
    traces = []

    class Model:
        def __init__(self):
            self.w = tf.Variable(rows(3))

        @gs.parallelize(devices=2)
        def __call__(self, x):
            traces.append(1)
            return x @ self.w

    model = Model()
    for found in at_once(lambda _: model(rows(5))):
        assert_close(found, rows(5) @ model.w)
    assert len(traces) == 1


@pytest.mark.long
def test_in_outer_functions():
    w = tf.Variable(rows(3))
    parallel = gs.parallelize(forward(w), devices=2)
    expected = [gradients(forward(w), rows(2 + i % 3), w) for i in range(THREADS)]

    def work(i: int) -> Any:
        return gradients(tf.function(lambda x: parallel(x), autograph=False), rows(2 + i % 3), w)

    assert_close(at_once(work), expected)


def test_everything_that_is_asked_of_a_function():
    w = tf.Variable(rows(3))
    parallel = gs.parallelize(forward(w), devices=2)
    x = rows(6)
    expected = forward(w)(x)
    ask: list[Callable[[], Any]] = [
        lambda: str(parallel.plan(x)),
        lambda: str(parallel.gradient_plan(x)),
        lambda: len(parallel.graph_def(x).node),
        lambda: len(parallel.placement(x).graph),
        lambda: [len(result["y"]) for result in parallel.map([x, x])],
        lambda: gs.verify(parallel, x).largest < 1e-9,
        lambda: len(parallel.variables(x)),
        lambda: assert_close(parallel(x), expected),
    ]
    one_after_the_other = [question() for question in ask]
    assert at_once(lambda i: ask[i](), len(ask)) == one_after_the_other
    fresh = parallel = gs.parallelize(forward(w), devices=2)
    assert at_once(lambda i: ask[i](), len(ask)) == one_after_the_other
    assert len(fresh._traces.planned) == 1


@pytest.mark.long
def test_instances_that_take_each_others_place():
    """The identity of an object that is gone may be that of the next one; each has a value of its own."""

    class Held:
        pass

    made = itertools.count()
    values = PerInstance(lambda: next(made))
    seen = set()
    for _ in range(50):
        held = Held()
        value = values.of(held, "method")
        assert values.of(held, "method") == value
        assert value not in seen
        seen.add(value)
        # as if another thread had found the entry of an object that was there before
        values._found[id(held)] = weakref.ref(Held()), -1
        assert values.of(held, "method") != -1
        del held
    gc.collect()
    assert not values._found


def test_sizes_of_calls_are_not_kept_for_ever(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(traces, "MOST_COVERED", 5)
    double = gs.parallelize(lambda x: 2 * x, devices=2, tuning={"reduce_retracing": True})
    for count in range(1, 40):
        assert double(tf.ones(count)).shape == (count,)
    assert len(double._traces.covered) <= 5
    assert len(double._traces.planned) <= 2


class NoCluster:
    """What an undo log asks of a cluster before anything runs on it."""

    connections = 0


def test_a_device_has_one_counter(monkeypatch: pytest.MonkeyPatch):
    """Two would count by themselves, and a call would be taken back by the wrong one."""
    variable, log = tf.Variable, undo_log.UndoLog(NoCluster())

    def slowly(*args: Any, **options: Any) -> tf.Variable:
        time.sleep(0.01)
        return variable(*args, **options)

    monkeypatch.setattr(undo_log.tf, "Variable", slowly)
    counter, *more = at_once(lambda _: log.counter("/device:CPU:0"))
    assert all(other is counter for other in more)


@pytest.mark.long
@pytest.mark.parametrize("under_a_tape", [False, True])
def test_layouts_change_while_others_call(under_a_tape: bool):
    """No step is lost or half done, and no value, whatever lies how by the time that a call runs."""
    w, total = tf.Variable(tf.ones((40, 40), DOUBLE)), tf.Variable(tf.zeros(64, DOUBLE))
    x, ended = tf.ones((8, 40), DOUBLE), threading.Event()

    @gs.parallelize(devices=2)
    def step(x):
        total.assign_add(tf.ones(64, DOUBLE))
        w.assign_add(tf.ones((40, 40), DOUBLE))
        return x @ (0.0 * w + 1.0)

    def call() -> int:
        for count in itertools.count():
            if ended.is_set():
                return count
            with tf.GradientTape() as tape:
                if under_a_tape:
                    tape.watch(x)
                y = step(x)
            for found in [y, tape.gradient(y, x)] if under_a_tape else [y]:
                assert_close(found, tf.fill((8, 40), tf.constant(40.0, DOUBLE)))
        raise AssertionError

    def work(i: int) -> int:
        try:
            if i:
                return call()
            for layout in ("sharded", "home", "replicated", "home", "host", "sharded"):
                gs.set_variable_layout([w, total], layout, devices=2)
                time.sleep(0.1)
            return 0
        finally:
            ended.set()

    counts = at_once(work, 3)
    gs.set_variable_layout([w, total], "home")
    assert_close(w.value(), tf.fill((40, 40), tf.constant(sum(counts) + 1.0, DOUBLE)))
    assert_close(total.value(), tf.fill((64,), tf.constant(float(sum(counts)), DOUBLE)))


def test_calls_of_several_threads_run_at_the_same_time():
    meet = threading.Barrier(2, timeout=60)
    w = tf.Variable(rows(3))
    gs.set_variable_layout(w, "sharded", devices=2)

    @gs.parallelize(devices=2)
    def f(x):
        tf.numpy_function(lambda: meet.wait() * 0.0, [], tf.float64)  # ends when the other call is there, too
        return x @ w

    f.plan(rows(5))
    for found in at_once(lambda _: f(rows(5)), 2):
        assert_close(found, rows(5) @ w)


def test_python_code_inside_of_a_call(monkeypatch: pytest.MonkeyPatch):
    """It may read variables and call functions; what would have to move a value that the call uses is an error."""
    monkeypatch.setattr(running_calls, "_PATIENCE_S", 0.2)
    w, other = tf.Variable(tf.ones((64, 64), DOUBLE)), tf.Variable(tf.ones((64, 64), DOUBLE))
    gs.set_variable_layout([w, other], "sharded", devices=2)
    inner = gs.parallelize(lambda x: tf.reduce_sum(x @ w), devices=2)
    inner(tf.ones((2, 64), DOUBLE))
    asked: dict[str, Callable[[], Any]] = {
        "numpy": lambda: w.numpy().sum(),
        "call": lambda: inner(tf.ones((2, 64), DOUBLE)),
        "other": lambda: tf.reduce_sum(other),
        "read": lambda: tf.reduce_sum(w),
        "layout": lambda: gs.set_variable_layout(w, "home"),
    }
    which = ["numpy"]

    @gs.parallelize(devices=2)
    def f(x):
        return tf.reduce_sum(x @ w) + tf.numpy_function(lambda: np.float64(asked[which[0]]()), [], tf.float64)

    x, before = tf.ones((5, 64), DOUBLE), w.numpy()
    for which[0] in ("numpy", "call", "other"):
        assert np.isfinite(float(f(x)))
    for which[0] in ("read", "layout"):
        with pytest.raises(tf.errors.OpError, match=r"would have to move while a call runs.*\.numpy\(\)"):
            f(x)
    np.testing.assert_array_equal(w.numpy(), before)


def test_what_other_threads_are_making_is_not_held():
    """Python refuses to resize a tuple that somebody else holds: `tuple(generator)` would raise a SystemError."""

    class Kind:
        pass

    kept, failed, ended = [Kind() for _ in range(3)], [], threading.Event()
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)

    def make() -> None:
        while not ended.is_set():
            try:
                assert len(tuple(k for k in range(2000))) == 2000
            except SystemError as error:
                failed.append(error)

    threads = [threading.Thread(target=make) for _ in range(2)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(3):
            found = living_objects(Kind)
            assert sorted(map(id, found)) == sorted(map(id, kept))
    finally:
        ended.set()
        sys.setswitchinterval(before)
        for thread in threads:
            thread.join()
    assert failed == []
