"""Input of parallelized functions.

What enters: datasets, and the devices of a function. What leaves: batches that are cut and sent ahead of the call, or
read by the host that uses them.
"""
