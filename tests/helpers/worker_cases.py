"""Cases over worker processes: `python -m tests.helpers.worker_cases GROUP [NAME]`, one JSON object of what they said.

A process connects once, and before it makes anything, so a group of cases has a process of its own.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
import traceback

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import graphsplit as gs
from tests.helpers import worker_calls, worker_losses, worker_meshes, worker_pairs, worker_reading  # noqa: F401  (cases)
from tests.helpers.worker_scene import GROUPS, LIMIT_S, WAIT_S, all_well


def main() -> None:
    group = sys.argv[1]
    chosen = {name: fn for name, fn in GROUPS[group].items() if sys.argv[2:] in ([], [name])}
    gs.use_logical_devices(2)
    found = {}
    count, devices = (4, 1) if group == "meshes" else (2, 2)
    with gs.workers.LocalWorkers(count, devices) as workers:
        cluster = gs.connect(workers, timeout_s=WAIT_S)
        for name, fn in chosen.items():
            begin = time.perf_counter()
            faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # (the workers end with this process)
            try:
                fn(workers, cluster)
                found[name] = ""
            except BaseException:
                found[name] = traceback.format_exc()
            print(f"{name}: {time.perf_counter() - begin:.1f} s", file=sys.stderr, flush=True)
            all_well(workers, cluster)
            faulthandler.cancel_dump_traceback_later()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
