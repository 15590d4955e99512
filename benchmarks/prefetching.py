"""Batch inference where reading a batch costs time: batch by batch, and with the next batch read and sent ahead.

python -m benchmarks.prefetching [--devices 1] [--batches 40] [--rounds 5] [--wait 10]

Reading is decompression, or (`--wait`) waiting so many milliseconds, as for a disk or a network. The devices are
logical CPU devices of one thread each, so reading ahead only helps where a core is left for it, or where reading waits;
on GPUs the copy to the devices is hidden as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Iterator

import numpy as np

import graphsplit as gs

ROWS, FEATURES = 512, 1024


def main() -> None:
    """Print the time of a pass over the batches, with and without prefetching, interleaved, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--wait", type=float, default=0.0, help="milliseconds")
    options = parser.parse_args()
    gs.use_logical_devices(options.devices, threads_per_device=1)
    from benchmarks.networks import perceptron  # starts TensorFlow

    predict = gs.parallelize(perceptron(FEATURES, hidden=512, depth=3), devices=options.devices)
    values = np.random.default_rng(0).integers(0, 8, (ROWS, FEATURES)).astype(np.float32)
    packed = zlib.compress(values.tobytes(), 1)

    def batches(values: np.ndarray = values) -> Iterator[np.ndarray]:
        for _ in range(options.batches):
            if options.wait:
                time.sleep(options.wait / 1000)
            else:
                values = np.frombuffer(zlib.decompress(packed), np.float32).reshape(ROWS, FEATURES)
            yield values

    times: dict[int, list[float]] = {0: [], 1: []}
    for _ in range(options.rounds + 1):  # the first one traces
        for prefetch, found in times.items():
            start = time.perf_counter()
            for result in predict.map(batches(), prefetch=prefetch):
                result.numpy()
            found.append(time.perf_counter() - start)
    plain, ahead = (1000 * statistics.median(found[1:]) / options.batches for found in times.values())
    print(
        f"{options.devices} devices, {options.batches} batches: {plain:.2f} ms per batch, {ahead:.2f} ms with the next"
    )
    print(f"batch read and sent ahead: {ahead / plain:.2f} of the time")


if __name__ == "__main__":
    main()
