"""Keras models whose `fit`, `evaluate` and `predict` run on several devices. Imports neither Keras nor tf_keras."""
