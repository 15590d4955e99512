"""Cases of ops that need all rows at once: they stay at home, whatever is split."""

import numpy as np
import tensorflow as tf

from tests.rule_cases.table import BOOL, F32, UNIT32, Arg, add, call, case, ints

_HOME = {"expect": {"at_home": 1}}
_LENGTHS = ints(4, start=3)
for _type in ["CTCBeamSearchDecoder", "CTCGreedyDecoder"]:
    _options = {"beam_width": 3, "top_paths": 1} if "Beam" in _type else {}
    case(_type, "4b3", _LENGTHS("b"), **_HOME, **_options)


def _ctc(op_type):
    def function(rows, logits, lengths):
        places = [[row, word] for row in range(rows) for word in range(2)]
        return call(op_type, logits, np.array(places, np.int64), np.arange(2 * rows, dtype=np.int32) % 2, lengths)

    return function


add("CTCLoss", _ctc("CTCLoss"), [F32("4b3"), _LENGTHS("b")], at_home=1)
case("DynamicPartition", "b3", ints(2)("b"), num_partitions=2, **_HOME)
case("NonMaxSuppressionV3", F32("b4"), UNIT32("b"), 3, np.float32(0.5), np.float32(0.1), **_HOME)
case("NonMaxSuppressionV4", F32("b4"), UNIT32("b"), 3, np.float32(0.5), np.float32(0.1), **_HOME)
_SORTED = lambda shape: Arg(shape, lambda rng, sizes: np.sort(rng.integers(0, 3, sizes)).astype(np.int32))  # noqa: E731
for _type in ["Max", "Mean", "Min", "Prod", "Sum"]:
    case(f"Segment{_type}", "b3", _SORTED("b"), **_HOME)
case("StatelessMultinomial", "b5", 4, [1, 2], **_HOME)
case(
    "StatelessRandomBinomial",
    lambda rows: [rows],
    [3, 4],
    Arg("b", lambda rng, shape: rng.uniform(4, 9, shape)),
    0.3,
    dtype=tf.float64,
    **_HOME,
)
case(
    "StatelessRandomPoisson",
    lambda rows: [rows],
    [3, 4],
    Arg("b", lambda rng, shape: rng.uniform(4, 9, shape)),
    dtype=tf.float64,
    **_HOME,
)
case("Unique", ints(4)("b"), **_HOME)
case("UniqueV2", ints(2)("b2"), [0], **_HOME)
case("UniqueWithCounts", ints(4)("b"), **_HOME)
case("Where", BOOL("b3"), **_HOME)
