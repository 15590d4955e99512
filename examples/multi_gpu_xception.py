"""The example of Keras' `multi_gpu_model`: Xception on eight devices, saved through the template model.

python examples/multi_gpu_xception.py --image-size 71 --samples 16 --per-device 2 --classes 10
"""

from __future__ import annotations

import argparse

import keras
import numpy as np
from machine import devices

import graphsplit as gs


def main() -> None:
    """Train on random images, as the original example does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--per-device", type=int, default=32, help="images per device and batch")
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--samples", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--save", default="xception.keras")
    options = parser.parse_args()
    names = devices(options.devices)
    keras.utils.set_random_seed(0)

    shape = (options.image_size, options.image_size, 3)
    model = keras.applications.Xception(weights=None, input_shape=shape, classes=options.classes)

    parallel_model = gs.multi_gpu_model(model, gpus=names)
    parallel_model.compile(loss="categorical_crossentropy", optimizer="rmsprop")

    generator = np.random.default_rng(0)
    x = generator.random((options.samples, *shape), dtype=np.float32)
    y = generator.random((options.samples, options.classes), dtype=np.float32)
    parallel_model.fit(x, y, epochs=options.epochs, batch_size=options.per_device * len(names), verbose=2)
    print(parallel_model.plan())

    model.save(options.save)
    loaded = keras.models.load_model(options.save)
    difference = np.abs(loaded.predict(x[:2], verbose=0) - parallel_model.predict(x[:2], verbose=0)).max()
    print(f"saved as {options.save}; largest difference of a prediction after loading: {difference:.1g}")


if __name__ == "__main__":
    main()
