"""`scaling`: what more devices would bring, predicted for many numbers of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from graphsplit.api.predicted_calls import PredictedCall, predicted_call
from graphsplit.api.predictions import options_of, predict_call
from graphsplit.core.errors import ArgumentError, UnsupportedError
from graphsplit.core.layouts import Shard
from graphsplit.core.user_code import with_users_traceback
from graphsplit.costs.machine import Machine
from graphsplit.costs.machine_files import machine as machine_of
from graphsplit.prediction.predictions import Prediction
from graphsplit.prediction.scalings import Point, Scaling

KINDS = ("strong", "weak")
MOST_NODES = 1_000_000  # that are emitted for one prediction: about 2 minutes, and 3 GB


@with_users_traceback
def scaling(
    fn: Callable[..., Any],
    *args: Any,
    machine: str | os.PathLike[str] | Machine,
    devices: Sequence[int],
    layouts: Sequence[str] | None = None,
    kinds: Sequence[str] = KINDS,
    micro_batches: int | None = None,
    unknown_size: int | None = None,
    **kwargs: Any,
) -> Scaling:
    """Return predictions for many numbers of devices: `print` the table, `save` the curve. Nothing runs.

    Args:
      fn, *args, **kwargs: as for `predict`.
      machine: see `predict`. Where it has too few devices, it stands for a cluster of such machines.
      devices: how many, `[1, 2, 4, 8]`.
      layouts: of the variables, `["home", "mirrored", "sharded"]`; None: as they lie.
      kinds: `"strong"`, the batch as given over more devices; `"weak"`, on each device as many rows as are given.
      micro_batches, unknown_size: see `predict`.

    Raises:
      ArgumentError: as `predict`, and for weak scaling if no argument is split.
      UnsupportedError: for so many devices that the graph would have more than a million nodes.

    >>> import tensorflow as tf, graphsplit as gs
    >>> found = gs.scaling(tf.nn.relu, tf.TensorSpec([4096, 512]), machine="dgx-a100", devices=[1, 2])
    >>> [(point.kind, point.devices, point.rows) for point in found.points]
    [('strong', 1, 4096), ('strong', 2, 4096), ('weak', 1, 4096), ('weak', 2, 8192)]
    """
    found, counts = machine_of(machine), _checked_counts(devices)
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong or not kinds:
        raise ArgumentError(f"kinds={list(kinds)!r}: there are {', '.join(map(repr, KINDS))}.")
    options = options_of(micro_batches, None, None)
    call = predicted_call(fn, args, kwargs)
    points, skipped, assumptions = list[Point](), list[str](), tuple[str, ...]()
    for kind in kinds:
        for count in counts:
            own = call if kind == "strong" or count == 1 else _widened(fn, args, kwargs, call, count)
            if count > own.splitting.batch:
                skipped.append(f"{kind} scaling on {count} devices: {own.splitting.batch} rows leave some without any")
                continue
            _check_size(own, count)
            for layout in layouts or (None,):
                one = predict_call(own, found.covering(count), count, layout, unknown_size, **options)
                points.append(_point(kind, one, own, count))
                assumptions = one.assumptions
    points.sort(key=lambda p: (kinds.index(p.kind), list(layouts or ("",)).index(p.layout), p.devices))
    return Scaling(call.title, found.name, tuple(points), assumptions, tuple(skipped))


def _point(kind: str, prediction: Prediction, call: PredictedCall, count: int) -> Point:
    return Point(
        kind,
        prediction.layout,
        count,
        int(call.splitting.batch),
        prediction.step_s,
        max(prediction.memory_bytes.values(), default=0),
        prediction.sent_bytes,
        prediction.limit,
    )


def _checked_counts(devices: object) -> list[int]:
    counts = list(devices) if isinstance(devices, (list, tuple, range)) else []
    if not counts or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise ArgumentError(f"devices={devices!r}: scaling takes numbers of devices, each at least 1: [1, 2, 4, 8].")
    return sorted(dict.fromkeys(counts))


def _check_size(call: PredictedCall, count: int) -> None:
    nodes = count * sum(1 for op in call.trace.program.ops if op.type != "Const")
    if nodes > MOST_NODES:
        raise UnsupportedError(
            f"{call.title} on {count} devices would be a graph of about {nodes:,} nodes; a prediction replays at most "
            f"{MOST_NODES:,}. Choose at most {count * MOST_NODES // nodes} devices."
        )


def _widened(fn: Any, args: Sequence[Any], kwargs: dict[str, Any], call: PredictedCall, count: int) -> PredictedCall:
    """Return the call with so many times as many rows in what is split."""
    if not call.splitting.batch:
        raise ArgumentError(f"Weak scaling of {call.title}: no argument is split, so there are no rows to add.")
    layouts = iter(call.splitting.layouts)

    def widen(value: Any) -> Any:
        if not isinstance(value, (tf.Tensor, tf.TensorSpec)) and not hasattr(value, "__array_interface__"):
            return value
        layout, spec = (
            next(layouts),
            value if isinstance(value, tf.TensorSpec) else tf.TensorSpec.from_tensor(tf.convert_to_tensor(value)),
        )
        shape = list(spec.shape)
        if isinstance(layout, Shard):
            shape[layout.axis] *= count
        return tf.TensorSpec(shape, spec.dtype)

    wide = tf.nest.map_structure(widen, (tuple(args), dict(kwargs)))
    return predicted_call(fn, wide[0], wide[1])
