"""Layouts that users ask for.

What enters: variables, models or optimizers, and layouts as users write them, with names of mesh axes. What leaves:
variables that are stored so, or (for a prediction) where they would be.
"""
