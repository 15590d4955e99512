"""Variables in parts: a program whose variables are each one becomes one whose variables are several.

What enters: a program, and which device owns which part. What leaves: a program that reads and changes parts, and
when parts are put together.
"""
