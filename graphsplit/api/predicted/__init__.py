"""Predictions as users ask for them: `calibrate`, `predict`, `scaling`.

What enters: a function, and devices and variables that need not be there. What leaves: seconds and bytes, and what
they rest on.
"""
