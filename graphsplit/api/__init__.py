"""Functions on several devices: `parallelize`, `on_device`, `verify`, and layouts of variables.

What enters: a function, its options and arguments. What leaves: its results, from a graph that runs on several devices.
"""
