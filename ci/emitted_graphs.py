"""`python ci/emitted_graphs.py` writes `tests/emitted_graphs.txt`: digests of the graphs that are emitted for programs.

A commit that changes lines of it says why these graphs are others now. One that moves or renames changes none.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Write the file."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path.insert(0, str(ROOT))
    import tensorflow as tf

    import graphsplit as gs

    tf.config.set_visible_devices([], "GPU")
    gs.use_logical_devices(5)
    from tests.helpers import emitted_graphs  # makes tensors

    emitted_graphs.FILE.write_text(emitted_graphs.text(), encoding="utf-8")


if __name__ == "__main__":
    main()
