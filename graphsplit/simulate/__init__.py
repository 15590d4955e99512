"""How long a step would take, and which plan would be fastest, on machines that are here or elsewhere.

What enters: a function, and the figures of a machine. What leaves: seconds, bytes and memory, from the plan alone;
nothing is run or emitted.
"""

from graphsplit.planning.costs.machine import Machine
from graphsplit.simulate.calibration import calibrate
from graphsplit.simulate.calls import predict
from graphsplit.simulate.prediction.predictions import Prediction
from graphsplit.simulate.scaling_curves import Scaling, scaling

__all__ = ["Machine", "Prediction", "Scaling", "calibrate", "predict", "scaling"]
