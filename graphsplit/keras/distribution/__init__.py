"""`keras.distribution` on TensorFlow.

What enters: a distribution of Keras. What leaves: Keras' own `fit`, `evaluate` and `predict`, on all its devices.
"""
