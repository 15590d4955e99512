"""Outputs that TensorFlow allocates and does not write: other numbers in every run, on every device.

They are there for a signature's sake, or are what a kernel keeps for its own gradient. Nobody may compare them, and
nothing may be decided by them: no constant is folded from one, and no layout moves one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphsplit.core.tensorflow_internals import op_definition

_Outputs = tuple[int, ...]


def _where(attribute: str, *, on: _Outputs = (), off: _Outputs = ()) -> Callable[[Any], _Outputs]:
    """Return the outputs that are undefined where a boolean attribute is on, and where it is off."""
    return lambda node: on if _is_on(node, attribute) else off


def _is_on(node: Any, attribute: str) -> bool:
    if attribute in node.attr:  # (indexing the proto's map would add a missing entry)
        return bool(node.attr[attribute].b)
    return next(bool(a.default_value.b) for a in op_definition(node.op).attr if a.name == attribute)


def _always(*outputs: int) -> Callable[[Any], _Outputs]:
    return lambda _: outputs


# In inference only `y` is written by every kernel: `batch_mean` and `batch_variance` repeat what was given on CPUs and
# are left alone by cuDNN, both reserve spaces are written by oneDNN and left alone by Eigen (fused_batch_norm_op.cc).
# The third reserve space is cuDNN's own; elsewhere not even its shape is agreed on.
_NORMALIZED = _where("is_training", off=(1, 2, 3, 4))

_UNDEFINED: dict[str, Callable[[Any], _Outputs]] = {
    "BlockLSTM": _always(0, 2, 3, 4, 5),  # the gates of steps beyond seq_len_max; states there are zero
    "BlockLSTMV2": _always(0, 2, 3, 4, 5),
    "CudnnRNN": _always(3),  # what cuDNN keeps for the gradient
    "CudnnRNNV2": _always(3, 4),
    "CudnnRNNV3": _always(3, 4),
    "Eig": _where("compute_v", off=(1,)),  # vectors that were not asked for: a scalar that nobody wrote
    "Empty": _where("init", off=(0,)),
    "FusedBatchNorm": _NORMALIZED,
    "FusedBatchNormGrad": _always(3, 4),
    "FusedBatchNormGradV2": _always(3, 4),
    "FusedBatchNormGradV3": _always(3, 4),
    "FusedBatchNormV2": _NORMALIZED,
    "FusedBatchNormV3": _where("is_training", on=(5,), off=(1, 2, 3, 4, 5)),
    "SelfAdjointEigV2": _where("compute_v", off=(1,)),
    "Svd": _where("compute_uv", off=(1, 2)),
}
MAY_BE_UNDEFINED = frozenset(_UNDEFINED)
"""The op types that leave some output undefined, at least for some of their attributes."""


def undefined_outputs(node: Any) -> frozenset[int]:
    """Return the numbers of the outputs of a `NodeDef` that TensorFlow leaves undefined, on some device at least.

    >>> import tensorflow as tf
    >>> from graphsplit.core.protos import make_node
    >>> sorted(undefined_outputs(make_node("s", "Svd", ["x"], compute_uv=False)))
    [1, 2]
    """
    outputs_of = _UNDEFINED.get(node.op)
    return frozenset(outputs_of(node)) if outputs_of else frozenset()
