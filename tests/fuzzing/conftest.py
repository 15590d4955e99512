from __future__ import annotations

import pytest

from graphsplit.planning.variables import partitioning


@pytest.fixture(autouse=True)
def small_variables_stay_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs cut variables however small they are; other tests have the usual limit again."""
    monkeypatch.setattr(partitioning, "STAYS", partitioning.STAYS)
