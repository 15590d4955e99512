"""Sizes: integers, also those that are unknown when planning, and how rows are shared out.

What enters: integers, names of unknown sizes, shares of devices. What leaves: polynomials and arrays of them, which
are exact, and whole numbers of rows for each share.
"""
