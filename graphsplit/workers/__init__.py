"""Several machines: worker processes whose devices are used as if they were here, and calls that survive losing one.

What enters: addresses of worker processes, or how many to start here. What leaves: a `Cluster` with their
devices, and functions that go on when a worker is lost.
"""

from graphsplit.workers.cluster import Cluster
from graphsplit.workers.connecting import connect
from graphsplit.workers.local_workers import LocalWorkers
from graphsplit.workers.resilience import Resilient, resilient

__all__ = ["Cluster", "LocalWorkers", "Resilient", "connect", "resilient"]
