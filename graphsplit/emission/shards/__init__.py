"""The nodes of shards: copies of an operation with its own rows, sizes and random numbers."""
