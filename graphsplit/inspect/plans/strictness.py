"""Why `strict=True` refuses a plan: what of the work on the batch would run on one device, and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.errors import bullet_list
from graphsplit.inspect.plans.advice import advice_on
from graphsplit.inspect.plans.plan_text import cause_text
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.work_shares import shares_of
from graphsplit.program.program import Op

_MOST_CAUSES = 6
_INSTEAD = "Or drop strict=True, and assert how evenly devices work: step.plan(x).balance > 0.9."


def why_refused(plan: Decisions, stayed: Sequence[tuple[Op, str]], largest_share: float, finished: bool) -> str:
    """Return the message.

    Args:
      plan: which.
      stayed: operations on the batch that run on one device, and why.
      largest_share: of all floating-point operations, that may follow from rows on one device.
      finished: whether it is of a finished model, for the advice.
    """
    if stayed:
        return _stayed_message(plan, stayed, finished)
    shares = shares_of(plan)
    worst = shares.causes[:_MOST_CAUSES]
    causes = [_with_advice(cause_text(plan, cause, shares), cause.reason, finished) for cause in worst]
    return (
        f"strict=True, but {100 * shares.run_once:.4g} % of the floating-point operations work on the batch and "
        f"would run on one device, more than {100 * largest_share:.2g} %:\n"
        f"{bullet_list(causes)}\n{_INSTEAD}"
    )


def _stayed_message(plan: Decisions, stayed: Sequence[tuple[Op, str]], finished: bool) -> str:
    lines = []
    for op, reason in stayed:
        where = plan.program.line_of(op)
        where = f" at {where}" if where else ""
        text = f"{op.label}{where}: {plan.gathered_text(op)} gathered; {reason}"
        lines.append(_with_advice(text, reason, finished))
    return (
        "strict=True, but these operations work on rows of the batch and would run on one device:\n"
        f"{bullet_list(lines)}\n"
        f"{_INSTEAD}"
    )


def _with_advice(text: str, reason: str, finished: bool) -> str:
    return f"{text}\n    -> {advice_on(reason, finished)}"
