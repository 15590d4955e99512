"""Op rules, one module per family. Importing this package registers them all.

What enters: an operation, and the layouts of what it reads. What leaves: how it runs on the shards (`Sharded`), or why
it cannot (`Declined`).
"""

from graphsplit.rules.answers import answer, answer_for_output, partial_operands
from graphsplit.rules.factors import Declined
from graphsplit.rules.families import (  # noqa: F401  # they register their rules
    contractions,
    elementwise,
    gathers,
    images,
    lists,
    movers,
    random,
    recurrent,
    reductions,
    reshapes,
    rowwise,
    scatters,
    whole,
)
from graphsplit.rules.registry import Answer, Sharded, rule_of, ruled_types

__all__ = [
    "Answer",
    "Declined",
    "Sharded",
    "answer",
    "answer_for_output",
    "partial_operands",
    "rule_of",
    "ruled_types",
]
