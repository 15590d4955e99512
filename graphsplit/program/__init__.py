"""A traced function as a flat list of operations with shapes.

What enters: nodes of a graph. What leaves: a `Program`, which planning reads.
"""
