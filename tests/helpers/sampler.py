"""Random programs: compositions of ops of all families, with gradients inside, decided by a seed and static shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

MOST_ENTRIES = 3000
_KINK = 0.1234  # sums that cancel are rounding errors around zero: no op may switch there

Rng = np.random.Generator
Move = Callable[[Rng, Sequence[tf.Tensor]], tf.Tensor | None]


def pick(rng: Rng, pool: Sequence[tf.Tensor], *, rank: int = 0) -> tf.Tensor | None:
    """Return one of the tensors of at least this rank, the later the likelier."""
    fit = [tensor for tensor in pool if len(tensor.shape) >= rank]
    return fit[max(rng.integers(len(fit)), rng.integers(len(fit)))] if fit else None


def axis_of(rng: Rng, x: tf.Tensor) -> int:
    return int(rng.integers(len(x.shape)))


def smooth(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    x = pick(rng, pool)
    functions = [tf.tanh, tf.sigmoid, tf.math.softplus, tf.sin, tf.negative, lambda x: tf.exp(-tf.square(x))]
    return functions[rng.integers(len(functions))](x)


def kinked(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    x = pick(rng, pool) + _KINK
    functions = [tf.nn.relu, tf.abs, tf.nn.leaky_relu, tf.nn.elu, lambda x: tf.clip_by_value(x, -0.7, 0.8)]
    return functions[rng.integers(len(functions))](x)


def combine(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    x, y = pick(rng, pool), pick(rng, pool)
    try:
        tf.broadcast_static_shape(x.shape, y.shape)
    except ValueError:
        return None
    functions = [
        tf.add,
        tf.subtract,
        tf.multiply,
        lambda x, y: x / (1 + tf.square(y)),
        lambda x, y: tf.where(x > _KINK, x, y),
        lambda x, y: tf.add_n([x, y]) if x.shape == y.shape else x + y,
        tf.math.squared_difference,
    ]
    return functions[rng.integers(len(functions))](x, y)


def project(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Multiply with a matrix made from a constant: last axis, or any by einsum."""
    x = pick(rng, pool, rank=2)
    if x is None:
        return None
    axis = axis_of(rng, x) if rng.random() < 0.5 else len(x.shape) - 1
    size, width = x.shape[axis], int(rng.integers(1, 5))
    weight = tf.constant(rng.standard_normal((size, width)) / np.sqrt(size), x.dtype)
    if axis == len(x.shape) - 1 and len(x.shape) == 2:
        return tf.matmul(x, tf.transpose(weight), transpose_b=True) if rng.random() < 0.5 else tf.matmul(x, weight)
    letters = "abcdef"[: len(x.shape)]
    return tf.einsum(f"{letters},{letters[axis]}z->{letters.replace(letters[axis], 'z')}", x, weight)


def reduce(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    x = pick(rng, pool, rank=1)
    if x is None:
        return None
    functions = [tf.reduce_mean, tf.reduce_mean, tf.reduce_max, tf.reduce_min, tf.reduce_logsumexp]
    functions += [lambda x, axis, keepdims: tf.reduce_sum(x, axis, keepdims) / np.sqrt(x.shape.num_elements())]
    functions += [lambda x, axis, keepdims: tf.reduce_prod(tf.tanh(x) + 1.5, axis, keepdims) ** 0.1]
    axes = sorted({axis_of(rng, x) for _ in range(rng.integers(1, 3))})
    return functions[rng.integers(len(functions))](x, axis=axes, keepdims=bool(rng.random() < 0.5))


def couple_rows(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    """Let rows see each other: what must not be computed shard by shard."""
    x = pick(rng, pool, rank=2)
    if x is None:
        return None
    axis = axis_of(rng, x)
    choices: list[Callable[[], tf.Tensor]] = [
        lambda: tf.matmul(x, x, transpose_b=True) / x.shape[-1],
        lambda: tf.matmul(x, x, transpose_a=True) / x.shape[-2],
        lambda: x - tf.reduce_mean(x, axis, keepdims=True),
        lambda: x / tf.sqrt(1 + tf.reduce_sum(tf.square(x), axis, keepdims=True)),
        lambda: tf.nn.softmax(x, axis),
        lambda: tf.cumsum(x, axis) / x.shape[axis],
        lambda: tf.roll(x, 1, axis),
        lambda: tf.reverse(x, [axis]),
        lambda: tf.nn.moments(x, [axis], keepdims=True)[1],
    ]
    return choices[rng.integers(len(choices))]()


def reshape(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    x = pick(rng, pool, rank=1)
    if x is None:
        return None
    shape = list(x.shape)
    axis = axis_of(rng, x)
    action = rng.integers(6)
    if action == 0 and axis + 1 < len(shape):
        return tf.reshape(x, [*shape[:axis], shape[axis] * shape[axis + 1], *shape[axis + 2 :]])
    if action == 1:
        divisors = [d for d in range(1, shape[axis] + 1) if shape[axis] % d == 0]
        outer = divisors[rng.integers(len(divisors))]
        return tf.reshape(x, [*shape[:axis], outer, shape[axis] // outer, *shape[axis + 1 :]])
    if action == 2:
        return tf.reshape(x, [shape[0], -1])
    if action == 3:
        return tf.expand_dims(x, int(rng.integers(-1, len(shape) + 1)))
    if action == 4 and shape[axis] == 1:
        return tf.squeeze(x, [axis])
    return tf.transpose(x, rng.permutation(len(shape)).tolist())


def join(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    x = pick(rng, pool, rank=1)
    y = pick(rng, pool, rank=1)
    if x is None or y is None:
        return None
    axis = axis_of(rng, x)
    same = [a == b for a, b in zip(x.shape, y.shape, strict=False)]
    if len(x.shape) != len(y.shape) or not all(s for i, s in enumerate(same) if i != axis):
        y = tf.cos(x)
    if rng.random() < 0.3 and x.shape == y.shape:
        return tf.stack([x, y], axis)
    both = tf.concat([x, y, x] if rng.random() < 0.2 else [x, y], axis)
    if rng.random() < 0.4 and both.shape[axis] % 2 == 0:
        first, second = tf.split(tf.tanh(both), 2, axis)
        return first * 0.5 - second
    return both


def cut(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    x = pick(rng, pool, rank=1)
    if x is None:
        return None
    axis = axis_of(rng, x)
    size = x.shape[axis]
    start = int(rng.integers(size))
    spans: list[Any] = [slice(start, None), slice(None, start + 1), slice(None, None, 2), slice(None, None, -1), start]
    chosen = spans[rng.integers(len(spans))]
    if rng.random() < 0.3:
        return tf.gather(x, rng.integers(0, size, rng.integers(1, 4)).tolist(), axis=axis)
    index = [slice(None)] * len(x.shape)
    index[axis] = chosen
    return x[tuple(index)]


def repeat(rng: Rng, pool: Sequence[tf.Tensor]) -> tf.Tensor | None:
    x = pick(rng, pool, rank=1)
    if x is None:
        return None
    axis, times = axis_of(rng, x), int(rng.integers(2, 4))
    multiples = [times if i == axis else 1 for i in range(len(x.shape))]
    choices: list[Callable[[], tf.Tensor]] = [
        lambda: tf.tile(x, multiples),
        lambda: tf.repeat(x, times, axis),
        lambda: tf.broadcast_to(x, [times, *x.shape]),
        lambda: tf.pad(x, [[0, int(i == axis)] for i in range(len(x.shape))]),
    ]
    return choices[rng.integers(len(choices))]()


MOVES: list[Move] = [
    smooth,
    kinked,
    combine,
    combine,
    project,
    reduce,
    couple_rows,
    reshape,
    reshape,
    join,
    cut,
    repeat,
]


def grow(rng: Rng, pool: list[tf.Tensor], steps: int) -> list[tf.Tensor]:
    """Return the pool with `steps` more tensors made from those in it."""
    pool = list(pool)
    while steps:
        made = MOVES[rng.integers(len(MOVES))](rng, pool)
        if made is not None and 0 < made.shape.num_elements() <= MOST_ENTRIES:
            pool.append(made)
            steps -= 1
    return pool


def sample_program(seed: int, dtype: tf.DType) -> tuple[Callable[..., Any], list[tf.Variable]]:
    """Return a training step on random tensors: forward, a gradient inside the loss now and then, an update."""
    start = np.random.default_rng(seed)
    weight = tf.Variable(start.standard_normal((4, 3)) * 0.5, dtype=dtype)
    table = tf.Variable(start.standard_normal((5, 3)) * 0.5, dtype=dtype)

    def objective(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
        return tf.add_n([tf.reduce_mean(tf.square(tensor)) for tensor in tensors])

    @tf.autograph.experimental.do_not_convert
    def step(x: tf.Tensor, y: tf.Tensor, z: tf.Tensor, ids: tf.Tensor) -> Any:
        rng = np.random.default_rng(seed)
        with tf.GradientTape() as tape:
            tape.watch([x, y, z])
            pool = [x, y, z, x @ weight, tf.gather(tf.convert_to_tensor(table), ids)]
            pool = grow(rng, pool, int(rng.integers(3, 9)))
            if rng.random() < 0.3:
                with tf.GradientTape() as inner:
                    inner.watch(pool[0])
                    pool = grow(rng, pool, 3)
                    pool[3] = pool[0] @ weight
                    penalty = objective(pool[3:])
                pool.append(inner.gradient(penalty, pool[0]))
            pool = grow(rng, pool, 3)
            loss = objective(pool[-4:]) + 0.1 * objective(pool[3:5])
        gradients = tape.gradient(loss, [x, y, z, weight, table], unconnected_gradients="zero")
        clipped, norm = tf.clip_by_global_norm([tf.convert_to_tensor(g) for g in gradients[3:]], 5.0)
        weight.assign_sub(0.1 * clipped[0])
        table.assign_sub(0.1 * clipped[1])
        return {"loss": loss, "norm": norm, "gradients": gradients[:3], "last": pool[-1], "chosen": pool[-3]}

    return step, [weight, table]


def sample_arguments(seed: int, rows: int, dtype: tf.DType) -> tuple[tf.Tensor, ...]:
    """Return `x, y, z, ids`; the batch is the second axis of `z`."""
    rng = np.random.default_rng(seed)
    shapes = [(rows, 4), (rows, 3, 2), (2, rows)]
    return (*[tf.constant(rng.standard_normal(s), dtype) for s in shapes], tf.constant(rng.integers(0, 5, rows)))
