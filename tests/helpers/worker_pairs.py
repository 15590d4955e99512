"""Pairs with `resilient`, over worker processes of which one is lost between two calls; see `pairs.py`."""

from __future__ import annotations

import functools
import sys
import traceback
import warnings

from tests.helpers.pairs import check, pairs
from tests.helpers.worker_scene import all_well, case


@case("pairs")
def every_pair_with_resilient(workers, cluster) -> None:
    devices = [f"worker:{task}/CPU:{k}" for k in range(2) for task in range(2)]  # (of two, one is lost)
    failed = []
    for pair in pairs():
        if "resilient" not in pair:
            continue
        lost = iter([functools.partial(workers.kill, 1)])  # once, between the first call and the second
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check(*pair, devices=devices, lose=lambda lost=lost: next(lost, lambda: None)())
        except Exception:
            failed.append(f"{pair}:\n{traceback.format_exc()}")
        print(f"{pair}: {'failed' if failed and str(pair) in failed[-1] else 'well'}", file=sys.stderr, flush=True)
        all_well(workers, cluster)
    assert not failed, "\n".join(failed)
