"""A worker process: `graphsplit worker`. A TensorFlow server, whose devices clients use."""

from __future__ import annotations

import os
import signal
import sys
import threading

import tensorflow as tf

from graphsplit.core.addresses import WARNING, own_addresses
from graphsplit.core.version import __version__
from graphsplit.workers.connecting import apply_settings, introduce

_BETWEEN_S = 1.0


def serve(port: int, devices: int | None, threads: int | None, with_parent: bool = False) -> None:
    """Let clients use this process' devices until a signal ends it (SIGTERM, SIGINT).

    Args:
      port: where to listen.
      devices: how many logical CPU devices; by default one.
      threads: of an operation on the CPU; by default as many as there are cores.
      with_parent: whether it ends, too, with the process that started it.
    """
    apply_settings()
    keep = introduce(__version__)
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=threads or 0)
    if devices is not None:
        config.device_count["CPU"] = devices
    config.gpu_options.allow_growth = True  # what a client does not use, another program may
    spec = tf.train.ClusterSpec({"worker": [f"localhost:{port}"]})
    server = tf.distribute.Server(spec, job_name="worker", task_index=0, config=config)
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    parent = os.getppid()
    where = ", ".join([f"{address}:{port}" for address in own_addresses()])
    print(f"graphsplit worker {__version__}, TensorFlow {tf.__version__}, process {os.getpid()}: {where}", flush=True)
    print(f"Warning: {WARNING}", file=sys.stderr, flush=True)
    while not ended.wait(_BETWEEN_S) and (not with_parent or os.getppid() == parent):
        pass
    print("graphsplit worker: ended", flush=True)
    del keep, server
    os._exit(0)  # TensorFlow's servers cannot be stopped: without this, one waits for its clients
