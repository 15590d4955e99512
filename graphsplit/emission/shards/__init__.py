"""The nodes of shards.

What enters: an operation, and the rows of each shard. What leaves: a copy for each shard, with its own rows, sizes and
random numbers.
"""
