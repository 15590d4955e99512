"""A hundred programs of the fuzzer, always the same. `python -m tests.fuzzing` tries others."""

from __future__ import annotations

import pytest

from tests.fuzzing.generator import MODES, generate
from tests.fuzzing.oracle import judge
from tests.fuzzing.worker import explain

SEEDS = 100
SHRINK_SECONDS = 60.0
NOT_MENDED: dict[int, str] = {}  # strict: who mends one deletes its line


@pytest.mark.usefixtures("plain_oracle")
@pytest.mark.filterwarnings("ignore")  # random programs give TensorFlow reasons to warn
@pytest.mark.parametrize("seed", range(SEEDS))
def test_seed(seed: int, request: pytest.FixtureRequest) -> None:
    if seed in NOT_MENDED:
        request.applymarker(pytest.mark.xfail(strict=True, reason=NOT_MENDED[seed]))
    program = generate(seed)
    verdict = judge(program)
    if verdict.failed:
        seconds = 0.0 if seed in NOT_MENDED else SHRINK_SECONDS
        pytest.fail(explain(program, verdict, seconds), pytrace=False)


def test_seeds_are_of_all_modes() -> None:
    assert 10 * len(MODES) <= SEEDS
