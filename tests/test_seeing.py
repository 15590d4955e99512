"""What notebooks and terminals show: HTML of plans, reports and timelines; where values lie; placements of graphs."""

from __future__ import annotations

import html
import re

import pytest
import tensorflow as tf

import graphsplit as gs


def test_micro_batches_are_no_devices(capsys: pytest.CaptureFixture[str]):
    step = gs.parallelize(lambda x: x * 2.0, devices=2, micro_batches=3)
    print(gs.visualize_layout(step, tf.ones([6, 3])))
    assert "x float32[6,3], sharded along axis 0 over 2 devices" in capsys.readouterr().out


def test_what_lies_nowhere():
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.visualize_layout(7)
    assert str(error.value) == (
        "visualize_layout takes a variable, a model or other object with variables, a tensor or a parallelized "
        "function, got 7."
    )
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.visualize_layout(tf.ones(3), tf.ones(3))
    assert str(error.value) == (
        "visualize_layout(x, ...): with more than one argument, the first must be a parallelized function, got "
        "EagerTensor."
    )


def test_html_of_plans_and_reports():
    step = gs.parallelize(lambda x: tf.reduce_sum(tf.tanh(x)), devices=2, split={"x": 0})
    x = tf.random.normal((4, 3))
    plan, report = step.plan(x), gs.verify(step, x)
    html = plan._repr_html_()
    assert html.startswith('<div style="font-weight:600">')
    assert "<summary>the whole plan</summary>" in html
    assert "shard 0: CPU:0, 2 rows" in html
    html = report._repr_html_()
    assert html.startswith('<div style="font-weight:600;color:#1a7f37">PASS: ')
    assert "2 devices against one, &lt;lambda&gt;:" in html
    placement = step.placement(x)
    assert "<iframe" in placement._repr_html_()


def test_prompts_and_failed_assertions_show_what_print_shows():
    square = gs.parallelize(lambda x: tf.square(x), devices=2)
    x = tf.ones((4, 2))
    machine = "8xA100-SXM4-80GB"
    for shown in (
        square.plan(x),
        gs.verify(square, x),
        gs.inspect.timeline(square, x),
        gs.predict(square, x, machine=machine),
        gs.scaling(square, x, machine=machine, devices=[1, 2]),
    ):
        assert repr(shown) == str(shown)
        assert html.escape(str(shown).splitlines()[0]) in shown._repr_html_()
    ops = {op.type: op for op in square.plan(x).program.ops}
    assert repr(ops["Square"]) == "<Square 'Square'>"


def test_headlines_of_predictions_have_numbers():
    square, x = gs.parallelize(lambda x: tf.square(x), devices=2), tf.TensorSpec((4096, 512))
    one = gs.predict(square, x, machine="8xA100-SXM4-80GB")
    shown = re.search(r">([^<]*)</div>", one._repr_html_())
    assert shown is not None
    assert re.search(r": [\d.]+ ms a step$", shown[1]), shown[1]
    found = gs.scaling(
        lambda x: x @ tf.ones((512, 4096)), x, machine="8xA100-SXM4-80GB", devices=[1, 2], kinds=["weak"]
    )
    shown = re.search(r">([^<]*)</div>", found._repr_html_())
    assert shown is not None
    assert re.search(r": \S+ rows/s on 2 devices, [\d.]+ times as many as on 1$", shown[1]), shown[1]


def test_html_of_a_report_that_does_not_pass():
    report = gs.inspect.Report((gs.inspect.Difference("<loss>", 1.0, 1.0, 0.1),), ("CPU:0", "CPU:1"))
    assert "color:#9a6700" in report._repr_html_()
    assert "&lt;loss&gt;" in report._repr_html_()


def test_placement_of_a_graph():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [4, 3], name="x")
        with tf.device("/gpu:1"):
            tf.tanh(x, name="y")
    placement = gs.placement(graph)
    assert placement.ops["y"].device == "/device:GPU:1"
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.placement(graph, tf.ones((4, 3)))
    assert str(error.value) == "A tf.Graph takes no arguments here: its placeholders stand for them."
    with pytest.raises(gs.errors.ArgumentError) as error:
        gs.placement(graph, actual=True)
    assert str(error.value) == "actual=True runs the function; a bare graph cannot be run. Give the function itself."
