"""Run in a fresh process, without graphsplit: a SavedModel and its transpiled forms on the same requests.

    python saved_model_worker.py DEVICES {ORIGINAL REQUESTS.npz TRANSPILED,TRANSPILED}...

prints one line of JSON for each transpiled model, signature and number of rows: the largest difference of a float
output relative to its largest entry (or to 1), and whether all integer and string outputs are the same.
"""

import json
import os
import sys

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf


def difference(actual: tf.Tensor, expected: tf.Tensor) -> tuple[float, bool]:
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return float("inf"), False
    if not expected.dtype.is_floating:
        return 0.0, bool(np.array_equal(actual.numpy(), expected.numpy()))
    scale = max(1.0, float(np.max(np.abs(expected), initial=0.0)))
    return float(np.max(np.abs(actual - expected), initial=0.0)) / scale, True


def requests(function, key: str, stored) -> list[dict[str, tf.Tensor]]:
    """Return the arguments of each request: 0 to 9 rows, or as many as the signature says."""
    specs = function.structured_input_signature[1]
    found = []
    for rows in range(10):
        own = {}
        for name, spec in specs.items():
            whole = stored[f"{key}/{name}"]
            count = rows if spec.shape.rank and spec.shape[0] is None else (spec.shape[0] if spec.shape.rank else None)
            own[name] = tf.constant(whole if count is None else whole[:count])
        found.append(own)
        if all(spec.shape.rank == 0 or spec.shape[0] is not None for spec in specs.values()):
            break
    return found


def compare(original: str, stored: str, transpiled: list[str]) -> None:
    single = tf.saved_model.load(original)
    arguments = np.load(stored, allow_pickle=True)
    models = {folder: tf.saved_model.load(folder) for folder in transpiled}
    for key, function in single.signatures.items():
        for request in requests(function, key, arguments):
            rows = next((int(tensor.shape[0]) for tensor in request.values() if tensor.shape.rank), 0)
            try:
                expected = function(**request)
            except tf.errors.InvalidArgumentError:
                if rows:  # TensorFlow itself cannot always run a convolution on no rows at all
                    raise
                continue
            for folder, model in models.items():
                actual = model.signatures[key](**request)
                assert set(actual) == set(expected), (set(actual), set(expected))
                found = [difference(actual[name], expected[name]) for name in expected]
                largest, same = max(d for d, _ in found), all(s for _, s in found)
                print(json.dumps({"model": folder, "key": key, "rows": rows, "largest": largest, "same": same}))


def main(devices: int, jobs: list[str]) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * devices)
    while jobs:
        original, stored, transpiled, *jobs = jobs
        compare(original, stored, transpiled.split(","))
    assert "graphsplit" not in sys.modules


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
