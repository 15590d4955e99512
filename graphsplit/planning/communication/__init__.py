"""Communication: what travels between devices.

What enters: the layout in which each value is made, and those in which it is read. What leaves: a move for each
difference, the transfers that carry it out, and a check that derives both again.
"""
