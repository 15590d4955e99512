"""`graphsplit demo`: fit y = 5x^2 + 0x + 3 by gradient descent, as the make_parallel article does.

What enters: a number of devices, and perhaps a file of points. What leaves: progress and tables for the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import keras
import numpy as np
import tensorflow as tf
from rich.console import Console
from rich.progress import track
from rich.table import Table

from graphsplit.api.decorators import parallelize
from graphsplit.core.devices import resolve_devices, short_name, use_logical_devices
from graphsplit.core.gpus import count_gpus
from graphsplit.errors import ArgumentError

TRUE_COEFFICIENTS = (5.0, 0.0, 3.0)
LEARNING_RATE = 0.1


def training_step(dtype: tf.DType = tf.float32) -> tuple[Callable[[tf.Tensor, tf.Tensor], tf.Tensor], tf.Variable]:
    """Return a new training step, written for one device, and the coefficients that it fits, shape [3, 1]."""
    w = tf.Variable(tf.zeros([3, 1], dtype), name="w")
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build([w])

    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            features = tf.stack([tf.square(x), x, tf.ones_like(x)], 1)
            prediction = tf.squeeze(tf.matmul(features, w), 1)
            loss = tf.reduce_mean(tf.square(prediction - y))
        optimizer.apply([tape.gradient(loss, w)], [w])
        return loss

    return step, w


def example_points(steps: int, batch: int) -> np.ndarray:
    """Return points of y = 5x^2 + 3, x uniform in [-10, 10], always the same ones: float64 [steps * batch, 2]."""
    x = np.random.default_rng(0).uniform(-10, 10, steps * batch)
    return np.stack([x, 5 * x**2 + 3], 1)


def points_in(path: str) -> np.ndarray:
    """Return the points of a file, a line `x,y` each, with or without a line of names above: float64 [points, 2].

    Raises:
      ArgumentError: if it cannot be read, or has no such lines.
    """
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--data {path!r} cannot be read: {error}") from error
    pairs = []
    for number, line in enumerate(lines):
        try:
            x, y = map(float, line.split(","))
        except ValueError as error:
            if number:  # the first one may have names
                raise ArgumentError(f"--data {path!r}, line {number + 1}: a line is 'x,y', got {line!r}.") from error
        else:
            pairs.append((x, y))
    points = np.array(pairs, float)
    if not len(points) or not np.isfinite(points).all():
        raise ArgumentError(f"--data {path!r} has no points, or one that is not finite; a line is 'x,y'.")
    return points


def batches(points: np.ndarray, steps: int, batch: int) -> list[np.ndarray]:
    """Return a batch of points for each step, over and over through all; the last one of a pass may have fewer."""
    cuts = [points[k : k + batch] for k in range(0, len(points), batch)]
    return [cuts[k % len(cuts)] for k in range(steps)]


def run(devices: int, batch: int, steps: int, path: str | None = None) -> float:
    """Fit on one device and on several with the same data, print both, return the largest difference."""
    points = example_points(steps, batch) if path is None else points_in(path)
    units = np.ones(2) if path is None else np.abs(points).max(0) + np.finfo(float).tiny  # for one learning rate
    names = demo_devices(devices)
    # (where points lie on a curve, the loss falls to rounding errors, which Adam makes large: float64 has small ones)
    dtype = tf.float32 if path is None else tf.float64
    single_step, single_w = training_step(dtype)
    parallel_step, parallel_w = training_step(dtype)
    scales = np.array([units[1] / units[0] ** power for power in (2, 1, 0)])
    single = tf.function(single_step, reduce_retracing=True)
    parallel = parallelize(parallel_step, devices=names)
    difference = 0.0
    for rows in progress(batches(points / units, steps, batch), f"fitting on 1 and on {len(names)} devices"):
        x, y = tf.unstack(tf.constant(rows, dtype), axis=1)
        single(x, y)
        parallel(x, y)
        difference = max(difference, float(np.abs((single_w - parallel_w).numpy()[:, 0] * scales).max()))
    digits = ".4f" if path is None else ".5g"
    fitted = [[f"{w:{digits}}" for w in variable[:, 0].numpy() * scales] for variable in (single_w, parallel_w)]
    label = f"{len(names)} devices ({', '.join(short_name(n) for n in names)})"
    columns = {"term": ("x^2", "x", "1"), "true": TRUE_COEFFICIENTS, "1 device": fitted[0], label: fitted[1]}
    if path is not None:
        del columns["true"]
    table(f"Coefficients after {steps} steps", [*columns], zip(*columns.values(), strict=True))
    console.print(str(parallel.plan(x, y)), highlight=False, markup=False, soft_wrap=True)
    console.print(f"Largest difference of a coefficient at any step: {difference:.2g}", highlight=False)
    return difference


Item = TypeVar("Item")
console = Console()


def demo_devices(count: int) -> tuple[str, ...]:
    """Return the first `count` GPUs, or, on a machine with fewer, that many new logical CPU devices."""
    gpus = count_gpus()
    if gpus >= count:
        return resolve_devices(count)
    if gpus:
        console.print(f"{count} logical CPU devices: there are fewer GPUs. `--devices {gpus}` takes those.")
    return resolve_devices(use_logical_devices(count))


def progress(items: Sequence[Item], what: str) -> Iterable[Item]:
    """Yield the items while a bar shows how far it is."""
    return track(items, description=what, console=console)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table."""
    rich_table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        rich_table.add_row(*[str(cell) for cell in row])
    console.print(rich_table)
