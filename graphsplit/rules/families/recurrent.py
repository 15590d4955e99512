"""cuDNN's recurrent kernels: all steps of all sequences in one op, which Keras takes where there is a GPU.

Sequences are independent of each other: the batch is an axis as everywhere. But what the forward kernel keeps for the
backward one, it keeps in a form of its own that nobody can cut or join. So each shard's backward kernel reads what the
same shard's forward kernel kept: both are cut exactly as the sequences that both read come, or neither is.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphsplit.core.layouts import PARTIAL_SUM, REPLICATE, Layout, Shard
from graphsplit.core.sizes import Shape
from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Factors
from graphsplit.rules.registry import Answer, Sharded, register

_LENGTHS = 4  # the operand that says how long each sequence is, of the third version


def kernel_by_kernel(op: Op, layouts: Sequence[Layout]) -> Answer | None:
    """`(sequences, h, c, parameters[, lengths]) -> outputs, h, c`, and what is kept.

    Backward: operands and results, gradients by the latter -> gradients by sequences, h, c and parameters.
    """
    cut = _cut(op, layouts)
    if cut is None:
        return None
    wants = [_states(shape, cut) for shape in op.in_shapes]
    if op.type.endswith("V3"):
        wants[_LENGTHS] = cut.along(0)
    if "Backprop" in op.type:
        return Sharded(tuple(wants), (*[_states(shape, cut) for shape in op.in_shapes[:3]], PARTIAL_SUM))
    reserve_layouts = (REPLICATE,) * (len(op.out_shapes) - 3)
    return Sharded(tuple(wants), (*[_states(shape, cut) for shape in op.out_shapes[:3]], *reserve_layouts))


@register("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", layouts=kernel_by_kernel)
@register("CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3", layouts=kernel_by_kernel)
def recurrent_kernels(op: Op) -> Factors | Declined:
    """Asked where the sequences are not cut."""
    return Declined("its sequences are not cut, and what cuDNN keeps of them for the gradient cannot be")


def _cut(op: Op, layouts: Sequence[Layout]) -> Shard | None:
    """Return how the sequences are cut, None if they are not, or along another axis than that of the batch."""
    time_major = op.attr("time_major").b if "time_major" in op.node.attr else True
    sequences = layouts[0]
    ranks = [None if shape is None else len(shape) for shape in (op.in_shapes[0], op.in_shapes[1])]
    if not isinstance(sequences, Shard) or sequences.axis != int(time_major) or ranks != [3, 3]:
        return None
    return sequences


def _states(shape: Shape | None, cut: Shard) -> Layout:
    """Return how sequences and states lie; parameters, what is kept, and the `c` that a GRU lacks, have no batch."""
    return cut if shape is not None and len(shape) == 3 else REPLICATE
