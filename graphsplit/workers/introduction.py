"""What a worker started by `graphsplit worker` tells of itself: the versions that it runs.

TensorFlow runs a `numpy_function` wherever it is placed, and finds the Python function there under a token. So a worker
makes one before anything else: the client calls it by the token that the first of a process has.
"""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from graphsplit.errors import UnsupportedError

TOKEN = "pyfunc_0"


class Introduction(NamedTuple):
    """What a worker tells.

    Attributes:
      tensorflow, graphsplit: versions.
      pid: of its process.
    """

    tensorflow: str
    graphsplit: str
    pid: int


def introduce(graphsplit_version: str) -> Any:
    """Let this process answer `ask_who`, as long as what is returned lives."""
    own = json.dumps(Introduction(tf.__version__, graphsplit_version, os.getpid())._asdict()).encode()

    def answer_who(*asked: Any) -> Any:
        if asked:
            raise UnsupportedError(
                "This worker was asked to run a Python function of the client, which it does not have."
            )
        return np.array(own, object)

    graph = tf.Graph()
    with graph.as_default():
        answer = tf.numpy_function(answer_who, [], tf.string)
    token = answer.op.get_attr("token").decode()
    assert token == TOKEN, f"something else of this process had {TOKEN} before it introduced itself: {token}"
    return graph


def ask_who(device: str) -> Introduction | None:
    """Return what the worker that has a device tells of itself; None if it was not started by `graphsplit worker`."""
    with tf.device(device):
        try:
            [answer] = tf.raw_ops.PyFunc(input=[], token=TOKEN, Tout=[tf.string])
            return Introduction(**json.loads(answer.numpy()))
        except (tf.errors.InvalidArgumentError, tf.errors.UnknownError, TypeError, ValueError):
            return None  # it has no such function, or another one
