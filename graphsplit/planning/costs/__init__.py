"""Costs: what an operation or a copy takes.

What enters: an operation, a number of bytes, a machine file. What leaves: work in FLOPs and bytes, whether it
takes memory of its own, and seconds.
"""
