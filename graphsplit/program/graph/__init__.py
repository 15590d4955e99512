"""Graphs of node protos.

What enters: nodes, and the functions that they call. What leaves: which node reads which, in which order, and graphs
whose calls are inlined. Nothing here knows devices.
"""
