"""Strictness: refusing a plan that leaves work on the batch at home."""

from __future__ import annotations

from collections.abc import Sequence, Set

from graphsplit.errors import StrictError, bullet_list
from graphsplit.planning.plan import Plan
from graphsplit.planning.shares import shares_of
from graphsplit.planning.text.advice import advice_on
from graphsplit.planning.text.plan_text import cause_text
from graphsplit.program.graph.walks import reached
from graphsplit.program.program import Op, Program

_LARGEST_SHARE = 0.01  # of all FLOPs, that `strict=True` leaves to what follows from rows born whole
_MOST_CAUSES = 6
_INSTEAD = "Or drop strict=True, and assert how much is sharded: step.plan(x).sharded_fraction > 0.9."
_OF_IDS = frozenset({"Unique", "UniqueV2", "UniqueWithCounts"})


def check_strict(plan: Plan, strict: bool, finished: bool = False) -> None:
    """Raise `StrictError` if more of the work on the batch runs at home than is allowed.

    Args:
      plan: the decisions.
      strict: whether to: nothing may that reads rows of the shards, but for their ids, and of all floating-point
        operations a hundredth.
      finished: whether it is of a finished model, for the advice.
    """
    if not strict:
        return
    stayed = [(op, reason) for op, reason in plan.stayed_home if not _finds_ids(op, plan.program)]
    if stayed:
        raise StrictError(_stayed_message(plan, stayed, finished))
    shares = shares_of(plan)
    if shares.at_home > _LARGEST_SHARE:
        worst = shares.causes[:_MOST_CAUSES]
        causes = [_with_advice(cause_text(plan, cause, shares), cause.reason, finished) for cause in worst]
        raise StrictError(
            f"strict=True, but {100 * shares.at_home:.4g} % of the floating-point operations work on the batch and "
            f"would run on one device, more than {100 * _LARGEST_SHARE:.2g} %:\n"
            f"{bullet_list(causes)}\n{_INSTEAD}"
        )


def _finds_ids(op: Op, program: Program) -> bool:
    """Return whether an operation at home reads integers, and finds which of them differ, for what changes variables.

    Which rows of a table a batch has, for the sparse gradient of an embedding, is known where all ids are; the values
    stay on the shards. What follows from it at home counts with everything else.
    """
    return op.type in _OF_IDS and op.out_dtypes[0].is_integer and op.index not in _behind_results(program)


def _behind_results(program: Program) -> Set[int]:
    """Return the operations from which something flows to what the function returns."""
    made_from = [[tensor.op for tensor in op.inputs] for op in program.ops]
    return reached([tensor.op for tensor in program.outputs], made_from.__getitem__)


def _stayed_message(plan: Plan, stayed: Sequence[tuple[Op, str]], finished: bool) -> str:
    lines = []
    for op, reason in stayed:
        where = plan.program.line_of(op)
        where = f" at {where}" if where else ""
        text = f"{op.type} {op.name!r}{where}: {plan.gathered_text(op)} gathered; {reason}"
        lines.append(_with_advice(text, reason, finished))
    return (
        "strict=True, but these operations work on rows of the batch and would run on one device:\n"
        f"{bullet_list(lines)}\n"
        f"{_INSTEAD}"
    )


def _with_advice(text: str, reason: str, finished: bool) -> str:
    return f"{text}\n    -> {advice_on(reason, finished)}"
