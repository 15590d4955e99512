"""Ops on strings, entry by entry: what prepares words for a table or hashes them to categories."""

from __future__ import annotations

from graphsplit.rules.elementwise import elementwise
from graphsplit.rules.registry import register

ENTRY_BY_ENTRY = [
    "AsString",
    "DecodeBase64",
    "EncodeBase64",
    "RegexFullMatch",
    "RegexReplace",
    "StaticRegexFullMatch",
    "StaticRegexReplace",
    "StringJoin",
    "StringLength",
    "StringLower",
    "StringStrip",
    "StringToHashBucket",
    "StringToHashBucketFast",
    "StringToHashBucketStrong",
    "StringToNumber",
    "StringUpper",
    "Substr",
]
register(*ENTRY_BY_ENTRY)(elementwise)
