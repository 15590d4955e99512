"""Errors of the user's own code, when it is traced and when it runs: their lines, devices and rows."""

from __future__ import annotations

import functools
import inspect
import os
import sysconfig
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.api.calls import parallel_function
from graphsplit.core.user_code import line_in_models
from graphsplit.tracing import trace

HERE = os.path.basename(__file__)
OURS = os.path.dirname(os.path.abspath(gs.__file__)) + os.sep
TABLE = tf.constant([[1.0], [2.0], [3.0], [4.0]])


def line_of(code: str, function: Callable[..., Any]) -> str:
    """Return `file:line` of the line of a function that holds some code."""
    lines, first = inspect.getsourcelines(function)
    return f"{HERE}:{first + next(i for i, line in enumerate(lines) if code in line)}"


def raised(action: Callable[[], Any], kind: type[Exception] = Exception) -> Exception:
    with pytest.raises(kind) as info:
        action()
    return info.value


def files(error: BaseException) -> list[str]:
    return [frame.filename for frame in traceback.extract_tb(error.__traceback__)]


def multiplied(x):
    return helper(x) + 1


def helper(x):
    return tf.matmul(x, tf.ones((5, 2)))


def looked_up(i):
    return tf.gather(TABLE, i) * 2


def test_a_shape_error_has_no_lines_of_ours():
    plain = raised(lambda: tf.function(multiplied)(tf.ones((8, 4))), ValueError)
    error = raised(lambda: gs.parallelize(multiplied, devices=4)(tf.ones((8, 4))), ValueError)
    assert str(error) == str(plain)
    assert len(traceback.format_exception(error)) <= len(traceback.format_exception(plain))
    assert [name for name in files(error) if name.startswith(OURS)] == [inspect.getfile(parallel_function)]
    assert "site-packages" not in "".join(files(error))


def test_lines_of_code_that_is_not_rewritten():
    @tf.autograph.experimental.do_not_convert
    def plain(x):
        return helper(x)

    error = raised(lambda: gs.parallelize(plain, devices=4)(tf.ones((8, 4))), ValueError)
    assert line_in_models(traceback.extract_tb(error.__traceback__)) == line_of("tf.matmul", helper)
    assert [os.path.basename(name) for name in files(error)[-3:]] == ["parallel_function.py", HERE, HERE]


def test_lines_of_a_package_that_has_the_model():
    """The innermost line outside of TensorFlow and Keras, with the package's folder; else all are the line of `fit`."""
    packages = sysconfig.get_path("purelib")
    frames = [
        ("/home/me/train.py", 8, "fit"),
        (f"{packages}/keras/src/trainers/trainer.py", 300, "fit"),
        (f"{packages}/deepchem/models/layers.py", 90, "call"),
        (f"{packages}/keras/src/ops/numpy.py", 12, "matmul"),
        (f"{packages}/tensorflow/python/framework/ops.py", 1200, "create"),
        (inspect.getfile(functools), 50, "wrapped"),
    ]
    stack = [traceback.FrameSummary(*frame) for frame in frames]
    assert line_in_models(stack) == "deepchem/models/layers.py:90"
    assert line_in_models([*stack[:2], *stack[3:]]) == "train.py:8"
    assert line_in_models([stack[1], *stack[3:]]) == ""


def test_names_of_operations_in_functions():
    """A plan calls them by the scopes that the code has, not by the calls that were inlined."""
    inner = tf.function(lambda x: tf.sort(tf.tanh(x), 0))

    @tf.function
    def outer(x):
        with tf.name_scope("ranking"):
            return inner(x)

    step = gs.parallelize(lambda x: outer(x) + 1.0, devices=2)
    [(op, _)] = step.plan(tf.ones((4, 3))).unsharded_ops
    assert op.name.startswith("PartitionedCall/ranking/PartitionedCall/")
    assert op.label == "TopKV2 'ranking/sort/TopKV2'"
    assert "    TopKV2 'ranking/sort/TopKV2': 48 B gathered; " in str(step.plan(tf.ones((4, 3))))
    with pytest.raises(gs.errors.StrictError, match=r"TopKV2 'ranking/sort/TopKV2' at test_failures\.py:"):
        gs.parallelize(lambda x: outer(x) + 1.0, devices=2, strict=True)(tf.ones((4, 3)))


@pytest.mark.parametrize("ask", ["plan", "variables", "graph_def", "placement", "gradient_plan"])
def test_questions_have_short_errors_too(ask: str):
    step = gs.parallelize(multiplied, devices=4)
    error = raised(lambda: getattr(step, ask)(tf.ones((8, 4))), ValueError)
    assert len([name for name in files(error) if name.startswith(OURS)]) == 1


def test_all_lines_are_there_for_those_who_ask():
    tf.debugging.disable_traceback_filtering()
    try:
        error = raised(lambda: gs.parallelize(multiplied, devices=4)(tf.ones((8, 4))), ValueError)
    finally:
        tf.debugging.enable_traceback_filtering()
    assert trace.__file__ in files(error)


def test_a_defect_of_ours_keeps_its_lines(monkeypatch: pytest.MonkeyPatch):
    broken = eval("lambda *_: {}['a defect']")  # no file, so nobody's
    monkeypatch.setattr(parallel_function, "trace_and_plan", broken)
    error = raised(lambda: gs.parallelize(looked_up, devices=4)(tf.constant([1, 2])), KeyError)
    assert sum(name == inspect.getfile(parallel_function) for name in files(error)) > 1


def test_what_was_chained_stays_chained():
    class MineError(Exception):
        pass

    @tf.autograph.experimental.do_not_convert
    def chained(x):
        raise MineError("outer") from ValueError("inner")

    error = raised(lambda: gs.parallelize(chained, devices=2)(tf.ones(2)), MineError)
    assert repr(error.__cause__) == "ValueError('inner')"


@pytest.mark.parametrize(
    ("options", "rows", "where"),
    [
        ({}, 8, "CPU:3, rows 6-7"),
        ({}, 7, "CPU:3, row 6"),
        ({"shares": [1, 1, 1, 5]}, 8, "CPU:3, rows 3-7"),
        ({"micro_batches": 2}, 8, "CPU:3, row 7"),
        ({"tuning": {"reduce_retracing": True}}, 8, "CPU:3, rows 6-7"),
        ({"tuning": {"reduce_retracing": True}, "shares": [1, 1, 1, 5]}, 8, "CPU:3, rows 3-7"),
        ({"tuning": {"reduce_retracing": True}, "micro_batches": 2}, 7, "CPU:3, row 6"),
    ],
)
def test_an_error_while_running_says_where(options: Any, rows: int, where: str):
    step = gs.parallelize(looked_up, devices=4, **options)
    if "tuning" in options:
        step(tf.zeros(3, tf.int32)), step(tf.zeros(5, tf.int32))
        assert step.plan(tf.zeros(rows, tf.int32)).rows == ()
    ids = tf.concat([tf.zeros(rows - 1, tf.int32), [100]], 0)
    error = raised(lambda: step(ids), tf.errors.InvalidArgumentError)
    own = 0 if where.split(", ")[1].startswith("row ") else 1 if "6-7" in where else 4
    assert str(error) == f"{where}, {line_of('gather', looked_up)}: indices[{own}] = 100 is not in [0, 4)"
    assert type(error.__cause__) is tf.errors.InvalidArgumentError
    assert error.__cause__.__traceback__ is None
    assert "{{node" in str(error.__cause__)
    assert len([name for name in files(error) if name.startswith(OURS)]) == 1


def test_a_failed_assertion_says_the_values():
    def positive(x):
        tf.debugging.assert_greater(x, 0, message="x must be positive")
        return x * 2

    x = tf.constant([[-1, 2], [3, 4], [5, 6]])
    error = raised(lambda: gs.parallelize(positive, devices=2)(x), tf.errors.InvalidArgumentError)
    assert str(error) == (
        f"CPU:0, {line_of('assert_greater', positive)}: assertion failed: [x must be positive] "
        "[Condition x > y did not hold element-wise:] [x (x:0) = ] [[-1 2][3...]...] "
        "[y (assert_greater/y:0) = ] [0]"
    )


def test_under_a_tape_forward_and_backward():
    table = tf.Variable(TABLE)

    def checked(x):
        @tf.custom_gradient
        def same(x):
            def back(d):
                with tf.control_dependencies([tf.debugging.assert_less(d, 5.0)]):
                    return tf.identity(d)

            return x, back

        return same(x) * 2

    step = gs.parallelize(lambda i: tf.gather(table, i), devices=4)
    with tf.GradientTape():
        error = raised(lambda: step(tf.constant([0, 1, 2, 9])), tf.errors.InvalidArgumentError)
    assert str(error).startswith("CPU:3, row 3, test_failures.py:")
    assert str(error).endswith("9 is not in [0, 4)")
    step, x = gs.parallelize(checked, devices=4), tf.ones(4)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = step(x) * [1.0, 1.0, 1.0, 9.0]
    error = raised(lambda: tape.gradient(y, x), tf.errors.InvalidArgumentError)
    assert str(error).startswith("CPU:0, test_failures.py:")  # an assertion on the whole batch
    assert "assertion failed: [Condition x < y" in str(error)
    assert "{{" not in str(error)


def test_in_a_loop_and_in_a_map():
    def looping(i):
        total = tf.zeros(tf.shape(i)[0])
        for _ in tf.range(3):
            total += tf.gather(TABLE[:, 0], i)
        return total

    bad = tf.constant([0, 0, 0, 100])
    error = raised(lambda: gs.parallelize(looping, devices=2)(bad), tf.errors.InvalidArgumentError)
    assert str(error) == f"{line_of('for _ in', test_in_a_loop_and_in_a_map)}: indices[1] = 100 is not in [0, 4)"
    step = gs.parallelize(looked_up, devices=4)
    found = step.map([tf.zeros(4, tf.int32), bad])
    assert next(found).shape == (4, 1)
    error = raised(lambda: next(found), tf.errors.InvalidArgumentError)
    assert str(error) == f"CPU:3, row 3, {line_of('gather', looked_up)}: indices[0] = 100 is not in [0, 4)"


def test_lines_are_the_users_and_not_the_standard_librarys():
    import contextlib

    @contextlib.contextmanager
    def sorting(x):
        yield tf.sort(x, 0)

    def within(x):
        with sorting(x) as found:
            return found * 2.0

    plan = gs.parallelize(tf.autograph.experimental.do_not_convert(within), devices=2).plan(tf.ones((4, 2)))
    sort = next(op for op in plan.program.ops if op.type == "TopKV2")
    assert plan.program.line_of(sort) == line_of("tf.sort", test_lines_are_the_users_and_not_the_standard_librarys)


def test_the_warning_of_retracing_points_at_the_call():
    step = gs.parallelize(lambda x: x * 2, devices=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(2, 10):
            step(tf.ones(n))
    (warning,) = [w for w in caught if w.category.__name__ == "RetracingWarning"]
    assert f"{os.path.basename(warning.filename)}:{warning.lineno}" == line_of(
        "step(tf.ones(n))", test_the_warning_of_retracing_points_at_the_call
    )
