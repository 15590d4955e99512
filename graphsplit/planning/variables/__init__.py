"""Variables in parts and in copies.

What enters: a program whose variables are each one, and which device has which part or copy. What leaves: a program
that reads and writes parts, and when parts are gathered.
"""
