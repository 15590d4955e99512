"""Ops that need all rows at once, and why: no layout helps these."""

from __future__ import annotations

from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined
from graphsplit.rules.registry import register

_LABELS = "its labels are one sparse list of all rows"
_WORDS = "its words are one sparse list of all rows"
_FOUND = "how many entries it finds depends on all rows"
_NEW = "which entries are new depends on all rows"
_SEGMENTS = "how many segments there are depends on all rows"
_SUPPRESSED = "each box is compared with those chosen before it"
_SEED = "its numbers follow from a seed and the number of the row, and it cannot begin at a later row"

WHY = {
    "CTCBeamSearchDecoder": _WORDS,
    "CTCGreedyDecoder": _WORDS,
    "CTCLoss": _LABELS,
    "DynamicPartition": _FOUND,
    "NonMaxSuppressionV3": _SUPPRESSED,
    "NonMaxSuppressionV4": _SUPPRESSED,
    "SegmentMax": _SEGMENTS,
    "SegmentMean": _SEGMENTS,
    "SegmentMin": _SEGMENTS,
    "SegmentProd": _SEGMENTS,
    "SegmentSum": _SEGMENTS,
    "StatelessMultinomial": _SEED,
    "StatelessRandomBinomial": _SEED,
    "StatelessRandomPoisson": _SEED,
    "Unique": _NEW,
    "UniqueV2": _NEW,
    "UniqueWithCounts": _NEW,
    "Where": _FOUND,
}


@register(*WHY)
def needs_all_rows(op: Op) -> Declined:
    """It runs once."""
    return Declined(WHY[op.type])
