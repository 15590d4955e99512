"""Several machines: worker processes whose devices are used as if they were here, and calls that survive losing one."""

from graphsplit.workers.cluster import Cluster
from graphsplit.workers.connecting import connect
from graphsplit.workers.local_workers import LocalWorkers
from graphsplit.workers.resilience import Resilient, resilient

__all__ = ["Cluster", "LocalWorkers", "Resilient", "connect", "resilient"]
