"""What `graphsplit demo` runs.

What enters: a number of devices, and perhaps a file of points. What leaves: progress and tables for the terminal.
"""
