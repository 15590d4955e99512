"""Every op rule, run sharded against unsharded; and the table is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.core.layouts import PARTIAL_SUM, Partial, Shard
from graphsplit.emission import emit
from graphsplit.planning.propagation import forward_propagation
from graphsplit.rules import answers, rule_of, ruled_types
from tests.helpers.law import assert_close
from tests.helpers.samples import sample
from tests.rule_cases import CASES, Case
from tests.rule_cases.table import first_of_each

RUNS = [(7, 4)]  # rows, devices: uneven shares
OTHER_RUNS = [(2, 2), (1, 1), (5, 3)]  # one row each among them
AXES = 2  # of each case, of those that are no batch; the others with the long tests
# They have tests of their own, `test_recurrent_kernels.py`: the table's cases run.
ONLY_PLANNED = {"Switch", "Merge"}  # which planning writes, and no function: `test_sides_of_branches.py` tries them
WITHOUT_CPU_KERNEL = {f"CudnnRNN{direction}{version}" for direction in ("", "Backprop") for version in ("", "V2", "V3")}
WHOLE = [case for case in CASES if not case.partial]
# Each op in each way in which its rule may answer: on shards, in parts of a sum, at home.
BY_DEFAULT = sample({case.name: {"way": f"{case.op_type} {case.partial} {case.at_home}"} for case in CASES}, 560)


def made_arguments(case: Case) -> list[np.ndarray]:
    return [argument.make(np.random.default_rng(0), 3) for argument in case.arguments]


def other_axes(case: Case) -> list[tuple[int, int]]:
    """Return the axes, each with its argument's position, that could be split and are not those of the rows."""
    sizes = [value.shape for value in made_arguments(case)]
    axes = [(i, axis) for i, shape in enumerate(sizes) for axis, size in enumerate(shape) if size > 1]
    return [(i, axis) for i, axis in axes if axis != case.arguments[i].axis]


def summable(case: Case) -> list[int]:
    """Return the positions of the arguments that can be sums."""
    return [i for i, value in enumerate(made_arguments(case)) if value.dtype.kind in "fc"]


@pytest.fixture(autouse=True)
def partial_sums_are_kept_as_in_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put reductions off wherever a rule says that its op is linear, also where it would not pay: is it true?"""
    monkeypatch.setattr(answers, "_pays", lambda op, partial: True)
    monkeypatch.setattr(forward_propagation, "forks", lambda *_, **__: set())


def check_whole_plan(plan: gs.inspect.Plan) -> None:
    plan.check()
    plan.program.check()
    emit(plan).check()


def compare(actual: list[tf.Tensor], expected: list[tf.Tensor], what: str) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, what, 1e-12 if b.dtype == tf.complex128 else None)


def split_of(case: Case) -> dict[str, tuple[int | None, ...]]:
    return {"tensors": tuple(argument.axis for argument in case.arguments)}


@pytest.mark.sampled(quick=66)
@pytest.mark.parametrize(
    ("case", "runs"),
    [pytest.param(c, RUNS, id=c.name, marks=() if c.name in BY_DEFAULT else pytest.mark.long) for c in CASES]
    + [pytest.param(case, OTHER_RUNS, id=f"{case.name}, others", marks=pytest.mark.long) for case in CASES],
)
def test_sharded_equals_unsharded(case: Case, runs: list[tuple[int, int]]) -> None:
    for rows, devices in runs:
        arguments = case.make_arguments(rows)

        @tf.autograph.experimental.do_not_convert
        def function(*tensors, rows=rows):
            return case.run(rows, tensors)

        parallel = gs.parallelize(function, devices=devices, split=split_of(case))
        compare(parallel(*arguments), function(*arguments), f"{rows} rows on {devices} devices")
        plan = parallel.plan(*arguments)
        check_whole_plan(plan)
        if rows > 1:
            check_layouts(case, plan)


def check_layouts(case: Case, plan: gs.inspect.Plan) -> None:
    """The op runs on the shards, as the case expects, and what it expects at home is all that is there."""
    assert len(plan.unsharded_ops) == case.at_home, str(plan)
    pairs = zip(plan.program.ops, plan.steps, strict=True)
    steps = [step for op, step in pairs if op.type == case.op_type and (step.once or step.shards)]
    answers = [step.shards for step in steps if step.shards]
    if case.at_home and not answers:
        return
    assert answers, f"{case.op_type} is not sharded\n{plan}"
    if case.partial:
        operands = tuple(i for i, layout in enumerate(answers[-1].wants) if layout == PARTIAL_SUM)
        assert operands == case.partial
        assert isinstance(answers[-1].gives[0], Partial)
    elif case.demand:
        assert any(isinstance(layout, Shard) for layout in answers[-1].gives)
    else:
        assert any(isinstance(layout, Shard) for answer in answers for layout in (*answer.wants, *answer.gives))


# (what no rule answers for is made at home, whoever reads it; it may have no entries to be read in pieces)
@pytest.mark.sampled(35, quick=4)
@pytest.mark.parametrize(
    "case", first_of_each([c for c in WHOLE if c.answered or not c.at_home]), ids=lambda case: case.name
)
def test_made_in_pieces(case: Case) -> None:
    """The same op on constants: nothing of it is sharded until its result is read in pieces.

    In those that it has when its operands are sharded, it must be made in pieces itself. Where that result is a part
    of a sum, whole, or cut into blocks, no argument can ask for it: it is read along its first axis, if it has one.
    """
    rows, devices = 5, 3
    constants = [tensor.numpy() for tensor in case.make_arguments(rows)]
    layout = natural_layout(case, rows, devices)
    natural = layout is not None and layout.blocks == (1,)

    @tf.autograph.experimental.do_not_convert
    def function(factor: tf.Tensor) -> tf.Tensor:
        result = case.run(rows, [tf.constant(value) for value in constants])[0]
        return tf.where(factor > 0, result, tf.zeros_like(result))

    shape = case.run(rows, case.make_arguments(rows))[0].shape.as_list() or [rows]
    factor = tf.reshape(tf.range(np.prod(shape), dtype=tf.float64) % 3.0 - 1.0, shape)
    parallel = gs.parallelize(function, devices=devices, split={"factor": layout.axis if layout and natural else 0})
    compare([parallel(factor)], [function(factor)], case.name)
    plan = parallel.plan(factor)
    check_whole_plan(plan)
    assert "Greater" in {op.type for op in plan.sharded_ops}, str(plan)
    left = [op for op in plan.ops_once if op.type == case.op_type]
    assert not left or not natural or not case.answered, str(plan)


@pytest.mark.sampled(60, quick=7)
@pytest.mark.parametrize(
    ("case", "axes"),
    [pytest.param(case, other_axes(case)[:AXES], id=case.name) for case in WHOLE if other_axes(case)]
    + [
        pytest.param(case, other_axes(case)[AXES:], id=f"{case.name}, others", marks=pytest.mark.long)
        for case in WHOLE
        if other_axes(case)[AXES:]
    ],
)
def test_any_argument_split_along_any_axis(case: Case, axes: list[tuple[int, int]]) -> None:
    """Splitting what is no batch may be slow, but is never wrong: where an axis must be whole, the rule says so."""
    rows = 3
    arguments = case.make_arguments(rows)
    function = tf.autograph.experimental.do_not_convert(lambda *tensors: case.run(rows, tensors))
    expected = function(*arguments)
    for i, axis in axes:
        split = tuple(axis if j == i else None for j in range(len(arguments)))
        parallel = gs.parallelize(function, devices=2, split={"tensors": split})
        compare(parallel(*arguments), expected, f"argument {i} split along axis {axis}")
        parallel.plan(*arguments).check()


@pytest.mark.sampled(30, quick=3)
@pytest.mark.parametrize("case", first_of_each([case for case in WHOLE if summable(case)]), ids=lambda case: case.name)
def test_any_argument_as_a_partial_sum(case: Case) -> None:
    """Each argument in turn, and all at once, is a sum over devices: only what is linear may keep it in parts."""
    rows = 3
    whole = [tensor.numpy() for tensor in case.make_arguments(rows)]
    sums = summable(case)
    shares = np.array([2, 2, -2, -1])  # on three devices 4, -2 and -1: no sum of an odd function is right by chance
    for chosen in [*([i] for i in sums), *([sums] if len(sums) > 1 else [])]:

        @tf.autograph.experimental.do_not_convert
        def function(*tensors: tf.Tensor, chosen: list[int] = chosen) -> list[tf.Tensor]:
            return case.run(rows, [tf.reduce_sum(t, 0) if i in chosen else t for i, t in enumerate(tensors)])

        arguments = [
            tf.constant(np.multiply.outer(shares, value).astype(value.dtype) if i in chosen else value)
            for i, value in enumerate(whole)
        ]
        split = tuple(0 if i in chosen else None for i in range(len(whole)))
        parallel = gs.parallelize(function, devices=3, split={"tensors": split})
        compare(parallel(*arguments), function(*arguments), f"arguments {chosen} are partial sums")
        parallel.plan(*arguments).check()


def test_sums_of_integers_are_whole_before_they_are_cast() -> None:
    """Their parts do not overflow where their sum does."""
    large = tf.constant([[2**30]] * 4, tf.int32)

    def function(x: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.reduce_sum(x, 0), tf.float64)

    np.testing.assert_array_equal(gs.parallelize(function, devices=4)(large), function(large))


def natural_layout(case: Case, rows: int, devices: int) -> Shard | None:
    """Return the layout in which the case's op yields its first result when its operands are sharded."""
    function = tf.autograph.experimental.do_not_convert(lambda *tensors: case.run(rows, tensors))
    plan = gs.parallelize(function, devices=devices, split=split_of(case)).plan(*case.make_arguments(rows))
    pairs = zip(plan.program.ops, plan.steps, strict=True)
    answers = [step.shards for op, step in pairs if op.type == case.op_type and step.shards]
    layout = answers[-1].gives[0] if answers else None
    return layout if isinstance(layout, Shard) else None


def missing_cases(op_types: Iterable[str], cases: Sequence[Case]) -> list[str]:
    """Return what the table lacks: op types without a case, and ways of keeping a partial sum without one."""
    kept: dict[str, set[int]] = {op_type: set() for op_type in op_types}
    for case in cases:
        kept.get(case.op_type, set()).update(case.partial)
    missing = sorted(set(op_types) - {case.op_type for case in cases})
    for op_type in sorted(set(op_types) - set(missing)):
        rule = rule_of(op_type)
        assert rule is not None
        missing += [f"{op_type}, partial operand {i}" for i in rule.linear if i not in kept[op_type]]
        if rule.keeps_partial and not kept[op_type]:
            missing.append(f"{op_type}, partial")
    return missing


@pytest.mark.sampled(quick="all")
def test_every_rule_has_cases() -> None:
    assert missing_cases(ruled_types() - WITHOUT_CPU_KERNEL - ONLY_PLANNED, CASES) == []


def test_every_case_has_a_rule() -> None:
    assert {case.op_type for case in CASES} <= ruled_types()


@pytest.mark.sampled(quick="all")
@pytest.mark.parametrize(
    ("left_out", "missing"),
    [
        (lambda case: case.op_type == "Softmax", ["Softmax"]),
        (lambda case: case.op_type == "MatMul" and 1 in case.partial, ["MatMul, partial operand 1"]),
        (lambda case: case.op_type == "Pack" and case.partial, ["Pack, partial"]),
    ],
)
def test_coverage_check_can_fail(left_out: Callable[[Case], bool], missing: list[str]) -> None:
    found = missing_cases(ruled_types(), [case for case in CASES if not left_out(case)])
    assert set(found) - set(missing_cases(ruled_types(), CASES)) == set(missing)
