"""What the scripts that record programs of `tests/helpers` do first: five logical CPU devices, whatever is here."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def start() -> None:
    """Start TensorFlow with five logical CPU devices, and let `tests` be imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path.insert(0, str(Path(__file__).parent.parent))
    import tensorflow as tf

    import graphsplit as gs

    tf.config.set_visible_devices([], "GPU")
    gs.use_logical_devices(5)
