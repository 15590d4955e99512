"""The table of what updates send: a sample of its cells, and how it is written."""

from __future__ import annotations

import pytest

from benchmarks.updates import MODELS, MOST_P, VARIANTS, WAYS, Row, optimizers, page, planned

CELLS = [
    ("MLP", "Adam", "EMA", WAYS[1]),
    ("MLP", "Nadam", "global_clipnorm", WAYS[2]),
    ("MLP", "SGD", "clipnorm", WAYS[0]),
    ("embedding", "Lion", "clipnorm", WAYS[1]),
    ("MLP", "Adafactor", "clipnorm", WAYS[2]),
    ("embedding", "SGD", "plain", WAYS[2]),
]


@pytest.mark.parametrize("cell", CELLS, ids=", ".join)
def test_no_more_than_an_all_reduce_and_a_little(cell: tuple[str, str, str, str]):
    row = planned(*cell)
    assert row.p <= MOST_P + 0.05, row
    assert not row.is_above


@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop", "SGD"])
def test_dense_gradients(optimizer: str, variant: str, way: str):
    assert not planned("MLP", optimizer, variant, way).is_above


def test_what_is_above_says_why():
    row = planned("embedding", "Adam", "plain", WAYS[0])  # (which adds up rows, and their squares)
    assert row.why.startswith("the busiest device") or row.why.startswith("stays a branch: ")


def test_the_page():
    rows = [Row(m, "Adam", "plain", way, 1.8 + k, 1.0, f"reason {k}") for m in MODELS for k, way in enumerate(WAYS)]
    text = page(rows)
    assert "| Adam | 1.8, **2.8**, **3.8** |" in text
    assert "* Adam, plain, loss scaling: reason 2" in text
    assert "reason 0" not in text
    assert "Muon" in optimizers() or "Adam" in optimizers()
