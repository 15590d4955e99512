"""Prediction: what a plan takes on a machine, in seconds and bytes, without running or emitting it."""
