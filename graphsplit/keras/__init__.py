"""Keras models on several devices, with one device's numbers: wrapped, loaded, or under `keras.distribution`.

What enters: a model. What leaves: a model with Keras' own methods, whose steps run on several devices. Imports neither
Keras nor tf_keras by itself.
"""

from graphsplit.api.layouts.new_variables import initialize, without_values
from graphsplit.keras.distribution.enabling import KerasDistribution, enable_distribution
from graphsplit.keras.loading import load_weights
from graphsplit.keras.wrapping import multi_gpu_model

__all__ = [
    "KerasDistribution",
    "enable_distribution",
    "initialize",
    "load_weights",
    "multi_gpu_model",
    "without_values",
]
