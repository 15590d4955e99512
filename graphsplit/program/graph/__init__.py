"""Graphs of node protos: what reads what, in which order, and the functions that nodes call; nothing of devices."""
