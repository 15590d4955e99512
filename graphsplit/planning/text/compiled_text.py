"""What XLA compiles of a plan, in words."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from graphsplit.program.graph.compilability import why_not_compiled
from graphsplit.program.graph.inlining import is_compiled
from graphsplit.program.program import SIZES

if TYPE_CHECKING:
    from graphsplit.planning.plan import Plan

_NO_WORK = frozenset({"Placeholder", "Const", "NoOp", "ReadVariableOp", "Identity", SIZES})


def compiled_text(plan: Plan) -> list[str]:
    """Return what is compiled, what is not and why, and what unknown sizes cost; nothing unless XLA was asked for."""
    if not plan.jit_compile:
        return []
    kind = "GPU" if "GPU" in "".join((*plan.devices, plan.home)) else "CPU"
    functions = {function.signature.name: function for function in plan.program.library.function}
    ops = [op for op in (*plan.sharded_ops, *plan.home_ops) if op.type not in _NO_WORK and not is_compiled(op.node)]
    split = plan.turns_split
    left: Counter[tuple[str, str]] = Counter()
    for op in ops:
        if why := why_not_compiled(op.node, functions, kind):
            left[op.type, why] += 1
        elif op.index in split:
            left[op.type, "the devices exchange data in each of its turns"] += 1
    lines = [f"  compiled by XLA between moves: {len(ops) - left.total()} of {len(ops)} operations that compute"]
    lines += [f"    not compiled: {count} x {name}: {why}" for (name, why), count in left.most_common()]
    if plan.program.symbols:
        lines.append("    compiled again for each new size of a shard")
    return lines
