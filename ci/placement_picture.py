"""`python ci/placement_picture.py` draws docs/placement.png: the page of ResNet50 on eight GPUs, as a browser shows it.

It needs Chromium (`apt-get install chromium`), and matplotlib's Pillow for fewer colours. Nothing runs on a GPU.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import keras
import tensorflow as tf
from PIL import Image

import graphsplit as gs

PICTURE = Path(__file__).parent.parent / "docs" / "placement.png"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT, COLOURS = 1000, 820, 64


def main() -> None:
    """Plan, draw and write."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit(f"There is none of {', '.join(BROWSERS)} here: apt-get install chromium.")
    model = gs.multi_gpu_model(keras.applications.ResNet50(weights=None), gpus=[f"GPU:{k}" for k in range(8)])
    model.compile("adam", "sparse_categorical_crossentropy")
    placed = model.placement(tf.TensorSpec((16, 224, 224, 3)), tf.TensorSpec((16,), tf.int32))
    with tempfile.TemporaryDirectory() as folder:
        page, shot = Path(folder) / "page.html", Path(folder) / "shot.png"
        placed.save(str(page))
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/profile"]
        command += [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=10000", f"--screenshot={shot}"]
        subprocess.run([*command, page.as_uri()], check=True, capture_output=True, timeout=300)
        PICTURE.write_bytes(few_colours(shot.read_bytes()))


def few_colours(content: bytes) -> bytes:
    """Return a picture in few colours, for a small file."""
    fewer = io.BytesIO()
    picture = Image.open(io.BytesIO(content)).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(fewer, "PNG", optimize=True)
    return fewer.getvalue()


if __name__ == "__main__":
    main()
