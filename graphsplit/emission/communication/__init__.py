"""The nodes of moves.

What enters: a plan's moves and the values of their transfers. What leaves: nodes that slice, concatenate, add up,
fill and send.
"""
