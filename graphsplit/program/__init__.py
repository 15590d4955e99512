"""A traced function as a flat list of operations with shapes, and how a graph is read into it."""
