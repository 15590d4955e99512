"""Cases of numbers rounded as if they were quantized."""

import numpy as np

from tests.rule_cases.table import F32, case

_BOUNDS = (np.float32(-0.8), np.float32(1.1))
_EACH = (np.array([-1, -0.5, -0.8], np.float32), np.array([1, 0.5, 0.9], np.float32))
case("FakeQuantWithMinMaxArgs", F32("b3"), min=-0.8, max=1.1)
case("FakeQuantWithMinMaxVars", F32("4b3"), *_BOUNDS)
case("FakeQuantWithMinMaxVarsPerChannel", F32("4b3"), *_EACH)
case("FakeQuantWithMinMaxArgsGradient", F32("b3"), F32("b3"), min=-0.8, max=1.1)
case("FakeQuantWithMinMaxArgsGradient", F32("+3"), F32("3"), min=-0.8, max=1.1)
case("FakeQuantWithMinMaxVarsGradient", F32("4b3"), F32("4b3"), *_BOUNDS)
case("FakeQuantWithMinMaxVarsGradient", F32("+3"), F32("3"), *_BOUNDS)
case("FakeQuantWithMinMaxVarsPerChannelGradient", F32("b43"), F32("b43"), *_EACH)
case("FakeQuantWithMinMaxVarsPerChannelGradient", F32("+43"), F32("43"), *_EACH)
