"""Cases of ops on strings."""

import numpy as np
import tensorflow as tf

from tests.rule_cases.table import case, ints, kind

WORDS = kind(lambda rng, shape: rng.choice([b" An apple", b"a Day", b"keeps", b"", b"far away "], shape))
DIGITS = kind(lambda rng, shape: rng.choice([b"1", b"2.5", b"-3"], shape))

for _type in ["EncodeBase64", "StringLength", "StringLower", "StringStrip", "StringUpper"]:
    case(_type, WORDS("b3"))
    case(_type, WORDS("3b"))
case("AsString", "b3", precision=3)
case("AsString", ints(9)("b3"))
case("DecodeBase64", kind(lambda rng, shape: rng.choice([b"YWI", b"YXBwbGU"], shape))("b3"))
case("RegexFullMatch", WORDS("b3"), np.array("a.*"))
case("RegexReplace", WORDS("b3"), np.array("[aA]"), np.array("o"), replace_global=True)
case("StaticRegexFullMatch", WORDS("b3"), pattern="a.*")
case("StaticRegexReplace", WORDS("b3"), pattern="[aA]", rewrite="o", replace_global=True)
case("StringJoin", [WORDS("b3"), WORDS("b3")], separator="+")
case("StringToHashBucket", WORDS("b3"), num_buckets=7)
case("StringToHashBucketFast", WORDS("b3"), num_buckets=7)
case("StringToHashBucketStrong", WORDS("b3"), num_buckets=7, key=[1, 2])
case("StringToNumber", DIGITS("b3"))
case("Substr", WORDS("b3"), np.array(0), np.array(1), expect={"answered": False})


def _example(numbers, word):
    floats = tf.train.Feature(float_list=tf.train.FloatList(value=numbers))
    bytes_ = tf.train.Feature(bytes_list=tf.train.BytesList(value=[word]))
    features = tf.train.Features(feature={"numbers": floats, "word": bytes_})
    return tf.train.Example(features=features).SerializeToString()


def _examples(length):
    return kind(
        lambda rng, shape: np.array(
            [_example(rng.standard_normal(length(rng)), rng.choice([b"a", b"b"])) for _ in range(shape[0])], object
        )
    )


_THREE = _examples(lambda rng: 3)("b")
_SOME = _examples(lambda rng: rng.integers(1, 4))("b")
_KEYS = np.array(["numbers", "word"], object)
_NO_KEYS = np.array([], object)
_DEFAULTS = [np.zeros([0], np.float32), np.array(b"none", object)]
_DENSE = {"dense_shapes": [[3], []]}
_NO_OTHERS = {"num_sparse": 0, "sparse_types": [], "ragged_value_types": [], "ragged_split_types": []}
case("ParseExampleV2", _THREE, _NO_KEYS, _NO_KEYS, _KEYS, _NO_KEYS, _DEFAULTS, **_DENSE, **_NO_OTHERS)
case(
    "ParseExampleV2",
    _SOME,
    _NO_KEYS,
    _NO_KEYS,
    _KEYS[:1],
    _NO_KEYS,
    [np.zeros([1], np.float32)],
    **_NO_OTHERS,
    dense_shapes=[[None]],
    expect={"at_home": 1, "answered": False},
)
case(
    "ParseExample", _THREE, _NO_KEYS, [], [np.array("numbers"), np.array("word")], _DEFAULTS, **_DENSE, sparse_types=[]
)
