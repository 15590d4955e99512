"""How random programs are split, and how near their results are."""

from __future__ import annotations

import tensorflow as tf

TOLERANCE = {tf.float32: 2e-4, tf.float64: 1e-10}
SPLIT = {"x": 0, "y": 0, "z": 1, "ids": 0}
