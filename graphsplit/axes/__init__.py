"""The other axes of a mesh than the batch's, one after the other.

What enters: a program, and how its variables are cut along an axis. What leaves: a program with an operation for each
column of devices that runs it.
"""
