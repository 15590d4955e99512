"""What to do about work at home: one table for all reasons, one page, the same words wherever they are said."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.inspect.plans.advice import ADVICE, advice_on
from graphsplit.rules.families.whole import WHY
from graphsplit.rules.registry import rule_of, ruled_types
from tests.helpers.law import assert_close, check, rows

ROOT = Path(__file__).parent.parent
RAISED = {"Declined", "NotKnownError", "_NotByRowError"}
ASKED = {"axes_in", "known", "shape_operand"}  # (what of, with its verb: see `known`)


@functools.cache
def reasons() -> list[str]:
    """Return every reason that is written in rules and planning; what is filled in counts as `Op`."""
    found = [*WHY.values(), *[rule.why_whole for rule in map(rule_of, ruled_types()) if rule is not None]]
    for path in [*(ROOT / "graphsplit/rules").rglob("*.py"), *(ROOT / "graphsplit/planning").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) and node.args else ""
            if name in RAISED:
                found += [text for text in [_text(node.args[0])] if text not in ("", "Op")]
            elif name in ASKED and isinstance(node.args[-1], (ast.Constant, ast.JoinedStr)):
                found += [f"{text} not known when planning" for text in [_text(node.args[-1])] if " " in text]
    return sorted(set(found))


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return "Op"


def test_there_are_reasons():
    assert len(reasons()) >= 60
    assert "it needs all rows at once" in reasons()


@pytest.mark.parametrize("reason", reasons())
def test_every_reason_has_advice(reason: str):
    assert any(re.search(advice.reason, reason) for advice in ADVICE), reason


@pytest.mark.parametrize("advice", ADVICE, ids=lambda advice: advice.do)
def test_no_advice_is_idle(advice):
    known = [*reasons(), "rows are made in it, and too little work follows to split them"]
    assert any(advice_on(reason) is advice for reason in known)


def printing(x):
    tf.print(x)
    return tf.tanh(x)


DO = "move it into dataset.map, or out of the function"


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("a mean of integers rounds, and so does not follow from the means of the shards", "cast to floats first"),
        ("its equation takes a diagonal", "take the diagonal first, with tf.linalg.diag_part"),
    ],
)
def test_the_remedy_is_the_one_that_applies(reason: str, remedy: str):
    assert str(advice_on(reason)) == remedy


def test_lookups_without_unique_are_sharded_and_so_are_those_of_its_values():
    table, ids = rows(9, 4), tf.constant([[1, 2, 1], [5, 2, 5], [0, 8, 1]])

    def step(ids: tf.Tensor) -> tf.Tensor:
        values, places = tf.unique(tf.reshape(ids, [-1]))
        return tf.tanh(tf.gather(tf.gather(table, values), tf.reshape(places, tf.shape(ids))))

    assert "leave it out if it only saves lookups" in str(gs.parallelize(step, devices=2).plan(ids))
    values, places = tf.unique(tf.reshape(ids, [-1]))
    with_values = lambda values, places: tf.tanh(tf.gather(tf.gather(table, values), places))  # noqa: E731
    check(lambda ids: tf.tanh(tf.gather(table, ids)), ids, devices=2, sharded="GatherV2", strict=True)
    own = tf.reshape(places, ids.shape)
    check(with_values, values, own, devices=2, sharded="GatherV2", strict=True, split={"values": None})
    assert_close(with_values(values, own), step(ids))


def test_values_that_are_padded_make_one_signature():
    """As the advice has it: in each batch other ids are new, and another number of them."""
    table, ids = rows(9, 4), tf.constant([[1, 2, 1], [5, 2, 5], [0, 8, 1], [3, 3, 3]])
    step = gs.parallelize(
        lambda values, places: tf.tanh(tf.gather(tf.gather(table, values), places)), devices=2, split={"values": None}
    )

    def unique(batch: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values, places = tf.unique(tf.reshape(batch, [-1]))
        values = tf.pad(values, [[0, tf.size(batch) - tf.size(values)]])
        return tf.ensure_shape(values, [6]), tf.reshape(places, tf.shape(batch))

    dataset = tf.data.Dataset.from_tensor_slices(ids).batch(2, drop_remainder=True).map(unique)
    for result, batch in zip(step.map(dataset), (ids[:2], ids[2:]), strict=True):
        assert_close(result, tf.tanh(tf.gather(table, batch)))
    assert len(step._traces.planned) == 1


def test_the_same_words_everywhere():
    x = rows(4, 3)
    parallel = gs.parallelize(printing, devices=2)
    assert f"      -> {DO}" in str(parallel.plan(x)).splitlines()
    line = printing.__code__.co_firstlineno + 1
    with pytest.raises(gs.errors.StrictError) as error:
        gs.parallelize(printing, devices=2, strict=True).plan(x)
    assert str(error.value) == (
        "strict=True, but these operations work on rows of the batch and would run on one device:\n"
        f"  - StringFormat 'StringFormat' at test_advice.py:{line}: nothing gathered; no rule for StringFormat\n"
        f"    -> {DO}\n"
        "Or drop strict=True, and assert how evenly devices work: step.plan(x).balance > 0.9."
    )
    assert any(DO in warning for warning in parallel.placement(x).warnings)


@pytest.mark.long
def test_a_report_of_a_saved_model_says_it_too(tmp_path):
    module = tf.Module()
    module.serve = tf.function(
        lambda x: {"y": tf.unique(x).y, "z": tf.tanh(x)}, input_signature=[tf.TensorSpec([6], tf.float32, "x")]
    )
    tf.saved_model.save(module, str(tmp_path / "one"), signatures=module.serve)
    report = str(gs.serving.transpile_saved_model(tmp_path / "one", tmp_path / "two", 2))
    assert (
        "runs on one device: which entries are new depends on all rows; save the model without it, or call it before "
        "the request"
    ) in report


def counts(plan) -> list[int]:
    line = str(plan).splitlines()[1]
    return [int(number) for number in re.findall(r"(?:^|[:,]) +(\d+) ", line)]


@pytest.mark.parametrize("devices", [1, 3])
def test_the_numbers_of_a_plan_add_up(devices: int):
    weight = tf.Variable(rows(3, 2))

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.tanh(x @ weight) ** 2)
        weight.assign_sub(tape.gradient(loss, weight))
        return loss, tf.unique(tf.reshape(x, [-1])).y

    plan = gs.parallelize(step, devices=devices).plan(rows(7, 3))
    sent = re.findall(r", (\d+) B sent$", str(plan), re.MULTILINE)
    assert f", {sum(map(int, sent))} B sent a step; " in str(plan)
    total, *parts = counts(plan)
    assert total == sum(parts) == len({op.index for op in (*plan.ops_once, *plan.sharded_ops)})
