"""The conformance table of the op rules: for every registered op type, cases that run it sharded."""

from tests.rule_cases import (
    contractions,
    elementwise,
    images,
    lists,
    movers,
    picking,
    quantization,
    random,
    reductions,
    rowwise,
    scatters,
    special_functions,
    strings,
    warps,
    whole,
)
from tests.rule_cases.table import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "contractions",
    "elementwise",
    "images",
    "lists",
    "movers",
    "picking",
    "quantization",
    "random",
    "reductions",
    "rowwise",
    "scatters",
    "special_functions",
    "strings",
    "warps",
    "whole",
]
