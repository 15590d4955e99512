"""Propagation: which layout every tensor has, and where every operation runs.

What enters: a program, layouts of its arguments, the mesh. What leaves: a step for each operation: on the shards, on
one device, or not at all. `forward_propagation` asks the rules, `backward_propagation` asks the readers.
"""
