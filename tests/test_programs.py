"""Programs in the manner of well-known tutorials: equal to one device, and sharded."""

from __future__ import annotations

import pytest

import graphsplit as gs
from benchmarks.coverage_programs import ROWS, built, precision, run_program, start_elsewhere
from benchmarks.programs import FLOAT32, LESS_SHARDED, PROGRAMS
from tests.helpers import float64

EXACT = {"float64": float64.EXACT, "float32": 5e-5}  # a few hundred roundings

CHEAP = ["VQ-VAE", "Distillation", "DQN", "Quantization", "Supervised contrastive", "Two towers", "Hashed crosses"]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CHEAP)
def test_equal(name: str):
    with built(name) as training:
        arguments = training.inputs(ROWS)
        parallel = gs.parallelize(training.step, devices=3)
        start_elsewhere(parallel.variables(*arguments))
        assert gs.verify(parallel, *arguments).largest < EXACT[precision(name)]
        assert len(parallel.plan(*arguments).sharded_ops) > 10


@pytest.mark.long
@pytest.mark.parametrize("name", PROGRAMS)
def test_equal_and_sharded(name: str):
    outcome = run_program(name, devices=4)
    assert outcome.difference < EXACT[outcome.dtype], outcome
    assert outcome.share >= LESS_SHARDED.get(name, (0.99, ""))[0], outcome


def test_names():
    assert set(LESS_SHARDED) | set(CHEAP) | FLOAT32 <= set(PROGRAMS)
