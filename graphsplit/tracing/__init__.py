"""From a Python callable, or a finished graph, to a program.

What enters: a function and the structure of its arguments, or a graph. What leaves: a `Trace`: a `Program`, and the
variables and other tensors that it captured.
"""
