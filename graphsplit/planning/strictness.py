"""Strictness: refusing a plan that leaves work on the batch at home."""

from __future__ import annotations

from graphsplit.core.errors import StrictError, bullet_list
from graphsplit.planning.decisions import Decisions
from graphsplit.planning.plan_text import cause_text
from graphsplit.planning.shares import shares_of

_LARGEST_SHARE = 0.01  # of all FLOPs, that `strict=True` leaves to what follows from rows born whole
_MOST_CAUSES = 6


def check_strict(plan: Decisions, strict: bool | float) -> None:
    """Raise `StrictError` if more of the work on the batch runs at home than is allowed.

    Args:
      plan: the decisions.
      strict: nothing that reads rows of the shards, and of all floating-point operations at most a hundredth; or the
        largest share of these; False for any.
    """
    if strict is False:
        return
    if strict is True and plan.stayed_home:
        raise StrictError(_stayed_message(plan))
    shares, largest = shares_of(plan), _LARGEST_SHARE if strict is True else strict
    if shares.at_home > largest:
        raise StrictError(
            f"strict={strict}, but {100 * shares.at_home:.2g} % of the floating-point operations work on the batch and "
            f"would run at home, more than {100 * largest:.2g} %:\n"
            f"{bullet_list([cause_text(plan, cause, shares) for cause in shares.causes[:_MOST_CAUSES]])}\n"
            "Rewrite what comes first row by row, drop strict, or give the share that may stay: strict=0.1."
        )


def _stayed_message(plan: Decisions) -> str:
    lines = []
    for op, reason in plan.stayed_home:
        where = plan.program.locate(op.name)
        where = f" at {where}" if where else ""
        lines.append(f"{op.type} {op.name!r}{where}: {plan.gathered_text(op)} gathered; {reason}")
    return (
        "strict=True, but these operations carry rows of the batch and would run at home:\n"
        f"{bullet_list(lines)}\n"
        "Rewrite them row by row, keep their argument whole with split={...: None}, or drop strict=True."
    )
