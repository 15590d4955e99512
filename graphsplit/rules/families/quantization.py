"""Numbers rounded as if they were quantized, which is how networks are trained for it; given ranges only."""

from __future__ import annotations

from graphsplit.program.program import Op
from graphsplit.rules.factors import Declined, Factors
from graphsplit.rules.families.elementwise import elementwise
from graphsplit.rules.registry import register

register("FakeQuantWithMinMaxArgs", "FakeQuantWithMinMaxVars", "FakeQuantWithMinMaxVarsPerChannel")(elementwise)
register("FakeQuantWithMinMaxArgsGradient", linear=(0,))(elementwise)


@register("FakeQuantWithMinMaxVarsGradient", "FakeQuantWithMinMaxVarsPerChannelGradient", linear=(0,))
def fake_quantization_gradient(op: Op) -> Factors | Declined:
    """`(dy, x, min, max) -> dx, dmin, dmax`: of the range a sum over all entries, or over those of each channel."""
    shape = op.in_shapes[1]
    if shape is None:
        return Declined("the rank of an operand is not known")
    dims = tuple(range(len(shape)))
    bounds = dims[-1:] if "PerChannel" in op.type else ()
    contracted = {i: "sum" for i in dims if i not in bounds}
    return Factors((dims, dims, bounds, bounds), (dims, bounds, bounds), contracted)
