"""How long a step would take, and which layout would be fastest, on machines that are here or elsewhere.

Nothing is run or emitted: times, bytes and memory follow from the plan and from the figures of a machine.
"""

from graphsplit.planning.costs.machine import Machine
from graphsplit.simulate.calibration import calibrate
from graphsplit.simulate.calls import predict
from graphsplit.simulate.prediction.predictions import Prediction
from graphsplit.simulate.prediction.scalings import Scaling
from graphsplit.simulate.scaling_curves import scaling

__all__ = ["Machine", "Prediction", "Scaling", "calibrate", "predict", "scaling"]
