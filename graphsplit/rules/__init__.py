"""Op rules, one module per family. Importing this package registers them all."""

from graphsplit.rules import (
    contractions,
    elementwise,
    gathers,
    images,
    lists,
    movers,
    random,
    reductions,
    reshapes,
    rowwise,
    strings,
)
from graphsplit.rules.registry import (
    Answer,
    Declined,
    Sharded,
    answer,
    answer_for_output,
    rule_of,
    ruled_types,
    stays_partial,
)

__all__ = [
    "Answer",
    "Declined",
    "Sharded",
    "answer",
    "answer_for_output",
    "contractions",
    "elementwise",
    "gathers",
    "images",
    "lists",
    "movers",
    "random",
    "reductions",
    "reshapes",
    "rowwise",
    "rule_of",
    "ruled_types",
    "stays_partial",
    "strings",
]
