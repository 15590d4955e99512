"""Reading a graph into a program.

What enters: a graph's nodes and functions, and the shapes of its arguments. What leaves: a `Program`, whose
operations have shapes, known values and bodies.
"""
