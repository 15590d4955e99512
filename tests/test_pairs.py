"""Every pair of options, layouts and ways to call: one device's numbers, or a sentence that names both."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.helpers.pairs import FEATURES, NOTED, REFUSED, check, pairs

DEVICES = int(os.environ.get("GRAPHSPLIT_TEST_DEVICES", "5"))
ON_WORKERS = "resilient"  # by `worker_pairs.py`


def name_of(pair: Sequence[str]) -> str:
    """Return the name of a case; those of two axes begin with a word of their own."""
    is_of_axes = all(FEATURES[name].axis or name.startswith(("stages", "schedule")) for name in pair)
    return "-".join([*["axes"] * is_of_axes, *[re.sub(r"\W+", "_", name).strip("_") for name in pair]])


@pytest.mark.sampled(33)
@pytest.mark.usefixtures("plain_oracle")
@pytest.mark.filterwarnings("ignore")  # what the plan says is in the table, and not every warning is about the pair
@pytest.mark.parametrize(
    ("one", "other"), [pytest.param(*pair, id=name_of(pair)) for pair in pairs() if ON_WORKERS not in pair]
)
def test_pair(one: str, other: str):
    check(one, other, devices=[f"CPU:{k}" for k in range(DEVICES)])


@pytest.mark.long
@pytest.mark.skipif(DEVICES >= 8, reason="this is the process with eight devices")
def test_pairs_of_axes_on_eight_devices():
    """With an axis of the batch beside the two."""
    environment = {**os.environ, "GRAPHSPLIT_TEST_DEVICES": "8"}
    command = [sys.executable, "-m", "pytest", __file__, "-n", "0", "-q", "-k", "axes", "-m", "long or not long"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment)
    assert done.returncode == 0, done.stdout


def test_the_tables_name_pairs():
    own = set(pairs())
    tables: Sequence[Mapping[Any, str]] = (REFUSED, NOTED)
    assert all(pair in own for table in tables for pair in table)
    assert not REFUSED.keys() & NOTED.keys()
