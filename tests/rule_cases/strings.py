"""Cases of ops on strings."""

import numpy as np

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
