"""`python ci/printed_texts.py` writes `tests/golden/`: what graphsplit prints for programs, a text for each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Write the files, and remove those of programs that are gone."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path.insert(0, str(ROOT))
    import tensorflow as tf

    import graphsplit as gs

    tf.config.set_visible_devices([], "GPU")
    gs.use_logical_devices(5)
    from tests.helpers.printed_texts import FOLDER, TEXTS, file_of, text_of  # makes tensors

    FOLDER.mkdir(exist_ok=True)
    texts = {file_of(name): text_of(name) for name in TEXTS}
    for path in set(FOLDER.iterdir()) - set(texts):
        path.unlink()
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
