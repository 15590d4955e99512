"""Measuring a machine, for predictions.

What enters: the devices at hand. What leaves: how fast each does the work of each family of operations.
"""
