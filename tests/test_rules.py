"""Every op rule, run sharded against unsharded; and the table is complete."""

from __future__ import annotations

import pytest
import tensorflow as tf

import graphsplit as gs
from graphsplit.emission import emit
from graphsplit.layouts import PARTIAL_SUM, Partial, Shard
from tests.law import assert_close
from tests.rule_cases import CASES, Case

RUNS = [(1, 2), (2, 2), (3, 2), (4, 1), (5, 3), (7, 4)]  # rows, devices
FORWARD = [case for case in CASES if not case.demand]


def check_whole_plan(plan: gs.Plan) -> None:
    plan.check()
    plan.program.check()
    emit(plan).check()


def compare(actual: list[tf.Tensor], expected: list[tf.Tensor], what: str) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert_close(a, b, what, 1e-12 if b.dtype == tf.complex128 else None)


def split_of(case: Case) -> dict[str, tuple[int | None, ...]]:
    return {"tensors": tuple(argument.axis for argument in case.arguments)}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sharded_equals_unsharded(case: Case) -> None:
    for rows, devices in RUNS:
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


def check_layouts(case: Case, plan: gs.Plan) -> None:
    """The op runs on the shards, as the case expects, and what it expects at home is all that is there."""
    assert len(plan.stayed_home) == case.at_home, str(plan)
    pairs = zip(plan.program.ops, plan.steps, strict=True)
    steps = [step for op, step in pairs if op.type == case.op_type and (step.home or step.shards)]
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
