"""What to do about work that stays on one device: a sentence for each reason (docs/limits.md says more).

One table, which plans, `StrictError`, placements and reports of SavedModels share.
"""

from __future__ import annotations

import re
from typing import NamedTuple


class Advice(NamedTuple):
    """What to do.

    Attributes:
      reason: a pattern of the reasons for which it is meant.
      do: what to do, as part of a sentence.
      finished: what to do for a finished model, of which there is no code here, and no dataset; "" for the same.
    """

    reason: str
    do: str
    finished: str = ""

    def __str__(self) -> str:
        return self.do


ADVICE = (
    # (StringFormat: what tf.print prints)
    Advice(
        "side effects|no rule for StringFormat",
        "move it into dataset.map, or out of the function",
        "save the model without it",
    ),
    Advice(
        "its table lives|captures a table",
        "look it up in dataset.map",
        "look it up before the request, and save the model without it",
    ),
    Advice(
        "no rule for",
        "write it in operations that have a rule, or move it into dataset.map",
        "save the model with operations that have a rule",
    ),
    Advice(
        "entries are new",
        "leave it out if it only saves lookups, or call it in dataset.map, pad its values and pass them with "
        "split={...: None}",
        "save the model without it, or call it before the request",
    ),
    Advice("XLA compiles for sizes", "call with known sizes, or give jit_compile to parallelize instead"),
    Advice(
        "XLA compiles it as a whole|which XLA does",
        "take jit_compile=True off it and give that to parallelize",
    ),
    Advice(
        "picks rows by numbers|how many entries it finds",
        "keep all rows and give those that do not count a weight of 0, as tf.where does; rows that read others, as in "
        "a graph, need all",
        "nothing is to be done for a finished model",
    ),
    Advice("takes a diagonal", "take the diagonal first, with tf.linalg.diag_part"),
    Advice("names no axis", "name the axis"),
    Advice("other numbers of axes", "let both sides of the branch return tensors of as many axes"),
    Advice("kernels that cut and join", "cast it first to a type that TensorFlow cuts, int8 or float32"),
    Advice("before it is rounded", "keep the sum in the finer type"),
    Advice("of integers rounds|integers are summed", "cast to floats first"),
    Advice(
        "not Philox|numbers follow from a seed",
        "draw with tf.random.stateless_normal or stateless_uniform",
    ),
    Advice(
        "iterate once for each|the rows of one batch",
        "loop over all rows of one batch, as tf.map_fn does, or compute all rows at once without a loop",
    ),
    Advice(
        "depends on the rows before|iterations?\\b|branch|loop variable|the list |of a list in it|adds a list"
        "|list is (read|made) whole|in it[ :]|its value is .*, but it is read",
        "let each iteration keep rows apart, or compute all rows at once without a loop",
    ),
    Advice(
        "one list|padded to the longest|vector of examples|only equal once they are dense|sparse list",
        "parse and pad in dataset.map",
        "parse and pad before the request, and save the model without that",
    ),
    Advice(
        "rows are made in it|every device has",
        "make these rows in dataset.map, and pass them as an argument",
        "make these rows before the request, and save the model with them as an argument",
    ),
    Advice("not known|only known when it runs", "give it static shapes, as tf.ensure_shape does"),
    Advice(
        "all rows|whole batch|reads rows that are whole|chosen before it|several unrelated|changes the shape"
        "|sequences are not cut|no entries|would have .* pieces|different layouts",
        "rewrite it row by row, or keep its argument whole by split={...: None}",
    ),
)


def advice_on(reason: str, finished: bool = False) -> Advice:
    """Return what to do about an operation that runs once for a reason, `finished`: in a finished model.

    >>> print(advice_on("no rule for TopKUnique"))
    write it in operations that have a rule, or move it into dataset.map
    """
    first = next((advice for advice in ADVICE if re.search(advice.reason, reason)), ADVICE[-1])
    return first._replace(do=first.finished) if finished and first.finished else first
