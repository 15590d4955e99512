"""Prediction: what an emitted graph takes on a machine, in seconds and bytes, without running it."""
