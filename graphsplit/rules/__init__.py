"""Op rules, one module per family. Importing this package registers them all."""

from graphsplit.rules.answers import answer, answer_for_output, partial_operands, stays_partial
from graphsplit.rules.factors import Declined
from graphsplit.rules.families import (
    contractions,
    elementwise,
    gathers,
    images,
    joins,
    lists,
    movers,
    random,
    recurrent,
    reductions,
    reshapes,
    rowwise,
    scatters,
    strings,
    whole,
)
from graphsplit.rules.registry import Answer, Sharded, rule_of, ruled_types

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
    "joins",
    "lists",
    "movers",
    "partial_operands",
    "random",
    "recurrent",
    "reductions",
    "reshapes",
    "rowwise",
    "rule_of",
    "ruled_types",
    "scatters",
    "stays_partial",
    "strings",
    "whole",
]
